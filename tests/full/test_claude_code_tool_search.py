"""A real Claude Code with an MCP server of sixty tools: schemas asked for, or all of them in each prompt."""

from __future__ import annotations

import json
import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from insitu.agents.claude_code import RECIPE
from insitu.sandbox.local import LocalBackend
from insitu.types import FileEntry
from insitu_lab.conformance import run
from insitu_lab.conformance.agent_tools import AGENT_TOOLS

pytestmark = pytest.mark.full

SERVER = b"""
import json, sys

text = {"type": "string", "description": "an argument of the tool"}
schema = {"type": "object", "properties": {f"p{n}": text for n in range(6)}}
said = "Does a thing that is described at length. " * 8
tools = [{"name": f"tool_{n}", "description": said, "inputSchema": schema} for n in range(60)]
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    found = {"tools": tools}
    if asked["method"] == "initialize":
        version = asked["params"]["protocolVersion"]
        found = {"protocolVersion": version, "capabilities": {"tools": {}}}
        found["serverInfo"] = {"name": "many", "version": "1"}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": found}), flush=True)
"""
MCP = json.dumps({"mcpServers": {"many": {"command": "python3", "args": ["{files}/server.py"]}}})


@pytest.mark.parametrize(("search", "offered"), [("", 0), ("false", 60)])
async def test_both_are_trained(
    search: str, offered: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    play = AGENT_TOOLS["claude_code"]
    wider = replace(play, window_tokens=play.window_tokens + (25_000 if offered else 0))
    monkeypatch.setattr(run, "AGENT_TOOLS", {"claude_code": wider})
    recipe = replace(
        RECIPE,
        env={**RECIPE.env, **({"ENABLE_TOOL_SEARCH": search} if search else {})},
        files={"server.py": FileEntry(content=SERVER)},
        config_files={**RECIPE.config_files, "mcp.json": MCP},
        command=(*RECIPE.command, "--mcp-config", "{home}/mcp.json"),
    )
    finding = await run.conform(recipe, LocalBackend("auto"), tmp_path)
    assert finding.failures == ()
    assert (finding.unexplained, finding.trained) == (0, finding.sampled)
    lines = lzma.decompress((tmp_path / "claude_code.jsonl.xz").read_bytes()).splitlines()[1:]
    bodies = [json.loads(line)["body"] for line in lines]
    tools = [[tool["name"] for tool in body.get("tools", ())] for body in bodies]
    assert max(sum(name.startswith("mcp__many__") for name in names) for names in tools) == offered
    assert any("ToolSearch" in names for names in tools) is not bool(offered)
