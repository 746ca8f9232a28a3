"""State of a viewer that its pages share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from insitu_train.words import Words, WordsCache
from insitu_view.web.credit import Credits
from insitu_view.web.runs import RunHandle, Runs

T = TypeVar("T")


SHARE = 0.005
"""Most of a core that one page of a run under way may take when it is asked for again and again.

The overview asks for two of them.
"""
FREE_S = 0.1
"""Pages that take less CPU time are always up to date."""
KEPT = 64


class Tagged(dict[str, Any]):
    """A page with an entity tag: it is not sent again to a client that has it."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        super().__init__(found)
        self.tag = f'"{time.time_ns()}"'


@dataclass(frozen=True, slots=True)
class _Answer:
    """A page that was made before."""

    found: Tagged
    signature: object
    """Of the run when it was made."""
    until_s: float
    """Reading of time.monotonic() until which it serves although the run has changed."""


@dataclass(slots=True)
class Context:
    """State of a server that pages share."""

    runs: Runs
    credits: Credits = field(default_factory=Credits)
    words: WordsCache = field(default_factory=WordsCache)
    queries: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="insitu-view")
    )
    heavy: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="insitu-plan")
    )
    answers: dict[object, _Answer] = field(default_factory=dict)

    async def run(self, function: Callable[[], T], *, heavy: bool = False) -> T:
        """Return the result of a function in one of the threads."""
        pool = self.heavy if heavy else self.queries
        return await asyncio.get_running_loop().run_in_executor(pool, function)

    def reused(self, run: RunHandle, key: object, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return a page over all rollouts, or the last one.

        The last one is returned while the run is unchanged, and after a costly one for a while.
        """
        key, signature, now = (run.path, key), (run.signature(), run.state()), time.monotonic()
        kept = self.answers.get(key)
        if kept is not None and (kept.signature == signature or now < kept.until_s):
            return kept.found
        cpu_s = time.thread_time()
        found = Tagged(make())
        cpu_s = time.thread_time() - cpu_s
        until_s = time.monotonic() + cpu_s / SHARE if cpu_s > FREE_S else 0.0
        while len(self.answers) >= KEPT:
            self.answers.pop(next(iter(self.answers)), None)
        self.answers[key] = _Answer(found, signature, until_s)
        return found

    def words_of(self, run: RunHandle) -> tuple[Words | None, str]:
        """Return the decoder of a run, or None and why."""
        return self.words.of(run.config())
