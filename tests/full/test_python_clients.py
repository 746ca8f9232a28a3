"""LangGraph, pydantic-ai and the OpenAI Agents SDK, unmodified: loops of tool calls, all of it trained."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from gateway_rig import Rig, call, said
from render_families import write_renderer

from insitu.agents.install import install
from insitu.agents.recipe import Recipe
from insitu.chat.model_files import read_folder
from insitu.chat.template import template_renderer
from insitu.sandbox.rootfs import python_inside
from insitu.types import Message

pytestmark = pytest.mark.full

RECIPE = Recipe(
    name="python-clients",
    command=("python3",),
    pip=(
        "openai-agents==0.24.0",
        "openai==3.54.0",
        "pydantic-ai-slim==2.68.0",
        "langgraph==1.2.22",
        "langchain-openai==1.7.3",
        "langchain-core==1.7.2",
    ),
)
LOOK = Message(
    role="assistant",
    text="I look.",
    reasoning="Which file?",
    tool_calls=(call("read", '{"path": "a"}'), call("read", '{"path": "b"}')),
)
HAND_OVER = Message(role="assistant", tool_calls=(call("transfer_to_writer", "{}"),))
LIMIT_S = 120.0


@pytest.fixture(scope="session")
def site() -> str:
    return str(install(RECIPE).folder / "site")


@pytest.fixture(scope="session")
def python() -> str:
    """The Python that pip installed for."""
    inside = python_inside()
    return inside if Path(inside).exists() else sys.executable


@pytest.mark.parametrize("client", ["langgraph", "pydantic-ai", "agents", "agents chat", "agents handoff"])
async def test_a_library_finishes_its_loop_and_all_of_it_is_trained(
    site: str, python: str, tmp_path: Path, client: str
) -> None:
    """The final answer after a handoff comes from another agent, without tools."""
    renderer = template_renderer(read_folder(write_renderer(tmp_path / "hermes")))
    last = HAND_OVER if client == "agents handoff" else LOOK
    async with Rig(renderer, [LOOK, last, said("Done.")]) as rig:
        given = {"ADDRESS": rig.base, "KEY": rig.session.secret, "CLIENT": client, "PYTHONPATH": site}
        process = await asyncio.create_subprocess_exec(
            python,
            Path(__file__).with_name("python_clients.py"),
            env={"PATH": os.environ["PATH"], **given},
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await asyncio.wait_for(process.communicate(), LIMIT_S)
        assert process.returncode == 0, errors.decode()
        trajectory = await rig.sealed()
    assert json.loads(out.splitlines()[-1]) == "Done."
    assert len(trajectory.turns) == 3
    assert trajectory.ledger.excluded == {}
    assert trajectory.ledger.trained == trajectory.ledger.captured > 0
    assert rig.session.stats.edited == 0
    assert rig.session.stats.rejections.count == 0
