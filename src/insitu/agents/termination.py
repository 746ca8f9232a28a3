"""Timeout and termination of agents: SIGTERM, then SIGKILL.

    deadline, or finished but still running -> SIGTERM to all -> GRACE_S -> SIGKILL to all

A run normally ends with the exit of the process. An agent may also report completion (the gateway's exit
route) and keep running: it is stopped after LINGER_S. The caller closes the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

from insitu.agents.base import Clock, FinishedCheck, loop_time
from insitu.errors import SandboxError, SandboxLost
from insitu.sandbox.base import ExecResult, Sandbox, terminate
from insitu.stalls import awake_timeout

GRACE_S = 2.0
"""Time between SIGTERM and SIGKILL, for an agent to save its state."""
LINGER_S = 5.0
"""Time between an agent's report of completion and SIGTERM."""
POLL_S = 0.5
KILL_S = 10.0
Why = Literal["", "deadline", "finished"]
T = TypeVar("T")


async def attend(
    running: asyncio.Task[ExecResult],
    sandbox: Sandbox,
    *,
    wall_s: float,
    finished: FinishedCheck,
    clock: Clock = loop_time,
) -> tuple[ExecResult, Why]:
    """Wait for an agent's process; return its result and why it was stopped, if it was.

    The process has ended on return. Raises SandboxError.
    """
    try:
        why = await _until(running, wall_s, finished, clock)
        if why:
            await ask_to_stop(sandbox)
            await asyncio.wait({running}, timeout=GRACE_S)
        if not running.done():
            await sandbox.kill_all()
            with contextlib.suppress(TimeoutError):
                async with awake_timeout(KILL_S):
                    await asyncio.wait({running})
        if not running.done():
            raise SandboxLost("the agent could not be killed")
        return running.result(), why
    finally:
        running.cancel()
        await asyncio.wait({running})


async def _until(
    running: asyncio.Task[ExecResult], wall_s: float, finished: FinishedCheck, clock: Clock
) -> Why:
    """Wait for the process, at most until it must be stopped."""
    ends, lingers = clock() + wall_s, math.inf
    while (rest := min(ends - clock(), lingers - loop_time())) > 0:
        await asyncio.wait({running}, timeout=min(POLL_S, rest))
        if running.done():
            return ""
        if lingers == math.inf and finished():
            lingers = loop_time() + LINGER_S
    return "deadline" if lingers == math.inf else "finished"


async def within(coroutine: Coroutine[Any, Any, T], wall_s: float, clock: Clock) -> T:
    """Return the result of a coroutine within a timeout by `clock`.

    Cancels the coroutine and raises TimeoutError on timeout.
    """
    running, ends = asyncio.ensure_future(coroutine), clock() + wall_s
    try:
        while not running.done():
            rest = ends - clock()
            if rest <= 0:
                raise TimeoutError
            await asyncio.wait({running}, timeout=min(POLL_S, rest))
        return running.result()
    finally:
        running.cancel()
        await asyncio.wait({running})


async def ask_to_stop(sandbox: Sandbox) -> None:
    """Send SIGTERM to every process of the sandbox; errors are ignored, since SIGKILL follows."""
    with contextlib.suppress(SandboxError):
        await terminate(sandbox, GRACE_S)
