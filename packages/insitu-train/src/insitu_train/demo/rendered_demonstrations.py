"""Demonstrations rendered without the agent: the demonstrator's turns and what Pi's tools answer to them.

The texts of the tool results are Pi's own, as seen on the wire. tests/demo compares the ids with those of
demonstrations recorded through the real Pi; only because they are equal may these be trained on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from insitu.chat.renderer import ChatRenderer
from insitu.tasks.toy import ToyProblem, check_output
from insitu.types import BoolArray, IntArray, Message, ToolCall
from insitu_train.demo.demonstrator import Habits, plan_turns

REFUSED = "refused"
ACCEPTED = "accepted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One demonstration after the agent's constant prompt; `mask` marks the demonstrated tokens."""

    task_id: str
    ids: IntArray = field(repr=False)
    mask: BoolArray = field(repr=False)


class SimulatedPiTools:
    """Work folder of one problem, and Pi's tool results for calls on it."""

    def __init__(self, problem: ToyProblem) -> None:
        self._problem = problem
        self.text = problem.text(solved=False)

    def answer(self, call: ToolCall) -> tuple[str, str]:
        """Return (tool result, `accepted` or `refused` for an edit, else "")."""
        arguments = json.loads(call.arguments)
        if call.name == "read":
            return self.text, ""
        if call.name == "bash":
            return check_output(self._problem, self.text), ""
        return self._edit(arguments["edits"][0]["oldText"], arguments["edits"][0]["newText"])

    def _edit(self, old: str, new: str) -> tuple[str, str]:
        path, found = self._problem.path, self.text.count(old)
        if found == 0:
            return (
                f"Could not find the exact text in {path}. "
                "The old text must match exactly including all whitespace and newlines.",
                REFUSED,
            )
        if found > 1:
            return (
                f"Found {found} occurrences of the text in {path}. "
                "The text must be unique. Please provide more context to make it unique.",
                REFUSED,
            )
        if old == new:
            return (
                f"No changes made to {path}. The replacement produced identical content. "
                "This might indicate an issue with special characters or the text not existing as expected.",
                REFUSED,
            )
        self.text = self.text.replace(old, new)
        return f"Successfully replaced 1 block(s) in {path}.", ACCEPTED


def play(problem: ToyProblem, habits: Habits, seed: int) -> Sequence[tuple[Message, Message | None]]:
    """(assistant turn, tool result) pairs of one demonstration; the last has no result."""
    tools, last = SimulatedPiTools(problem), ""
    turns: list[tuple[Message, Message | None]] = []
    for step in plan_turns(problem, habits, seed):
        if step.after not in ("any", last):
            continue
        if not step.message.tool_calls:
            turns.append((step.message, None))
            break
        text, outcome = tools.answer(step.message.tool_calls[0])
        last = outcome or last
        turns.append((step.message, Message(role="tool", text=text, tool_call_id="rendered")))
    return turns


def render(renderer: ChatRenderer, problem: ToyProblem, habits: Habits, seed: int) -> Demonstration:
    """One demonstration as the gateway would have sent and taken it, from the user message on."""
    spans: list[tuple[IntArray, bool]] = [
        (renderer.append([Message(role="user", text=problem.prompt)]), False)
    ]
    for message, result in play(problem, habits, seed):
        sampled = renderer.render_reply(message)
        spans += [(renderer.generation_prompt(), False), (sampled, True)]
        if result is not None:
            spans += [(renderer.close(sampled, "stop"), False), (renderer.append([result]), False)]
    return Demonstration(
        task_id=f"toy-{problem.seed}",
        ids=np.concatenate([ids for ids, _ in spans]),
        mask=np.concatenate([np.full(len(ids), kept) for ids, kept in spans]),
    )
