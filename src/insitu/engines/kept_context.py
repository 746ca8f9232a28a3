"""Which weights the context of a session was computed with, where updates keep it (engine.publish_mode).

A session's calls read cached keys and values only under the name of the version that its context began with
(vLLM's `cache_salt`). A token is stamped with that version, the oldest weights that its computation used,
until everything is computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from insitu.types import VersionRuns


class KeptContext:
    """Ages of the contexts at one server."""

    def __init__(self, most: int) -> None:
        """Keep contexts that are at most `most` versions old; 0 = every update computes all again."""
        self.most = most
        self._began: dict[str, int] = {}
        """Session -> version."""
        self._running: Counter[str] = Counter()
        """Calls by session."""
        self._oldest = 0
        """Context that began earlier is not used any more."""
        self._dropped: list[int] = []
        """Versions with whose load all was computed again."""

    @contextmanager
    def call(self, session: str, version: int) -> Iterator[int]:
        """Yield the version that the context of a call began with; `version`: the present one."""
        began = self._began.get(session, -1)
        if began < self._oldest:
            began = self._began[session] = version
        self._running[session] += 1
        try:
            yield began
        finally:
            self._running[session] -= 1
            if not self._running[session]:
                del self._running[session]

    def update(self, version: int) -> bool:
        """Return whether all must be computed again with the update to `version`.

        That is so if a running call would be too old, and with the first update: earlier calls were made with
        weights of the same name.
        """
        limit = version - self.most
        drop = not self._dropped or any(self._began[session] < limit for session in self._running)
        if drop:
            self._dropped.append(version)
            self._began = dict.fromkeys(self._running, version)
        self._oldest = version if drop else limit
        self._began = {session: began for session, began in self._began.items() if began >= self._oldest}
        return drop

    def stamped(self, runs: VersionRuns, began: int) -> VersionRuns:
        """Return the version runs of a call, each with the oldest weights that it was computed with."""
        found: list[tuple[int, int]] = []
        for start, version in runs:
            oldest = max([began, *(dropped for dropped in self._dropped if dropped <= version)])
            if not found or found[-1][1] != oldest:
                found.append((start, oldest))
        return tuple(found)
