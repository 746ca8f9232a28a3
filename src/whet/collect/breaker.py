"""Stops a run whose infrastructure is broken, with the cause, instead of letting it fail slot by slot."""

from __future__ import annotations

from whet.errors import SandboxError


class Breaker:
    """Counts consecutive infrastructure failures; a success resets the count."""

    def __init__(self, limit: int = 20) -> None:
        self._limit, self._failures = limit, 0

    def record(self, failed: bool, cause: str) -> None:
        """Raises SandboxError naming the last cause when `limit` attempts in a row have failed."""
        self._failures = self._failures + 1 if failed else 0
        if self._failures >= self._limit:
            raise SandboxError(f"{self._failures} attempts in a row failed; the last: {cause}")
