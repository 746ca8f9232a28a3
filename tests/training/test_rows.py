"""Which rows of a rollout are trained: modes, caps, the account, and what the means run over."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from train_lab import group, rollout, segment

from insitu.config import load_config
from insitu.config.training import RowRules
from insitu.errors import ConfigError
from insitu.types import Ledger, Rollout, Segment
from insitu_train.plan.row_selection import choose_rows
from insitu_train.plan.step import PlanConfig, StepPlan, plan_step, use_of

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

A, B = "train/0/0/0", "train/0/0/1"


def labelled(name: str, index: int, label: str, ids: list[int], trained: set[int], version: int) -> Segment:
    mask = [i in trained for i in range(len(ids))]
    made = segment(name, index, ids, mask, [-0.5 - index - i / 100 for i in range(len(ids))], version)
    return dataclasses.replace(made, label=label)


def forked() -> Rollout:
    """A turn (2, 3) that both chains share and the first holds; a sub-agent's row last."""
    return rollout(A, 1.0, [
        labelled(A, 0, "wipe", [1, 1, 7, 8, 4, 9], {2, 3, 5}, 1),
        labelled(A, 1, "final", [1, 1, 7, 8, 5, 6, 6], {5, 6}, 2),
        labelled(A, 2, "subagent", [2, 2, 3], {2}, 3),
    ])  # fmt: skip


def plain() -> Rollout:
    return rollout(B, 0.0, [labelled(B, 0, "final", [1, 1, 5, 5], {2, 3}, 0)])


def planned(rules: RowRules, **more: object) -> StepPlan:
    return plan_step([group("train/0/0", [forked(), plain()])], PlanConfig(**rules.model_dump(), **more))  # type: ignore[arg-type]


def test_collapse_trains_the_final_chain_with_the_turns_that_it_shares() -> None:
    plan = planned(RowRules(rows="collapse"))
    row = plan.rows[0]
    assert [(r.rollout_id, r.segment) for r in plan.rows] == [(A, 1), (B, 0)]
    assert row.ids.tolist() == [1, 1, 7, 8, 5, 6, 6]
    assert np.flatnonzero(row.mask).tolist() == [2, 3, 5, 6]
    assert row.logprobs[row.mask] == pytest.approx([-0.52, -0.53, -1.55, -1.56])
    assert row.versions[row.mask].tolist() == [1, 1, 2, 2]
    assert row.weight == pytest.approx(1 / 2 / 4)  # nothing but its four tokens
    assert plan.ledger == Ledger(captured=8, trained=6, excluded={"not_final": 2})


def test_final_gives_credit_to_the_same_row_but_all_tokens_count() -> None:
    plan = planned(RowRules(rows="final"))
    assert np.flatnonzero(plan.rows[0].mask).tolist() == [2, 3, 5, 6]
    assert plan.rows[0].weight == pytest.approx(1 / 2 / 6)
    assert plan.ledger == Ledger(captured=8, trained=6, excluded={"not_final": 2})


def test_all_is_the_default_and_counts_every_token_once() -> None:
    plan = planned(RowRules())
    assert [(r.rollout_id, r.segment) for r in plan.rows] == [(A, 0), (A, 1), (A, 2), (B, 0)]
    assert [r.weight for r in plan.rows[:3]] == pytest.approx([1 / 2 / 6] * 3)
    assert plan.ledger == Ledger(captured=8, trained=8)


def test_a_cap_on_rows_keeps_the_first_and_the_last() -> None:
    plan = planned(RowRules(max_rows=2))
    assert [r.segment for r in plan.rows if r.rollout_id == A] == [0, 2]
    assert [r.weight for r in plan.rows[:2]] == pytest.approx([1 / 2 / 4] * 2)
    assert plan.ledger == Ledger(captured=8, trained=6, excluded={"row_cap": 2})
    assert [r.segment for r in planned(RowRules(max_rows=1)).rows] == [2, 0]


def test_a_row_over_the_cap_is_told_as_overlong() -> None:
    plan = planned(RowRules(max_row_tokens=6))
    assert [r.segment for r in plan.rows if r.rollout_id == A] == [0, 2]
    assert plan.ledger.excluded == {"overlong": 2}
    both = choose_rows(forked(), RowRules(max_rows=2, max_row_tokens=3))
    assert [s.index for s in both.rows] == [2]
    assert (both.counted, both.excluded) == (1, {"row_cap": 2, "overlong": 3})


def test_a_rollout_whose_rows_are_all_over_the_cap_is_no_group_of_its_own() -> None:
    plan = planned(RowRules(max_row_tokens=2))
    assert plan.skipped
    assert plan.ledger == Ledger(captured=8, trained=0, excluded={"overlong": 8})


def test_a_rollout_of_which_no_row_is_left_is_not_called_trained() -> None:
    """Its group's others are; its tokens keep the names under which they were left out."""
    long = rollout(A, 1.0, [segment(A, 0, list(range(9)), [False] + [True] * 8, [-1.0] * 9)])
    groups = [group("train/0/0", [long, rollout(B, 0.0, [segment(B, 0, [1, 2], [False, True], [-1.0] * 2)])])]
    plan = plan_step(groups, PlanConfig(max_row_tokens=4))
    assert (plan.exclusion_reasons, plan.skipped) == ({A: "overlong", B: ""}, "")
    assert plan.ledger == Ledger(captured=9, trained=1, excluded={"overlong": 8})


def test_a_rollout_without_a_token_to_train_is_not_called_trained() -> None:
    silent = rollout(A, 1.0, [], excluded={"edited": 3})
    other = rollout(B, 0.0, [segment(B, 0, [1, 2], [False, True], [-1.0] * 2)])
    plan = plan_step([group("train/0/0", [silent, other])], PlanConfig())
    assert plan.exclusion_reasons == {A: "no_tokens", B: ""}
    assert plan.ledger == Ledger(captured=4, trained=1, excluded={"edited": 3})
    both = group("train/0/0", [silent, rollout(B, 0.0, [])])
    assert set(plan_step([both], PlanConfig()).exclusion_reasons.values()) == {"no_tokens"}
    assert use_of(both, PlanConfig()) == "no_tokens"


def test_without_a_final_row_the_last_one_is_taken() -> None:
    segments = forked().trajectory.segments
    bare = [dataclasses.replace(s, label="append") for s in segments]
    assert [s.index for s in choose_rows(rollout(A, 1.0, bare), RowRules(rows="collapse")).rows] == [2]


def test_the_keys_reach_the_planner() -> None:
    config = load_config(None, ["train.rows=collapse", "train.max_row_tokens=900"])
    assert PlanConfig.of(config).pick(RowRules) == RowRules(rows="collapse", max_row_tokens=900)
    assert PlanConfig.of(load_config(None, ["train.max_rows=8"])).pick(RowRules) == RowRules(max_rows=8)
    with pytest.raises(ConfigError, match=r"max_rows has no effect with rows = 'final', only with all"):
        load_config(None, ["train.max_rows=8", "train.rows=final"])
