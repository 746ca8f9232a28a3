"""Values come back equal from arrays and from JSON, or are refused with the name of the field."""

from __future__ import annotations

import math
from dataclasses import replace
from types import GenericAlias
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pytest

from insitu.types import (
    CallTimes,
    Case,
    DriftNote,
    FailingCheck,
    FileEntry,
    Ledger,
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
from insitu.types.codec import VALUES, dtype_of, dumps, head, pick, read
from insitu_train.channel.rpc import Decoder, encode


def carried(value: object) -> Any:
    """Return the value after the bytes of a frame."""
    (received,) = Decoder().feed(encode({"id": 1}, VALUES.pack(value)))
    return VALUES.unpack(type(value), received.arrays)


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
    assert sorted(VALUES.pack(value)) == ["<f4", "<i4", "value", "|b1", "|u1"]
    assert same(carried(value), value)


@pytest.mark.parametrize("array", [np.zeros((0, 3)), np.array(2.5), np.arange(12).reshape(3, 4)[:, ::2]])
def test_arrays_of_any_shape_come_back(array: Any) -> None:
    assert same(carried((array, array)), (array, array))


def test_hidden_cases_hold_any_python_value() -> None:
    args = (1 << 70, (1, [2.5, "\ud800"]), {3: {4}}, frozenset({5}), None, True, b"x", math.inf)
    oracle = Oracle(task_id="t", cases=(Case(function="f", args=args, expected={"a": (1,)}),))
    assert carried(oracle) == oracle


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="a value of type object is not carried"):
        VALUES.pack(replace(rollout(), reward_components={"x": object()}))  # type: ignore[dict-item]


def changed(value: object, old: bytes, new: bytes) -> Any:
    """Return the packed value with another JSON."""
    arrays = VALUES.pack(value)
    return arrays | {"value": np.frombuffer(arrays["value"].tobytes().replace(old, new), np.uint8)}


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (b'"began_s",', b"", "CallTimes lacks began_s"),
        (b'"began_s"', b'"began_s","held"', "CallTimes has no held"),
        (b'"CallTimes":', b'"Times":', "a value of type Times is not carried"),
        (b'["CallTimes",', b'["CallTimes",1,', "zip"),
        (b'["CallTimes",', b'["Calls",', "malformed Turn: KeyError"),
        (b'["array","<i4",0,3]', b'["array","<i4",0,9]', "an array of .9,. is cut after 7"),
        (b'["array","<i4",0,3]', b'["array","<i8",0,9]', "malformed Turn: KeyError"),
    ],
)
def test_a_value_of_other_fields_is_refused_by_the_name_of_the_field(
    old: bytes, new: bytes, line: str
) -> None:
    turn = rollout().turns[0]
    with pytest.raises(ValueError, match=line):
        VALUES.unpack(Turn, changed(turn, old, new))


def test_another_kind_of_value_is_refused() -> None:
    with pytest.raises(ValueError, match="a Turn came for a Rollout"):
        VALUES.unpack(Rollout, VALUES.pack(rollout().turns[0]))
    with pytest.raises(ValueError, match="malformed Turn: KeyError"):
        VALUES.unpack(Turn, {})


def test_annotations_of_numpy_2_5_are_arrays_too() -> None:
    """There `NDArray` is an alias with a name, which hides `np.ndarray`."""
    named = GenericAlias(npt.NDArray, (np.float32,))
    assert [dtype_of(hint) for hint in (named, named | None, npt.NDArray[np.int32], int)] == [
        np.float32, np.float32, np.int32, None,
    ]  # fmt: skip


def test_json_reads_back_equal() -> None:
    for value in (
        rollout().turns[0],
        rollout().trajectory,
        rollout().verdict,
        DriftNote(kind="a", cause="b"),
    ):
        assert same(read(type(value), orjson.loads(dumps(value))), value)


def test_what_json_lacks_has_its_default() -> None:
    turn = pick(Turn, orjson.loads(dumps(head(rollout().turns[0]))) | {"other": 1}, **ARRAYS)
    assert same(turn, replace(rollout().turns[0], **ARRAYS))
    old = {"index": 0, "parent": -1, "finish": "stop", "version_runs": []}
    assert pick(Turn, old, **ARRAYS).times == CallTimes()


ARRAYS: dict[str, Any] = {
    "context_ids": np.zeros(1, np.int32),
    "ids": np.zeros(2, np.int32),
    "logprobs": None,
}


def test_whole_numbers_are_log_probabilities_too() -> None:
    """JSON of other programs has 0 for 0.0."""
    found = read(Turn, {**orjson.loads(dumps(rollout().turns[0])), "logprobs": [0, -1]})
    assert (found.logprobs.dtype, found.logprobs.tolist()) == (np.float32, [0.0, -1.0])
    with pytest.raises(ValueError, match="logprobs: no list of one type"):
        read(Turn, {**orjson.loads(dumps(rollout().turns[0])), "logprobs": [True, False]})


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("finish", "end", "finish: 'end' is not stop or length or abort"),
        ("version_runs", [[0]], "version_runs: .* is not a list of 2"),
        ("version_runs", [[0, "1"]], "version_runs: '1' is not int"),
        ("times", {"cached": 1.5}, "times: cached: '1.5' is not int"),
        ("times", {"held": 1}, "times: CallTimes has no held"),
        ("times", [], "times: .* is not an object"),
        ("hints", 3, "hints: '3' is not a list"),
        ("excluded", None, "excluded: 'None' is not str"),
        ("ids", [1, 2.5], "ids: no list of one type without gaps"),
        ("ids", [1, None], "ids: no list of one type without gaps"),
        ("ids", np.zeros(2), "ids: no list of one type without gaps"),
    ],
)
def test_malformed_json_is_refused_by_the_name_of_the_field(field: str, value: object, line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}"):
        read(Turn, orjson.loads(dumps(rollout().turns[0])) | {field: value})


def test_a_field_without_a_default_must_be_there() -> None:
    with pytest.raises(ValueError, match="Turn lacks parent"):
        pick(Turn, {"index": 0}, **ARRAYS)
