"""The sampler in the learner's process as a server of an `EngineSet`.

    EngineSet -> LearnerEngine --engine.*--> EngineService -> EmbeddedCore

The process has one thread: while it trains, saves or publishes, new requests wait here (`sleep`), with the
deadlines of their agents paused; running ones finish first. After a restart it holds the start model, and
nothing is sampled until weights are published to it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from insitu.engines.base import EngineInfo, PauseMode, Receipt
from insitu.engines.http import RequestGate
from insitu.errors import EngineError, EngineUnavailable, boundary
from insitu.types import Generation, IntArray, RequestKey, SamplingParams
from insitu.types.codec import VALUES
from insitu_train.channel.calls import read_generation
from insitu_train.channel.rpc import Array, Frame, Meta, RpcPeer

QUIET_S = 30.0
"""Silence of the learner after which a waiting call is looked into."""
Explain = Callable[[EngineError], Awaitable[EngineError]]
"""Returns the error itself, or the cause of death of the process."""


async def _as_it_is(error: EngineError) -> EngineError:
    return error


class LearnerEngine:
    """Implements `engines.base.LoadingEngine`; the channel's owner closes it. Make one with `attach`."""

    def __init__(
        self, channel: RpcPeer, explain: Explain, info: EngineInfo, receipt: Receipt, call_deadline_s: float
    ) -> None:
        self.use(channel, explain)
        self.info, self._receipt, self._deadline_s = info, receipt, call_deadline_s
        self.one_thread = True
        """Whether the process cannot sample beside its other work."""
        self._gate, self._sleepers = RequestGate(), 0
        self.fed = True
        """False = the process was restarted and has no published weights yet: nothing is sampled."""

    @classmethod
    async def attach(
        cls, channel: RpcPeer, explain: Explain = _as_it_is, *, call_deadline_s: float = 120.0
    ) -> LearnerEngine:
        """Query the learner. call_deadline_s: timeout of every later call. Raises EngineError."""
        reply = await channel.call("engine.info", deadline_s=call_deadline_s)
        with boundary(EngineError, "read engine.info"):
            info = EngineInfo(name=reply.meta["name"], max_context_tokens=int(reply.meta["max_context"]))
            return cls(channel, explain, info, _receipt(reply.meta), call_deadline_s)

    def use(self, channel: RpcPeer, explain: Explain) -> None:
        """Use the channel of a restarted process."""
        self._channel, self._explain = channel, explain

    @property
    def receipt(self) -> Receipt:
        """Of the weights that the process held when it was last asked."""
        return self._receipt

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        """Sample a continuation of `ids`. Raises EngineError; cancellation aborts at the learner."""
        await self._gate.wait(self._deadline_s)
        await self.version()
        frame = await self._call("engine.generate", None, VALUES.pack((ids, params, key)))
        return read_generation(frame.arrays)

    async def version(self) -> int:
        """Return the version; raise EngineUnavailable for a process that is dead or has no weights yet."""
        if not self._channel.alive:
            raise EngineUnavailable(str(await self._explain(EngineError("the learner is gone"))))
        if not self.fed:
            raise EngineUnavailable("the learner was restarted and has no published weights yet")
        return self._receipt.version

    async def recognise(self) -> Receipt:
        """Ask the process what weights it holds, and take them for published."""
        return self._took(await self._call("engine.info"))

    async def load(self, folder: Path, version: int, *, mode: PauseMode = "wait") -> Receipt:
        """Sample with weights of another trainer; running requests finish first. folder: absolute path."""
        return self._took(await self._call("engine.load", {"folder": str(folder), "version": version}))

    async def has_own_head(self) -> bool:
        """Return False: it samples with the trainer's own tensors."""
        return False

    async def sleep(self) -> None:
        self._sleepers += 1
        self._gate.sleep()

    async def wake(self) -> None:
        self._sleepers -= 1
        if not self._sleepers:
            self._gate.wake()
            self._gate.open()

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Sleep while the process works at something else, unless it can sample beside."""
        if not self.one_thread:
            yield
            return
        await self.sleep()
        try:
            yield
        finally:
            await self.wake()

    async def pause(self) -> None:
        """Return when no request is running; new ones wait for `resume`."""
        try:
            await self._call("engine.pause")
        except BaseException:
            # Whoever gave up will not resume, and the answer may be on its way: too late for a cancellation.
            self._channel.notify("engine.resume", {})
            raise

    async def resume(self) -> None:
        self._receipt = _receipt((await self._call("engine.resume")).meta)

    async def close(self) -> None:
        """Do nothing: the channel is the learner's."""

    def _took(self, reply: Frame) -> Receipt:
        self._receipt, self.fed = _receipt(reply.meta), True
        return self._receipt

    async def _call(
        self, op: str, meta: Meta | None = None, arrays: Mapping[str, Array] | None = None
    ) -> Frame:
        try:
            return await self._channel.call(op, meta, arrays, deadline_s=self._deadline_s, quiet_s=QUIET_S)
        except EngineError as error:
            raise await self._explain(error) from error


def _receipt(meta: Meta) -> Receipt:
    return Receipt(version=int(meta["version"]), checksum=str(meta["checksum"]))
