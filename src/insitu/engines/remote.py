"""The embedded engine from the controller's side: `engines.base.Engine` over a channel to the learner.

The sampler itself (torch) is core.py, in the learner's process; this side never imports torch. Cancelling
`generate` aborts the request there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from insitu.engines.base import EngineInfo, PauseMode, Receipt
from insitu.engines.rpc import Array, Meta, RpcClient
from insitu.errors import EngineError, boundary
from insitu.types import Generation, IntArray, RequestKey, SamplingParams
from insitu.types.codec import VALUES

QUIET_S = 30.0
"""Silence of the learner after which a waiting call is looked into."""


class ChildEngine:
    """Implements `engines.base.Engine`; make one with `attach`. The channel's owner closes the learner."""

    def __init__(
        self, channel: RpcClient, info: EngineInfo, receipt: Receipt, call_deadline_s: float
    ) -> None:
        self._channel = channel
        self._info = info
        self._receipt = receipt
        self._deadline_s = call_deadline_s

    @classmethod
    async def attach(cls, channel: RpcClient, *, call_deadline_s: float = 120.0) -> ChildEngine:
        """Query the learner. call_deadline_s: timeout of every later call. Raises EngineError."""
        reply = await channel.call("engine.info", deadline_s=call_deadline_s)
        with boundary(EngineError, "read engine.info"):
            info = EngineInfo(name=reply.meta["name"], max_context_tokens=int(reply.meta["max_context"]))
        return cls(channel, info, _receipt(reply.meta), call_deadline_s)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def receipt(self) -> Receipt:
        """Receipt of the current weights, updated at `resume` and `refresh`."""
        return self._receipt

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        """Sample a continuation of `ids`. Raises EngineError; cancellation aborts at the learner."""
        request = VALUES.pack((ids, params, key))
        frame = await self._channel.call(
            "engine.generate", None, request, deadline_s=self._deadline_s, quiet_s=QUIET_S
        )
        return read_generation(frame.arrays)

    async def pause(self) -> None:
        """Return when no request is running; new ones wait for `resume`."""
        try:
            await self._channel.call("engine.pause", deadline_s=self._deadline_s, quiet_s=QUIET_S)
        except BaseException:
            # Whoever gave up will not resume, and the answer may be on its way: too late for a cancellation.
            self._channel.notify("engine.resume", {})
            raise

    async def resume(self) -> None:
        frame = await self._channel.call("engine.resume", deadline_s=self._deadline_s, quiet_s=QUIET_S)
        self._receipt = _receipt(frame.meta)

    async def load(self, folder: Path, version: int, *, mode: PauseMode = "wait") -> Receipt:
        """Sample with the weights of a folder (absolute path); running requests finish first.

        Raises EngineError.
        """
        meta: Meta = {"folder": str(folder), "version": version}
        frame = await self._channel.call("engine.load", meta, deadline_s=self._deadline_s, quiet_s=QUIET_S)
        self._receipt = _receipt(frame.meta)
        return self._receipt

    async def refresh(self) -> Receipt:
        """Fetch the receipt of the current weights after a publication."""
        frame = await self._channel.call("engine.info", deadline_s=self._deadline_s, quiet_s=QUIET_S)
        self._receipt = _receipt(frame.meta)
        return self._receipt

    async def close(self) -> None:
        """Close the channel. May be called twice."""
        await self._channel.close()


def read_request(arrays: Mapping[str, Array]) -> tuple[IntArray, SamplingParams, RequestKey]:
    """Return the ids, parameters and key of a call of engine.generate. Raises EngineError."""
    with boundary(EngineError, "read engine.generate"):
        ids, params, key = VALUES.unpack(tuple, arrays)
    return ids, params, key


def read_generation(arrays: Mapping[str, Array]) -> Generation:
    """Return the answer of engine.generate. Raises EngineError."""
    with boundary(EngineError, "read a generation"):
        return VALUES.unpack(Generation, arrays)


def _receipt(meta: Meta) -> Receipt:
    return Receipt(version=int(meta["version"]), checksum=str(meta["checksum"]))
