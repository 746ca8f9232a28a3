"""Values as frames with a checksum: what goes to a node, and the finished attempt that comes back."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from insitu.attempt import AttemptSpec
from insitu.errors import EngineError, boundary
from insitu.types.codec import ValueCodec
from insitu_train.channel.rpc import Array, Frame

_CODEC = ValueCodec(AttemptSpec)


def pack(*values: object) -> Frame:
    """Return values as a frame. Raises EngineError for a type that is not carried."""
    with boundary(EngineError, "write a frame"):
        arrays = _CODEC.pack(values)
    return Frame(meta={"crc32": _checksum(arrays)}, arrays=arrays)


def unpack(frame: Frame) -> tuple[Any, ...]:
    """Return the values of a frame. Raises EngineError if it is damaged."""
    with boundary(EngineError, "read a frame"):
        if _checksum(frame.arrays) != frame.meta["crc32"]:
            raise ValueError("its checksum is wrong")
        return _CODEC.unpack(tuple, frame.arrays)


def _checksum(arrays: Mapping[str, Array]) -> int:
    crc = 0
    for name in sorted(arrays):
        crc = zlib.crc32(arrays[name].view(np.uint8).data, crc)
    return crc
