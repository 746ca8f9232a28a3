"""What goes over the wire of a fleet comes back equal, or is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from insitu.attempt import AttemptSpec
from insitu.engines.rpc import Decoder, Frame, encode
from insitu.errors import EngineError
from insitu.runtime.fleet.values import pack, unpack
from insitu.tasks.toy import ToySource
from insitu.types import (
    Case,
    FailingCheck,
    FileEntry,
    Ledger,
    Limits,
    Oracle,
    Outcome,
    Rollout,
    Segment,
    Status,
    Timings,
    Trajectory,
    Turn,
    Verdict,
)


def carried(value: object) -> Any:
    """Return the value after the bytes of a frame."""
    frame = pack(value)
    (received,) = Decoder().feed(encode({**frame.meta, "id": 1}, frame.arrays))
    return unpack(received)


def rollout() -> Rollout:
    ids = np.arange(7, dtype=np.int32)
    turn = Turn(
        index=0, parent=-1, context_ids=ids[:3], ids=ids[3:], logprobs=np.full(4, -0.5, np.float32),
        finish="stop", version_runs=((0, 3), (2, 4)), hints=(("label", "main"),),
        spans=(("user", 0, 3, ""),),
    )  # fmt: skip
    segment = Segment(
        rollout_id="train/00001/000/00", index=0, kind="sampled", label="append", ids=ids, mask=ids > 2,
        logprobs=np.linspace(-1, 0, 7, dtype=np.float32), versions=ids,
    )  # fmt: skip
    verdict = Verdict(
        outcome=Outcome.UNRESOLVED,
        reward=0.0,
        trust="strong",
        evidence=(FailingCheck(name="a", outcome="b"),),
    )
    return Rollout(
        id="train/00001/000/00", task_id="t", category="", status=Status.OK, reward=0.0,
        trajectory=Trajectory(
            segments=(segment,), turns=(turn,), ledger=Ledger(captured=4, trained=3, excluded={"edited": 1})
        ),
        verdict=verdict, changed={"a.py": FileEntry(content=b"\x00\xff", executable=True)}, deleted=("b",),
        timings=Timings(total_s=1.5), reward_components={"x": 0.25},
    )  # fmt: skip


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and bool(np.array_equal(left, right))
    if hasattr(left, "__dataclass_fields__"):
        names = left.__dataclass_fields__
        return type(left) is type(right) and all(same(getattr(left, n), getattr(right, n)) for n in names)
    if isinstance(left, tuple | list):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


def test_a_rollout_comes_back_bit_for_bit() -> None:
    value = rollout()
    assert same(carried(value), value)


def test_arrays_are_joined_by_dtype_however_many_turns_a_rollout_has() -> None:
    value = rollout()
    turns = tuple(replace(value.trajectory.turns[0], index=n) for n in range(20))
    value = replace(value, trajectory=replace(value.trajectory, turns=turns))
    assert sorted(pack(value).arrays) == ["<f4", "<i4", "value", "|b1", "|u1"]
    assert same(carried(value), value)


@pytest.mark.parametrize("array", [np.zeros((0, 3)), np.array(2.5), np.arange(12).reshape(3, 4)[:, ::2]])
def test_arrays_of_any_shape_come_back(array: Any) -> None:
    assert same(carried((array, array)), (array, array))


def test_a_task_and_its_oracle_come_back() -> None:
    source = ToySource(Limits())
    (task,) = source.tasks("train", 0, 1)
    spec = AttemptSpec(rollout_id="train/00001/000/00", task=task, seed=7, attempt=2, temperature=0.5)
    assert carried(spec) == spec
    assert carried(source.oracle(task)) == source.oracle(task)


def test_hidden_cases_hold_any_python_value() -> None:
    args = (1 << 70, (1, [2.5, "\ud800"]), {3: {4}}, frozenset({5}), None, True, b"x", math.inf)
    oracle = Oracle(task_id="t", cases=(Case(function="f", args=args, expected={"a": (1,)}),))
    assert carried(oracle) == oracle


def test_a_damaged_frame_is_refused() -> None:
    frame = pack(rollout())
    broken = {name: array.copy() for name, array in frame.arrays.items()}
    broken["<i4"].flat[0] += 1
    with pytest.raises(EngineError, match="checksum"):
        unpack(Frame(meta=frame.meta, arrays=broken))


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(EngineError, match="object"):
        pack(replace(rollout(), reward_components={"x": object()}))  # type: ignore[dict-item]
