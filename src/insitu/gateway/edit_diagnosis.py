"""Diagnosis of an edited request: decode the stored turn and compare.

Runs only when a request contains an assistant message other than the sampled one.
"""

from __future__ import annotations

from dataclasses import replace

from insitu.capture.drift import PromptPlan
from insitu.capture.drift_diagnosis import Diagnosis, diagnose, first_token
from insitu.capture.forest import Forest
from insitu.chat.renderer import ChatRenderer
from insitu.errors import RenderError
from insitu.types import IntArray, Message, ToolCall


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
