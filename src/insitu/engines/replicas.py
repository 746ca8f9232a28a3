"""One or more servers of the same model as one engine: sticky sessions, failover, restored weights.

    generate -> the server of its session -> failed? -> gone, or other weights? -> fenced; the request again
    fenced   -> answers again -> the newest weights -> the same receipt as the others -> serves again
    update, sleep, wake -> all servers at once; those that fail are fenced, an error only if all fail

A session stays with one server, which has its context in the prefix cache; a new one goes to the server with
the fewest. While no server serves, requests wait with agent deadlines paused. Whoever started a server
restarts it, the learner when `check` asks for it; here only its return is awaited.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Self, TypeVar

from insitu.concurrency import run_all
from insitu.engines.base import EngineInfo, LoadingEngine, PauseMode, Receipt
from insitu.engines.downtime import engine_down
from insitu.errors import EngineError, EngineUnavailable, InsituError
from insitu.types import Generation, IntArray, RequestKey, SamplingParams

log = logging.getLogger(__name__)

T = TypeVar("T")
Feed = Callable[[LoadingEngine], Awaitable[Receipt]]
"""Brings the newest weights into one server."""
POLL_S = 0.5
"""Between two checks of a fenced server."""
REFUSED_S = 30.0
"""Between two attempts to restore a server that refused the weights."""
LAST_CHECK_S = 5.0
"""Timeout of one more check for a request after the wait has expired."""


class _Member:
    """One server of the set."""

    def __init__(self, name: str, engine: LoadingEngine) -> None:
        self.name, self.engine = name, engine
        self.error: EngineError | None = None
        """Why it is fenced; None while it serves."""
        self.must_feed = False
        """Its weights are unknown, whatever version it reports."""
        self.hopeless = False
        """Requests do not wait for it: it refused the weights, or was restarted too often."""
        self.restores = 0
        """Since the last update."""
        self.life = 0
        """Increases when it is fenced or updated: earlier failures say nothing of its present state."""
        self.sessions: set[str] = set()


async def may_come_back() -> None:
    """Do nothing: an unreachable server is an error of each call."""


class EngineSet:
    """Implements `engines.base.Engine`; an async context, which ends the checks of fenced servers."""

    def __init__(
        self,
        engines: Mapping[str, LoadingEngine],
        *,
        max_wait_s: float,
        restarts: int = 3,
        share_gpu: bool = False,
        say: Callable[[str], None] = log.warning,
        check: Callable[[], Awaitable[None]] = may_come_back,
    ) -> None:
        """Make one engine of `engines`, by address.

        max_wait_s: how long requests wait while none serves. restarts: of one server between two updates, and
        of one request. share_gpu: they sleep during training. say: receives warnings. check: restarts what a
        fenced server runs on, or raises when it will never answer again.
        """
        self._members = [_Member(name, engine) for name, engine in engines.items()]
        self._max_wait_s, self._restarts = max_wait_s, restarts
        self._share_gpu, self._say, self.check = share_gpu, say, check
        self._receipt = self._members[0].engine.receipt
        self._feed: Feed = _recognise
        self._updated = False
        """False = the servers keep the weights that they were started with."""
        self._updating = False
        self._homes: dict[str, _Member] = {}
        """Session -> the server that has its context."""
        self._lock = asyncio.Lock()
        """Held while weights are loaded, the servers sleep, or the state of one is decided."""
        self._checked = asyncio.Event()
        """Set, and replaced, after each check of a fenced server."""
        self._down_since = 0.0
        """When the last serving server was fenced. All requests share this wait."""
        self._checks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._checks:
            task.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)

    @property
    def info(self) -> EngineInfo:
        return self._members[0].engine.info

    @property
    def receipt(self) -> Receipt:
        return self._receipt

    def check_same_weights(self) -> None:
        """Raise EngineError unless all hold the same weights, as they must if they are never given any."""
        for member in self._members:
            if member.engine.receipt != self._receipt:
                found = f"version {member.engine.receipt.version}, {member.engine.receipt.checksum[:12]}"
                raise EngineError(
                    f"{member.name} holds other weights ({found}) than {self._members[0].name} (version"
                    f" {self._receipt.version}, {self._receipt.checksum[:12]}): start both on one model"
                )

    # ----------------------------------------------------------------------- requests

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        """Sample at the server of the key's session. Raises EngineError."""
        retries = 0
        while True:
            member = await self._home(key.rollout_id)
            life = member.life
            try:
                reply = await member.engine.generate(ids, params, key)
            except EngineError as error:
                with engine_down():
                    again = await self._check_failed(member, life, error)
                # An agent that is trained retries itself; of served sessions no call may fail.
                again |= not self._updated and isinstance(error, EngineUnavailable)
                if not again or retries >= self._restarts:
                    raise
                retries += 1
                continue
            if self._updating:
                async with self._lock:
                    pass  # a version exists once all servers have it
                if member.error is not None:
                    continue
            return reply

    def release(self, session: str) -> None:
        """Forget a session that has ended."""
        if (member := self._homes.pop(session, None)) is not None:
            member.sessions.discard(session)

    async def _home(self, session: str) -> _Member:
        """Return the server of a session, when there is one."""
        while session not in self._homes:
            if serving := self._serving():
                member = min(serving, key=lambda one: len(one.sessions))
                member.sessions.add(session)
                self._homes[session] = member
                continue
            with engine_down():
                while not self._serving():
                    await self._wait()
        return self._homes[session]

    def _serving(self) -> list[_Member]:
        return [member for member in self._members if member.error is None]

    async def _wait(self) -> None:
        """Return after a check of a fenced server; raise EngineUnavailable after `max_wait_s`."""
        errors = [member.error for member in self._members if member.error is not None]
        if all(member.hopeless for member in self._members):
            raise type(errors[0])(str(errors[0]))
        ends = self._down_since + self._max_wait_s
        late = _now() >= ends
        try:
            async with asyncio.timeout_at(_now() + LAST_CHECK_S if late else ends):
                await self._checked.wait()
        except TimeoutError:
            late = True
        if late and not self._serving():
            raise self._late(errors[0])

    def _late(self, error: EngineError) -> EngineUnavailable:
        return EngineUnavailable(f"{error}; the server did not come back within {self._max_wait_s:g} s")

    async def _check_failed(self, member: _Member, life: int, error: EngineError) -> bool:
        """Return whether a failure is the server's, which is fenced then, and not that of the request."""
        async with self._lock:
            if member.life == life and await self._lost(member):
                self._fence(member, error)
            return member.life != life

    async def _lost(self, member: _Member) -> bool:
        """Return whether a server does not answer or holds other weights than the set."""
        try:
            return await member.engine.version() != self._receipt.version
        except EngineError:
            return True

    # ----------------------------------------------------------------------- fenced servers

    def _fence(self, member: _Member, error: EngineError, *, must_feed: bool = False) -> None:
        member.life += 1
        member.must_feed |= must_feed
        for session in member.sessions:
            del self._homes[session]
        member.sessions.clear()
        if member.error is None:
            member.error = error
            task = asyncio.create_task(self._restore(member))
            self._checks.add(task)
            task.add_done_callback(self._checks.discard)
            if self._serving():
                self._say(f"{error}; {len(self._serving())} of {len(self._members)} servers are left")
            else:
                self._down_since = _now()

    async def _restore(self, member: _Member) -> None:
        """Check a fenced server until it serves again; a defect ends all waits for it with its name."""
        try:
            await self._restored(member)
        except Exception as error:
            member.error, member.hopeless = EngineError(f"{type(error).__name__}: {error}"), True
            self._tell()
            log.exception("check of a server failed server=%s", member.name)

    async def _restored(self, member: _Member) -> None:
        said = bool(self._serving())
        while member.error is not None:
            answers = await self._answers(member)
            if not (answers or said or member.hopeless):
                said = True
                limit = "" if self._max_wait_s == math.inf else f" {self._max_wait_s:g} s"
                self._say(f"{member.error}; waiting{limit} for it")
            if answers:
                async with self._lock:
                    if member.error is not None:
                        await self._bring_back(member)
            self._tell()
            if member.error is not None:
                await asyncio.sleep(REFUSED_S if member.hopeless else POLL_S)

    async def _answers(self, member: _Member) -> bool:
        try:
            await self.check()
        except InsituError as error:
            member.error, member.hopeless = EngineError(str(error)), True
            return False
        try:
            await member.engine.version()
        except EngineUnavailable:
            return False
        except EngineError:
            pass  # unknown weights
        return True

    def _tell(self) -> None:
        """Let those that wait look at the servers."""
        self._checked.set()
        self._checked = asyncio.Event()

    async def _bring_back(self, member: _Member) -> None:
        """Restore the weights of a fenced server that answers, if it has lost them, and let it serve."""
        if not member.must_feed and not await self._lost(member):
            self._serve(member)
            return
        held = f"version {self._receipt.version}"
        if self._updated and member.restores >= self._restarts:
            if not member.hopeless:
                why = f"the server was restarted more than {self._restarts} times since {held}"
                member.error, member.hopeless = EngineUnavailable(f"{member.error}; {why}"), True
            return
        member.restores += 1
        if not member.hopeless:
            self._say(f"{member.error}; restoring {held}")
        try:
            receipt = await self._feed(member.engine)
            if receipt != self._receipt:
                raise EngineError(f"{member.name} holds other weights than the other servers at {held}")
        except EngineUnavailable as error:
            member.error = error
        except InsituError as error:
            member.error, member.hopeless = EngineError(str(error)), True
        else:
            self._serve(member)

    def _serve(self, member: _Member) -> None:
        if member.error is not None and self._serving():
            self._say(f"{member.name} serves again, with version {self._receipt.version}")
        member.error, member.must_feed, member.hopeless = None, False, False
        self._tell()

    # ----------------------------------------------------------------------- all servers

    async def load(self, folder: Path, version: int, *, mode: PauseMode = "wait") -> Receipt:
        """Load the model folder into all servers; raise EngineError if none takes it."""
        return await self.update(lambda engine: engine.load(folder, version, mode=mode))

    async def update(self, feed: Feed) -> Receipt:
        """Feed all servers and return their receipt; those that fail or disagree are fenced.

        Raises EngineError if all fail, or no receipt has a majority.
        """
        async with self._lock:
            self._updating = True
            try:
                fed = await self._on_all(feed)
                agreed = _agreed([receipt for _, receipt in fed])
            finally:
                self._updating = False
            self._feed, self._receipt, self._updated = feed, agreed, True
            for member in self._members:
                member.restores, member.hopeless = 0, False
            for member, receipt in fed:
                member.life += 1
                if receipt == agreed:
                    self._serve(member)
                else:
                    other = f"{member.name} holds other weights than the other servers at version"
                    self._fence(member, EngineError(f"{other} {agreed.version}"), must_feed=True)
            return agreed

    async def has_own_head(self) -> bool:
        """Return whether the output head is a separate tensor at the servers."""
        return await (self._serving() or self._members)[0].engine.has_own_head()

    async def pause(self) -> None:
        await self._on_all(lambda engine: engine.pause())

    async def resume(self) -> None:
        await self._on_all(lambda engine: engine.resume())

    async def close(self) -> None:
        await run_all(*(member.engine.close() for member in self._members))

    def training(self) -> AbstractAsyncContextManager[None]:
        """Return the context of a training step: servers that share the trainer's GPU sleep meanwhile."""
        return self._asleep() if self._share_gpu else nullcontext()

    @asynccontextmanager
    async def _asleep(self) -> AsyncIterator[None]:
        """Let the servers sleep meanwhile; their running calls end first.

        A server restarted meanwhile is awake with its own weights: it gets the run's at the next publication
        or request, not while the trainer uses the GPU.
        """
        async with self._lock:
            await self._on_all(lambda engine: engine.sleep())
            try:
                yield
            except BaseException:
                # the error of the step matters more than a failed wake-up
                with suppress(EngineError):
                    await self._on_all(lambda engine: engine.wake())
                raise
            await self._on_all(lambda engine: engine.wake())

    async def _on_all(self, do: Callable[[LoadingEngine], Awaitable[T]]) -> list[tuple[_Member, T]]:
        """Call `do` on every serving server, on all if none serves; fence those where it fails.

        If it fails on all, raise the error; where they did not answer, after one more attempt when one does.
        """
        members = self._serving() or self._members
        for last in (False, True):
            results = await run_all(*(_attempt(do, member) for member in members))
            errors = [result for result in results if isinstance(result, EngineError)]
            if len(errors) < len(members):
                break
            refused = [error for error in errors if not isinstance(error, EngineUnavailable)]
            if last or refused:
                raise (refused or errors)[0]
            await self._until_one_answers(members, errors[0])
        done: list[tuple[_Member, T]] = []
        for member, result in zip(members, results, strict=True):
            if isinstance(result, EngineError):
                self._fence(member, result, must_feed=True)
            else:
                done.append((member, result))
        return done

    async def _until_one_answers(self, members: Sequence[_Member], error: EngineError) -> None:
        try:
            async with asyncio.timeout(self._max_wait_s):
                while True:
                    for member in members:
                        try:
                            await member.engine.version()
                        except EngineUnavailable:
                            continue
                        except EngineError:
                            return  # unknown weights
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise self._late(error) from error


async def _recognise(engine: LoadingEngine) -> Receipt:
    return await engine.recognise()


async def _attempt(do: Callable[[LoadingEngine], Awaitable[T]], member: _Member) -> T | EngineError:
    try:
        return await do(member.engine)
    except EngineError as error:
        return error


def _agreed(receipts: Sequence[Receipt]) -> Receipt:
    """Return the receipt of the majority; raise EngineError without one."""
    counts = Counter((receipt.version, receipt.checksum) for receipt in receipts)
    (most, count), *_ = counts.most_common(1)
    if 2 * count <= len(receipts):
        sums = ", ".join(sorted({receipt.checksum[:12] for receipt in receipts}))
        raise EngineError(f"the servers hold different weights after an update to version {most[0]}: {sums}")
    return next(receipt for receipt in receipts if (receipt.version, receipt.checksum) == most)


def _now() -> float:
    return asyncio.get_running_loop().time()
