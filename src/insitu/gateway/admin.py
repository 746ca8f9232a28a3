"""Admin API: sessions over HTTP, on a listener and with a secret of its own.

    POST   /sessions                 open one: its public id, the agent's secret, the host tools' secret
    GET    /sessions                 all of them; /sessions/{id} one, /sessions/{id}/calls its host tool calls
    POST   /sessions/{id}/seal       refuse further calls, finish running ones, take the reward
    GET    /sessions/{id}/export     the captured tokens: ?format=json|npz
    DELETE /sessions/{id}            abort it, or forget a sealed one
    GET    /stats                    the gateway's counters

Its secret does not open an agent's routes and theirs does not open these. A bounded number of sealed sessions
is kept for export.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Annotated, NoReturn, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from insitu.errors import ConfigError, InsituError, describe_invalid
from insitu.gateway.connection import json_response
from insitu.gateway.dialects.base import WireError
from insitu.gateway.host_tools import HostTool
from insitu.gateway.listeners import Listener, listen_tcp
from insitu.gateway.request import read_json, secret_of
from insitu.gateway.server import Gateway
from insitu.gateway.session import Session, secret_digest
from insitu.gateway.session_export import export_json, export_npz
from insitu.gateway.text_tool_calls import TextShim
from insitu.gateway.token_backend import TokenSession
from insitu.types import MIN_TEMPERATURE, Limits, Trajectory

log = logging.getLogger(__name__)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


_AnyBody = TypeVar("_AnyBody", bound=_Body)


class _LimitsBody(_Body, Limits):
    """Limits of a session; those that are not set are the server's own."""


class ToolBody(_Body):
    """One host tool."""

    name: str
    description: str = ""
    parameters: dict[str, object]
    ends: bool = False


class _ShimBody(_Body):
    """`text_tool_calls.TextShim`."""

    tool: str = "bash"
    argument: str = "command"
    whole_text: bool = False


class _SessionBody(_Body):
    """Options of a new session."""

    rollout_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    task: Annotated[str, Field(max_length=200)] = ""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE)] = 1.0
    limits: _LimitsBody = _LimitsBody()
    tools: list[ToolBody] | None = None
    shim: _ShimBody | None = None


class _SealBody(_Body):
    """Options of sealing."""

    deadline_s: Annotated[float, Field(ge=0, le=600)] = 10.0
    reward: float | None = None


class _AdminError(Exception):
    """A refusal with HTTP status and one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Admin:
    """Serves the operator of one gateway."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        secret: str | None = None,
        limits: Limits | None = None,
        max_sessions: int = 4096,
        sealed_kept: int = 64,
        on_sealed: Callable[[Session, Trajectory], None] = lambda session, trajectory: None,
    ) -> None:
        """Take the limits for what requests leave out, and what stores a session that the operator seals.

        Raises ConfigError for a short secret.
        """
        self.secret = secrets.token_urlsafe(32) if secret is None else secret
        if len(self.secret) < 16:
            raise ConfigError("the admin secret must have at least 16 characters")
        self._digest = secret_digest(self.secret)
        self._gateway = gateway
        self._limits = limits or Limits()
        self._max_sessions, self._sealed_kept = max_sessions, sealed_kept
        self._on_sealed = on_sealed
        self._open: dict[str, Session] = {}
        self._names: set[str] = set()
        self._sealed: OrderedDict[str, tuple[Session, Trajectory]] = OrderedDict()

    def listen_tcp(self, port: int = 0) -> AbstractAsyncContextManager[Listener]:
        """Serve the operator on a loopback port. Raises SetupError."""
        return listen_tcp(self._handle, "127.0.0.1", port)

    def adopt(self, session: Session) -> None:
        """Add a session that was opened in process."""
        self._open[session.public_id] = session
        self._names.add(session.rollout_id)

    def keep(self, session: Session, trajectory: Trajectory) -> None:
        """Keep a sealed session for export until there are too many newer ones."""
        self._open.pop(session.public_id, None)
        self._sealed[session.public_id] = session, trajectory
        while len(self._sealed) > self._sealed_kept:
            self._sealed.popitem(last=False)

    # ----------------------------------------------------------------------- requests

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer every failure as JSON: the request boundary."""
        try:
            return await self._answer(http)
        except _AdminError as error:
            return _failure(error.status, str(error))
        except WireError as error:
            return _failure(error.status, str(error))
        except ConfigError as error:
            return _failure(400, str(error))
        except InsituError as error:
            return _failure(500, str(error))
        except (ConnectionResetError, asyncio.CancelledError):
            raise
        except Exception as error:  # the boundary; a defect is logged without data of the request
            log.exception("admin request failed path=%s", http.path)
            return _failure(500, type(error).__name__)

    async def _answer(self, http: web.BaseRequest) -> web.Response:
        if http.path == "/health":
            return json_response({"status": "ok"})
        secret = secret_of(http)
        if secret is None or not hmac.compare_digest(self._digest, secret_digest(secret)):
            raise _AdminError(401, "the admin secret is missing or wrong")
        parts = http.path.strip("/").split("/")
        if parts == ["stats"] and http.method == "GET":
            return json_response(dataclasses.asdict(self._gateway.counters))
        if parts == ["sessions"]:
            return await self._collection(http)
        if parts[0] == "sessions" and len(parts) in (2, 3):
            return await self._one(http, parts[1], parts[2] if len(parts) == 3 else "")
        raise _AdminError(404, "no such route")

    async def _collection(self, http: web.BaseRequest) -> web.Response:
        if http.method == "GET":
            found = [*self._open.values(), *(session for session, _ in self._sealed.values())]
            return json_response({"sessions": [_describe(session) for session in found]})
        if http.method == "POST":
            return await self._create(http)
        raise _AdminError(405, "GET or POST")

    async def _create(self, http: web.BaseRequest) -> web.Response:
        body = _parsed(_SessionBody, await read_json(http, self._gateway.config, 1 << 20))
        rollout_id = body.rollout_id or f"session-{secrets.token_hex(6)}"
        if len(self._open) >= self._max_sessions:
            raise _AdminError(429, f"{self._max_sessions} sessions are open")
        if rollout_id in self._names:
            raise _AdminError(409, "a session of this rollout exists")
        limits = body.limits.over(self._limits)
        session = self._gateway.open_session(
            rollout_id,
            seed=body.seed,
            limits=limits,
            temperature=body.temperature,
            tools=None if body.tools is None else [HostTool(**tool.model_dump()) for tool in body.tools],
            shim=TextShim(**body.shim.model_dump()) if body.shim else None,
        )
        session.task = body.task
        self.adopt(session)
        return json_response(
            {
                **_describe(session),
                "secret": session.secret,
                "tool_secret": session.tool_secret,
                "path": f"/s/{session.public_id}",
            },
            201,
        )

    async def _one(self, http: web.BaseRequest, name: str, action: str) -> web.Response:
        asked = (http.method, action)
        if asked == ("POST", "seal"):
            return await self._seal(http, name)
        if asked == ("DELETE", ""):
            return await self._delete(name)
        kept = self._sealed.get(name)
        session = kept[0] if kept else self._open.get(name)
        if session is None:
            _unknown()
        if asked == ("GET", ""):
            return json_response(_describe(session))
        if asked == ("GET", "calls"):
            return json_response({"calls": [dataclasses.asdict(call) for call in session.tools.calls]})
        if asked == ("GET", "export"):
            if kept is None:
                raise _AdminError(409, "the session is not sealed")
            return await self._export(http, *kept)
        raise _AdminError(405 if action in ("", "seal", "calls", "export") else 404, "no such operation")

    async def _seal(self, http: web.BaseRequest, name: str) -> web.Response:
        raw = await read_json(http, self._gateway.config, 1 << 16) if http.can_read_body else {}
        body = _parsed(_SealBody, raw)
        if name in self._sealed:
            return json_response(_describe(*self._sealed[name]))
        session = self._open.get(name)
        if session is None:
            _unknown()
        if session.state == "draining":
            raise _AdminError(409, "the session is being sealed")
        session.reward = body.reward
        try:
            trajectory = await session.seal(body.deadline_s)
        finally:
            self._open.pop(name, None)
        self.keep(session, trajectory)
        self._on_sealed(session, trajectory)
        return json_response(_describe(session, trajectory))

    async def _delete(self, name: str) -> web.Response:
        session = self._open.pop(name, None)
        kept = self._sealed.pop(name, None)
        if session is not None:
            await session.abandon()
        elif kept is not None:
            session = kept[0]
        else:
            _unknown()
        session.drop_log()
        return json_response({"status": "deleted"})

    async def _export(self, http: web.BaseRequest, session: Session, trajectory: Trajectory) -> web.Response:
        kind = http.query.get("format", "json")
        if kind not in ("json", "npz") or http.query.keys() - {"format"}:
            raise _AdminError(400, "?format=json or ?format=npz")
        dump = export_json if kind == "json" else export_npz
        if not isinstance(session, TokenSession):
            raise _AdminError(409, "a provider's calls have no tokens: their text is in the run directory")
        raw = await asyncio.to_thread(dump, trajectory, temperature=session.temperature)
        content_type = "application/json" if kind == "json" else "application/octet-stream"
        return web.Response(body=raw, content_type=content_type)


def _describe(session: Session, trajectory: Trajectory | None = None) -> Mapping[str, object]:
    """Return a summary of a session without secrets and text."""
    summary: dict[str, object] = {
        "public_id": session.public_id,
        "rollout_id": session.rollout_id,
        "state": session.state,
        "left": session.left,
        "stats": dataclasses.asdict(session.stats),
        "tool_calls": len(session.tools.calls),
    }
    if trajectory is not None:
        summary["ledger"] = dataclasses.asdict(trajectory.ledger)
        summary["segments"] = len(trajectory.segments)
    return summary


def _parsed(kind: type[_AnyBody], body: Mapping[str, object]) -> _AnyBody:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _AdminError(400, describe_invalid(error)) from error


def _unknown() -> NoReturn:
    raise _AdminError(404, "no such session")


def _failure(status: int, message: str) -> web.Response:
    return json_response({"error": {"message": " ".join(message.split())}}, status)
