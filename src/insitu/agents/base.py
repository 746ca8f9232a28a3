"""A Harness is the unmodified agent program plus the recipe to install, configure, start and await it.

A Worker is one sandbox with the agent in it that runs one rollout at a time. In strict mode a worker lives
for one rollout; a warm worker serves many and wipes and kills everything between two. Exit is the authority;
grace timers are a fall-back. A harness never sees a reward, an oracle or the gateway object: only an
address and a secret.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

from insitu.types import Setup, Task, Tree

PLAIN = Setup()
"""Of a task that needs nothing but its files."""
AwayTime = Callable[[], float]
"""Seconds so far in which the agent waited for an engine that was away: its time is longer by as much."""


def no_time() -> float:
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAccess:
    """What the agent gets to reach its model: the session's secret and paths under the sandbox's loopback."""

    public_id: str
    """Routing only: every wire format lies below http://127.0.0.1:{port}/s/{public_id}."""
    secret: str
    """Bearer. Travels by environment or file, never argv; dies with the session."""
    model: str = "policy"
    max_call_tokens: int = 512
    max_context_tokens: int = 1 << 17
    """Prompt plus sampled tokens of one call, as the gateway counts them: the window the agent hears of."""
    away_s: AwayTime = field(default=no_time, repr=False, compare=False)
    """For the worker, not for the agent."""


AgentExit = Literal["finished", "failed", "timeout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """What one agent run left behind. `tree` was captured after every process of the rollout was killed."""

    exit: AgentExit
    tree: Tree
    detail: str = ""
    """One redacted line: exit code, signal or the agent's own error."""
    log: bytes = b""
    """Redacted agent output, bounded."""
    duration_s: float = 0.0
    egress_attempts: int | None = None
    """What the sandbox's kernel refused to carry out of it, as sandbox/egress.py counts; None = not known."""
    artifacts: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Redacted content of what was declared to be kept, by inside path."""


Left = Callable[[], bool]
"""Whether the agent has said, at the gateway, that it is done."""


def never() -> bool:
    return False


class Worker(Protocol):
    """One sandbox with the agent in it; an async context manager that starts it and removes everything."""

    async def run(self, task: Task, access: ModelAccess, left: Left = never) -> AgentResult:
        """Put the task's files, run the agent on `task.prompt` within `task.limits.wall_s` and
        `access.away_s`, stop it, capture.
        An agent that has `left` and does not end is stopped early, which is no failure.
        Raises HarnessError or SandboxError for host-side causes only."""

    @property
    def gateway_socket(self) -> Path:
        """The host unix socket through which this worker's sandbox reaches the gateway."""

    @property
    def healthy(self) -> bool:
        """False when the worker must not be used again (timeout, wear, lost process)."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Harness(Protocol):
    """One agent."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def worker(self, gateway_socket: Path, setup: Setup = PLAIN) -> Worker:
        """A worker for tasks of this setup, whose sandbox reaches the gateway through this host unix socket
        only."""
