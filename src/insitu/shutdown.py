"""Run an asyncio program so that Ctrl-C ends it cleanly and within a few seconds.

The first SIGINT, SIGTERM or SIGHUP cancels the program, which tears everything down in order. If that takes
longer than `STOP_S`, or at a second signal, every descendant process is killed and this one exits: stored
results are on disk already, so nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
STOP_S = 4.5
"""Seconds from the first signal to the hard stop."""
EXIT_INTERRUPTED = 130
LAST_WORDS = b"insitu: forced stop without cleanup; stored results are kept\n"
SHOW_CURSOR = b"\x1b[?25h\n"
"""Restores the cursor of a terminal with a live view."""


def run_interruptible(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` as asyncio.run does, with a clean stop on signals.

    Raises KeyboardInterrupt after teardown. Must be called from the main thread.
    """
    stopping = threading.Event()
    torn_down = threading.Event()

    async def cancellable() -> T:
        task = asyncio.ensure_future(main)
        loop = asyncio.get_running_loop()

        # A plain handler, not loop.add_signal_handler: the second signal must act when the loop hangs.
        def on_signal(number: int, frame: FrameType | None) -> None:
            if stopping.is_set():
                hard_exit()
            stopping.set()
            threading.Thread(target=_deadline, args=(torn_down,), daemon=True).start()
            loop.call_soon_threadsafe(task.cancel)

        before = {
            number: signal.signal(number, on_signal)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            # nohup: the run must outlive its terminal
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }
        try:
            return await task
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    try:
        return asyncio.run(cancellable())
    except BaseException as error:
        # Ctrl-C reaches the children of a terminal too: what fails from then on is a consequence.
        if stopping.is_set():
            raise KeyboardInterrupt from error
        raise
    finally:
        torn_down.set()


def hard_exit() -> None:
    """Kill every descendant of this process, print a message and exit at once."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    # Not print: the interrupted code may hold the stream's lock. select: a pipe's reader may have stopped.
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") + LAST_WORDS)
    os._exit(EXIT_INTERRUPTED)


def descendants(root: int) -> list[int]:
    """Return the living processes below `root` from /proc, children before grandchildren."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # pid (name) state ppid ...; the name may hold spaces and parentheses
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] in "ZX":
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def _deadline(torn_down: threading.Event) -> None:
    if not torn_down.wait(STOP_S):
        hard_exit()
