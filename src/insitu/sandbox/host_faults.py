"""Whether the host lost a sandbox, by facts that no process inside can cause.

The kernel killed a process of it though it had used little memory; or it killed one elsewhere, and none in
this sandbox; or several sandboxes were lost together. Kills inside the sandboxes of this process, for memory
of their own, are no such fact. Without a control group nothing tells whose memory it was: then only a loss of
several counts.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, runtime_checkable
from weakref import WeakSet

from insitu.sandbox.cgroup import OomCounter, kills_in_groups

SEVERAL = 3
"""Sandboxes lost within TOGETHER_S that make it the host's doing; fewer do if no other is alive."""
TOGETHER_S = 5.0
SETTLE_S = 2.0
"""Wait for the losses of others before an agent is blamed."""
VMSTAT = Path("/proc/vmstat")


def _kills() -> int:
    """Return the OOM kills of this machine."""
    try:
        lines = VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


class Fate:
    """What the host knows of one sandbox; each rollout starts with `mark`."""

    def __init__(self, kills: OomCounter) -> None:
        self.kills = kills
        self.beside: Callable[[], Awaitable[str]] | None = None
        self.made_at, self.lost_at = time.monotonic(), -math.inf
        self.mark()
        _live.add(self)

    def mark(self) -> None:
        self._own = self.kills.count()
        # Groups first here and last later: a kill in a group between two readings never counts as elsewhere.
        self._elsewhere = -kills_in_groups()
        self._elsewhere += _kills()

    def end(self) -> None:
        """Note that the owner closes the sandbox: it is not alive, and what ends now is no loss."""
        _live.discard(self)

    def lose(self) -> None:
        """Note that what ran in the sandbox ended without its owner's doing."""
        if self in _live:
            self.lost_at = time.monotonic()
            _losses.append(self)

    @property
    def killed(self) -> bool:
        """Whether the kernel's OOM killer ended a process of it since the mark."""
        return self.kills.count() > self._own

    def fell_with(self, other: Fate) -> bool:
        """Return whether both were lost within TOGETHER_S, and lived at the same time before."""
        together = abs(self.lost_at - other.lost_at) <= TOGETHER_S
        return together and max(self.made_at, other.made_at) <= min(self.lost_at, other.lost_at)

    @property
    def too_large(self) -> bool:
        return self.killed and not self.kills.modest()

    @property
    def kills_elsewhere(self) -> bool:
        kills = _kills()
        return kills - kills_in_groups() > self._elsewhere


_live: WeakSet[Fate] = WeakSet()
_losses: deque[Fate] = deque(maxlen=256)


@runtime_checkable
class _HasFate(Protocol):
    @property
    def fate(self) -> Fate | None: ...


def fate_of(sandbox: object) -> Fate | None:
    """Return the facts about a sandbox; None for one that lives elsewhere."""
    return sandbox.fate if isinstance(sandbox, _HasFate) else None


def mark(sandbox: object) -> None:
    """Start a rollout in this sandbox: what happened before counts no more."""
    if fate := fate_of(sandbox):
        fate.mark()


async def host_fault(sandbox: object, *, lost: bool = True) -> str:
    """Return why the host is to blame for a sandbox that was lost; empty if no fact says so.

    `lost` False: the sandbox lives, but what ran in it was killed or failed. It may be closed already.
    """
    fate = fate_of(sandbox)
    if fate is None:
        return ""
    if fate.killed:
        return "" if fate.too_large else "the kernel killed it for memory that others had taken"
    elsewhere = fate.kills_elsewhere
    if lost and elsewhere and fate.kills.counts:
        return "the kernel killed processes for memory, and none of them for this sandbox's own"
    if not lost:
        if not elsewhere or fate.kills.counts:
            return ""
        fate.lose()
    return await _lost_together(fate)


async def _lost_together(fate: Fate) -> str:
    if fate.lost_at < 0:
        return ""
    if _live - {fate}:
        await asyncio.sleep(SETTLE_S)
    struck = {other for other in _losses if fate.fell_with(other) and not other.too_large}
    if len(struck) >= SEVERAL or (len(struck) > 1 and struck >= set(_live)):
        return f"{len(struck)} sandboxes were lost within {TOGETHER_S:g} s"
    return ""
