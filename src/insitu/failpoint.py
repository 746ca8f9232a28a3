"""Failpoints: places where a test can kill a process, to check that nothing is lost there.

`hit(name)` is a no-op unless the environment variable INSITU_FAILPOINT contains `name:count:file` (several
are separated by commas). The process that passes the place for the count-th time creates the file and kills
itself with SIGKILL, as an out-of-memory killer would; if the file exists already, nothing happens. A test in
the same process uses `armed` instead, which raises `FailpointHit`. `POINTS` lists the names: one before and
one after each commit of the store, and those between the writes that a commit depends on.
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
"""Transactions of the store."""
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
"""Places that simulate a failure instead: an attempt whose sandbox is lost."""


class FailpointHit(BaseException):
    """An armed failpoint was passed; derives from BaseException so that no error handler catches it."""


@dataclass(slots=True)
class _Armed:
    """An armed failpoint of this process."""

    left: int
    """Passes until it triggers."""
    once: str = ""
    """File that marks it as triggered; empty: raise instead."""


def _parse(text: str) -> dict[str, _Armed]:
    armed = {}
    for entry in filter(None, text.split(",")):
        name, count, once = entry.split(":", 2)
        armed[name] = _Armed(int(count), once)
    return armed


_armed = _parse(os.environ.get(VARIABLE, ""))


def hit(name: str) -> None:
    """Trigger this failpoint if it is armed and due."""
    place = _due(name)
    if place is not None and not place.once:
        raise FailpointHit(name)
    if place is not None and _first(place):
        os.kill(os.getpid(), signal.SIGKILL)


def fails(name: str) -> bool:
    """Return whether this failpoint, one of FAILURES, is armed and due; triggers once, like `hit`."""
    place = _due(name)
    return place is not None and (not place.once or _first(place))


def _due(name: str) -> _Armed | None:
    if not _armed or name not in _armed:
        return None
    place = _armed[name]
    place.left -= 1
    return None if place.left else place


def _first(place: _Armed) -> bool:
    """Return whether it has not triggered in this or an earlier process."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(place.once, os.O_CREAT | os.O_EXCL))
        return True
    return False


@contextmanager
def armed(name: str, count: int = 1) -> Iterator[None]:
    """Raise `FailpointHit` when this process passes the place for the `count`-th time."""
    if name not in (*POINTS, *FAILURES):
        raise ValueError(f"no such failpoint: {name}")
    _armed[name] = _Armed(count)
    try:
        yield
    finally:
        del _armed[name]
