"""New prompt ids of a request: those between the stored path it continues and its reply."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import takewhile

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
    renderer: ChatRenderer, forest: Forest, plan: PromptPlan, request: ModelRequest
) -> tuple[IntArray, MessageSpans]:
    """Return the ids to append to the stored path, and which of them are which message.

    Raises RenderError.
    """
    root, close = np.zeros(0, dtype=np.int32), 0
    if plan.base is None:
        root = renderer.open(leading_system(request.messages), request.tools)
        run = renderer.append(plan.replace)
    else:
        said = forest.sampled(plan.base)
        run = renderer.join(said.ids, said.finish, plan.replace)
        close = len(renderer.close(said.ids, said.finish))
    ids = np.concatenate([root, run, renderer.generation_prompt(request.messages[-1].role)])
    inner = _inner_starts(renderer, plan.replace, run[close:])
    if inner is None:
        return ids.astype(np.int32, copy=False), ()
    before, end = len(root) + close, len(root) + len(run)
    starts = [before, *(before + start for start in inner), end]
    spans: MessageSpans = (("system", 0, len(root), ""),) if len(root) else ()
    for message, start, stop in zip(plan.replace, starts, starts[1:], strict=False):
        spans += ((message.role, start, stop, forest.tool_name(message.tool_call_id)),)
    return ids.astype(np.int32, copy=False), spans


def _inner_starts(renderer: ChatRenderer, run: Sequence[Message], ids: IntArray) -> list[int] | None:
    """Return where the second and later messages of a run begin in its ids; None = too costly to find.

    A message begins where the ids of the run before it stop being those of the whole run.
    """
    if len(run) < 2:
        return []
    chars = sum(len(message.text) + CHARS_PER_MESSAGE for message in run)
    if len(run) * chars > MAX_SPLIT_CHARS or renderer.caps.open_ended:
        return None
    return [first_difference(renderer.append(run[:count]), ids) for count in range(1, len(run))]


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
