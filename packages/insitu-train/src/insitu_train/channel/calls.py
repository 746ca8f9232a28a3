"""A request and its answer as arrays of a channel, for an engine in another process."""

from __future__ import annotations

from collections.abc import Mapping

from insitu.errors import EngineError, boundary
from insitu.types import Generation, IntArray, RequestKey, SamplingParams
from insitu.types.codec import VALUES
from insitu_train.channel.rpc import Array


def read_request(arrays: Mapping[str, Array]) -> tuple[IntArray, SamplingParams, RequestKey]:
    """Return the ids, parameters and key of a call of engine.generate. Raises EngineError."""
    with boundary(EngineError, "read engine.generate"):
        ids, params, key = VALUES.unpack(tuple, arrays)
    return ids, params, key


def read_generation(arrays: Mapping[str, Array]) -> Generation:
    """Return the answer of engine.generate. Raises EngineError."""
    with boundary(EngineError, "read a generation"):
        return VALUES.unpack(Generation, arrays)
