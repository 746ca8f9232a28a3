"""The Vercel AI SDK, unmodified, in Node: loops of tool calls and objects over three wire formats."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from gateway_rig import Rig, call, said
from render_families import write_renderer

from insitu.agents.install import find_node, install
from insitu.agents.recipe import Recipe
from insitu.chat.model_files import read_folder
from insitu.chat.template import template_renderer
from insitu.types import Message

pytestmark = pytest.mark.full

PACKAGES = {
    "AI": ("ai", "6.0.326"),
    "OPENAI": ("@ai-sdk/openai", "3.0.141"),
    "ANTHROPIC": ("@ai-sdk/anthropic", "3.0.139"),
}
LOOK = Message(
    role="assistant",
    text="I look.",
    reasoning="Which file?",
    tool_calls=(call("read", '{"path": "a"}'), call("read", '{"path": "b"}')),
)
SCRIPT = [LOOK, LOOK, said("Done."), said('{"answer": 7}')]
LIMIT_S = 120.0


@pytest.fixture(scope="session")
def folders() -> dict[str, str]:
    """Folder of each package, by the variable that the script reads."""
    found = {}
    for variable, (name, version) in PACKAGES.items():
        recipe = Recipe(name=name, command=("node",), npm=(f"{name}@{version}",))
        found[variable] = str(install(recipe).folder)
    return found


@pytest.mark.parametrize("client", ["openai", "openai chat", "anthropic"])
async def test_the_vercel_sdk_finishes_its_loop(folders: dict[str, str], tmp_path: Path, client: str) -> None:
    renderer = template_renderer(read_folder(write_renderer(tmp_path / "hermes")))
    async with Rig(renderer, SCRIPT) as rig:
        given = {"ADDRESS": rig.base.removesuffix("/v1"), "KEY": rig.session.secret, "CLIENT": client}
        process = await asyncio.create_subprocess_exec(
            find_node(),
            Path(__file__).with_name("js_clients.mjs"),
            env={"PATH": os.environ["PATH"], **folders, **given},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await asyncio.wait_for(process.communicate(), LIMIT_S)
        assert process.returncode == 0, errors.decode()
        reported = json.loads(out.splitlines()[-1])
        trajectory = await rig.sealed()
    assert reported == {"text": "Done.", "steps": 3, "object": {"answer": 7}}
    assert [turn.parent for turn in trajectory.turns] == [-1, 0, 1, -1]
    # The object is asked for without tools, beside a line that has some.
    assert trajectory.ledger.excluded == {"auxiliary": len(trajectory.turns[-1].ids)}
    assert rig.session.stats.edited == 0
