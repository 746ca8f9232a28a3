"""Real coding agents find the skills that `insitu skills` writes, read one and run its commands on a run."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from insitu.agents.install import install
from insitu.agents.recipe import Start, shipped_recipes
from insitu.gateway.server import Gateway
from insitu.gateway.token_backend import TokenBackend
from insitu.types import IntArray, Limits, Message, RequestKey, ToolCall
from insitu_lab.open_renderer import open_renderer
from insitu_train.demo.scripted import ScriptedEngine
from insitu_view.skills import AGENTS, write_skills
from tests.view.web.run_lab import make_run

pytestmark = [pytest.mark.slow, pytest.mark.full]

SKILL = "insitu-watch"
DIGEST = "insitu digest runs/lab --tokens 1000"


def called(name: str, arguments: Mapping[str, object]) -> Message:
    return Message(
        role="assistant", tool_calls=(ToolCall(id="", name=name, arguments=json.dumps(arguments)),)
    )


def claude_code(prompt: str) -> Message:
    """It lists the skills to the model, and has a tool that reads one."""
    if "56 rollouts" in prompt:
        return Message(role="assistant", text="It learns: 0.25 before, 0.50 now.")
    if "# Watch a run" in prompt:
        return called("Bash", {"command": DIGEST, "description": "Look at the run"})
    return called("Skill", {"skill": SKILL})


def codex(prompt: str) -> Message:
    """It lists the skills with their files, which the model reads with the shell."""
    if "56 rollouts" in prompt:
        return Message(role="assistant", text="It learns: 0.25 before, 0.50 now.")
    if "# Watch a run" in prompt:
        return called("exec_command", {"cmd": DIGEST})
    return called("exec_command", {"cmd": f"cat {AGENTS['codex']}/{SKILL}/SKILL.md"})


@pytest.mark.parametrize(
    ("name", "agent", "policy"), [("claude_code", "claude-code", claude_code), ("codex", "codex", codex)]
)
async def test_it_reads_the_skill_and_runs_its_commands(
    name: str, agent: str, policy: Callable[[str], Message], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    for folder in (home, tmp_path / "work" / "runs"):
        folder.mkdir(parents=True)
    work = tmp_path / "work"
    # Codex runs commands in a login shell, which sets PATH itself.
    programs = Path(sys.executable).parent
    (home / ".bash_profile").write_text(f'export PATH="{programs}:$PATH"\n')
    make_run(work / "runs" / "lab")
    write_skills(work, [agent])
    renderer, recipe = open_renderer(tmp_path / "model"), shipped_recipes()[name]
    found = install(recipe)
    prompts: list[str] = []

    def policy_of(ids: IntArray, key: RequestKey) -> Message:
        prompts.append(renderer.decode(ids))
        return policy(prompts[-1])

    engine = ScriptedEngine(renderer, policy_of, sampled=True)
    limits = Limits(max_calls=12, max_call_tokens=2048, max_context_tokens=200_000)
    async with Gateway(TokenBackend(engine, renderer)) as gateway, gateway.listen_tcp() as listener:
        session = gateway.open_session("r/0", seed=1, limits=limits)
        start = Start(
            address=f"http://127.0.0.1:{listener.port}/s/{session.public_id}",
            api_key=session.secret,
            model="policy",
            prompt="How is my run doing?",
            max_call_tokens=2048,
            context_tokens=200_000,
            home=str(home),
        )
        for file, content, _ in recipe.home_files(start):
            target = home / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        program = found.program[0].replace("{root}", str(found.folder))
        path = f"{programs}:{os.environ['PATH']}"
        process = await asyncio.create_subprocess_exec(
            program,
            *map(start.fill, recipe.command[1:]),
            cwd=work,
            env={"PATH": path, "HOME": str(home), **recipe.environment(start)},
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
        trajectory = await session.seal(1.0)
    assert b"It learns" in out
    assert SKILL in prompts[0]
    assert "eval_after step 3: 2 of 4 (0.50)" in prompts[-1]
    assert trajectory.ledger.balanced
