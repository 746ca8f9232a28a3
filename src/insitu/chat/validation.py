"""What every family must show at load before it may render a session; refused with the reason otherwise.

The checks are of the protocol, not of one implementation: pieces rendered apart must be independent of what
stands around them, markers in content must stay text, and what a reply was rendered from must be read back
from its ids. Callers: render/template, render/known.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from insitu.chat.codec import Codec
from insitu.chat.renderer import Capabilities, ChatRenderer
from insitu.errors import RenderError
from insitu.types import IntArray, Message, ToolCall, ToolSpec

PROBE_TOOL = ToolSpec(
    name="look",
    description="Look.",
    parameters='{"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}}',
)
_USER = Message(role="user", text="Question.")
_CALL = ToolCall(id="call_a", name="look", arguments='{"path": "a b", "n": 3}')
_OTHER = ToolCall(id="call_b", name="look", arguments='{"path": "c\\\\nd"}')
_RESULT = Message(role="tool", text="result", tool_call_id="call_a")


class Coded(ChatRenderer, Protocol):
    """A family with a codec of ours."""

    @property
    def codec(self) -> Codec: ...


def abilities(chat_renderer: Coded) -> Capabilities:
    """The family's capabilities, found by saying things and reading them back."""

    def says(message: Message) -> bool:
        try:
            return reads_back(chat_renderer, message)
        except RenderError:
            return False

    native = chat_renderer.caps.native_system
    try:
        shown = chat_renderer.decode(chat_renderer.append([Message(role="system", text="Note."), _USER]))
        native = native and "Note." in shown
    except RenderError:
        native = False
    return replace(
        chat_renderer.caps,
        tools="Look." in chat_renderer.decode(chat_renderer.open((), (PROBE_TOOL,))),
        native_system=native,
        parallel_calls=says(Message(role="assistant", tool_calls=(_CALL, _OTHER))),
        text_with_calls=says(Message(role="assistant", text="Look.", tool_calls=(_CALL,))),
        reasoning=says(Message(role="assistant", text="So.", reasoning="Hm.")),
    )


def reads_back(chat_renderer: ChatRenderer, message: Message) -> bool:
    """parse(render_reply(message)) means the message."""
    ids = chat_renderer.render_reply(message)
    if not len(ids) or int(ids[-1]) not in chat_renderer.stop_ids:
        return False
    parsed = chat_renderer.parse(ids, (PROBE_TOOL,))
    calls = [(call.name, call.arguments) for call in parsed.calls]
    return (
        not parsed.malformed
        and (parsed.text, parsed.reasoning) == (message.text, message.reasoning)
        and calls == [(call.name, call.arguments) for call in message.tool_calls]
    )


def check_renderer(chat_renderer: Coded) -> None:
    """Raises RenderError with the first reason found."""
    _check_roots(chat_renderer)
    _check_runs(chat_renderer)
    _check_replies(chat_renderer)
    _check_markers(chat_renderer)


def _check_roots(chat_renderer: Coded) -> None:
    """A root says what it was given."""
    for system in ([], [Message(role="system", text="Rules.")]):
        plain, tooled = chat_renderer.open(system, ()), chat_renderer.open(system, (PROBE_TOOL,))
        if system and not all("Rules." in chat_renderer.decode(ids) for ids in (plain, tooled)):
            raise RenderError("the root block leaves out the system message")


def _check_runs(chat_renderer: Coded) -> None:
    """Runs are written alike wherever they are cut, begin with a control token and show their content."""
    runs: list[list[Message]] = [
        [_USER],
        [Message(role="system", text="Note."), _USER],
        [_RESULT],
        [_RESULT, replace(_RESULT, text="other", tool_call_id="call_b")],
        [_RESULT, _USER],
    ]
    for run in runs:
        ids = chat_renderer.append(run)
        if not len(ids) or int(ids[0]) not in chat_renderer.codec.names:
            raise RenderError(f"a {run[0].role} message does not begin with a control token")
        text = chat_renderer.decode(ids)
        if any(message.text not in text for message in run):
            raise RenderError(f"a {run[-1].role} message's text is left out or changed")
    apart = [chat_renderer.append([_USER]), chat_renderer.append([Message(role="user", text="More.")])]
    together = chat_renderer.append([_USER, Message(role="user", text="More.")])
    if not np.array_equal(np.concatenate(apart), together):
        raise RenderError("not prefix-stable: a user message depends on its neighbours")
    apart = [chat_renderer.append([_RESULT]), chat_renderer.append([_USER])]
    if not np.array_equal(np.concatenate(apart), chat_renderer.append([_RESULT, _USER])):
        raise RenderError("not prefix-stable: a user message depends on the tool result before it")


def _check_replies(chat_renderer: Coded) -> None:
    """Replies are read back, and are closed by what their rendering in a history has behind them."""
    said = Message(role="assistant", text="Answer.")
    called = Message(role="assistant", tool_calls=(_CALL,))
    for message in (said, called):
        if not reads_back(chat_renderer, message):
            told = "text" if message is said else "a tool call"
            raise RenderError(f"a reply with {told} is not read back as it was written")
    for message, run in ((said, [_USER]), (called, [_RESULT])):
        ids = chat_renderer.render_reply(message)
        # Only what follows the stop token: many rules restyle an older turn (they strip its reasoning).
        tail = np.concatenate([ids[-1:], chat_renderer.join(ids, "stop", run)])
        whole = chat_renderer.append([_USER, message, *run])
        if not np.array_equal(whole[len(whole) - len(tail) :], tail):
            raise RenderError(
                f"not prefix-stable: a {run[0].role} message changes the end of the turn before it"
            )


def _check_markers(chat_renderer: Coded) -> None:
    """No control token comes of what stands in content, wherever it stands."""
    markers = "".join(f" {name}\n" for name in chat_renderer.codec.control)
    call = replace(_CALL, arguments=_quoted("x"))
    pairs: Sequence[tuple[Sequence[Message], Sequence[Message]]] = [
        ([Message(role=role, text=markers)], [Message(role=role, text="x")])
        for role in ("user", "tool", "system")
    ]
    for evil, honest in pairs:
        if _scaffold(chat_renderer, chat_renderer.append(evil)) != _scaffold(
            chat_renderer, chat_renderer.append(honest)
        ):
            raise RenderError(f"markers in a {evil[0].role} message become control tokens")
    described = (replace(PROBE_TOOL, description=markers),)
    if _scaffold(chat_renderer, chat_renderer.open((), described)) != _scaffold(
        chat_renderer, chat_renderer.open((), (PROBE_TOOL,))
    ):
        raise RenderError("markers in a tool's description become control tokens")
    said = Message(role="assistant", text="a", tool_calls=(call,))
    evil_said = Message(role="assistant", text="a", tool_calls=(replace(call, arguments=_quoted(markers)),))
    try:
        honest_ids = chat_renderer.append([said])
    except RenderError:
        return
    if _scaffold(chat_renderer, chat_renderer.append([evil_said])) != _scaffold(chat_renderer, honest_ids):
        raise RenderError("markers in a call's arguments become control tokens")


def _scaffold(chat_renderer: Coded, ids: IntArray) -> list[int]:
    return [int(ids[i]) for i in chat_renderer.codec.control_positions(ids)]


def _quoted(text: str) -> str:
    return json.dumps({"path": text})
