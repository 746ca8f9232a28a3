"""Runs one command; ends it, with everything it started, when standard input ends or a signal comes.

Started by `launch.py`, in a session of its own. A server's processes would outlive a controller that is
killed -9, but the pipe ends then. The kernel gives orphans of the command to this process (subreaper), so all
of them are found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

from insitu.shutdown import descendants

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S = 3.0
"""Time for a clean exit."""


def _end_all() -> None:
    """End every descendant: SIGTERM, then SIGKILL after GRACE_S, until none is left."""
    ends, sent = time.monotonic() + GRACE_S, signal.SIGTERM
    while left := descendants(os.getpid()):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)
        while descendants(os.getpid()) and (sent == signal.SIGTERM and time.monotonic() < ends):
            time.sleep(0.05)
        sent = signal.SIGKILL
        time.sleep(0.01)


def _die_with_keeper() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(command: list[str]) -> int:
    """Return the command's exit status, negative for a signal; 0 if it was ended."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    awake, wake = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: os.write(wake, b"."))
    # the server has another environment, in which insitu's packages must not be found first
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=kept, preexec_fn=_die_with_keeper)
    ended = os.pidfd_open(child.pid)
    try:
        ready, _, _ = select.select([0, ended, awake], [], [])
    finally:
        _end_all()
    code = child.wait()
    return code if ended in ready else 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.exit(status if status >= 0 else 128 - status)
