"""The embedded engine from the controller's side: `engines.base.Engine` over a channel to the learner.

The sampler itself (torch) is core.py, in the learner's process; this side never imports torch. Cancelling
`generate` aborts the request there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from insitu.engines.base import EngineInfo, PauseMode, Receipt
from insitu.engines.rpc import Meta, RpcClient
from insitu.errors import EngineError, boundary
from insitu.types import CallTimes, Finish, Generation, IntArray, RequestKey, SamplingParams

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
        meta = params_meta(params, key)
        frame = await self._channel.call(
            "engine.generate", meta, {"ids": ids}, deadline_s=self._deadline_s, quiet_s=QUIET_S
        )
        if frame.meta["finish"] not in ("stop", "length", "abort"):
            raise EngineError(f"the learner answered finish={frame.meta['finish']!r}")
        runs = cast("list[list[Any]]", frame.meta["version_runs"])
        return Generation(
            ids=frame.arrays["ids"],
            logprobs=frame.arrays["logprobs"],
            finish=cast(Finish, frame.meta["finish"]),
            version_runs=tuple((int(start), int(version)) for start, version in runs),
            times=CallTimes(first_s=frame.meta.get("first_s"), cached=frame.meta.get("cached")),
        )

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


def params_meta(params: SamplingParams, key: RequestKey) -> Meta:
    """Return a request without its ids; `request_of` reads it."""
    return {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "stop_ids": sorted(params.stop_ids),
        "experts_from": params.experts_from,
        "seed": key.seed,
        "rollout_id": key.rollout_id,
        "turn": key.turn,
    }


def request_of(meta: Meta) -> tuple[SamplingParams, RequestKey]:
    """Return what `params_meta` was made of; raise EngineError."""
    with boundary(EngineError, "read engine.generate"):
        params = SamplingParams(
            max_tokens=int(meta["max_tokens"]),
            temperature=float(meta["temperature"]),
            stop_ids=frozenset(int(i) for i in meta["stop_ids"]),
            experts_from=int(meta["experts_from"]),
        )
        return params, RequestKey(
            seed=int(meta["seed"]), rollout_id=meta["rollout_id"], turn=int(meta["turn"])
        )


def _receipt(meta: Meta) -> Receipt:
    return Receipt(version=int(meta["version"]), checksum=str(meta["checksum"]))
