"""Places where a test can make a process die, to prove that nothing is lost there.

`hit(name)` does nothing unless the environment variable INSITU_FAILPOINT holds `name:count:file`; several
have commas between them. The process that passes the place for the count-th time makes the file and kills
itself with SIGKILL, as an out-of-memory killer would; where the file is there already, nothing happens any
more. A test in the same process arms a place with `armed` instead and gets `FailpointHit` raised. `POINTS`
are the names: one before and one after each commit of the store, and those between the writes that a commit
rests on.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

VARIABLE = "INSITU_FAILPOINT"
COMMITS = (
    "schema",
    "meta",
    "plan",
    "start",
    "attempt",
    "graded",
    "verdict",
    "score",
    "assign",
    "discard",
    "step",
    "recover",
)
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
FAILURES = ("try.lost",)
"""Places where a failure happens instead: a try whose sandbox is lost."""


class FailpointHit(BaseException):
    """A place armed in this process was passed. No handler of errors takes it for one."""


@dataclass(slots=True)
class _Armed:
    """A place at which this process is to die."""

    left: int
    """How often it is still to be passed."""
    once: str = ""
    """File that says that it has happened; empty: raise instead."""


def _parse(text: str) -> dict[str, _Armed]:
    armed = {}
    for entry in filter(None, text.split(",")):
        name, count, once = entry.split(":", 2)
        armed[name] = _Armed(int(count), once)
    return armed


_armed = _parse(os.environ.get(VARIABLE, ""))


def hit(name: str) -> None:
    """Die here if this place is armed and it is time."""
    place = _due(name)
    if place is not None and not place.once:
        raise FailpointHit(name)
    if place is not None and _first(place):
        os.kill(os.getpid(), signal.SIGKILL)


def fails(name: str) -> bool:
    """Whether this place, one of FAILURES, is armed and it is time: once, as with `hit`."""
    place = _due(name)
    return place is not None and (not place.once or _first(place))


def _due(name: str) -> _Armed | None:
    if not _armed or name not in _armed:
        return None
    place = _armed[name]
    place.left -= 1
    return None if place.left else place


def _first(place: _Armed) -> bool:
    """It has not happened in this or an earlier process."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(place.once, os.O_CREAT | os.O_EXCL))
        return True
    return False


@contextmanager
def armed(name: str, count: int = 1) -> Iterator[None]:
    """Have `FailpointHit` raised when this process passes the place for the `count`-th time."""
    if name not in (*POINTS, *FAILURES):
        raise ValueError(f"no such failpoint: {name}")
    _armed[name] = _Armed(count)
    try:
        yield
    finally:
        del _armed[name]
