"""Host tools inside a real agent that speaks MCP: it lists them, offers them to its model and calls them."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from gateway_rig import call, said
from test_host_tools import SUBMIT, ToolRig

from insitu.agents.install import install
from insitu.agents.recipe import Start, shipped_recipes
from insitu.chat.template import TemplateRenderer
from insitu.errors import SetupError
from insitu.types import Message

pytestmark = pytest.mark.slow


def installed_program(name: str) -> str:
    try:
        found = install(shipped_recipes()[name])
    except SetupError as error:
        pytest.fail(str(error))
    return found.program[0].replace("{root}", str(found.folder))


@pytest.mark.full
async def test_claude_code_calls_a_host_tool_over_mcp(renderer: TemplateRenderer, tmp_path: Path) -> None:
    name = "mcp__insitu__submit"
    script = [Message(role="assistant", tool_calls=(call(name, '{"answer": "42"}'),)), said("All done.")]
    recipe = shipped_recipes()["claude_code"]
    async with ToolRig(renderer, script) as rig:
        start = Start(
            address=f"{rig.origin}/s/{rig.session.public_id}",
            api_key=rig.session.secret,
            model="policy",
            prompt="Hand in 42.",
            max_call_tokens=512,
            context_tokens=100_000,
        )
        server = {"type": "http", "url": f"{start.address}/mcp", "headers": rig.tool_auth}
        config = json.dumps({"mcpServers": {"insitu": server}})
        process = await asyncio.create_subprocess_exec(
            installed_program("claude_code"),
            *map(start.fill, recipe.command[1:]),
            "--mcp-config",
            config,
            "--strict-mcp-config",
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **recipe.environment(start)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            out, _ = await asyncio.wait_for(process.communicate(start.prompt.encode()), 150)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert b"All done." in out, out[-2000:]
        assert [(c.name, c.source, c.error) for c in rig.session.tools.calls] == [("submit", "agent", "")]
        first = renderer.decode(rig.engine.sent[0].ids)
        # It offers the tool under the server's name: it is not injected a second time.
        assert first.count(SUBMIT.description) == 1
        assert name in first
        assert '"ok":true' in renderer.decode(rig.engine.sent[-1].ids)
        trajectory = await rig.session.seal(1.0)
        assert trajectory.ledger.balanced
