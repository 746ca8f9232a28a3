"""A judge that compares the rollouts of a group."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from judge_lab import KEY, finished, judge_at, parts, scored

from insitu.errors import GradeError
from insitu.types import FinishedRollout
from insitu_tasksets.judges import Ranking


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)


def group_of(*diffs: str) -> list[FinishedRollout]:
    made = [finished(diff, f"g/{number}") for number, diff in enumerate(diffs)]
    return [replace(one, group=tuple(made)) for one in made]


async def test_one_question_ranks_a_group_and_equal_rollouts_are_equal(tmp_path: Path) -> None:
    async with judge_at(tmp_path, scored(lambda name, text: min(10, len(text)))) as (provider, client):
        judge = Ranking(endpoint=client, solved=0.5, weight=2.0)
        group = group_of("a", "bbbbb", "a", "bbbbbbbbbbbbb")
        found = await asyncio.gather(*map(judge, group))
        assert [one["judged"] for one in found] == pytest.approx([0.2, 1.0, 0.2, 2.0])
        assert {one["solved"] for one in found} == {0.5}
        assert len(provider.received) == 1
        shown = parts(json.loads(provider.received[0].body))
        assert sorted(shown.values()) == sorted(["a", "bbbbb", "bbbbbbbbbbbbb", "Make f return 2."])
        # who made which does not matter: the same question
        again = group_of("bbbbbbbbbbbbb", "a", "bbbbb", "a")
        assert (await judge(again[0]))["judged"] == pytest.approx(2.0)
        assert len(provider.received) == 1


async def test_one_that_the_judge_leaves_out_has_the_lowest_score_and_the_others_keep_theirs(
    tmp_path: Path,
) -> None:
    def reply(body: object) -> dict[str, str]:
        whole = json.loads(scored(lambda name, text: 5)(body)["content"])
        whole["scores"].pop("candidate-1")
        return {"content": json.dumps(whole)}

    async with judge_at(tmp_path, reply) as (_, client):
        group = group_of("a", "b")
        with pytest.raises(GradeError, match="did not score each candidate once"):
            await Ranking(endpoint=client, no_verdict=None)(group[0])
        found = await asyncio.gather(*map(Ranking(endpoint=client), group))
        assert sorted(one["judged"] for one in found if one) == [0.0, 0.5]


async def test_a_group_of_which_the_judge_says_nothing_has_no_reward_and_is_no_failure(
    tmp_path: Path,
) -> None:
    async with judge_at(tmp_path, lambda body: {"content": "All are fine."}) as (_, client):
        group = group_of("a", "b")
        assert await Ranking(endpoint=client, solved=1.0)(group[0]) is None


async def test_long_candidates_share_the_room(tmp_path: Path) -> None:
    async with judge_at(tmp_path, scored(lambda name, text: 5)) as (provider, client):
        await Ranking(endpoint=client, max_chars=200)(group_of("a" * 500, "b" * 500)[0])
        shown = parts(json.loads(provider.received[0].body))
        assert {len(text) for name, text in shown.items() if name != "task"} == {
            100 + len("\n[400 characters are left out here]\n")
        }
