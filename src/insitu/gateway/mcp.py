"""The host tools of a session as an MCP server: JSON-RPC over HTTP, one JSON answer per POST; pure.

Stateless: the secret identifies the session, so there is no session header, event stream or resumption.
Supports the listed protocol versions; newer clients fall back to them.
"""

from __future__ import annotations

from collections.abc import Mapping

from insitu import __version__
from insitu.gateway.dialects.base import WireError, json_text
from insitu.gateway.host_tools import SERVER, ToolBox

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Newest first."""

INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32600, -32601, -32602


class _RpcError(Exception):
    """A JSON-RPC error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def answer(tools: ToolBox, message: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the response to one message, None for a notification or a response."""
    if "method" not in message and ("result" in message or "error" in message):
        return None
    number = message.get("id")
    method = message.get("method")
    if number is None and isinstance(method, str):
        return None
    try:
        if not isinstance(method, str) or not isinstance(number, str | int):
            raise _RpcError(INVALID_REQUEST, "not a JSON-RPC request")
        params = message.get("params") or {}
        if not isinstance(params, dict):
            raise _RpcError(INVALID_PARAMS, "params must be an object")
        return {"jsonrpc": "2.0", "id": number, "result": _result(tools, method, params)}
    except _RpcError as error:
        failure = {"code": error.code, "message": str(error)}
        return {"jsonrpc": "2.0", "id": number, "error": failure}


def _result(tools: ToolBox, method: str, params: Mapping[str, object]) -> Mapping[str, object]:
    if method == "initialize":
        asked = params.get("protocolVersion")
        return {
            "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": SERVER, "version": __version__},
        }
    if method == "ping":
        return {}
    if method == "tools/list":
        return {"tools": list(listed(tools))}
    if method == "tools/call":
        return _call(tools, params)
    raise _RpcError(METHOD_NOT_FOUND, f"no such method: {method[:64]}")


def listed(tools: ToolBox) -> list[Mapping[str, object]]:
    """Return the tools in MCP form."""
    return [
        {"name": tool.name, "description": tool.description, "inputSchema": tool.parameters}
        for tool in tools.tools
    ]


def _call(tools: ToolBox, params: Mapping[str, object]) -> Mapping[str, object]:
    name = params.get("name")
    try:
        result = tools.call(name if isinstance(name, str) else "", params.get("arguments") or {})
    except WireError as error:
        if error.cause == "not_found":
            raise _RpcError(INVALID_PARAMS, str(error)) from error
        result = {"ok": False, "error": str(error)}
    return {"content": [{"type": "text", "text": json_text(result)}], "isError": not result["ok"]}
