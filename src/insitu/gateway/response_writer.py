"""Delivery of a reply: complete, or as a stream that is kept alive until the reply is ready.

Headers of a stream are held until the engine answered or failure is no longer likely; then keep-alive frames
and well-formed events follow. A call is marked delivered after the last byte, and released when its client is
gone before.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from insitu.gateway.backend import AgentRequest, CallReport, ServerState
from insitu.gateway.connection import name_request
from insitu.gateway.dialects.base import SSE_HEADERS, Envelope, WireCall, WireError
from insitu.gateway.turn import Answer
from insitu.types import Reply

if TYPE_CHECKING:
    from insitu.gateway.token_backend import ModelCall, TokenCalls


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Delivery of one call to one client."""

    request: AgentRequest
    server: ServerState
    calls: TokenCalls
    call: ModelCall
    wire: WireCall
    begun: float = field(default_factory=time.monotonic)

    def report(self, failure: str = "") -> CallReport:
        """Return the report of the call; `failure` is the cause when there was no reply."""
        task = self.call.task
        answered = task.done() and not task.cancelled() and task.exception() is None
        answer = task.result() if answered else None
        reply = answer.reply if answer else Reply()
        outcome = failure or ("synthetic" if answer and answer.node is None else reply.finish)
        return CallReport(
            rollout_id=self.calls.session.rollout_id,
            turn=self.call.turn,
            dialect=self.request.dialect.name,
            outcome=outcome,
            drift=answer.drift if answer else "",
            prompt_tokens=reply.prompt_tokens,
            fresh_tokens=answer.fresh if answer else 0,
            sampled_tokens=reply.sampled_tokens,
            tool_calls=len(reply.tool_calls),
            ms=1000 * (time.monotonic() - self.begun),
            dead=self.calls.dead,
        )

    async def run(self) -> tuple[web.StreamResponse, str]:
        """Wait for the call and write its reply; return also the cause of a failure sent in the stream.

        Raises WireError while a status can still be sent, ConnectionResetError when the client is gone.
        """
        try:
            return await (self._stream() if self.wire.request.stream else self._whole())
        except (ConnectionResetError, TimeoutError) as error:
            self.calls.released(self.call)
            raise ConnectionResetError("client gone") from error
        except BaseException:
            self.calls.released(self.call)
            raise

    async def _whole(self) -> tuple[web.StreamResponse, str]:
        await asyncio.wait({self.call.task})
        answer = _result(self.call)
        envelope = self._envelope()
        body = self.request.dialect.reply(answer.reply, envelope)
        self._store(body)
        response = json_response(body)
        name_request(response, envelope.id)
        async with asyncio.timeout(self.server.config.write_timeout_s):
            await response.prepare(self.request.http)
            await response.write_eof()
        self._delivered()
        return response, ""

    async def _stream(self) -> tuple[web.StreamResponse, str]:
        envelope = self._envelope()
        response = web.StreamResponse(headers={**SSE_HEADERS, "Content-Type": envelope.content_type})
        name_request(response, envelope.id)
        wait_s = self.server.config.hold_headers_s
        while not (await asyncio.wait({self.call.task}, timeout=wait_s))[0]:
            await self._write(response, self.request.dialect.keep_alive(envelope))
            envelope = replace(envelope, kept_alive=envelope.kept_alive + 1)
            wait_s = self.server.config.keep_alive_s
        try:
            answer = _result(self.call)
        except WireError as error:
            if not response.prepared and error.cause not in self.request.dialect.in_band:
                raise
            self.server.counters.refused += 1
            await self._write(response, self.request.dialect.error_event(error, envelope), last=True)
            self.calls.released(self.call)
            return response, error.cause
        if self.wire.kept is not None:
            self._store(self.request.dialect.reply(answer.reply, envelope))
        await self._write(response, b"".join(self.request.dialect.events(answer.reply, envelope)), last=True)
        self._delivered()
        return response, ""

    def _store(self, body: Mapping[str, object]) -> None:
        """Store the reply before the client can refer to it."""
        if self.wire.kept is not None:
            self.calls.bodies.stored.keep(self.wire.kept, body)

    def _delivered(self) -> None:
        self.calls.delivered(self.call)
        self.server.counters.replies += 1

    async def _write(self, response: web.StreamResponse, frames: bytes, *, last: bool = False) -> None:
        """Write frames; the last ones together with the end, which saves a packet."""
        async with asyncio.timeout(self.server.config.write_timeout_s):
            if not response.prepared:
                await response.prepare(self.request.http)
            await (response.write_eof(frames) if last else response.write(frames))

    def _envelope(self) -> Envelope:
        name = f"{self.calls.session.rollout_id}\0{self.call.turn}".encode()
        return Envelope(
            id=hashlib.blake2b(name, digest_size=12).hexdigest(),
            created=int(time.time()),
            model=self.server.config.model_name,
            include_usage=self.wire.include_usage,
            names=self.wire.names,
            content_type=self.wire.content_type,
            compaction=self.wire.compaction,
            history=self.wire.history,
            echo=self.wire.echo,
            stored=self.wire.kept is not None,
        )


def _result(call: ModelCall) -> Answer:
    """Return the answer of a finished call. Raises WireError; the session keeps defects."""
    if call.task.cancelled():
        raise WireError("session_closed", "This session is closed.")
    error = call.task.exception()
    if error is not None and not isinstance(error, WireError):
        raise WireError("engine_failed", "The gateway failed.") from error
    return call.task.result()


def json_response(body: Mapping[str, object], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
