"""Pairs for DPO: who is compared with whom, what is left out by which name, and TRL's arguments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from row_lab import rollout, stepped

from insitu.errors import RecordError
from insitu.types import Group, Rollout, Status
from insitu_bridges import trl
from insitu_bridges.rows import Conversion, rows_of
from insitu_bridges.targets import TARGETS, check_payload
from insitu_bridges.to_dpo import to_dpo
from insitu_train.plan.step import PlanConfig


def made(*rollouts: Rollout) -> Conversion[list[dict[str, Any]]]:
    return to_dpo(rows_of([Group(id="g", task_id="t", rollouts=rollouts)], PlanConfig()))


def names(found: Conversion[list[dict[str, Any]]]) -> list[tuple[str, str]]:
    return [(pair["chosen_rollout"], pair["rejected_rollout"]) for pair in found.payload]


def with_prompt(one: Rollout, first_id: int) -> Rollout:
    [row] = one.trajectory.segments
    ids = row.ids.copy()
    ids[0] = first_id
    return replace(one, trajectory=replace(one.trajectory, segments=(replace(row, ids=ids),)))


def test_the_best_stands_against_the_worst_and_then_the_next_two() -> None:
    rewards = {"a": 0.25, "b": 1.0, "c": 0.0, "d": 0.75, "e": 0.5}
    found = made(*(rollout(name, reward) for name, reward in rewards.items()))
    assert names(found) == [("b", "c"), ("d", "a")]
    assert [(p["chosen_reward"], p["rejected_reward"]) for p in found.payload] == [(1.0, 0.0), (0.75, 0.25)]
    assert found.account.excluded == {"zero_advantage": 3}, "the one in the middle has its reason"


def test_equal_rewards_make_no_pair() -> None:
    found = made(rollout("a", 1.0), rollout("b", 1.0), rollout("c", 1.0), rollout("d", 0.0))
    assert names(found) == [("a", "d")]
    assert found.refused == {("b", 0): "target_pair", ("c", 0): "target_pair"}
    same = made(rollout("a", 1.0), rollout("b", 1.0))
    assert (same.payload, same.account.excluded) == ([], {"degenerate": 6})


def test_what_was_not_graded_is_in_no_pair() -> None:
    failed = rollout("c", None, status=Status.INFRA_FAILED)
    found = made(rollout("a", 1.0), rollout("b", None), failed, rollout("d", 0.0))
    assert names(found) == [("a", "d")]
    assert found.account.excluded == {"infra": 3, "target_unscored": 3}


def test_no_row_stands_for_several_steps() -> None:
    two = stepped(rollout("a", 1.0)), stepped(rollout("b", 0.0))
    found = made(*two, rollout("c", 0.75), rollout("d", 0.25))
    assert names(found) == [("c", "d")]
    assert found.refused == {("a", 0): "target_steps", ("b", 0): "target_steps"}


def test_a_pair_has_one_prompt() -> None:
    found = made(rollout("a", 1.0), with_prompt(rollout("b", 0.0), 90), with_prompt(rollout("c", 0.75), 90))
    assert names(found) == [("c", "b")]
    assert found.refused == {("a", 0): "target_pair"}


def test_ids_and_masks_are_those_of_the_final_rows() -> None:
    """Rollouts of two rows: the final ones, with what was not sampled between and after."""
    both = [rollout("a", 1.0, 2), rollout("b", 0.0, 2)]
    changed = []
    for one in both:
        row = one.trajectory.segments[1]
        mask = row.mask.copy()
        mask[5] = False  # an observation
        rows = (one.trajectory.segments[0], replace(row, mask=mask))
        ledger = replace(one.trajectory.ledger, captured=5, trained=5)
        changed.append(replace(one, trajectory=replace(one.trajectory, segments=rows, ledger=ledger)))
    found = made(*changed)
    [pair] = found.payload
    row = changed[0].trajectory.segments[1]
    assert pair["prompt_ids"] + pair["chosen_ids"] == row.ids.tolist()
    assert pair["chosen_mask"] == pair["rejected_mask"] == [1, 0, 1, 0]
    assert np.array_equal(np.float32(pair["chosen_logprobs"]), row.logprobs[4:])
    assert set(found.refused.values()) == {"target_one_row"}
    assert (found.account.trained, found.account.excluded) == (4, {"target_one_row": 6})


def test_a_sub_agent_that_ends_last_is_not_the_final_row() -> None:
    both = []
    for one in (rollout("a", 1.0, 2), rollout("b", 0.0, 2)):
        first, last = one.trajectory.segments
        rows = (first, replace(last, label="subagent"))
        both.append(replace(one, trajectory=replace(one.trajectory, segments=rows)))
    found = made(*both)
    assert found.taken == {("a", 0), ("b", 0)}
    assert found.refused == {("a", 1): "target_one_row", ("b", 1): "target_one_row"}


def test_pairs_are_read_back() -> None:
    groups = rows_of(
        [Group(id="g", task_id="t", rollouts=(rollout("a", 1.0), rollout("b", 0.0)))], PlanConfig()
    )
    payload = orjson.loads(orjson.dumps(TARGETS["dpo"].convert(groups).payload))
    check_payload("dpo", groups, payload)
    payload[0]["rejected_ids"][0] += 1
    with pytest.raises(RecordError, match="rollout b row 0: ids differ"):
        check_payload("dpo", groups, payload)


def test_what_holds_no_pairs_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="has no pairs"):
        trl.preferences(tmp_path)
    with pytest.raises(RecordError, match="cannot|read"):
        trl.preferences(tmp_path / "gone.jsonl")
    other = tmp_path / "other.jsonl"
    for text in ("[1]", '{"prompt_ids": [1]}'):
        other.write_text(text)
        with pytest.raises(RecordError, match="holds no pairs of insitu export --to dpo"):
            trl.preferences(other)
    pair = {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5], "chosen_mask": [1]}
    other.write_bytes(orjson.dumps(pair))
    with pytest.raises(RecordError, match="has no pairs of at most 3 tokens"):
        trl.preferences(other, max_length=3)
