"""State of a viewer that its pages share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from insitu.view.web.credit import Credits
from insitu.view.web.runs import RunHandle, Runs
from insitu.view.web.words import Words, WordsCache

T = TypeVar("T")


@dataclass(slots=True)
class Context:
    """State of a server that pages share."""

    runs: Runs
    credits: Credits
    words: WordsCache
    queries: ThreadPoolExecutor
    heavy: ThreadPoolExecutor

    async def run(self, function: Callable[[], T], *, heavy: bool = False) -> T:
        """Return the result of a function in one of the threads."""
        pool = self.heavy if heavy else self.queries
        return await asyncio.get_running_loop().run_in_executor(pool, function)

    def words_of(self, run: RunHandle) -> tuple[Words | None, str]:
        """Return the decoder of a run, or None and why."""
        return self.words.of(run.config())
