"""Gateway-side life of one rollout: open -> live -> draining -> sealed.

A session holds identity, secrets, limits, counters and host tools; its backend answers its calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from insitu.errors import GatewayError
from insitu.gateway.backend import SessionBackend, SessionCalls
from insitu.gateway.dialects.base import WireError
from insitu.gateway.host_tools import HostCall, ToolBox
from insitu.gateway.session_spec import SessionSpec, SessionStats
from insitu.stalls import stalled_s
from insitu.types import Trajectory

State = Literal["open", "live", "draining", "sealed"]


def secret_digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


class Session:
    """Made by `Gateway.open_session`; lives on the gateway's event loop."""

    def __init__(
        self,
        spec: SessionSpec,
        backend: SessionBackend,
        *,
        listener: Path | None,
        on_sealed: Callable[[Session], None],
        tools: ToolBox | None = None,
    ) -> None:
        self.spec = spec
        self.rollout_id, self.temperature = spec.rollout_id, spec.temperature
        self.public_id = secrets.token_hex(8)
        self.secret = secrets.token_urlsafe(32)
        """For the agent; passed by environment or file, never written by the gateway."""
        self.secret_digest = secret_digest(self.secret)
        self.tool_secret = secrets.token_urlsafe(32)
        """For the host tools' endpoint and the MCP server only."""
        self.tool_digest = secret_digest(self.tool_secret)
        self.tools = tools or ToolBox()
        self.listener = listener
        self.state: State = "open"
        self.task = ""
        """Task that the operator opened it for; sessions of one task form a group."""
        self.reward: float | None = None
        """Set by the operator before it is sealed; None = not graded."""
        self.left = False
        """The agent reported that it is done."""
        self.failure: BaseException | None = None
        """What `seal` will raise: a broken invariant or a defect. Engine failures: `stats.infra_error`."""
        self.stats = SessionStats()
        self._stalled = stalled_s()
        self._on_sealed = on_sealed
        self.calls: SessionCalls = backend.open_calls(self)

    @property
    def dead(self) -> str:
        """Permanent failure because of which no more calls are answered; empty while they are."""
        return self.calls.dead

    @property
    def host_calls(self) -> Sequence[HostCall]:
        """Calls of host tools so far, in order."""
        return self.tools.calls

    def clock(self) -> float:
        """Return the loop time without waits for the engine, and without stalls since the session opened."""
        stalled = stalled_s() - self._stalled
        now = asyncio.get_running_loop().time()
        return now - self.stats.away(now) - stalled

    def owns(self, secret: str, listener: Path | None, scope: str = "agent") -> bool:
        """Return whether `secret` is this session's for `scope`, from a listener that may use it.

        That is the session's own socket, or TCP (`listener` None), which only the operator opens and no
        sandbox can reach.
        """
        held = self.tool_digest if scope == "tool" else self.secret_digest
        known = hmac.compare_digest(held, secret_digest(secret))
        return known and (self.listener is None or listener is None or self.listener == listener)

    def check_open(self) -> None:
        """Raise WireError when no more calls are accepted."""
        if self.left or self.state not in ("open", "live"):
            raise WireError("session_closed", "This session is closed.")

    def leave(self) -> None:
        """Refuse further calls at the agent's request; running ones finish. Only the operator seals."""
        self.left = True

    async def seal(self, deadline_s: float) -> Trajectory:
        """Refuse new calls, let running ones finish within `deadline_s`, abort the rest, return the tokens.

        Raises what broke the session (CaptureError and defects), GatewayError when it was sealed before.
        """
        if self.state in ("draining", "sealed"):
            raise GatewayError(f"session of rollout {self.rollout_id} is already {self.state}")
        await self._end(deadline_s)
        if self.failure is not None:
            raise self.failure
        return self.calls.trajectory()

    async def abandon(self) -> None:
        """Abort everything without an export: the gateway is closing."""
        if self.state != "sealed":
            await self._end(0.0)

    async def _end(self, deadline_s: float) -> None:
        self.state = "draining"
        try:
            await self.calls.drain(deadline_s)
        finally:
            self.state = "sealed"
            self._on_sealed(self)
            self.calls.close()
