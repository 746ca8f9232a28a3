"""How an agent that must stop is stopped: asked by TERM, then killed, then its sandbox is closed.

    deadline, or the agent said that it is done and stays -> TERM to all -> GRACE_S -> KILL to all -> sandbox

The process's own exit is the notice that ends a run. An agent may also say that it is done (the gateway's
exit route) and then linger: it is given LINGER_S. Called by the workers; the sandbox is closed by whoever
has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

from insitu.agents.base import AwayTime, Left, no_time
from insitu.errors import SandboxError, SandboxLost
from insitu.sandbox.base import ExecResult, Sandbox

GRACE_S = 2.0
"""From TERM to KILL: for an agent to write down what it has."""
LINGER_S = 5.0
"""From the agent's word that it is done to TERM."""
POLL_S = 0.5
KILL_S = 10.0
Why = Literal["", "deadline", "left"]
T = TypeVar("T")


async def attend(
    running: asyncio.Task[ExecResult],
    sandbox: Sandbox,
    *,
    wall_s: float,
    left: Left,
    away_s: AwayTime = no_time,
) -> tuple[ExecResult, Why]:
    """The result of an agent's process, and why it was stopped if it was. The process is over then.

    Raises SandboxError.
    """
    try:
        why = await _until(running, wall_s, left, away_s)
        if why:
            await ask_to_stop(sandbox)
            await asyncio.wait({running}, timeout=GRACE_S)
        if not running.done():
            await sandbox.kill_all()
            await asyncio.wait({running}, timeout=KILL_S)
        if not running.done():
            raise SandboxLost("the agent could not be killed")
        return running.result(), why
    finally:
        running.cancel()
        await asyncio.wait({running})


async def _until(running: asyncio.Task[ExecResult], wall_s: float, left: Left, away_s: AwayTime) -> Why:
    """Waits for the process, at most until it must be stopped."""
    ends, lingers = time.monotonic() + wall_s, math.inf
    while (rest := min(ends + away_s(), lingers) - time.monotonic()) > 0:
        await asyncio.wait({running}, timeout=min(POLL_S, rest))
        if running.done():
            return ""
        if lingers == math.inf and left():
            lingers = time.monotonic() + LINGER_S
    return "deadline" if lingers == math.inf else "left"


async def within(doing: Coroutine[Any, Any, T], wall_s: float, away_s: AwayTime) -> T:
    """Its result. Cancels it and raises TimeoutError when the time is over."""
    running, ends = asyncio.ensure_future(doing), time.monotonic() + wall_s
    try:
        while not running.done():
            rest = ends + away_s() - time.monotonic()
            if rest <= 0:
                raise TimeoutError
            await asyncio.wait({running}, timeout=min(POLL_S, rest))
        return running.result()
    finally:
        running.cancel()
        await asyncio.wait({running})


async def ask_to_stop(sandbox: Sandbox) -> None:
    """TERM to every process of the sandbox. One that cannot start another process, or that does not listen,
    is killed next in any case."""
    with contextlib.suppress(SandboxError):
        await sandbox.exec(["/bin/sh", "-c", "kill -TERM -1"], timeout_s=GRACE_S)
