"""Routes by path; pure.

A session's routes are below `/s/{public_id}`, below the compatibility prefix `/rollout/{id}` (public id, or a
rollout id without a slash) and, for agents that can set only a key, without a prefix. The id never
authorises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["call", "count", "models", "model", "exit", "hello", "tool", "tools", "mcp"]
"""A model call, a token count, the model list, one model, the end of the session, a health check, a host
tool, their list or their MCP server."""

SCOPE: Mapping[Kind, str] = {"tool": "tool", "tools": "tool", "mcp": "tool"}
"""Scope of the secret that opens a route, if not `agent`."""

METHODS: Mapping[Kind, tuple[str, ...]] = {
    "models": ("GET", "HEAD"),
    "model": ("GET", "HEAD"),
    "hello": ("GET", "HEAD"),
    "tools": ("GET", "HEAD"),
}
"""HTTP methods of a kind, if not POST."""

_V1: Mapping[str, tuple[str, Kind]] = {
    "chat/completions": ("chat", "call"),
    "messages": ("anthropic", "call"),
    "messages/count_tokens": ("anthropic", "count"),
    "responses": ("responses", "call"),
    "responses/compact": ("responses", "call"),
    "responses/input_tokens": ("responses", "count"),
    "models": ("", "models"),
    "exit": ("", "exit"),
}

_GEMINI: Mapping[str, Kind] = {
    "generateContent": "call",
    "streamGenerateContent": "call",
    "countTokens": "count",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A parsed request path."""

    public_id: str | None
    """None on the key-only routes."""
    dialect: str
    """Wire format of the answer, "" where the path does not determine it."""
    action: str
    """The path behind the version; for a host tool its name."""
    kind: Kind

    @property
    def scope(self) -> str:
        """`agent` or `tool`: the scope of its secret."""
        return SCOPE.get(self.kind, "agent")

    @property
    def methods(self) -> tuple[str, ...]:
        return METHODS.get(self.kind, ("POST",))


def parse_path(path: str) -> Route | None:
    """Return the route of a decoded path, None when there is none."""
    public_id, rest = _prefix(path)
    version, _, action = rest.partition("/")
    if rest in ("mcp", "v1/mcp"):
        return Route(public_id=public_id, dialect="", action="mcp", kind="mcp")
    if rest == "api/hello":
        return Route(public_id=public_id, dialect="anthropic", action=rest, kind="hello")
    if rest == "exit":
        return Route(public_id=public_id, dialect="", action=rest, kind="exit")
    if version == "tools" and public_id is None:
        owner, _, name = action.partition("/")
        return _tool(owner, name)
    if version == "v1" and (action == "tools" or action.startswith("tools/")):
        return _tool(public_id, action.removeprefix("tools").lstrip("/"))
    if version in ("v1", "v1beta", "v1alpha"):
        return _versioned(public_id, version, action)
    return None


def dialect_of(path: str) -> str:
    """Return the wire format for the error of an unknown path, "" where it does not determine one."""
    _, rest = _prefix(path)
    if rest.startswith(("v1beta/", "v1alpha/")):
        return "gemini"
    for action, (dialect, _) in _V1.items():
        if dialect and rest.startswith(f"v1/{action}"):
            return dialect
    return ""


def _prefix(path: str) -> tuple[str | None, str]:
    parts = path.split("/", 3)
    if len(parts) == 4 and parts[0] == "" and parts[1] in ("s", "rollout"):
        return parts[2], parts[3].rstrip("/")
    return None, path.strip("/")


def _tool(public_id: str | None, name: str) -> Route | None:
    if "/" in name:
        return None
    if not name:
        return Route(public_id=public_id, dialect="", action="tools", kind="tools")
    return Route(public_id=public_id, dialect="", action=name, kind="tool")


def _versioned(public_id: str | None, version: str, action: str) -> Route | None:
    if action.startswith("models/"):
        method = action.rpartition(":")[2] if ":" in action else ""
        if method in _GEMINI:
            return Route(public_id=public_id, dialect="gemini", action=action, kind=_GEMINI[method])
        if method and version != "v1":
            return None
        dialect = "" if version == "v1" else "gemini"
        return Route(public_id=public_id, dialect=dialect, action=action, kind="model")
    if version != "v1" and action == "models":
        return Route(public_id=public_id, dialect="gemini", action=action, kind="models")
    if version == "v1" and action in _V1:
        dialect, kind = _V1[action]
        return Route(public_id=public_id, dialect=dialect, action=action, kind=kind)
    return None
