"""What goes over the wire of a fleet comes back equal, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from insitu.attempt import AttemptSpec
from insitu.errors import EngineError
from insitu.tasks.toy import ToySource
from insitu.types import Limits
from insitu_fleet.values import pack, unpack
from insitu_train.channel.rpc import Decoder, Frame, encode


def carried(value: object) -> Any:
    """Return the value after the bytes of a frame."""
    frame = pack(value)
    (received,) = Decoder().feed(encode({**frame.meta, "id": 1}, frame.arrays))
    (again,) = unpack(received)
    return again


def test_a_task_and_its_oracle_come_back() -> None:
    source = ToySource(Limits())
    (task,) = source.tasks("train", 0, 1)
    spec = AttemptSpec(rollout_id="train/00001/000/00", task=task, seed=7, attempt=2, temperature=0.5)
    assert carried(spec) == spec
    assert carried(source.oracle(task)) == source.oracle(task)


def test_a_damaged_frame_is_refused() -> None:
    frame = pack(("a", 1))
    broken = {name: array.copy() for name, array in frame.arrays.items()}
    broken["value"].flat[-2] += 1
    with pytest.raises(EngineError, match="checksum"):
        unpack(Frame(meta=frame.meta, arrays=broken))


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(EngineError, match="write a frame: a value of type object is not carried"):
        pack({"x": object()})
