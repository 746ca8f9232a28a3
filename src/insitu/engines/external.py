"""Pull mode: a trainer fetches requests (prompt ids, parameters, key), samples itself and delivers the ids.

    insitu:    generate() ── queue ──► take()            the trainer, in this process or over `external_http`
             generate() ◄─────────── deliver(), fail()

A request is handed out once and answered once. An answer to one that is unknown, was given up (deadline,
client gone) or has its answer is refused, and so is one that breaks the contract of an engine; then
`generate` raises.
`publish` says which weights the trainer samples with from now on.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from insitu.engines.base import EngineInfo, PauseMode, Receipt
from insitu.engines.request_ids import request_name, stream_seed
from insitu.engines.response_checks import RawReply, checked
from insitu.errors import EngineError, EngineUnavailable
from insitu.types import Generation, IntArray, RequestKey, SamplingParams, VersionRuns

Gone = Literal["was answered before", "was given up", "failed before"]
REMEMBERED = 4096
"""Ended requests remembered by id, so that a late answer is rejected with the reason."""


class DeliveryRejected(EngineError):
    """The trainer's answer is rejected; the message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalRequest:
    """A sampling request for the trainer."""

    name: str
    """To be given back with the answer."""
    ids: IntArray = field(repr=False)
    params: SamplingParams
    key: RequestKey

    @property
    def seed(self) -> int:
        """Seed of the key's random stream."""
        return stream_seed(self.key)


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    request: ExternalRequest
    answer: asyncio.Future[Generation]
    version: int = -1
    """Published when the trainer took it."""


class ExternalEngine:
    """Implements `engines.base.Engine`; the other half is for the trainer."""

    def __init__(self, *, max_context_tokens: int, call_deadline_s: float = 600.0) -> None:
        self._max_context, self._deadline_s = max_context_tokens, call_deadline_s
        self._receipt = Receipt(version=0, checksum="unknown")
        self._numbers = itertools.count()
        self._queue: deque[_Waiting] = deque()
        self._taken: dict[str, _Waiting] = {}
        self._gone: OrderedDict[str, Gone] = OrderedDict()
        self._arrived, self._idle, self._running = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._running.set()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(name="external", max_context_tokens=self._max_context)

    @property
    def receipt(self) -> Receipt:
        return self._receipt

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        """Wait for the trainer's answer. Raises EngineError; after a cancellation its answer is refused."""
        request = ExternalRequest(
            name=request_name(key, next(self._numbers)), ids=ids.copy(), params=params, key=key
        )
        waiting = _Waiting(request=request, answer=asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._arrived.set()
        try:
            async with asyncio.timeout(self._deadline_s):
                return await waiting.answer
        except TimeoutError as error:
            raise EngineUnavailable(f"the trainer gave no answer within {self._deadline_s:g} s") from error
        finally:
            if request.name not in self._gone:
                self._end(waiting, "was given up")

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Hand out nothing more. `wait` waits for what is out, `abort` gives it up, `keep` leaves it."""
        self._running.clear()
        if mode == "abort":
            for waiting in list(self._taken.values()):
                waiting.answer.set_exception(EngineError("the request was aborted by a pause"))
                self._end(waiting, "was given up")
        if mode == "wait":
            try:
                async with asyncio.timeout(self._deadline_s):
                    await self._idle.wait()
            except TimeoutError as error:
                raise EngineError(
                    f"the trainer did not end its requests in {self._deadline_s:g} s"
                ) from error

    async def resume(self) -> None:
        self._running.set()

    async def close(self) -> None:
        """Every waiting request fails."""
        for waiting in [*self._queue, *self._taken.values()]:
            if not waiting.answer.done():
                waiting.answer.set_exception(EngineError("the engine was closed"))
                self._end(waiting, "was given up")

    # ----------------------------------------------------------------------- the trainer's side

    async def take(self, limit: int = 1, *, wait_s: float = 0.0) -> list[ExternalRequest]:
        """Up to `limit` requests, oldest first; waits up to `wait_s` for the first, then may be empty."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + wait_s
        while not (self._queue and self._running.is_set()):
            signal = self._running if not self._running.is_set() else self._arrived
            try:
                async with asyncio.timeout(ends - loop.time()):
                    await signal.wait()
            except TimeoutError:
                return []
        taken = [self._queue.popleft() for _ in range(min(limit, len(self._queue)))]
        if not self._queue:
            self._arrived.clear()
        for waiting in taken:
            waiting.version = self._receipt.version
            self._taken[waiting.request.name] = waiting
        self._idle.clear()
        return [waiting.request for waiting in taken]

    def open(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that still want an answer: the trainer may stop working on the others."""
        return [name for name in names if name in self._taken]

    def deliver(
        self,
        name: str,
        *,
        ids: object,
        logprobs: object,
        finish: object,
        version_runs: VersionRuns | None = None,
    ) -> None:
        """Answer a request: lists of ids and of one logprob each, and stop or length.

        Without version runs all ids belong to the version published when the request was taken; the answer is
        rejected if another version has been published since. Raises DeliveryRejected; an invalid answer also
        fails the request.
        """
        waiting = self._known(name)
        runs = version_runs or ((0, waiting.version),)
        raw = RawReply(ids=ids, logprobs=logprobs, finish=finish, version_runs=runs)
        try:
            if not version_runs and waiting.version != self._receipt.version:
                raise EngineError(
                    f"external: version {self._receipt.version} was published since the request was taken at "
                    f"{waiting.version}, so the answer must have version runs"
                )
            if any(version > self._receipt.version for _, version in runs):
                raise EngineError(f"external: version runs {list(runs)} are newer than what was published")
            generation = checked(raw, waiting.request.ids, waiting.request.params, "external")
        except EngineError as error:
            waiting.answer.set_exception(error)
            self._end(waiting, "failed before")
            raise DeliveryRejected(f"the answer to {name} breaks the contract: {error}") from error
        waiting.answer.set_result(generation)
        self._end(waiting, "was answered before")

    def fail(self, name: str, why: str) -> None:
        """Fail a request, so that `generate` raises; raise DeliveryRejected if it is not open."""
        waiting = self._known(name)
        waiting.answer.set_exception(EngineError(f"the trainer failed: {' '.join(why.split())[:300]}"))
        self._end(waiting, "failed before")

    def publish(self, receipt: Receipt) -> None:
        """Set the version that the trainer samples with; raise DeliveryRejected for an older one."""
        if receipt.version < self._receipt.version:
            raise DeliveryRejected(
                f"version {receipt.version} is older than {self._receipt.version}, which is published"
            )
        self._receipt = receipt

    def _known(self, name: str) -> _Waiting:
        waiting = self._taken.get(name)
        if waiting is None:
            raise DeliveryRejected(
                f"request {name} {self._gone.get(name, 'is not known or was not handed out')}"
            )
        return waiting

    def _end(self, waiting: _Waiting, how: Gone) -> None:
        name = waiting.request.name
        if waiting in self._queue:
            self._queue.remove(waiting)
        if not self._queue:
            self._arrived.clear()
        self._taken.pop(name, None)
        if not self._taken:
            self._idle.set()
        self._gone[name] = how
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
