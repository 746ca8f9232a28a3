"""Explains an edited request: decodes the held turn, which the forest keeps as ids only, and compares.

Runs only when a request shows an assistant message other than what was sampled. Caller: turn.
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
    """The diagnosis of `plan.drift`, or None when it is no edit of a held turn that can be decoded."""
    drift = plan.drift
    if drift.kind != "edited" or drift.node is None:
        return None
    said = forest.sampled(drift.node).ids
    parsed = renderer.parse(said)
    calls = tuple(ToolCall(id="call", name=c.name, arguments=c.arguments) for c in parsed.calls)
    held = Message(role="assistant", text=parsed.text, reasoning=parsed.reasoning, tool_calls=calls)
    if not forest.said(drift.node, held):  # the wire carried something else, a translated text for instance
        return None
    echo = plan.replace[drift.at :]
    found = diagnose(held, echo, turns_named=forest.turns_named(echo[0]))

    def render(message: Message) -> IntArray | None:
        try:
            return renderer.render_reply(message)
        except RenderError:
            return None

    token = 0 if found.cause == "missing" else first_token(held, echo[0], said, render)
    return replace(found, token=token)
