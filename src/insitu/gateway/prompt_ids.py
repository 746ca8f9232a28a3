"""New prompt ids of a request: those between the stored path it continues and its reply."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from insitu.capture.drift import PromptPlan
from insitu.capture.forest import Forest
from insitu.capture.message_history import History, Unread
from insitu.chat.renderer import ChatRenderer
from insitu.types import IntArray, Message, ModelRequest


def leading_system(messages: Sequence[Message]) -> list[Message]:
    """Return the leading system messages, which belong to the root block."""
    return list(takewhile(lambda m: m.role == "system", messages))


def new_ids(renderer: ChatRenderer, forest: Forest, plan: PromptPlan, request: ModelRequest) -> IntArray:
    """Return the ids to append to the stored path. Raises RenderError."""
    if plan.base is None:
        parts = [renderer.open(leading_system(request.messages), request.tools)]
        parts.append(renderer.append(plan.replace))
    else:
        said = forest.sampled(plan.base)
        parts = [renderer.join(said.ids, said.finish, plan.replace)]
    parts.append(renderer.generation_prompt(request.messages[-1].role))
    return np.concatenate(parts).astype(np.int32, copy=False)


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
