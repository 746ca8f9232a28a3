"""One model call: plan -> new ids -> engine -> parse -> commit. No lock is held while the engine generates.

The prompt sent is the path stored in the forest, and the generation is committed unchanged. Budgets end a
session with a synthetic reply that makes the agent stop; a prompt that is too long is a provider's context
error.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from insitu.capture.drift import PromptPlan
from insitu.capture.forest import Forest
from insitu.chat.renderer import ChatRenderer, ParsedReply
from insitu.engines.base import Engine
from insitu.engines.downtime import on_downtime
from insitu.errors import EngineError, EngineUnavailable
from insitu.gateway.deadlines import CallDeadline, QueueTimeout, SessionClock
from insitu.gateway.dialects.base import WireError, labels
from insitu.gateway.dialects.client_tools import echoed
from insitu.gateway.dialects.media import in_place_of
from insitu.gateway.edit_diagnosis import explain
from insitu.gateway.host_tools import ToolBox
from insitu.gateway.prompt_ids import CHARS_PER_MESSAGE, fresh_texts, new_ids, planned
from insitu.gateway.reply_checks import ReplyChecks, cut_at_stop
from insitu.gateway.session_spec import SessionSpec, SessionStats
from insitu.gateway.text_tool_calls import translate
from insitu.types import (
    MALFORMED,
    PARTS_LEFT_OUT,
    UNKNOWN_TOOL,
    Generation,
    IntArray,
    Message,
    MessageSpans,
    ModelRequest,
    Reply,
    RequestKey,
    SamplingParams,
    ToolCall,
)

CHARS_PER_TOKEN = 16
"""Text with more characters per token of the context is refused without encoding it."""
BYTES_PER_CHAR = 6
"""Size of an escaped character."""
MIN_BODY_LIMIT = 32 << 20
"""Images are part of a body and not of the prompt; providers take bodies of this size."""
MAX_STOPS = 16
"""Synthetic replies before an agent that does not stop is refused: its summaries and titles need some."""
DROPPED_PART = "dropped_part"
"""Hint of a turn that names what was left out."""
DOING_CHARS = 200
"""Characters of `SessionStats.doing`."""
MAX_REFUSALS = 256
"""Calls in a row refused as too many before the session is stopped, which ends a storm of retries."""
_NO_NAMES: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished call. `node` is its sampled node; None for a synthetic reply."""

    reply: Reply
    turn: int
    node: int | None
    drift: str = ""
    """Kind and cause of the request's relation to the stored tokens."""
    fresh: int = 0
    """Prompt tokens that were new since the turn it continues."""


def mint_call_id(seed: int, rollout_id: str, turn: int, index: int) -> str:
    """Return the wire id of a tool call: a function of its place in the run, so that runs repeat."""
    name = f"{seed}\0{rollout_id}\0{turn}\0{index}".encode()
    return "call_" + hashlib.blake2b(name, digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """A request as it went to the engine."""

    request: ModelRequest
    plan: PromptPlan
    node: int
    """Its context node."""
    prompt: int
    """Number of its tokens."""
    fresh: int
    """Number of tokens that were rendered for it."""
    names: Mapping[str, str]
    """`WireCall.names` of the request."""


class Turns:
    """Runs the calls of one session against one forest."""

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer,
        forest: Forest,
        spec: SessionSpec,
        tools: ToolBox,
        stats: SessionStats | None = None,
    ) -> None:
        self.stats = stats or SessionStats()
        self._tools = tools
        self._engine = engine
        self._renderer = renderer
        self._forest = forest
        self._spec = spec
        self.unanswered: dict[int, int] = {}
        """Context node -> turn of its latest call that the engine failed and no later call repaired."""
        self.cut_off = set[int]()
        """Calls that were cancelled while the engine was down."""
        self.refused = 0
        """Calls refused as too many since the last answered one."""
        self._checks = ReplyChecks(engine, renderer, spec.temperature)
        self._own_ids: dict[str, str] = {}
        """Wire id -> the id that the model sampled, where its format has such ids."""
        self._places = asyncio.Semaphore(spec.max_concurrent_calls)
        self._reserved = 0
        self._freed = asyncio.Event()
        """Set when reserved tokens are free again."""
        self._wall = SessionClock(spec.limits.wall_s, self.stats)
        limit = spec.limits.max_context_tokens
        self._max_context = min(limit, engine.info.max_context_tokens)
        self.max_body_bytes = max(MIN_BODY_LIMIT, BYTES_PER_CHAR * CHARS_PER_TOKEN * self._max_context)
        """A longer text cannot be a prompt that fits the context."""

    async def run(self, request: ModelRequest, turn: int, names: Mapping[str, str] = _NO_NAMES) -> Answer:
        """Answer one call; `names`: `WireCall.names`.

        Raises WireError (the agent's fault), EngineError, RenderError, CaptureError.
        """
        if self._spent():
            return self._synthetic(turn)
        async with self._place():
            return await self._run(request, turn, names)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Wait for a place at the engine, first come, first served. Raises WireError after the deadline."""
        held = False
        try:
            async with QueueTimeout(self._wall, self._spec.engine_deadline_s):
                held = await self._places.acquire()
        except TimeoutError:
            if not self._wall.over:
                raise WireError("rate_limited", "Too many calls at a time in this session.") from None
        try:
            yield
        finally:
            if held:
                self._places.release()

    async def _run(self, request: ModelRequest, turn: int, names: Mapping[str, str]) -> Answer:
        if self._spent():
            return self._synthetic(turn)
        self.stats.calls += 1
        request, injected = self._tools.prepare(request)
        try:
            plan, fresh = await self._plan(request)
            delta, spans, typed = await self._render(plan, request, fresh)
        except WireError as error:
            if error.cause == "context_length_exceeded":
                self._overflowed()
            raise
        self.stats.injections += typed
        plan = self._labelled(plan, fresh)
        node = self._forest.extend(plan, delta, explain(self._renderer, self._forest, plan), spans)
        prompt = self._forest.path_ids(node)
        answer: Answer | None = None
        try:
            generation = await self._sample(prompt, request, turn, max(0, len(prompt) - len(delta) - 1))
            if generation is not None:
                sent = _Sent(
                    request=request, plan=plan, node=node, prompt=len(prompt), fresh=len(delta), names=names
                )
                answer = self._commit(sent, generation, turn)
        except (EngineError, asyncio.CancelledError) as error:
            if isinstance(error, EngineError) or turn in self.cut_off:
                self.unanswered[node] = turn
            raise
        finally:
            if answer is None:
                self._forest.mark_aborted(node)
        if answer is None:
            self._spend("wall")
            return self._synthetic(turn)
        self.refused = 0
        if self.unanswered.get(node, turn) < turn:
            del self.unanswered[node]
        self._tools.sampled(answer.reply.tool_calls, injected)
        return answer

    def _labelled(self, plan: PromptPlan, fresh: list[str]) -> PromptPlan:
        """Return the plan with a label for each kind of part that its new texts have a line for."""
        dropped = in_place_of(fresh)
        self.stats.left_out += len(dropped)
        return replace(plan, hints=labels([*((DROPPED_PART, kind) for kind in dropped), *plan.hints]))

    async def _sample(
        self, prompt: IntArray, request: ModelRequest, turn: int, experts_from: int
    ) -> Generation | None:
        """Generate with reserved tokens; None when a budget ran out first, the wall time if none is named."""
        max_tokens = 0
        try:
            if not await self._tokens_left():
                return None
            max_tokens = self._room(request, len(prompt))
            self._reserved += max_tokens
            return await self._generate(prompt, max_tokens, turn, experts_from)
        except asyncio.CancelledError:
            self.stats.aborted += 1
            raise
        finally:
            self._reserved -= max_tokens
            self._freed.set()

    async def _tokens_left(self) -> bool:
        """Wait for tokens reserved by parallel calls; False when none are left. Raises WireError."""
        limit = self._spec.limits.max_session_tokens
        try:
            async with QueueTimeout(self._wall, self._spec.engine_deadline_s):
                while self.stats.sampled_tokens + self._reserved >= limit:
                    if self.stats.sampled_tokens >= limit:
                        self._spend("tokens")
                        return False
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            if self._wall.over:
                return False
            raise WireError("rate_limited", "Too many calls at a time in this session.") from None
        return True

    async def count(self, request: ModelRequest) -> int:
        """Return the prompt tokens of a call with this request; changes nothing.

        Raises RenderError and WireError.
        """
        request, _ = self._tools.prepare(request)
        self._check_size(request)
        plan = await planned(self._forest, request, self._renderer.fingerprint)
        if plan.parent is not None:
            return len(self._forest.path_ids(plan.parent))
        held = 0 if plan.base is None else len(self._forest.path_ids(plan.base))
        delta, _, _ = await self._render(plan, request, fresh_texts(plan, request))
        return held + len(delta)

    async def _plan(self, request: ModelRequest) -> tuple[PromptPlan, list[str]]:
        """Return what the request continues, and its new texts. Raises WireError."""
        self._check_size(request)
        plan = await planned(self._forest, request, self._renderer.fingerprint)
        self.stats.edited += plan.drift.kind == "edited"
        self.stats.forks += plan.drift.kind == "fork"
        return plan, fresh_texts(plan, request)

    def _check_size(self, request: ModelRequest) -> None:
        """Raise WireError for more messages than the context has tokens: each takes one at least."""
        if len(request.messages) > self._max_context:
            raise self._overflow(len(request.messages), "at least ")

    async def _render(
        self, plan: PromptPlan, request: ModelRequest, fresh: list[str]
    ) -> tuple[IntArray, MessageSpans, int]:
        """Return the new ids, their messages, and the number of control markers in the new texts.

        Raises WireError.
        """
        chars = sum(map(len, fresh))
        if chars > CHARS_PER_TOKEN * self._max_context:
            raise self._overflow(chars // CHARS_PER_TOKEN, "at least ")

        def work() -> tuple[IntArray, MessageSpans, int]:
            ids, spans = new_ids(self._renderer, self._forest, plan, request, self._own_ids)
            return ids, spans, sum(map(self._renderer.injections, fresh))

        effort = chars + CHARS_PER_MESSAGE * len(plan.replace)
        return work() if effort <= self._spec.inline_chars else await asyncio.to_thread(work)

    def _overflowed(self) -> None:
        self.stats.overflows += 1
        self.stats.truncated = True

    def _overflow(self, prompt: int, how: str = "") -> WireError:
        """Return the error; `how` qualifies a number of tokens that was only estimated."""
        return WireError(
            "context_length_exceeded",
            f"This model's maximum context length is {self._max_context} tokens. However, your messages "
            f"resulted in {how}{prompt} tokens. Please reduce the length of the messages.",
            "messages",
            used=prompt,
            limit=self._max_context,
        )

    def _room(self, request: ModelRequest, prompt: int) -> int:
        """Return how many tokens this call may sample. Raises WireError on overflow."""
        if prompt >= self._max_context:
            self._overflowed()
            raise self._overflow(prompt)
        requested = self._spec.max_call_tokens if request.max_tokens is None else request.max_tokens
        left = self._spec.limits.max_session_tokens - self.stats.sampled_tokens - self._reserved
        return max(1, min(self._spec.max_call_tokens, requested, self._max_context - prompt, left))

    async def _generate(
        self, prompt: IntArray, max_tokens: int, turn: int, experts_from: int
    ) -> Generation | None:
        """Return the engine's answer, None when the session's wall time ran out first. Raises EngineError."""
        clock = asyncio.get_running_loop().time
        started, began_s = clock(), time.time()
        deadline = self._spec.engine_deadline_s
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=self._spec.temperature,
            stop_ids=self._renderer.stop_ids,
            experts_from=experts_from,
        )
        key = RequestKey(seed=self._spec.seed, rollout_id=self._spec.rollout_id, turn=turn)
        timer = CallDeadline(self._wall, deadline)
        try:
            async with timer:
                with on_downtime(timer):
                    generation = await self._engine.generate(prompt, params, key)
        except TimeoutError as error:
            if timer.cut:
                raise EngineUnavailable("the engine was down for longer than a session waits") from error
            if not timer.expired or timer.too_slow:
                raise EngineUnavailable(f"engine gave no answer within {deadline:g} s") from error
            return None
        except asyncio.CancelledError:
            if timer.cut:
                self.cut_off.add(turn)
            raise
        finally:
            self.stats.engine_s += clock() - started
        self._checks.check(generation, max_tokens)
        times = replace(generation.times, began_s=began_s, ended_s=time.time())
        return replace(generation, times=times)

    def _commit(self, sent: _Sent, generation: Generation, turn: int) -> Answer:
        sampled_tokens = len(generation.ids)
        request = sent.request
        generation, parsed, stop = cut_at_stop(self._renderer, generation, request.stop, request.tools)
        parsed = self._translated(parsed, request, turn)
        calls = self._minted(parsed, turn)
        known = tuple(
            echoed(call, sent.names[call.name]) if call.name in sent.names else call for call in calls
        )
        sampled = self._forest.commit(
            sent.node,
            generation,
            Message(role="assistant", text=parsed.text, reasoning=parsed.reasoning, tool_calls=known),
            turn=turn,
            discarded=sampled_tokens - len(generation.ids),
            labels=self._labels(parsed, sent, turn),
            advisory=request.advisory,
        )
        self.stats.prompt_tokens += sent.prompt
        self.stats.sampled_tokens += sampled_tokens
        first = f"{calls[0].name} {calls[0].arguments}" if calls else parsed.text
        self.stats.doing = f"call {turn + 1}: {first[:DOING_CHARS]}"
        self.stats.truncated |= generation.finish == "length"
        reply = Reply(
            text=parsed.text,
            reasoning=parsed.reasoning,
            tool_calls=calls,
            finish=generation.finish,
            stop=stop,
            prompt_tokens=sent.prompt,
            sampled_tokens=len(generation.ids),
            pointer=self._forest.pointer(sampled),
        )
        drift = f"{sent.plan.drift.kind} {sent.plan.drift.cause}"
        return Answer(reply=reply, turn=turn, node=sampled, drift=drift, fresh=sent.fresh)

    def _translated(self, parsed: ParsedReply, request: ModelRequest, turn: int) -> ParsedReply:
        """Turn a text that stands for a command into a call, on the wire only, if the session has a shim."""
        shim = self._spec.shim
        if shim is None or parsed.calls or all(tool.name != shim.tool for tool in request.tools):
            return parsed
        call = translate(shim, parsed.text)
        if call is None:
            return parsed
        self.stats.shimmed.append(turn)
        return replace(parsed, calls=(call,))

    def _labels(self, parsed: ParsedReply, sent: _Sent, turn: int) -> list[str]:
        """Return the labels of a turn (`Turn.labels`), and count its calls."""
        offered = {tool.name for tool in sent.request.tools}
        unknown = any(call.name not in offered for call in parsed.calls)
        self.stats.malformed += parsed.malformed
        self.stats.unknown_tools += unknown
        found = {
            "shim": self.stats.shimmed[-1:] == [turn],
            MALFORMED: parsed.malformed,
            UNKNOWN_TOOL: unknown,
            PARTS_LEFT_OUT: any(name == DROPPED_PART for name, _ in sent.plan.hints),
        }
        return [label for label, holds in found.items() if holds]

    def _minted(self, parsed: ParsedReply, turn: int) -> tuple[ToolCall, ...]:
        """Return the calls of a reply with their wire ids."""
        spec = self._spec
        minted = tuple(
            ToolCall(
                id=mint_call_id(spec.seed, spec.rollout_id, turn, i),
                name=call.name,
                arguments=call.arguments,
            )
            for i, call in enumerate(parsed.calls)
        )
        self._own_ids.update((m.id, call.id) for m, call in zip(minted, parsed.calls, strict=True) if call.id)
        return minted

    def out_of(self) -> str:
        """Return the first budget that is used up; empty when there is none."""
        limits = self._spec.limits
        used_up = {
            "calls": self.stats.calls >= limits.max_calls,
            "tokens": self.stats.sampled_tokens >= limits.max_session_tokens,
            "prompt_tokens": 0 < limits.max_prompt_tokens <= self.stats.prompt_tokens,
            "nodes": len(self._forest) + 2 > limits.max_nodes,
            "refusals": self.refused >= MAX_REFUSALS,
            "wall": self._wall.over,
        }
        return self.stats.budget_stop or next((name for name, out in used_up.items() if out), "")

    @property
    def overtime_s(self) -> float:
        """Seconds since the wall time was over; negative before."""
        return asyncio.get_running_loop().time() - self._wall.ends

    def _spent(self) -> bool:
        """Return whether a budget is used up; record the first one."""
        self._spend(self.out_of())
        return bool(self.stats.budget_stop)

    def _spend(self, budget: str) -> None:
        self.stats.budget_stop = self.stats.budget_stop or budget

    def _synthetic(self, turn: int) -> Answer:
        """Return a reply that ends the agent's loop: plain text, no call, finish stop; never trained.

        Raises a WireError that no agent retries when the agent continues all the same.
        """
        self.stats.stops += 1
        if self.stats.stops > MAX_STOPS:
            raise WireError("session_failed", "The budget of this session is used up.")
        text = f"[insitu] The budget of this session is used up ({self.stats.budget_stop}). Stopping here."
        return Answer(reply=Reply(text=text), turn=turn, node=None)
