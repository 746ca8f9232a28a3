"""The part `offer_servers`: MCP servers of a task in the configuration of the agent.

The servers run beside the sandbox (containers.py) or are started in it by the agent; nothing outside of it
reaches them, and the gateway sees their tools as the agent's own.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from insitu_tasksets.container_plan import McpServer, read_plan

log = logging.getLogger(__name__)

HomeFile = tuple[str, bytes, bool]
"""Path, content, whether it is executable."""


def offer_servers(agent: str, home: str, files: Iterable[HomeFile], container: str) -> list[HomeFile]:
    """Return an agent's files with the servers of `Setup.container` in its configuration.

    An agent without an MCP client gets its files unchanged, and a line is logged once.
    """
    found = list(files)
    servers = read_plan(container).mcp_servers
    if not servers:
        return found
    if agent not in CLIENTS:
        _say(agent, "has no MCP client that insitu knows")
        return found
    name, write = CLIENTS[agent]
    path = f"{home}/{name}"
    below = next((content for at, content, _ in found if at == path), b"")
    usable = [server for server in servers if agent not in NO_SSE or server.transport != "sse"]
    if len(usable) < len(servers):
        _say(agent, "reads no MCP server of transport sse")
    return [*(file for file in found if file[0] != path), (path, write(below, usable), False)]


@functools.cache
def _say(agent: str, why: str) -> None:
    log.warning("agent=%s %s: such servers of tasks are not offered to it", agent, why)


def _codex(below: bytes, servers: Sequence[McpServer]) -> bytes:
    lines = [below.decode().rstrip("\n")]
    for server in servers:
        lines.append(f"[mcp_servers.{server.name}]")
        if server.transport == "stdio":
            lines += [f"command = {_toml(server.command)}", f"args = {_toml(server.args)}"]
        else:
            lines.append(f"url = {_toml(server.url)}")
    return "\n".join([*lines, ""]).encode()


def _toml(value: str | Sequence[str]) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _in_json(key: str, entry: Callable[[McpServer], Mapping[str, Any]]) -> Callable[..., bytes]:
    """Return a writer of a JSON file with an object of servers by name."""

    def write(below: bytes, servers: Sequence[McpServer]) -> bytes:
        config = json.loads(below or b"{}")
        config.setdefault(key, {}).update({server.name: entry(server) for server in servers})
        return json.dumps(config).encode()

    return write


def _started(server: McpServer) -> dict[str, Any]:
    return {"command": server.command, "args": list(server.args)}


def _claude(server: McpServer) -> dict[str, Any]:
    if server.transport == "stdio":
        return {"type": "stdio", **_started(server)}
    return {"type": "sse" if server.transport == "sse" else "http", "url": server.url}


def _gemini(server: McpServer) -> dict[str, Any]:
    if server.transport == "stdio":
        return {**_started(server), "trust": True}
    return {"url" if server.transport == "sse" else "httpUrl": server.url, "trust": True}


def _opencode(server: McpServer) -> dict[str, Any]:
    if server.transport == "stdio":
        return {"type": "local", "command": [server.command, *server.args], "enabled": True}
    return {"type": "remote", "url": server.url, "enabled": True}


CLIENTS: Mapping[str, tuple[str, Callable[..., bytes]]] = {
    "claude_code": (".claude.json", _in_json("mcpServers", _claude)),
    "codex": (".codex/config.toml", _codex),
    "opencode": (".config/opencode/opencode.json", _in_json("mcp", _opencode)),
    "qwen_code": (".qwen/settings.json", _in_json("mcpServers", _gemini)),
    "gemini_cli": (".gemini/settings.json", _in_json("mcpServers", _gemini)),
}
"""Agent -> its file below the home folder, and what writes servers into it."""
NO_SSE = frozenset({"codex"})
