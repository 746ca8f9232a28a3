"""Interfaces of agents: Harness and Worker.

A Harness is the unmodified agent program with the code to install, configure, start and await it. A Worker is
one sandbox with the agent in it and runs one rollout at a time. In strict mode a worker serves one rollout; a
warm worker serves many and is wiped between them. A run ends with the process's exit; timers are a fallback.
A harness gets an address and a secret, never a reward, an oracle or the gateway object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

from insitu.config import Config
from insitu.sandbox.base import Sandbox
from insitu.types import Setup, Task, Tree

PLAIN = Setup()
"""Setup of a task that needs nothing but its files."""
Clock = Callable[[], float]
"""Returns seconds; the clock of an attempt is paused while its calls wait for the engine."""


def loop_time() -> float:
    """Return the loop's time; a stall of the machine counts."""
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAccess:
    """Credentials and limits for an agent's model calls through the gateway."""

    public_id: str
    """Used for routing: every wire format is below http://127.0.0.1:{port}/s/{public_id}."""
    secret: str
    """Bearer token, valid for the session. Passed by environment or file, never by argv."""
    model: str = "policy"
    max_call_tokens: int = 512
    max_context_tokens: int = 1 << 17
    """Context window reported to the agent: prompt plus sampled tokens of one call, counted by the
    gateway."""
    clock: Clock = field(default=loop_time, repr=False, compare=False)
    """Used by the worker; not passed to the agent."""


AgentExit = Literal["finished", "failed", "timeout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """Result of one agent run; `tree` was captured after all processes were killed."""

    exit: AgentExit
    tree: Tree
    detail: str = ""
    """One redacted line: exit code, signal or the agent's own error."""
    log: bytes = b""
    """Redacted agent output, bounded."""
    duration_s: float = 0.0
    egress_attempts: int | None = None
    """Blocked outgoing connection attempts, see `sandbox.egress`; None = unknown."""
    artifacts: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Redacted content of declared artifacts by path inside the sandbox."""


FinishedCheck = Callable[[], bool]
"""Returns whether the agent has called the gateway's exit route."""
GradeStep = Callable[[int, Tree], Awaitable[bool]]
"""Gets the number of a step, from 0, and the files after it; returns whether the next one starts."""


def never_finished() -> bool:
    return False


class Worker(Protocol):
    """One sandbox with the agent in it; an async context manager that starts and removes it."""

    async def run(
        self,
        task: Task,
        access: ModelAccess,
        finished: FinishedCheck = never_finished,
        live: Callable[[Sandbox], Awaitable[None]] | None = None,
        graded: GradeStep | None = None,
    ) -> AgentResult:
        """Write the task's files, run the agent on `task.prompt`, stop it and collect the result.

        The timeout is `task.limits.wall_s` by `access.clock`. An agent that is `finished` but does not
        exit is stopped early; that is not a failure. `live` gets the sandbox when the agent has ended, with
        what it left running, after its files were read. `graded` comes with a task that has steps: the agent
        is started for each of them. Raises HarnessError or SandboxError for host failures
        only.
        """

    @property
    def gateway_socket(self) -> Path:
        """Host unix socket through which this worker's sandbox reaches the gateway."""

    @property
    def healthy(self) -> bool:
        """Whether the worker may be used again (not after a timeout, its last use or a lost process)."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def model_name(config: Config) -> str:
    """Return the model name that agents request."""
    return config.engine.model or "policy"


class Harness(Protocol):
    """One agent."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def worker(self, gateway_socket: Path, setup: Setup = PLAIN, gateway_url: str = "") -> Worker:
        """Return a worker for tasks of this setup.

        Its sandbox has no network except the gateway at this host unix socket, or at this public URL.
        """
