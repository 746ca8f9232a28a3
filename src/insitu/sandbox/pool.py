"""The pool: one backend made of several, that bounds, prepares and retries sandboxes and avoids what is
broken.

    create(spec) -> permit -> spare of the same spec, else boot: the next sound backend, some tries
    a circuit opens -> in the background: cool down, reap, boot a plain sandbox -> it closes, or cools for
    longer

Everything that runs sandboxes gets them here. Which failures count against a backend: sandboxes that do not
start, and calls given up on; never an image that cannot be had, nor the loss of a live sandbox, which what
ran in it can bring about.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from insitu.backoff import backoff_s
from insitu.config.base import Count
from insitu.config.sandbox import PoolKeys
from insitu.errors import (
    ImageMissing,
    ImageUnavailable,
    InsituError,
    PolicyUnsupported,
    SandboxError,
    SandboxStartError,
)
from insitu.sandbox.base import Capability, Sandbox, SandboxBackend, SandboxSpec, SupportsReap
from insitu.sandbox.base_tree import ResolvesImages
from insitu.sandbox.circuit_breaker import Circuit, CircuitOptions
from insitu.sandbox.pooled_sandbox import PooledSandbox

log = logging.getLogger(__name__)

DEFAULT_MAX_SANDBOXES = 128

ASKED_FOR: frozenset[Capability] = frozenset(
    {"network_none", "gateway_only", "allowlist", "images", "resource_limits", "root_setup"}
)
"""Capabilities that a spec can ask for: one backend that has them is enough."""
REMEMBERED = 16
"""Specs whose repetition is noticed."""
ALIVE_S = 5.0
CONTROLS = 4
"""Sandboxes at once that are opened only to see whether sandboxes work: beside the permits, or whoever uses
up all of them would make the backend look broken."""
TELL_S = 30.0
"""A wait for a permit that is told, and how often it is told again."""


class PoolOptions(PoolKeys):
    """How a pool treats its backends."""

    max_sandboxes: Count = DEFAULT_MAX_SANDBOXES
    pause_s: float = 0.5
    """Before the second try; each further pause is twice as long."""
    permit_wait_s: float = 3600.0
    """Most that a sandbox is waited for because others hold every permit."""
    in_order: bool = False
    """Always the first backend that is not down, and the others while it is: fail-over. Else in turn."""
    down_s: float = 30.0
    """How long a sandbox is waited for when every backend is down, before the best of them is tried
    anyway."""
    circuit: CircuitOptions = CircuitOptions()


@dataclass(slots=True, kw_only=True)
class PooledBackend:
    """One backend of a pool."""

    backend: SandboxBackend
    circuit: Circuit
    recovery: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spare:
    spec: SandboxSpec
    sandbox: Sandbox
    member: PooledBackend


class Pool:
    """Implements insitu.sandbox.base.SandboxBackend over others; an async context manager."""

    def __init__(
        self,
        backends: Sequence[SandboxBackend],
        options: PoolOptions | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`say` gets a line for a person when a backend goes down and when it is back."""
        self._options, self._say = options or PoolOptions(), say
        self.members = [
            PooledBackend(backend=each, circuit=Circuit(self._options.circuit)) for each in backends
        ]
        self._turn = 0
        self._permits = asyncio.Semaphore(self._options.max_sandboxes)
        self._controls = asyncio.Semaphore(CONTROLS)
        self._spares: list[_Spare] = []
        self._seen: list[SandboxSpec] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        """Set, and replaced, whenever a circuit closes."""
        self._closed = False
        self.live = 0
        """Sandboxes handed out and not closed."""
        self.reaped = 0
        """Sandboxes of dead owners that were found at the start or during a recovery."""

    @property
    def name(self) -> str:
        return "+".join(member.backend.name for member in self.members)

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What a spec can ask for, if one backend has it; what holds for every sandbox, if all have it. With
        fail-over only what all have: what one lacks it could not take over."""
        each = [member.backend.capabilities for member in self.members]
        if self._options.in_order:
            return frozenset.intersection(*each)
        return (frozenset.union(*each) & ASKED_FOR) | frozenset.intersection(*each)

    async def create(self, spec: SandboxSpec) -> PooledSandbox:
        """A sandbox; waits for a permit. Of a spec with neither network nor files that was asked for before,
        a spare is kept ready. Raises PolicyUnsupported, SandboxStartError."""
        if self._closed:
            raise SandboxStartError("the pool of sandboxes is closed")
        spare = await self._take_spare(spec)
        if spare is None:
            if self._permits.locked() and self._spares:
                await self._discard(self._spares.pop(0))
            await self._permit()
            member, sandbox = await self._boot_for(self._permits, spec, self.members)
        else:
            member, sandbox = spare.member, spare.sandbox
        self._prewarm(spec)
        return self._lease(member, sandbox, self._permits)

    async def control(self, spec: SandboxSpec, lost: Sandbox | None = None) -> PooledSandbox:
        """Implements insitu.sandbox.base.Controls: takes no permit and no spare. Raises as `create`, and at
        once while the backend of `lost` is down: what another can do says nothing of it."""
        fit = self.members
        if isinstance(lost, PooledSandbox):
            fit = [member for member in fit if member.backend.name == lost.backend]
            if all(member.circuit.state == "open" for member in fit):
                raise SandboxStartError(f"{lost.backend} is down: {fit[0].circuit.cause}")
        await self._controls.acquire()  # those who hold them use them for one short command
        member, sandbox = await self._boot_for(self._controls, spec, fit)
        return self._lease(member, sandbox, self._controls)

    def _lease(self, member: PooledBackend, sandbox: Sandbox, permits: asyncio.Semaphore) -> PooledSandbox:
        self.live += 1

        def gave_back() -> None:
            self.live -= 1
            permits.release()

        return PooledSandbox(
            sandbox, member.backend.name, gave_back, lambda cause: self._count(member, cause)
        )

    async def _boot_for(
        self, permits: asyncio.Semaphore, spec: SandboxSpec, members: Sequence[PooledBackend]
    ) -> tuple[PooledBackend, Sandbox]:
        """A sandbox of one of `members` in exchange for a permit that the caller has."""
        try:
            return await self._boot(spec, members)
        except BaseException:
            permits.release()
            raise

    async def _permit(self) -> None:
        """Raises SandboxStartError when none became free in time."""
        most, waited = self._options.permit_wait_s, 0.0
        while True:
            step = min(TELL_S, most - waited)
            try:
                async with asyncio.timeout(step):
                    await self._permits.acquire()
                return
            except TimeoutError:
                waited += step
            held = f"all {self._options.max_sandboxes} permits for sandboxes are held"
            if waited >= most:
                raise SandboxStartError(f"{held}, and none was given back within {most:g} s")
            log.warning("wait for=permit waited_s=%.0f cause=%s", waited, held)

    async def image_digest(self, image: str) -> str:
        """As the first backend with images knows it. Raises SandboxStartError."""
        for member in self.members:
            if isinstance(member.backend, ResolvesImages):
                return await member.backend.image_digest(image)
        return image

    async def _boot(
        self, spec: SandboxSpec, members: Sequence[PooledBackend]
    ) -> tuple[PooledBackend, Sandbox]:
        fit = list(members)
        until = time.monotonic() + self._options.down_s
        tries: Counter[int] = Counter()
        broken: SandboxError | None = None
        while True:
            member = await self._choose(fit, until)
            try:
                return member, await self._start(member, spec)
            except PolicyUnsupported as error:
                fit.remove(member)
                if not fit:  # one that offers it is down: not the spec's fault
                    raise broken or error from None
            except ImageMissing:
                raise
            except SandboxError as error:
                broken = error
                if not isinstance(error, ImageUnavailable):
                    self._count(member, str(error))
                tries[id(member)] += 1
                tried = tries[id(member)]
                log.warning("boot backend=%s tried=%d cause=%s", member.backend.name, tried, error)
                if tried >= self._options.boot_attempts:
                    fit.remove(member)
                    if not fit:
                        raise
                    continue
                await asyncio.sleep(backoff_s(tried, self._options.pause_s))

    async def _start(self, member: PooledBackend, spec: SandboxSpec) -> Sandbox:
        limit = self._options.boot_timeout_s
        if spec.image and isinstance(member.backend, ResolvesImages):
            # Its own wait: a long download says nothing of the backend, and goes on until the next try.
            try:
                async with asyncio.timeout(limit):
                    await member.backend.image_digest(spec.image)
            except TimeoutError as error:
                raise ImageUnavailable(f"image {spec.image}: not here within {limit:g} s") from error
        try:
            async with asyncio.timeout(limit):
                sandbox = await member.backend.create(spec)
        except TimeoutError as error:
            raise SandboxStartError(
                f"{member.backend.name}: a sandbox was not ready within {limit:g} s"
            ) from error
        if member.circuit.state != "closed":
            self._recovered(member)
        member.circuit.succeed()
        return sandbox

    async def _choose(self, fit: Sequence[PooledBackend], until: float) -> PooledBackend:
        """The next backend that is not known to be broken. When all are, wait until one recovers or `until`,
        then take the one whose cool-down ends first: to be refused is worse than to fail."""
        while True:
            sound = [member for member in fit if member.circuit.state == "closed"]
            if sound and self._options.in_order:
                return sound[0]
            if sound:
                self._turn += 1
                return sound[self._turn % len(sound)]
            left = until - time.monotonic()
            if left <= 0:
                return min(fit, key=lambda member: member.circuit.cooled_in_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    def _count(self, member: PooledBackend, cause: str) -> None:
        member.circuit.fail(cause)
        if member.circuit.state == "open" and member.recovery is None and not self._closed:
            wait = member.circuit.cooled_in_s
            log.error("down backend=%s for_s=%.1f cause=%s", member.backend.name, wait, cause)
            self._say(f"the {member.backend.name} sandbox is down ({cause}): {self._instead(member)}")
            member.recovery = self._background(self._recover(member))

    def _instead(self, down: PooledBackend) -> str:
        sound = [each.backend.name for each in self.members if each.circuit.state == "closed"]
        return f"sandboxes come from {sound[0]}" if sound else f"sandboxes wait for {down.backend.name}"

    def _recovered(self, member: PooledBackend) -> None:
        log.warning("up backend=%s", member.backend.name)
        self._say(f"the {member.backend.name} sandbox is back")
        self._changed.set()
        self._changed = asyncio.Event()

    async def _recover(self, member: PooledBackend) -> None:
        """Until the circuit is closed: cool down, remove leaked sandboxes, boot a plain one."""
        try:
            while member.circuit.state != "closed":
                await asyncio.sleep(member.circuit.cooled_in_s)
                if not member.circuit.try_again():
                    continue
                try:
                    await self._reap(member)
                    sandbox = await self._start(member, SandboxSpec(label="probe"))
                except PolicyUnsupported:  # it answered
                    self._recovered(member)
                    member.circuit.succeed()
                except (InsituError, OSError) as error:
                    member.circuit.fail(str(error) or type(error).__name__)
                    wait = member.circuit.cooled_in_s
                    log.error("still_down backend=%s for_s=%.1f cause=%s", member.backend.name, wait, error)
                else:
                    await sandbox.close()
        finally:
            member.recovery = None
            if member.circuit.state == "half_open":
                member.circuit.fail("its trial was broken off")

    async def _reap(self, member: PooledBackend) -> None:
        if isinstance(member.backend, SupportsReap):
            found = await member.backend.reap()
            self.reaped += found
            if found:
                log.warning("reaped backend=%s sandboxes=%d", member.backend.name, found)

    async def _take_spare(self, spec: SandboxSpec) -> _Spare | None:
        """A spare that is still alive: a sandbox found dead later would be held against what ran in it."""
        wanted = replace(spec, label="")
        while match := next((spare for spare in self._spares if spare.spec == wanted), None):
            self._spares.remove(match)
            alive = False
            try:
                with contextlib.suppress(SandboxError):
                    alive = (await match.sandbox.exec(["true"], timeout_s=ALIVE_S)).exit_code == 0
            finally:
                if not alive:
                    await self._discard(match)
            if alive:
                return match
        return None

    def _prewarm(self, spec: SandboxSpec) -> None:
        """Boot a spare in the background for a spec that comes again."""
        if spec.network != "none" or spec.files or not self._options.warm:
            return
        if spec.root_setup:
            return  # to see whether it is alive would end its root
        wanted = replace(spec, label="")
        known = wanted in self._seen
        if known:
            self._seen.remove(wanted)
            self._background(self._refill(wanted))
        self._seen = [*self._seen[1 - REMEMBERED :], wanted]

    async def _refill(self, spec: SandboxSpec) -> None:
        if self._permits.locked() or sum(s.spec == spec for s in self._spares) >= self._options.warm:
            return
        await self._permits.acquire()
        try:
            member, sandbox = await self._boot(replace(spec, label="spare"), self.members)
        except SandboxError:  # told and counted by _boot; whoever needs the sandbox tries again
            self._permits.release()
            return
        except BaseException:
            self._permits.release()
            raise
        self._spares.append(_Spare(spec=spec, sandbox=sandbox, member=member))
        # Whoever waits for a permit comes before any spare.
        while len(self._spares) > self._options.warm or (self._permits.locked() and self._spares):
            await self._discard(self._spares.pop(0))

    async def _discard(self, spare: _Spare) -> None:
        try:
            await spare.sandbox.close()
        finally:
            self._permits.release()

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def __aenter__(self) -> Self:
        """Removes what owners that were killed have left. A backend that is down says so when it is used."""
        for member in self.members:
            try:
                async with asyncio.timeout(self._options.boot_timeout_s):
                    await self._reap(member)
            except (SandboxError, TimeoutError) as error:
                log.warning("reap backend=%s cause=%s", member.backend.name, error)
        return self

    async def close(self) -> None:
        """Ends background work and spare sandboxes; sandboxes handed out end when they are closed."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._spares:
            await self._discard(self._spares.pop())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
