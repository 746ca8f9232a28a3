"""A hook on tool calls under real agents: a blocked command never runs, the model reads why and goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from insitu.agents.base import AgentResult, ModelAccess
from insitu.agents.recipe import shipped_recipes
from insitu.gateway.request import GatewayConfig
from insitu.gateway.server import Gateway
from insitu.gateway.token_backend import TokenBackend
from insitu.gateway.tool_hooks import BLOCKED
from insitu.sandbox.local import LocalBackend
from insitu.types import IntArray, Limits, Message, RequestKey, Task, ToolCall, ToolEvent, Trajectory
from insitu_lab.conformance.agent_tools import AGENT_TOOLS
from insitu_lab.conformance.run import make_harness
from insitu_lab.exactness import training_faults
from insitu_lab.open_renderer import open_renderer
from insitu_tasksets.tool_hooks import UserHook
from insitu_train.demo.scripted import ScriptedEngine

pytestmark = [pytest.mark.slow, pytest.mark.full]

WHY = "The operator forbids to make blocked.txt."
BAD, GOOD = "echo no > blocked.txt", "echo yes > good.txt; echo the-result"
EDITED = {"opencode"}
"""Gives a call of an unknown tool another name in its history: it is rendered again for later turns."""
TOKENS = 2048
WINDOW = 100_000


def hook(event: ToolEvent) -> dict[str, str] | None:
    if event.kind == "call" and "blocked.txt" in str(event.arguments):
        return {"block": WHY}
    if event.kind == "result" and "the-result" in event.text:
        return {"remind": "Be brief."}
    return None


def called(name: str, arguments: Mapping[str, object]) -> Message:
    return Message(
        role="assistant", tool_calls=(ToolCall(id="", name=name, arguments=json.dumps(arguments)),)
    )


class Session:
    """One agent whose model calls BAD first, then GOOD once it has read why, then ends."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.tools = name, folder, AGENT_TOOLS[name]
        self.renderer = open_renderer(folder / "model")
        self.engine = ScriptedEngine(self.renderer, self.policy, sampled=True)
        self.prompts: list[str] = []

    def policy(self, ids: IntArray, key: RequestKey) -> Message:
        self.prompts.append(self.renderer.decode(ids))
        _, why, after = self.prompts[-1].rpartition(WHY)
        if not why:
            return called(*self.tools.run(BAD))
        if "the-result" not in after:
            return called(*self.tools.run(GOOD))
        return called(*self.tools.finish) if self.tools.finish else Message(role="assistant", text="Done.")

    async def run(self) -> tuple[AgentResult, Trajectory]:
        limits = Limits(wall_s=120.0, max_calls=12, max_call_tokens=TOKENS, max_context_tokens=WINDOW)
        access = ModelAccess(public_id="", secret="", max_call_tokens=TOKENS, max_context_tokens=WINDOW)
        harness = make_harness(shipped_recipes()[self.name], LocalBackend(), access)
        backend, entrance = TokenBackend(self.engine, self.renderer), self.folder / "g"
        config = GatewayConfig(hook=UserHook("hook", hook))
        async with Gateway(backend, config) as gateway, gateway.listen_unix(entrance):
            session = gateway.open_session("r/0", seed=1, limits=limits, listener=entrance)
            task = Task(id="t", prompt="Make the files.", files={}, limits=limits)
            access = ModelAccess(
                public_id=session.public_id,
                secret=session.secret,
                max_call_tokens=TOKENS,
                max_context_tokens=WINDOW,
            )
            async with harness.worker(entrance) as worker:
                result = await worker.run(task, access)
            return result, await session.seal(10.0)


@pytest.mark.parametrize("name", ["pi", "claude_code", "codex", "opencode", "qwen_code", "gemini_cli"])
async def test_a_blocked_command_never_runs(name: str, tmp_path: Path) -> None:
    made = Session(name, tmp_path)
    result, trajectory = await made.run()
    assert result.exit == "finished", result.log[-2000:]
    assert "good.txt" in result.tree
    assert "blocked.txt" not in result.tree
    assert WHY in made.prompts[-1]
    assert "Be brief." in made.prompts[-1]
    assert any(BLOCKED in turn.labels for turn in trajectory.turns)
    assert trajectory.ledger.balanced
    answers = {key.turn: answer for key, answer in made.engine.answers.items()}
    assert list(training_faults(trajectory, answers)) == []
    assert {note.kind for note in trajectory.drifts} == ({"edited"} if name in EDITED else set())


async def test_mini_swe_tells_the_model_in_its_own_words(tmp_path: Path) -> None:
    """It drops a reply with a call of an unknown tool and ends at the third: the reason gets lost."""
    made = Session("mini_swe", tmp_path)
    result, trajectory = await made.run()
    assert result.exit == "failed"
    assert "blocked.txt" not in result.tree
    assert [BLOCKED in turn.labels for turn in trajectory.turns] == [True, True, True]
    assert trajectory.ledger.balanced
