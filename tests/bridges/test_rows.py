"""Rows for other trainers are the planner's, and every conversion accounts for every captured token."""

from __future__ import annotations

import numpy as np
import pytest
from row_lab import PLAN, groups, rollout

from insitu.errors import ConfigError, TrainError
from insitu.types import EXCLUSIONS, Group, Status
from insitu_bridges.rows import REFUSALS, GroupRows, convert, rows_alone, rows_of, unscored
from insitu_train.plan.step import plan_step


def all_rows(made: tuple[GroupRows, ...]) -> list[tuple[str, int]]:
    return [(row.rollout_id, row.segment) for group in made for row in group.rows]


def test_rows_are_those_of_the_plan() -> None:
    made = rows_of(groups(), PLAN)
    plan = plan_step(groups(), PLAN)
    rows = [row for group in made for row in group.rows]
    assert len(rows) == len(plan.rows) == 3
    for mine, theirs in zip(rows, plan.rows, strict=True):
        assert (mine.group_id, mine.rollout_id, mine.segment) == (
            theirs.group_id,
            theirs.rollout_id,
            theirs.segment,
        )
        assert (mine.advantage, mine.weight) == (theirs.advantage, theirs.weight)
        for name in ("ids", "mask", "logprobs", "versions"):
            assert np.array_equal(getattr(mine, name), getattr(theirs, name))
    reasons = {item.rollout.id: item.reason for group in made for item in group.rollouts}
    assert reasons == plan.exclusion_reasons


def test_what_has_no_score_has_no_advantage() -> None:
    first, same = rows_of(groups(), PLAN)
    assert [item.advantage for item in first.rollouts] == [0.5, -0.5, 0.0, None, None]
    assert [item.reason for item in first.rollouts] == ["", "", "zero_advantage", "ungraded", "infra"]
    assert [item.rollout.id for item in first.scored] == ["train/1/0/0", "train/1/0/1", "train/1/0/2"]
    assert [item.reason for item in same.rollouts] == ["degenerate", "degenerate"]
    assert len(same.scored) == 2


def test_a_conversion_accounts_for_every_token() -> None:
    made = rows_of(groups(), PLAN)
    trained = all_rows(made)
    whole = convert(None, made, trained)
    assert whole.account == plan_step(groups(), PLAN).ledger
    cut = convert(None, made, trained[1:], {trained[0]: "target_length"})
    assert cut.account.excluded["target_length"] == 3
    assert cut.account.captured == whole.account.captured == 26
    assert REFUSALS.isdisjoint(EXCLUSIONS)


def test_a_target_with_its_own_advantages_takes_the_baseline_too() -> None:
    made = rows_of(groups(), PLAN)
    taken = [(i.rollout.id, s.index) for g in made for i in g.scored for s in i.segments]
    found = convert(None, made, taken, unscored(made))
    assert found.account.trained == 18
    assert found.account.excluded == {"edited": 2, "infra": 3, "target_unscored": 3}


def test_a_rollout_without_others_to_compare_is_refused() -> None:
    alone = (rollout("train/1/0/0", 1.0), rollout("train/1/0/1", None, status=Status.INFRA_FAILED))
    made = rows_of([Group(id="train/1/0", task_id="t", rollouts=alone)], PLAN)
    assert made[0].scored == ()
    assert convert(None, made, ()).account.excluded == {"infra": 6}


def test_a_rollout_alone_cannot_be_dropped_with_its_group() -> None:
    with pytest.raises(ConfigError, match="needs whole groups"):
        rows_alone(rollout("train/1/0/0", 1.0), PLAN.changed(truncated="drop_group"))


def test_a_row_is_never_left_out_or_given_twice() -> None:
    made = rows_of(groups(), PLAN)
    trained = all_rows(made)
    with pytest.raises(TrainError, match="neither in the payload nor refused"):
        convert(None, made, trained[1:])
    with pytest.raises(TrainError, match="in the payload twice"):
        convert(None, made, [*trained, trained[0]])
    with pytest.raises(TrainError, match="was not given"):
        convert(None, made, [*trained, ("train/9/9/9", 0)])
