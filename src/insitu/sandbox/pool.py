"""The pool: one backend over several, with permits, spare sandboxes, retries and circuit breakers.

    create(spec) -> permit -> spare of the same spec, or boot on a backend whose circuit is closed, with
    retries circuit opens -> background: cool-down, reap, boot a plain sandbox -> circuit closes or cools
    down again

Failed starts and calls that ran out of retries count against a backend. A missing image does not, nor the
loss of a live sandbox: what ran in it can cause that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from insitu.backoff import backoff_s
from insitu.config.base import Count, CountOrZero, Keys, Seconds
from insitu.errors import (
    ImageMissing,
    ImageUnavailable,
    InsituError,
    PolicyUnsupported,
    SandboxError,
    SandboxStartError,
)
from insitu.sandbox.base import GRADING, Capability, Sandbox, SandboxBackend, SandboxSpec, SupportsReap
from insitu.sandbox.base_tree import ResolvesImages
from insitu.sandbox.circuit_breaker import Circuit, CircuitOptions
from insitu.sandbox.pooled_sandbox import PooledSandbox

log = logging.getLogger(__name__)

DEFAULT_MAX_SANDBOXES = 128

REQUESTABLE: frozenset[Capability] = frozenset(
    {"network_none", "gateway_only", "allowlist", "images", "resource_limits", "root_setup"}
)
"""Capabilities that a spec requests: one backend that has them is enough."""
REMEMBERED = 16
"""Specs remembered for pre-warming."""
ALIVE_S = 5.0
CONTROLS = 4
"""Permits of control sandboxes, separate: exhausted permits must not make a backend look broken."""
LOG_S = 30.0
"""Interval of log lines while a permit is awaited."""


class PoolOptions(Keys):
    """Options of a pool."""

    max_sandboxes: Count = DEFAULT_MAX_SANDBOXES
    warm: CountOrZero = 1
    """Spare sandboxes kept ready for a plain spec that is requested repeatedly, e.g. for grading."""
    boot_attempts: Count = 3
    """Attempts to start a sandbox before the rollout attempt fails, which is itself repeated."""
    boot_timeout_s: Seconds = 120.0
    """Timeout of one start: many times what a container or a cloud takes, once its image is there."""
    pause_s: float = 0.5
    """Backoff before the second attempt; doubled each time."""
    permit_wait_s: float = 3600.0
    """Timeout of the wait for a permit."""
    in_order: bool = False
    """Failover: the first backend that is not down. Else round robin."""
    down_s: float = 30.0
    """Wait for a recovery when every backend is down, before one is tried anyway."""
    circuit: CircuitOptions = CircuitOptions()


@dataclass(slots=True, kw_only=True)
class _PooledBackend:
    """A backend with its circuit breaker."""

    backend: SandboxBackend
    circuit: Circuit
    recovery: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spare:
    spec: SandboxSpec
    sandbox: Sandbox
    member: _PooledBackend


class Pool:
    """Implements insitu.sandbox.base.SandboxBackend over other backends; an async context manager."""

    def __init__(
        self,
        backends: Sequence[SandboxBackend],
        options: PoolOptions | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`say` is called with a line when a backend goes down and when it recovers."""
        self._options, self._say = options or PoolOptions(), say
        self.members = [
            _PooledBackend(backend=each, circuit=Circuit(self._options.circuit)) for each in backends
        ]
        self._turn = 0
        self._permits = asyncio.Semaphore(self._options.max_sandboxes)
        self._controls = asyncio.Semaphore(CONTROLS)
        self._spares: list[_Spare] = []
        self._seen: list[SandboxSpec] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        """Set and replaced when a circuit closes."""
        self._closed = False
        self.live = 0
        """Leased sandboxes that are not closed."""
        self.reaped = 0
        """Leaked sandboxes removed so far."""

    @property
    def name(self) -> str:
        return "+".join(member.backend.name for member in self.members)

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What all backends have; without failover also what a spec can request of one of them.

        With failover also what grading needs, if all backends that cut the network have it: the others refuse
        sandboxes without network, so that these come from those.
        """
        each = [member.backend.capabilities for member in self.members]
        if self._options.in_order:
            offline = [one for one in each if "network_none" in one] or each
            return frozenset.intersection(*each) | (frozenset.intersection(*offline) & GRADING)
        return (frozenset.union(*each) & REQUESTABLE) | frozenset.intersection(*each)

    async def create(self, spec: SandboxSpec) -> PooledSandbox:
        """Wait for a permit and lease a sandbox. A repeated spec without network and files gets a spare.

        Raises PolicyUnsupported, SandboxStartError.
        """
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
        """Lease a sandbox of the backend of `lost` (SupportsControl), without a permit of `create`.

        Raises as `create`, at once while that backend is down.
        """
        fit = self.members
        if isinstance(lost, PooledSandbox):
            fit = [member for member in fit if member.backend.name == lost.backend]
            if all(member.circuit.state == "open" for member in fit):
                raise SandboxStartError(f"{lost.backend} is down: {fit[0].circuit.cause}")
        await self._controls.acquire()  # no timeout: each is held for one short command
        member, sandbox = await self._boot_for(self._controls, spec, fit)
        return self._lease(member, sandbox, self._controls)

    def _lease(self, member: _PooledBackend, sandbox: Sandbox, permits: asyncio.Semaphore) -> PooledSandbox:
        self.live += 1

        def released() -> None:
            self.live -= 1
            permits.release()

        return PooledSandbox(sandbox, member.backend.name, released, lambda cause: self._count(member, cause))

    async def _boot_for(
        self, permits: asyncio.Semaphore, spec: SandboxSpec, members: Sequence[_PooledBackend]
    ) -> tuple[_PooledBackend, Sandbox]:
        """Boot a sandbox; release the caller's permit on failure."""
        try:
            return await self._boot(spec, members)
        except BaseException:
            permits.release()
            raise

    async def _permit(self) -> None:
        """Acquire a permit. Raises SandboxStartError after `permit_wait_s`."""
        most, waited = self._options.permit_wait_s, 0.0
        while True:
            step = min(LOG_S, most - waited)
            try:
                async with asyncio.timeout(step):
                    await self._permits.acquire()
                return
            except TimeoutError:
                waited += step
            held = f"all {self._options.max_sandboxes} permits for sandboxes are in use"
            if waited >= most:
                raise SandboxStartError(f"{held}, and none was released within {most:g} s")
            log.warning("wait for=permit waited_s=%.0f cause=%s", waited, held)

    async def image_digest(self, image: str) -> str:
        """Return the digest from the first backend with images. Raises SandboxStartError."""
        for member in self.members:
            if isinstance(member.backend, ResolvesImages):
                return await member.backend.image_digest(image)
        return image

    async def _boot(
        self, spec: SandboxSpec, members: Sequence[_PooledBackend]
    ) -> tuple[_PooledBackend, Sandbox]:
        fit = list(members)
        until = time.monotonic() + self._options.down_s
        failures: Counter[int] = Counter()
        broken: SandboxError | None = None
        while True:
            member = await self._choose(fit, until)
            try:
                return member, await self._start(member, spec)
            except PolicyUnsupported as error:
                fit.remove(member)
                if not fit:  # a backend that supports it is down
                    raise broken or error from None
            except ImageMissing:
                raise
            except SandboxError as error:
                broken = error
                if not isinstance(error, ImageUnavailable):
                    self._count(member, str(error))
                failures[id(member)] += 1
                failed = failures[id(member)]
                log.warning("boot backend=%s failed=%d cause=%s", member.backend.name, failed, error)
                if failed >= self._options.boot_attempts:
                    fit.remove(member)
                    if not fit:
                        raise
                    continue
                await asyncio.sleep(backoff_s(failed, self._options.pause_s))

    async def _start(self, member: _PooledBackend, spec: SandboxSpec) -> Sandbox:
        limit = self._options.boot_timeout_s
        if spec.container and "container" not in member.backend.capabilities:
            raise PolicyUnsupported(f"{member.backend.name} starts a task's image alone, without services")
        if spec.image and isinstance(member.backend, ResolvesImages):
            # A timeout of its own: a slow download does not count against the backend, and goes on.
            try:
                async with asyncio.timeout(limit):
                    await member.backend.image_digest(spec.image)
            except TimeoutError as error:
                raise ImageUnavailable(f"image {spec.image}: not downloaded within {limit:g} s") from error
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

    async def _choose(self, fit: Sequence[_PooledBackend], until: float) -> _PooledBackend:
        """Return the next backend whose circuit is closed.

        When all are open, wait for a recovery until `until`, then return the one whose cool-down ends first.
        """
        while True:
            up = [member for member in fit if member.circuit.state == "closed"]
            if up and self._options.in_order:
                return up[0]
            if up:
                self._turn += 1
                return up[self._turn % len(up)]
            left = until - time.monotonic()
            if left <= 0:
                return min(fit, key=lambda member: member.circuit.cooled_in_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    def _count(self, member: _PooledBackend, cause: str) -> None:
        member.circuit.fail(cause)
        if member.circuit.state == "open" and member.recovery is None and not self._closed:
            wait = member.circuit.cooled_in_s
            log.error("down backend=%s for_s=%.1f cause=%s", member.backend.name, wait, cause)
            self._say(f"the {member.backend.name} sandbox is down ({cause}): {self._fallback(member)}")
            member.recovery = self._background(self._recover(member))

    def _fallback(self, down: _PooledBackend) -> str:
        up = [each.backend.name for each in self.members if each.circuit.state == "closed"]
        return f"sandboxes come from {up[0]}" if up else f"sandboxes wait for {down.backend.name}"

    def _recovered(self, member: _PooledBackend) -> None:
        log.warning("up backend=%s", member.backend.name)
        self._say(f"the {member.backend.name} sandbox is back")
        self._changed.set()
        self._changed = asyncio.Event()

    async def _recover(self, member: _PooledBackend) -> None:
        """Cool down, reap and boot a plain sandbox until the circuit closes."""
        try:
            while member.circuit.state != "closed":
                await asyncio.sleep(member.circuit.cooled_in_s)
                if not member.circuit.try_again():
                    continue
                try:
                    await self._reap(member)
                    sandbox = await self._start(member, SandboxSpec(label="probe"))
                except PolicyUnsupported:  # the backend responds
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
                member.circuit.fail("the trial was cancelled")

    async def _reap(self, member: _PooledBackend) -> None:
        if isinstance(member.backend, SupportsReap):
            found = await member.backend.reap()
            self.reaped += found
            if found:
                log.warning("reaped backend=%s sandboxes=%d", member.backend.name, found)

    async def _take_spare(self, spec: SandboxSpec) -> _Spare | None:
        """Return a spare after a check that it is alive: a later loss would be blamed on the candidate."""
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
        """Boot a spare in the background for a repeated spec."""
        # `root_setup`: the check whether a spare is alive would drop its root.
        if spec.network != "none" or spec.files or spec.root_setup or not self._options.warm:
            return
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
            wanted = replace(spec, label="spare")
            member, sandbox = await self._boot_for(self._permits, wanted, self.members)
        except SandboxError:  # logged and counted by _boot
            return
        self._spares.append(_Spare(spec=spec, sandbox=sandbox, member=member))
        # Callers that wait for a permit take precedence over spares.
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
        """Remove leaked sandboxes; failures are logged."""
        for member in self.members:
            try:
                async with asyncio.timeout(self._options.boot_timeout_s):
                    await self._reap(member)
            except (SandboxError, TimeoutError) as error:
                log.warning("reap backend=%s cause=%s", member.backend.name, error)
        return self

    async def close(self) -> None:
        """End background tasks and spares; leased sandboxes end when they are closed."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._spares:
            await self._discard(self._spares.pop())

    async def __aexit__(self, *error: object) -> None:
        await self.close()
