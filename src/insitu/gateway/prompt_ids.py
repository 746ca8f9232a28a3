"""New prompt ids of a request: those between the stored path it continues and its reply.

And, where it contains an assistant message other than the sampled one, what differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from insitu.capture.drift import PromptPlan
from insitu.capture.drift_diagnosis import Diagnosis, diagnose, first_difference, first_token
from insitu.capture.forest import Forest
from insitu.capture.message_history import History, Unread
from insitu.chat.renderer import ChatRenderer
from insitu.errors import FunctionFailed, InsituError, RenderError
from insitu.gateway.dialects.base import WireError
from insitu.gateway.host_tools import HostTool
from insitu.types import IntArray, Message, MessageSpans, ModelRequest, ToolCall

if TYPE_CHECKING:
    from insitu.gateway.token_backend import TokenSession

CHARS_PER_TOKEN = 16
"""Text with more characters per token of the context is refused without encoding it."""
CHARS_PER_MESSAGE = 100
"""Rendering a message costs as much as encoding this many characters."""
MAX_SPLIT_CHARS = 200_000
"""Most characters encoded to find the messages within a run."""


def leading_system(messages: Sequence[Message]) -> list[Message]:
    """Return the leading system messages, which belong to the root block."""
    return list(takewhile(lambda m: m.role == "system", messages))


def new_ids(
    renderer: ChatRenderer,
    forest: Forest,
    plan: PromptPlan,
    request: ModelRequest,
    own_ids: Mapping[str, str] = MappingProxyType({}),
) -> tuple[IntArray, MessageSpans]:
    """Return the ids to append to the stored path, and which of them are which message.

    `own_ids`: the model's own call id by wire id. Raises RenderError.
    """
    root, close, write = np.zeros(0, dtype=np.int32), 0, renderer.append
    if plan.base is None:
        root = renderer.open(leading_system(request.messages), request.tools)
    else:
        said = forest.sampled(plan.base)
        if own_ids:
            own_ids = {**own_ids, **_echoed_ids(renderer, said.ids, plan, request, own_ids)}
        write = partial(renderer.join, said.ids, said.finish)
        close = len(renderer.close(said.ids, said.finish))
    messages = [_renamed(message, own_ids) for message in plan.replace] if own_ids else plan.replace
    run = write(messages)
    ids = np.concatenate([root, run, renderer.generation_prompt(request.messages[-1].role)])
    inner = _inner_starts(renderer, write, messages, run)
    if inner is None:
        return ids.astype(np.int32, copy=False), ()
    starts = [len(root) + start for start in (close, *inner, len(run))]
    spans: MessageSpans = (("system", 0, len(root), ""),) if len(root) else ()
    for message, start, stop in zip(plan.replace, starts, starts[1:], strict=False):
        spans += ((message.role, start, stop, forest.tool_name(message.tool_call_id)),)
    return ids.astype(np.int32, copy=False), spans


def _echoed_ids(
    renderer: ChatRenderer, said: IntArray, plan: PromptPlan, request: ModelRequest, known: Mapping[str, str]
) -> dict[str, str]:
    """Return the model's own call ids in the turn `said` by those that a client gave its echo instead."""
    if {message.tool_call_id for message in plan.replace if message.role == "tool"} <= known.keys():
        return {}
    echo = request.messages[len(request.messages) - len(plan.replace) - 1]
    given, own = [call.id for call in echo.tool_calls], [call.id for call in renderer.parse(said).calls]
    return dict(zip(given, own, strict=True)) if len({*given}) == len(own) == len(given) else {}


def _renamed(message: Message, ids: Mapping[str, str]) -> Message:
    calls = tuple(replace(call, id=ids.get(call.id, call.id)) for call in message.tool_calls)
    return replace(
        message, tool_calls=calls, tool_call_id=ids.get(message.tool_call_id, message.tool_call_id)
    )


def _inner_starts(
    renderer: ChatRenderer,
    write: Callable[[Sequence[Message]], IntArray],
    run: Sequence[Message],
    ids: IntArray,
) -> list[int] | None:
    """Return where the second and later messages of a run begin in its ids; None = too costly to find.

    A message begins where the ids of the run before it stop being those of the whole run.
    """
    if len(run) < 2:
        return []
    chars = sum(len(message.text) + CHARS_PER_MESSAGE for message in run)
    if len(run) * chars > MAX_SPLIT_CHARS or renderer.caps.open_ended:
        return None
    return [first_difference(write(run[:count]), ids) for count in range(1, len(run))]


async def planned(forest: Forest, request: ModelRequest, fingerprint: str) -> PromptPlan:
    """Return `Forest.plan`, with known messages of a long body parsed again in a worker thread if needed.

    Raises WireError for a body that is refused when read completely.
    """
    try:
        with History.of(request.messages).without_parsing():
            return forest.plan(request, fingerprint)
    except Unread as unread:
        await asyncio.to_thread(unread.read)
    return forest.plan(request, fingerprint)


def fresh_texts(plan: PromptPlan, request: ModelRequest) -> list[str]:
    """Return the texts from outside that this request adds."""
    texts = [text for message in plan.replace for text in (message.text, message.reasoning)]
    texts += [text for m in plan.replace for call in m.tool_calls for text in (call.name, call.arguments)]
    if plan.base is None:
        texts += [message.text for message in leading_system(request.messages)]
        texts += [text for tool in request.tools for text in (tool.name, tool.description, tool.parameters)]
    return texts


def check_size(request: ModelRequest, max_context: int) -> None:
    """Raise WireError for more messages than the context has tokens: each takes one at least."""
    if len(request.messages) > max_context:
        raise overflow(len(request.messages), max_context, "at least ")


def overflow(prompt: int, limit: int, how: str = "") -> WireError:
    """Return the error; `how` qualifies a number of tokens that was only estimated."""
    return WireError(
        "context_length_exceeded",
        f"This model's maximum context length is {limit} tokens. However, your messages "
        f"resulted in {how}{prompt} tokens. Please reduce the length of the messages.",
        "messages",
        used=prompt,
        limit=limit,
    )


def unrenderable(error: RenderError) -> WireError:
    return WireError("invalid_request", f"The conversation cannot be rendered: {error}")


async def rendered(
    session: TokenSession, plan: PromptPlan, request: ModelRequest, texts: list[str]
) -> tuple[IntArray, MessageSpans, int]:
    """Return the new ids, their messages, and the number of control markers in the new texts.

    Raises WireError.
    """
    renderer, chars = session.renderer, sum(map(len, texts))
    if chars > CHARS_PER_TOKEN * session.max_context:
        raise overflow(chars // CHARS_PER_TOKEN, session.max_context, "at least ")

    def work() -> tuple[IntArray, MessageSpans, int]:
        ids, spans = new_ids(renderer, session.forest, plan, request, session.own_ids)
        return ids, spans, sum(map(renderer.injections, texts))

    effort = chars + CHARS_PER_MESSAGE * len(plan.replace)
    return work() if effort <= session.server.config.inline_chars else await asyncio.to_thread(work)


@contextmanager
def host_failures(session: TokenSession) -> Iterator[None]:
    """Raise WireError when code of the operator's fails: whatever the agent does, nothing is graded then."""
    try:
        yield
    except FunctionFailed as error:  # ends the run
        session.broken(error)
        raise WireError("engine_failed", "A function of the operator failed.") from error
    except InsituError as error:
        session.stats.infra_error = session.stats.infra_error or str(error)
        raise WireError("engine_failed", "The environment failed.") from error


async def prepared(
    session: TokenSession, request: ModelRequest
) -> tuple[ModelRequest, Mapping[str, HostTool]]:
    """Return the request as the model reads it, and the host tools that the agent does not offer itself.

    Waits for the tools that the host answers. Raises WireError if one failed or there are too many messages.
    """
    check_size(request, session.max_context)
    with host_failures(session):
        await session.tools.answered(request.messages)
        request, injected = session.tools.prepare(request)
        return (await session.hook.read(request) if session.hook else request), injected


async def counted(session: TokenSession, request: ModelRequest) -> int:
    """Return the prompt tokens of a call with this request; changes nothing.

    Raises RenderError and WireError.
    """
    forest = session.forest
    request, _ = await prepared(session, request)
    plan = await planned(forest, request, session.renderer.fingerprint)
    if plan.parent is not None:
        return len(forest.path_ids(plan.parent))
    held = 0 if plan.base is None else len(forest.path_ids(plan.base))
    delta, _, _ = await rendered(session, plan, request, fresh_texts(plan, request))
    return held + len(delta)


def explain(renderer: ChatRenderer, forest: Forest, plan: PromptPlan) -> Diagnosis | None:
    """Return the diagnosis of `plan.drift`, None if it is no edit of a stored turn that can be decoded."""
    drift = plan.drift
    if drift.kind != "edited" or drift.node is None:
        return None
    sampled_ids = forest.sampled(drift.node).ids
    parsed = renderer.parse(sampled_ids)
    calls = tuple(ToolCall(id="call", name=c.name, arguments=c.arguments) for c in parsed.calls)
    stored = Message(role="assistant", text=parsed.text, reasoning=parsed.reasoning, tool_calls=calls)
    if not forest.said(drift.node, stored):  # something else was sent, e.g. a translated text
        return None
    echo = plan.replace[drift.at :]
    found = diagnose(stored, echo, turns_named=forest.turns_named(echo[0]))

    def render(message: Message) -> IntArray | None:
        try:
            return renderer.render_reply(message)
        except RenderError:
            return None

    token = 0 if found.cause == "missing" else first_token(stored, echo[0], sampled_ids, render)
    return replace(found, token=token)
