"""Stop a run with broken infrastructure, with the cause, instead of failing slot by slot."""

from __future__ import annotations

import math

from insitu.errors import SandboxError
from insitu.sandbox.circuit_breaker import Circuit, CircuitOptions

LOST = "node lost: "
"""Begin of the cause of attempts that ended with their node; the rest of it names this one loss."""


class Breaker:
    """Circuit breaker over the attempts of a run; it never closes again: once open, the run ends."""

    def __init__(self, limit: int = 20) -> None:
        self._circuit = Circuit(CircuitOptions(threshold=limit, window_s=math.inf))
        self._losses: set[str] = set()

    def record(self, failed: bool, cause: str) -> None:
        """Count one attempt; raise SandboxError with the last cause after `limit` consecutive failures.

        All attempts that ended with the same node are one failure.
        """
        if not failed:
            self._circuit.succeed()
            return
        if cause.startswith(LOST):
            if cause in self._losses:
                return
            self._losses.add(cause)
        self._circuit.fail(cause)
        if self._circuit.state == "open":
            count = self._circuit.failures
            raise SandboxError(f"{count} attempts in a row failed; the last: {self._circuit.cause}")
