"""SDKs as agents (LangGraph, pydantic-ai, OpenAI, OpenHands), unmodified: every token is trained."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gateway_rig import Rig, call, said
from render_families import write_renderer

from insitu.agents.install import install
from insitu.agents.recipe import parse_agent
from insitu.chat.model_files import read_folder
from insitu.chat.template import template_renderer
from insitu.registry import SATELLITES
from insitu.sandbox import rootfs
from insitu.sandbox.local import LocalBackend
from insitu.types import Message
from insitu_lab.conformance.run import conform

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples/agents").glob("*.toml"))
NAMED = SATELLITES["tasksets"]["agents"].split()
LOOK = Message(
    role="assistant",
    text="I look.",
    reasoning="Which file?",
    tool_calls=(call("read", '{"path": "a"}'), call("read", '{"path": "b"}')),
)
HAND_OVER = Message(role="assistant", tool_calls=(call("transfer_to_writer", "{}"),))
LIMIT_S = 120.0
NEWER = {"openhands": (3, 12)}
"""The Python that an example needs in a sandbox."""


def sandbox_python() -> str:
    """Return the Python that pip installs for."""
    inside = rootfs.python_inside()
    return inside if Path(inside).exists() else sys.executable


def lend_python(least: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lend sandboxes a Python that is new enough, as insitu does its own where the system has none."""
    if rootfs.python_version(Path(sandbox_python())) >= least:
        return
    names = (sys.executable, *(shutil.which(f"python3.{minor}") for minor in range(least[1], 20)))
    found = [Path(name) for name in names if name]
    for program in (*found, *sorted(Path.home().glob(".pyenv/versions/3.*/bin/python3"))):
        if rootfs.python_version(program) >= least:
            command = [program, "-I", "-S", "-c", "import sys; print(sys.base_prefix, end='')"]
            prefix = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            monkeypatch.setattr(rootfs, "SYSTEM_PYTHON", Path(prefix, "no-system-python"))
            monkeypatch.setattr(sys, "base_prefix", prefix)
            return
    pytest.skip("no Python {}.{} or newer here".format(*least))


@pytest.mark.parametrize("name", EXAMPLES)
async def test_an_example_conforms_token_by_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lend_python(NEWER.get(name, rootfs.OLDEST_PYTHON), monkeypatch)
    finding = await conform(parse_agent(f"examples/agents/{name}.toml"), LocalBackend("auto"))
    assert finding.failures == ()
    assert finding.calls >= (1 if name == "aider" else 5)  # aider has no tools
    assert finding.sampled == finding.trained > 0


@pytest.mark.parametrize("name", NAMED)
async def test_a_named_agent_conforms_token_by_token(name: str) -> None:
    finding = await conform(parse_agent(name), LocalBackend("auto"))
    assert finding.failures == ()
    assert finding.unexplained == 0
    assert finding.calls >= (1 if name == "aider" else 4)


@pytest.mark.parametrize("client", ["chat", "handoff"])
async def test_the_agents_sdk_finishes_its_loop_and_all_of_it_is_trained(
    tmp_path: Path, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The final answer after a handoff comes from another agent, without tools."""
    monkeypatch.chdir(ROOT)
    folder = install(parse_agent("examples/agents/openai_agents.toml")).folder
    renderer = template_renderer(read_folder(write_renderer(tmp_path / "hermes")))
    last = HAND_OVER if client == "handoff" else LOOK
    async with Rig(renderer, [LOOK, last, said("Done.")]) as rig:
        given = {"ADDRESS": rig.base, "KEY": rig.session.secret, "CLIENT": client}
        process = await asyncio.create_subprocess_exec(
            sandbox_python(),
            Path(__file__).with_name("python_clients.py"),
            env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{folder}/site", **given},
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
