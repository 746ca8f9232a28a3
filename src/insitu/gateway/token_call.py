"""One model call, from a parsed body to the last byte of its reply.

    plan -> new ids -> engine -> parse -> commit -> write

The prompt sent is the path stored in the forest, and the generation is committed unchanged; no lock is held
while the engine generates. The call is a task of its own: it outlives a client that is gone, and another one
that sends the same body gets its reply. Headers of a stream are held until the engine answered or failure is
no longer likely; then keep-alive frames and well-formed events follow.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import is_not
from typing import TYPE_CHECKING

from aiohttp import web

from insitu.capture.drift import PromptPlan
from insitu.chat.renderer import ParsedReply
from insitu.engines.downtime import on_downtime
from insitu.errors import EngineError, EngineUnavailable, RenderError
from insitu.gateway.backend import CallReport
from insitu.gateway.body_parser import canonical_digest
from insitu.gateway.connection import json_response, name_request
from insitu.gateway.deadlines import CallDeadline
from insitu.gateway.dialects.base import SSE_HEADERS, Dialect, Envelope, ParsedBody, WireError, labels
from insitu.gateway.dialects.client_tools import echoed
from insitu.gateway.dialects.media import in_place_of
from insitu.gateway.prompt_ids import (
    explain,
    fresh_texts,
    host_failures,
    planned,
    prepared,
    rendered,
    unrenderable,
)
from insitu.gateway.reply_checks import cut_at_stop, minted
from insitu.gateway.text_tool_calls import translated
from insitu.gateway.tool_hooks import BLOCKED
from insitu.types import (
    MALFORMED,
    PARTS_LEFT_OUT,
    STEP,
    UNKNOWN_TOOL,
    Generation,
    IntArray,
    Message,
    ModelRequest,
    Reply,
    RequestKey,
    SamplingParams,
    ToolCall,
)

if TYPE_CHECKING:
    from insitu.gateway.token_backend import TokenSession

DROPPED_PART = "dropped_part"
"""Hint of a turn that names what was left out."""
DOING_CHARS = 200
"""Characters of `SessionStats.doing`."""


class TokenCall:
    """Sampled once, and written to the client that is attached. Made and held by its session."""

    def __init__(self, session: TokenSession, body: ParsedBody, turn: int) -> None:
        """Start it."""
        self.session, self.turn = session, turn
        self.digest = body.digest
        self.canonical = b""
        """`canonical_digest` of its body, once its client is gone: the body is not kept for a retry."""
        self.attached = True
        """A client is waiting for it."""
        self.left = asyncio.Event()
        """Set when the attached client has its reply or is gone."""
        self._grace: asyncio.TimerHandle | None = None
        self._context = -1
        """Node of its prompt; -1 before that is stored."""
        self._node: int | None = None
        """Node of what was sampled; None for a synthetic reply."""
        self._drift = ""
        """Kind and cause of the request's relation to the stored tokens."""
        self._fresh = 0
        """Prompt tokens that were new since the turn it continues."""
        self._cut_off = False
        """It was cancelled while the engine was down."""
        self.task = asyncio.create_task(self._run(body.request, body.names))
        self.task.add_done_callback(self._settled)

    # ----------------------------------------------------------------------- clients

    def attach(self) -> None:
        """Take the client that sent the same body after the first one was gone."""
        self.attached = True
        self.left = asyncio.Event()
        if self._grace is not None:
            self._grace.cancel()
        self.session.stats.replays += 1

    async def deliver(self, http: web.BaseRequest, dialect: Dialect, body: ParsedBody) -> web.StreamResponse:
        """Wait for the reply, write it to the attached client and report the call.

        Raises WireError while a status can still be sent, ConnectionResetError when the client is gone.
        """
        began, failure = time.monotonic(), "client gone"
        try:
            write = self._stream if body.request.stream else self._whole
            response, failure = await write(http, dialect, body)
        except (ConnectionResetError, TimeoutError) as error:
            self._released(body)
            raise ConnectionResetError("client gone") from error
        except BaseException as error:
            self._released(body)
            failure = error.cause if isinstance(error, WireError) else failure
            raise
        finally:
            self.session.server.reports.report(self._report(dialect, failure, time.monotonic() - began))
        return response

    async def _whole(
        self, http: web.BaseRequest, dialect: Dialect, body: ParsedBody
    ) -> tuple[web.StreamResponse, str]:
        await asyncio.wait({self.task})
        reply, envelope = self._result(), self._envelope(body)
        said = dialect.reply(reply, envelope)
        if body.kept is not None:  # before the client can refer to it
            self.session.bodies.stored.keep(body.kept, said)
        response = json_response(said)
        name_request(response, envelope.id)
        async with asyncio.timeout(self.session.server.config.write_timeout_s):
            await response.prepare(http)
            await response.write_eof()
        self.delivered()
        return response, ""

    async def _stream(
        self, http: web.BaseRequest, dialect: Dialect, body: ParsedBody
    ) -> tuple[web.StreamResponse, str]:
        """Return also the cause of a failure that was sent in the stream."""
        server, envelope = self.session.server, self._envelope(body)
        response = web.StreamResponse(headers={**SSE_HEADERS, "Content-Type": body.content_type})
        name_request(response, envelope.id)

        async def send(frames: bytes, *, last: bool = False) -> None:
            """Write frames; the last ones together with the end, which saves a packet."""
            async with asyncio.timeout(server.config.write_timeout_s):
                if not response.prepared:
                    await response.prepare(http)
                await (response.write_eof(frames) if last else response.write(frames))

        wait_s = server.config.hold_headers_s
        while not (await asyncio.wait({self.task}, timeout=wait_s))[0]:
            await send(dialect.keep_alive(envelope))
            envelope = replace(envelope, kept_alive=envelope.kept_alive + 1)
            wait_s = server.config.keep_alive_s
        try:
            reply = self._result()
        except WireError as error:
            if not response.prepared and error.cause not in dialect.in_band:
                raise
            server.counters.refused += 1
            await send(dialect.error_event(error, envelope), last=True)
            self._released(body)
            return response, error.cause
        if body.kept is not None:
            self.session.bodies.stored.keep(body.kept, dialect.reply(reply, envelope))
        await send(b"".join(dialect.events(reply, envelope)), last=True)
        self.delivered()
        return response, ""

    def _result(self) -> Reply:
        """Return the reply of a finished call. Raises WireError; the session keeps defects."""
        if self.task.cancelled():
            raise WireError("session_closed", "This session is closed.")
        error = self.task.exception()
        if error is not None and not isinstance(error, WireError):
            raise WireError("engine_failed", "The gateway failed.") from error
        return self.task.result()

    def _envelope(self, body: ParsedBody) -> Envelope:
        name = f"{self.session.rollout_id}\0{self.turn}".encode()
        id, model = hashlib.blake2b(name, digest_size=12).hexdigest(), self.session.server.config.model_name
        return Envelope(id=id, created=int(time.time()), model=model, body=body)

    def delivered(self) -> None:
        """Record that the terminal event of the reply was written."""
        if self._node is not None and self.session.state != "sealed":
            self.session.forest.mark_delivered(self._node)
            self.session.tools.delivered(call.id for call in self._result().tool_calls)
        self._forget()
        self.left.set()
        self.session.server.counters.replies += 1

    def _released(self, body: ParsedBody) -> None:
        """Keep an undelivered reply, or give the call a short grace period: its client is gone."""
        self.attached = False
        self.left.set()
        if self.session.state == "sealed" or self not in self.session.calls:
            return
        self.canonical = self.canonical or canonical_digest(body)
        if not self.task.done():
            grace_s = self.session.server.config.disconnect_grace_s
            self._grace = asyncio.get_running_loop().call_later(grace_s, self.task.cancel)
        elif self._answered and self._node is not None:
            self.session.forest.mark_aborted(self._node)

    def _forget(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
        if self in self.session.calls:
            self.session.calls.remove(self)

    def _settled(self, task: asyncio.Task[Reply]) -> None:
        """Keep what its end means for the session; every exception of a turn passes here."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, WireError):
            self.session.broken(error)
        if task.cancelled() or error is not None:
            self._forget()

    @property
    def _answered(self) -> bool:
        return self.task.done() and not self.task.cancelled() and self.task.exception() is None

    def _report(self, dialect: Dialect, failure: str, seconds: float) -> CallReport:
        """Return the report of the call; `failure` is the cause when there was no reply."""
        reply = self.task.result() if self._answered else Reply()
        sampled = self._answered and self._node is not None
        outcome = failure or ("synthetic" if self._answered and not sampled else reply.finish)
        return CallReport(
            rollout_id=self.session.rollout_id,
            turn=self.turn,
            dialect=dialect.name,
            outcome=outcome,
            drift=self._drift if sampled else "",
            prompt_tokens=reply.prompt_tokens,
            fresh_tokens=self._fresh if sampled else 0,
            sampled_tokens=reply.sampled_tokens,
            tool_calls=len(reply.tool_calls),
            ms=1000 * seconds,
            dead=self.session.dead,
        )

    # ----------------------------------------------------------------------- tokens

    async def _run(self, request: ModelRequest, names: Mapping[str, str]) -> Reply:
        """Answer the request; internal failures become errors that the agent may see."""
        session = self.session
        try:
            if session.spent():
                return session.stop()
            async with session.place():
                return session.stop() if session.spent() else await self._sampled(request, names)
        except WireError as error:
            if error.cause == "context_length_exceeded":
                session.stats.overflows += 1
                session.stats.truncated = True
            raise
        except RenderError as error:
            raise unrenderable(error) from error
        except EngineError as error:
            session.engine_failed(error, self._context, self.turn)
            raise WireError("engine_failed", "The model server failed.") from error
        except asyncio.CancelledError:
            if self._cut_off:
                # Whether the agent or its timeout stopped it: it got no answer because the engine was down.
                stopped = EngineUnavailable("the engine was down when the call was stopped")
                session.engine_failed(stopped, self._context, self.turn)
            raise

    async def _sampled(self, request: ModelRequest, names: Mapping[str, str]) -> Reply:
        """Return the model's reply, a synthetic one where a budget ran out meanwhile."""
        session, forest = self.session, self.session.forest
        session.stats.calls += 1
        request, injected = await prepared(session, request)
        plan = await planned(forest, request, session.renderer.fingerprint)
        session.stats.edited += plan.drift.kind == "edited"
        session.stats.forks += plan.drift.kind == "fork"
        texts = fresh_texts(plan, request)
        delta, spans, typed = await rendered(session, plan, request, texts)
        session.stats.injections += typed
        plan = self._labelled(plan, texts)
        context = forest.extend(plan, delta, explain(session.renderer, forest, plan), spans)
        prompt = forest.path_ids(context)
        self._context, self._fresh = context, len(delta)
        self._drift = f"{plan.drift.kind} {plan.drift.cause}"
        reply: Reply | None = None
        try:
            async with session.reserved(request, len(prompt)) as most:
                generation = await self._generated(prompt, most) if most else None
            if generation is not None:
                reply = await self._committed(request, plan, len(prompt), generation, names)
        except asyncio.CancelledError:
            session.stats.aborted += 1
            raise
        finally:
            if reply is None:
                forest.mark_aborted(context if self._node is None else self._node)
        if reply is None:
            session.spend("wall")
            return session.stop()
        session.answered(context, self.turn)
        session.tools.sampled(reply.tool_calls, injected)
        return reply

    def _labelled(self, plan: PromptPlan, texts: list[str]) -> PromptPlan:
        """Return the plan with a label for each kind of part that its new texts have a line for."""
        dropped = in_place_of(texts)
        self.session.stats.left_out += len(dropped)
        did = [] if self.session.hook is None else self.session.hook.hints(plan.replace)
        return replace(plan, hints=labels([*((DROPPED_PART, kind) for kind in dropped), *did, *plan.hints]))

    async def _generated(self, prompt: IntArray, most: int) -> Generation | None:
        """Return the engine's answer, None when the session's wall time ran out first. Raises EngineError."""
        session, deadline = self.session, self.session.server.config.engine_deadline_s
        clock = asyncio.get_running_loop().time
        started, began_s = clock(), time.time()
        params = SamplingParams(
            max_tokens=most,
            temperature=session.temperature,
            stop_ids=session.renderer.stop_ids,
            experts_from=max(0, len(prompt) - self._fresh - 1),
        )
        key = RequestKey(seed=session.spec.seed, rollout_id=session.rollout_id, turn=self.turn)
        timer = CallDeadline(session.wall, deadline)
        try:
            async with timer:
                with on_downtime(timer):
                    generation = await session.engine.generate(prompt, params, key)
        except TimeoutError as error:
            if timer.cut:
                raise EngineUnavailable("the engine was down for longer than a session waits") from error
            if not timer.expired or timer.too_slow:
                raise EngineUnavailable(f"engine gave no answer within {deadline:g} s") from error
            return None
        except asyncio.CancelledError:
            self._cut_off |= timer.cut
            raise
        finally:
            session.stats.engine_s += clock() - started
        session.checks.check(generation, most)
        times = replace(generation.times, began_s=began_s, ended_s=time.time())
        return replace(generation, times=times)

    async def _committed(
        self,
        request: ModelRequest,
        plan: PromptPlan,
        prompt: int,
        generation: Generation,
        names: Mapping[str, str],
    ) -> Reply:
        """Store what was sampled and return it as a reply; `names`: `ParsedBody.names`."""
        session, stats = self.session, self.session.stats
        sampled_tokens = len(generation.ids)
        generation, parsed, stop = cut_at_stop(session.renderer, generation, request.stop, request.tools)
        called = translated(parsed, session.spec.shim, request.tools)
        if called is not parsed:
            stats.shimmed.append(self.turn)
            parsed = called
        calls = minted(session.spec.seed, session.rollout_id, self.turn, parsed.calls)
        own = zip(calls, parsed.calls, strict=True)
        session.own_ids.update((call.id, sampled.id) for call, sampled in own if sampled.id)
        given, failure = await self._given(calls)
        known = tuple(echoed(call, names[call.name]) if call.name in names else call for call in given)
        self._node = session.forest.commit(
            self._context,
            generation,
            Message(role="assistant", text=parsed.text, reasoning=parsed.reasoning, tool_calls=known),
            turn=self.turn,
            discarded=sampled_tokens - len(generation.ids),
            labels=self._labels(parsed, request, plan, [*map(is_not, given, calls)]),
            advisory=request.advisory,
        )
        stats.prompt_tokens += prompt
        stats.sampled_tokens += sampled_tokens
        first = f"{given[0].name} {given[0].arguments}" if given else parsed.text
        stats.doing = f"call {self.turn + 1}: {first[:DOING_CHARS]}"
        stats.truncated |= generation.finish == "length"
        if failure is not None:
            raise failure
        return Reply(
            text=parsed.text,
            reasoning=parsed.reasoning,
            tool_calls=given,
            finish=generation.finish,
            stop=stop,
            prompt_tokens=prompt,
            sampled_tokens=len(generation.ids),
            pointer=session.forest.pointer(self._node),
        )

    async def _given(self, calls: tuple[ToolCall, ...]) -> tuple[tuple[ToolCall, ...], BaseException | None]:
        """Return the calls as the agent gets them, or what to raise once they are stored as sampled."""
        try:
            with host_failures(self.session):
                return await self.session.hook.called(self.turn, calls) if self.session.hook else calls, None
        except (WireError, asyncio.CancelledError) as error:
            return calls, error

    def _labels(
        self, parsed: ParsedReply, request: ModelRequest, plan: PromptPlan, blocked: Sequence[bool]
    ) -> list[str]:
        """Return the labels of a turn (`Turn.labels`), and count its calls."""
        stats = self.session.stats
        offered = {tool.name for tool in request.tools}
        unknown = any(call.name not in offered for call in parsed.calls)
        stats.malformed += parsed.malformed
        stats.unknown_tools += unknown
        found = {
            "shim": self.turn in stats.shimmed,
            MALFORMED: parsed.malformed,
            UNKNOWN_TOOL: unknown,
            PARTS_LEFT_OUT: any(name == DROPPED_PART for name, _ in plan.hints),
            BLOCKED: any(blocked),
            f"{STEP}{self.session.step}": self.session.step > 1,
        }
        return [label for label, holds in found.items() if holds]
