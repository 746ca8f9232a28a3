"""Examples for supervised trainers: which rollouts are the best, what is left out by which name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from row_lab import rollout
from run_lab import Flavour, make_rollout

from insitu.capture.ledger import reassign
from insitu.cli import main
from insitu.config import load_config
from insitu.errors import RecordError
from insitu.storage.run_dir import RunDir
from insitu.types import Group, Rollout, Status
from insitu_bridges.rows import Conversion, rows_of
from insitu_bridges.targets import TARGETS, check_payload
from insitu_bridges.to_sft import CONTEXT, to_sft
from insitu_train.plan.step import PlanConfig


def made(*rollouts: Rollout) -> Conversion[list[dict[str, Any]]]:
    return to_sft(rows_of([Group(id="g", task_id="t", rollouts=rollouts)], PlanConfig()))


def names(found: Conversion[list[dict[str, Any]]]) -> list[str]:
    return [one["rollout"] for one in found.payload]


def test_the_best_of_a_group_are_examples_and_all_others_have_a_reason() -> None:
    found = made(rollout("a", 0.5), rollout("b", 0.75), rollout("c", 0.0), rollout("d", 0.75))
    assert names(found) == ["b", "d"]
    assert found.refused == {("c", 0): "target_not_best"}
    assert found.account.excluded == {"target_not_best": 3, "zero_advantage": 3}, "a is at the mean"
    assert {one["reward"] for one in found.payload} == {0.75}


def test_equal_and_single_rollouts_are_examples() -> None:
    """A trainer that compares needs two rewards; one that imitates needs one."""
    assert names(made(rollout("a", 1.0), rollout("b", 1.0))) == ["a", "b"]
    assert names(made(rollout("a", 1.0))) == ["a"]
    lost = rollout("b", None, status=Status.INFRA_FAILED)
    found = made(rollout("a", 1.0), lost)
    assert (names(found), found.account.excluded) == (["a"], {"infra": 3})


def test_what_is_no_example() -> None:
    nothing = made(rollout("a", 0.0), rollout("b", -1.0))
    assert (nothing.payload, nothing.account.excluded) == ([], {"target_not_best": 6}), "no rollout solved it"
    failed = rollout("a", 1.0, status=Status.AGENT_FAILED)
    assert names(made(failed, rollout("b", 0.5), rollout("c", 0.0))) == ["b"]
    found = made(rollout("a", 1.0), rollout("b", None), rollout("c", 0.0))
    assert found.account.excluded == {"target_not_best": 3, "target_unscored": 3} or (
        found.account.excluded == {"target_not_best": 3, "ungraded": 3}
    )


def test_every_row_is_an_example_with_loss_on_what_was_sampled() -> None:
    one = rollout("a", 1.0, 2)
    first, last = one.trajectory.segments
    mask = last.mask.copy()
    mask[5] = False  # an observation
    rows = (replace(first, label="subagent"), replace(last, mask=mask))
    ledger = replace(one.trajectory.ledger, captured=5, trained=5)
    one = replace(one, trajectory=replace(one.trajectory, segments=rows, ledger=ledger))
    found = made(one, rollout("b", 0.0))
    assert [example["row"] for example in found.payload] == ["subagent", "final"]
    example = found.payload[1]
    assert example["input_ids"] == last.ids.tolist()
    sampled = [4, 6]
    expected = [int(last.ids[n]) if n in sampled else CONTEXT for n in range(len(last.ids))]
    assert example["labels"] == expected
    assert np.array_equal(np.float32(example["logprobs"]), last.logprobs)
    assert found.account.trained == 5


def test_examples_are_read_back() -> None:
    groups = rows_of([Group(id="g", task_id="t", rollouts=(rollout("a", 1.0),))], PlanConfig())
    payload = orjson.loads(orjson.dumps(TARGETS["sft"].convert(groups).payload))
    check_payload("sft", groups, payload)
    payload[0]["labels"][4] += 1
    with pytest.raises(RecordError, match="a label is another token than the one at its place"):
        check_payload("sft", groups, payload)


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("form", ["sft", "dpo"])
def test_rollouts_of_training_tasks_are_taken_and_those_of_held_out_ones_are_not(
    split: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`insitu rollout` stores all as evaluations; a teacher's rollouts are made by it."""
    path, out = tmp_path / "run", tmp_path / "out"
    config = load_config(tables={"run": {"dir": str(path)}, "rollout": {"split": split, "samples": 2}})
    with RunDir.create(config) as run, run.store() as store:
        for slot in range(2):
            one = make_rollout(Flavour(), "rollout", 0, 0, slot, slot == 0)
            ledger = reassign(one.trajectory.ledger, "evaluation")
            one = replace(one, trajectory=replace(one.trajectory, ledger=ledger))
            store.put_rollout("rollout", 0, 0, slot, one)
    assert main(["export", str(path), "--to", form, "--out", str(out), "--check", "--json"]) == 0
    account = orjson.loads(capsys.readouterr().out)["account"]
    rows = [line for file in (out / "data").iterdir() for line in file.read_bytes().splitlines()]
    if split == "eval":
        assert (rows, account["trained"], list(account["excluded"])) == ([], 0, ["evaluation"])
    else:
        assert len(rows) == {"sft": 3, "dpo": 1}[form]
        assert account["trained"] > 0
        assert "evaluation" not in account["excluded"]
