"""examples/own/judge.py against a fake provider: retries, cache, pace, and a judge that gives no score."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from test_reward import SOLVED, TASK

from insitu import registry
from insitu.errors import GradeError
from insitu.tasks.user_functions import UserFunction
from insitu.types import FinishedRollout, Outcome, Status
from tests.fakes.provider import KEY, FakeProvider, serve_provider

pytestmark = pytest.mark.slow

JUDGE = Path(__file__).parents[2] / "examples" / "own" / "judge.py"
SCORE = {"content": "Minimal. score: 5"}


@pytest.fixture
async def provider(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[FakeProvider]:
    async with serve_provider() as provider:
        provider.replies = lambda body: SCORE
        monkeypatch.setenv("JUDGE_URL", f"{provider.url}/v1")
        monkeypatch.setenv("JUDGE_KEY", KEY)
        monkeypatch.setenv("JUDGE_MODEL", "judge")
        module = sys.modules[registry.load(f"{JUDGE}:reward").__module__]
        monkeypatch.setattr(module, "CACHE", tmp_path / "cache")
        monkeypatch.setattr(module, "PER_MINUTE", 60_000)
        yield provider


def finished(number: int = 0, **more: Any) -> FinishedRollout:
    fields = {"id": f"r{number}", "task": TASK, "row": {}, "files": {}, "diff": f"+x = {number}\n"}
    rest = {"transcript": "", "turns": (), "status": Status.OK, "verdict": SOLVED}
    return FinishedRollout(**{**fields, **rest, **more})


async def judged(*rollouts: FinishedRollout) -> list[Any]:
    user = UserFunction("reward.function judge", registry.load(f"{JUDGE}:reward"), max_concurrent=4)
    calls = [user.call(lambda reward, one=one: reward(one)) for one in rollouts]  # type: ignore[misc]
    try:
        return await asyncio.gather(*calls)
    finally:
        user.close()


async def test_the_judge_is_asked_once_per_change(provider: FakeProvider) -> None:
    wrong = dataclasses.replace(SOLVED, outcome=Outcome.UNRESOLVED, reward=0.0)
    provider.busy = [(429, "0"), (503, "0")]
    assert await judged(finished(1), finished(2)) == 2 * [{"solved": 1.0, "judge": pytest.approx(0.1)}]
    asked = len(provider.received)
    assert asked == 4  # two were retried
    assert await judged(finished(1), finished(3, verdict=wrong)) == [
        {"solved": 1.0, "judge": pytest.approx(0.1)},
        {"solved": 0.0},
    ]
    assert len(provider.received) == asked


async def test_a_judge_without_a_score_is_a_failure(provider: FakeProvider) -> None:
    provider.replies = lambda body: {"content": "Nice."}
    with pytest.raises(GradeError, match="the judge gave no score: 'Nice.'") as raised:
        await judged(finished(4))
    assert raised.value.infra
