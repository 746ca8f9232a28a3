"""Places where a test can make a process die, to prove that nothing is lost there.

`hit(name)` does nothing unless the environment variable WHET_FAILPOINT is `name:count:file`. The process
that passes the place for the count-th time makes the file and kills itself with SIGKILL, as an out-of-memory
killer would; where the file is there already, nothing happens any more. A test in the same process arms a
place with `armed` instead and gets `Reached` raised. `POINTS` are the names: one before and one after each
commit of the store, and those between the writes that a commit rests on.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "WHET_FAILPOINT"
COMMITS = ("plan", "start", "attempt", "graded", "score", "assign", "discard", "step", "recover")
"""What the store writes in a transaction of its own."""
POINTS = (
    *(f"{name}.{when}" for name in COMMITS for when in ("before", "after")),
    "learner.stepped",
    "learner.published",
    "checkpoint.written",
    "checkpoint.between",
    "checkpoint.renamed",
    "loop.committed",
    "loop.published",
    "loop.pruned",
)


class Reached(BaseException):
    """A place armed in this process was passed. No handler of errors takes it for one."""


class _Armed:
    """What is armed in this process, and how often it is still to be passed."""

    def __init__(self, text: str) -> None:
        self.name, _, rest = text.partition(":")
        count, _, once = rest.partition(":")
        self.left, self.once = int(count or "1"), once


_armed = _Armed(os.environ.get(VARIABLE, ""))


def hit(name: str) -> None:
    """Die here if this place is armed and it is time."""
    if name != _armed.name:
        return
    _armed.left -= 1
    if _armed.left:
        return
    if not _armed.once:
        raise Reached(name)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(_armed.once, os.O_CREAT | os.O_EXCL))
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def armed(name: str, count: int = 1) -> Iterator[None]:
    """Have `Reached` raised when this process passes the place for the `count`-th time."""
    if name not in POINTS:
        raise ValueError(f"no such failpoint: {name}")
    _armed.name, _armed.left, _armed.once = name, count, ""
    try:
        yield
    finally:
        _armed.name = ""
