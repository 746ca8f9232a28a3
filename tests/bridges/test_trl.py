"""Contracts of the bridge to TRL, without TRL: rows, refusals, sessions."""

from __future__ import annotations

import subprocess
import sys
import types
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from row_lab import PLAN, groups, rollout, segment, stepped
from trl_cpu import arguments

from insitu.config import load_config
from insitu.errors import ConfigError, TrainError
from insitu.types import Group, Rollout, Status
from insitu_bridges import trl
from insitu_bridges.rows import rows_of


@dataclass(slots=True)
class Sample:
    """The fields of TRL's RolloutSample."""

    prompt: Any
    completion: Any
    input_ids: Any
    completion_mask: Any
    old_log_probs: Any
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None


@pytest.fixture
def fake_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("trl.experimental.async_grpo.async_rollout_worker")
    module.RolloutSample = Sample  # type: ignore[attr-defined]
    for name in ("trl", "trl.experimental", "trl.experimental.async_grpo"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def two_versions() -> Group:
    """A rollout of two rows, one older; one with reward 0, one at the mean, one not graded."""
    first = rollout("train/1/0/0", 1.0, 2)
    old = replace(segment("train/1/0/0", 1), versions=np.where(segment("x", 1).mask, 2, 0).astype(np.int32))
    path = replace(first.trajectory, segments=(first.trajectory.segments[0], old))
    others = (rollout("train/1/0/1", 0.0), rollout("train/1/0/2", 0.5), rollout("train/1/0/3", None))
    return Group(id="train/1/0", task_id="t", rollouts=(replace(first, trajectory=path), *others))


@pytest.mark.usefixtures("fake_trl")
def test_samples_are_the_trained_rows() -> None:
    made = rows_of([two_versions()], PLAN)
    converted = trl.to_samples(made, first_group=7)
    rows = made[0].rows
    assert len(converted.payload) == len(rows) == 3
    for sample, row in zip(converted.payload, rows, strict=True):
        assert sample.input_ids.tolist() == row.ids.tolist()
        assert (sample.input_ids.dtype, sample.completion_mask.dtype) == (np.int64, np.int64)
        assert sample.completion_mask.tolist() == row.mask.astype(int).tolist()
        assert sample.old_log_probs.dtype == np.float32
        assert sample.old_log_probs[~row.mask].tolist() == [0.0] * int((~row.mask).sum())
        assert np.array_equal(sample.old_log_probs[row.mask], row.logprobs[row.mask])
    assert {sample.model_version for sample in converted.payload} == {2}  # dropped together or not at all
    assert {sample.group_id for sample in converted.payload} == {7}
    assert [sample.metrics["reward"] for sample in converted.payload] == [1.0, 1.0, 0.0]
    assert converted.account.captured == 15
    assert converted.account.trained == 9
    assert converted.account.excluded == {"ungraded": 3, "zero_advantage": 3}


@pytest.mark.usefixtures("fake_trl")
@pytest.mark.parametrize("reducer", ["constant", "rollout", "token", "group"])
def test_weights_are_folded_into_advantages(reducer: str) -> None:
    """The weighted sum of losses is that of the plan up to one factor, which is 1 per token on average."""
    made = rows_of(groups(), PLAN.changed(reducer=reducer))
    samples = trl.to_samples(made).payload
    rows = [row for group in made for row in group.rows]
    factors = [sample.advantage / row.advantage for sample, row in zip(samples, rows, strict=True)]
    ratio = [factor / row.weight for factor, row in zip(factors, rows, strict=True)]
    assert ratio == pytest.approx([ratio[0]] * len(rows))
    tokens = [int(row.mask.sum()) for row in rows]
    assert np.average(factors, weights=tokens) == pytest.approx(1.0)


@pytest.mark.usefixtures("fake_trl")
def test_no_rows_give_no_samples() -> None:
    same = Group(id="g", task_id="t", rollouts=(rollout("g/0", 1.0), rollout("g/1", 1.0)))
    converted = trl.to_samples(rows_of([same], PLAN))
    assert converted.payload == []
    assert converted.account.excluded == {"degenerate": 6}


CONFIG = load_config(None, ("collect.groups_per_step=4", "collect.group_size=8", "collect.max_staleness=1"))


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"token_budget": None}, "token_budget None"),
        ({"token_budget": 256}, "set token_budget=0"),
        ({"max_staleness": 0}, "set max_staleness=1"),
        ({"temperature": 0.7}, "temperature 0.7 of the trainer is not engine.temperature 1.0"),
        ({"per_device_train_batch_size": 4}, "rows would be up to 11 versions old"),
    ],
)
def test_arguments_with_which_trl_would_hang_are_refused(own: dict[str, Any], said: str) -> None:
    trl.check_async(CONFIG, arguments())
    with pytest.raises(ConfigError, match=said):
        trl.RolloutWorker(CONFIG, arguments(**own))


def test_rollout_func_gives_one_row_per_prompt() -> None:
    many = rollout("a", 1.0, 3)
    failed = rollout("b", None, status=Status.INFRA_FAILED)
    ungraded = rollout("c", None)
    converted = trl.to_outputs([many, failed, ungraded], PLAN, "final")
    out = converted.payload
    assert {len(column) for column in out.values()} == {3}
    assert out["env_reward"] == [1.0, None, None]
    assert out["rollout_id"] == ["a", "b", "c"]
    assert out["prompt_ids"][0] + out["completion_ids"][0] == many.trajectory.segments[2].ids[:7].tolist()
    assert out["env_mask"] == [[1, 1, 1], [0], [0]]
    assert out["logprobs"][0] == [-0.25] * 3
    assert converted.account.captured == 15
    assert converted.account.trained == 3
    # The failed one has a trajectory only in this test.
    assert converted.account.excluded["target_one_row"] == 6
    assert trl.reward(**out) == out["env_reward"]  # type: ignore[arg-type]


def test_rollout_func_chooses_or_refuses() -> None:
    long = segment("a", 0, trained=9)
    path = rollout("a", 1.0, 2).trajectory
    two = replace(rollout("a", 1.0, 2), trajectory=_path(rollout("a", 1.0, 2), (long, path.segments[1])))
    longest = trl.to_outputs([two], PLAN, "longest").payload
    assert len(longest["completion_ids"][0]) == 9
    with pytest.raises(TrainError, match="2 rows, and rollout_func takes one"):
        trl.to_outputs([two], PLAN, "refuse")
    with pytest.raises(TrainError, match="is of several steps"):
        trl.to_outputs([stepped(rollout("a", 1.0))], PLAN, "final")


def _path(one: Rollout, segments: Any) -> Any:
    trained = sum(int(each.mask.sum()) for each in segments)
    ledger = replace(one.trajectory.ledger, captured=trained, trained=trained)
    return replace(one.trajectory, segments=segments, ledger=ledger)


def test_a_session_factory_refuses_other_sampling() -> None:
    trl.SessionFactory(CONFIG, sampling={"temperature": 1.0, "top_p": 1.0, "top_k": 0})
    with pytest.raises(ConfigError, match="top_p 0.9 of the trainer"):
        trl.SessionFactory(CONFIG, sampling={"top_p": 0.9})


def test_a_session_starts_its_agent_with_its_first_use() -> None:
    started: list[Future[Rollout]] = []

    class Source:
        def submit(self, make: object) -> Future[Rollout]:
            started.append(Future())
            return started[-1]

    factory = trl.SessionFactory(CONFIG)
    factory.__dict__["source"] = Source()
    unused, used = factory.create("toy-1"), factory.create("toy-1")
    assert not started
    assert used.initial_messages() == []
    started[0].set_result(rollout("a", 1.0))
    assert (used.wait_for_completion(1.0), len(started)) == (0, 1)
    used.close()
    unused.close()
    with pytest.raises(TrainError, match="closed before its agent began"):
        unused.wait_for_completion(1.0)
    assert len(started) == 1


def test_a_session_that_is_closed_while_the_source_opens_has_no_agent() -> None:
    factory, running = trl.SessionFactory(CONFIG), Future[Rollout]()
    session = factory.create("toy-1")

    class Opening:
        def submit(self, make: object) -> Future[Rollout]:
            session.close()  # by another thread
            return running

    factory.__dict__["source"] = Opening()
    session.initial_messages()
    assert running.cancelled()


@pytest.mark.slow
def test_neither_torch_nor_trl_is_imported_with_the_bridge() -> None:
    found = "sorted({'torch', 'trl', 'openenv', 'safetensors'} & set(sys.modules))"
    code = f"import sys, insitu_bridges.trl; print({found})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "[]\n"
