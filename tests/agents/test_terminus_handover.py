"""The terminal loop at the real gateway: its three-step hand-over, with every token in the books."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from insitu.agents.base import AgentResult, ModelAccess
from insitu.agents.harness import RecipeHarness
from insitu.chat.template import TemplateRenderer
from insitu.gateway.server import Gateway
from insitu.gateway.token_backend import TokenBackend
from insitu.sandbox.local import LocalBackend
from insitu.types import IntArray, Limits, Message, RequestKey, Task, Trajectory
from insitu_lab.open_renderer import open_renderer
from insitu_tasksets.terminus import RECIPE
from insitu_train.demo.scripted import ScriptedEngine

pytestmark = pytest.mark.slow

CONTEXT, CALL = 4000, 200


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return open_renderer(tmp_path_factory.mktemp("model"))


class Policy:
    """Types the given keys one after the other, and answers what a hand-over asks."""

    def __init__(self, renderer: TemplateRenderer, keys: list[str]) -> None:
        self.asked: list[str] = []
        self.turns: list[int] = []
        """Calls that were refused for their length have their numbers too."""
        self._renderer, self._keys = renderer, keys

    def __call__(self, ids: IntArray, key: RequestKey) -> IntArray:
        self.turns.append(key.turn)
        last = self._renderer.decode(ids).rpartition("<|im_start|>user")[2]
        for mark in ("successor takes over", "ask your predecessor", "Your successor asks"):
            if mark in last:
                self.asked.append(mark)
                return self._say(f"{len(self.asked)}: all is well.")
        self.asked.append("go on" if "Your predecessor answers" in last else "keys")
        typed = self._keys.pop(0) if self._keys else ""
        commands = [{"keystrokes": typed, "duration": 10}] if typed else []
        return self._say(json.dumps({"commands": commands, "task_complete": not typed}))

    def _say(self, text: str) -> IntArray:
        return self._renderer.render_reply(Message(role="assistant", text=text))


async def run(
    renderer: TemplateRenderer, backend: LocalBackend, task: Task, tmp_path: Path, keys: list[str]
) -> tuple[AgentResult, Trajectory, Policy, ScriptedEngine]:
    policy = Policy(renderer, keys)
    engine = ScriptedEngine(renderer, policy, sampled=True)
    limits = Limits(max_calls=64, max_context_tokens=CONTEXT, max_call_tokens=CALL)
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(Gateway(TokenBackend(engine, renderer)))
        socket = tmp_path / "gateway"
        await stack.enter_async_context(gateway.listen_unix(socket))
        session = gateway.open_session("r/0", seed=1, limits=limits, listener=socket)
        access = ModelAccess(
            public_id=session.public_id,
            secret=session.secret,
            max_call_tokens=CALL,
            max_context_tokens=CONTEXT,
        )
        async with RecipeHarness(RECIPE, backend).worker(socket) as worker:
            result = await worker.run(task, access)
        return result, await session.seal(5.0), policy, engine


HAND_OVER = ["successor takes over", "ask your predecessor", "Your successor asks", "go on"]


@pytest.mark.case(33)
@pytest.mark.parametrize(
    "much",
    ["seq 400\n", "seq 1500\n"],
    ids=["before the window is full", "when the gateway says that it is full"],
)
async def test_a_hand_over_keeps_and_trains_every_token(
    renderer: TemplateRenderer, backend: LocalBackend, task: Task, tmp_path: Path, much: str
) -> None:
    keys = ["sed -i 's/+/*/' app.py\n", much, much, "python3 check.py > ran\n"]
    result, trajectory, policy, engine = await run(renderer, backend, task, tmp_path, keys)
    assert (result.exit, result.detail) == ("finished", "")
    assert result.tree["app.py"].content == b"def f(a, b):\n    return a * b\n"
    assert result.tree["ran"].content == b"ok\n"
    at = policy.asked.index("successor takes over")
    assert at > 1
    assert policy.asked[at : at + 4] == HAND_OVER
    assert policy.asked[-1] == "keys"
    lost = trajectory.ledger.captured - trajectory.ledger.trained
    assert (lost, trajectory.ledger.excluded) == (0, {})
    # The old line says summary and answers, the new one asks and goes on: two rows, nothing foreign in them.
    summary, questions, answers, going_on = policy.turns[at : at + 4]
    parents = {turn.index: turn.parent for turn in trajectory.turns}
    assert [parents[turn] for turn in (questions, answers, going_on)] == [-1, summary, questions]
    assert [note.kind for note in trajectory.drifts] == ["fork"] * len(trajectory.drifts)
    held = sum(len(segment.ids) for segment in trajectory.segments)
    assert held < sum(len(request.ids) for request in engine.sent)
    masked = [int(segment.mask.sum()) for segment in trajectory.segments]
    assert all(masked)
    assert sum(masked) == sum(len(turn.ids) for turn in trajectory.turns)
    assert all(np.isfinite(segment.logprobs).all() for segment in trajectory.segments)


async def test_without_much_to_see_nothing_is_handed_over(
    renderer: TemplateRenderer, backend: LocalBackend, task: Task, tmp_path: Path
) -> None:
    result, trajectory, policy, _ = await run(renderer, backend, task, tmp_path, ["ls\n"])
    assert result.exit == "finished"
    assert set(policy.asked) == {"keys"}
    assert len(trajectory.segments) == 1
    assert trajectory.drifts == ()
