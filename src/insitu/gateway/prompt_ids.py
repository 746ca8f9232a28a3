"""New prompt ids of a request: those between the stored path it continues and its reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from types import MappingProxyType

import numpy as np

from insitu.capture.drift import PromptPlan
from insitu.capture.drift_diagnosis import first_difference
from insitu.capture.forest import Forest
from insitu.capture.message_history import History, Unread
from insitu.chat.renderer import ChatRenderer
from insitu.types import IntArray, Message, MessageSpans, ModelRequest

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
    messages = request.messages
    if not isinstance(messages, History):
        return forest.plan(request, fingerprint)
    try:
        with messages.without_parsing():
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
