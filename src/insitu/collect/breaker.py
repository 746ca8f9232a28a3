"""Stop a run with broken infrastructure, with the cause, instead of failing slot by slot."""

from __future__ import annotations

import math

from insitu.errors import SandboxError
from insitu.sandbox.circuit_breaker import Circuit, CircuitOptions


class Breaker:
    """Circuit breaker over the attempts of a run; it never closes again: once open, the run ends."""

    def __init__(self, limit: int = 20) -> None:
        self._circuit = Circuit(CircuitOptions(threshold=limit, window_s=math.inf))

    def record(self, failed: bool, cause: str) -> None:
        """Count one attempt; raise SandboxError with the last cause after `limit` consecutive failures."""
        if not failed:
            self._circuit.succeed()
            return
        self._circuit.fail(cause)
        if self._circuit.state == "open":
            count = self._circuit.failures
            raise SandboxError(f"{count} attempts in a row failed; the last: {self._circuit.cause}")
