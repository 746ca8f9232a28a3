"""Checks that every renderer must pass at load.

They test the protocol, not one implementation: pieces rendered separately must not depend on their
neighbours, markers in content must stay text, and a reply must parse back to the message it was rendered
from.
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
PROBE_CALL = ToolCall(id="call_a", name="look", arguments='{"path": "a b", "n": 3}')
_OTHER = ToolCall(id="call_b", name="look", arguments='{"path": "c\\\\nd"}')
_RESULT = Message(role="tool", text="result", tool_call_id="call_a")


class CodecRenderer(ChatRenderer, Protocol):
    """A renderer with an insitu codec."""

    @property
    def codec(self) -> Codec: ...


def find_capabilities(chat_renderer: CodecRenderer) -> Capabilities:
    """Return the renderer's capabilities, found by rendering probes and parsing them back."""

    def supports(message: Message) -> bool:
        try:
            return round_trips(chat_renderer, message)
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
        parallel_calls=supports(Message(role="assistant", tool_calls=(PROBE_CALL, _OTHER))),
        text_with_calls=supports(Message(role="assistant", text="Look.", tool_calls=(PROBE_CALL,))),
        reasoning=supports(Message(role="assistant", text="So.", reasoning="Hm.")),
    )


def round_trips(chat_renderer: ChatRenderer, message: Message) -> bool:
    """Return whether parse(render_reply(message)) equals the message."""
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


def check_renderer(chat_renderer: CodecRenderer) -> None:
    """Raise RenderError with the first failure."""
    _check_roots(chat_renderer)
    _check_runs(chat_renderer)
    _check_replies(chat_renderer)
    _check_markers(chat_renderer)


def _check_roots(chat_renderer: CodecRenderer) -> None:
    """Check that the root block contains the system message."""
    for system in ([], [Message(role="system", text="Rules.")]):
        plain, tooled = chat_renderer.open(system, ()), chat_renderer.open(system, (PROBE_TOOL,))
        if system and not all("Rules." in chat_renderer.decode(ids) for ids in (plain, tooled)):
            raise RenderError("the root block omits the system message")


def _check_runs(chat_renderer: CodecRenderer) -> None:
    """Check that runs are split-invariant, begin with a control token and show their content."""
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
            raise RenderError(f"a {run[-1].role} message's text is omitted or changed")
    separate = [chat_renderer.append([_USER]), chat_renderer.append([Message(role="user", text="More.")])]
    together = chat_renderer.append([_USER, Message(role="user", text="More.")])
    if not np.array_equal(np.concatenate(separate), together):
        raise RenderError("not prefix-stable: a user message depends on its neighbours")
    separate = [chat_renderer.append([_RESULT]), chat_renderer.append([_USER])]
    if not np.array_equal(np.concatenate(separate), chat_renderer.append([_RESULT, _USER])):
        raise RenderError("not prefix-stable: a user message depends on the tool result before it")


def _check_replies(chat_renderer: CodecRenderer) -> None:
    """Check that replies parse back, and that a turn ends as it does inside a history."""
    answer = Message(role="assistant", text="Answer.")
    called = Message(role="assistant", tool_calls=(PROBE_CALL,))
    for message in (answer, called):
        if not round_trips(chat_renderer, message):
            kind = "text" if message is answer else "a tool call"
            raise RenderError(f"a reply with {kind} does not parse back to what was rendered")
    for message, run in ((answer, [_USER]), (called, [_RESULT])):
        ids = chat_renderer.render_reply(message)
        # Only what follows the stop token: many rules restyle an older turn (they strip its reasoning).
        tail = np.concatenate([ids[-1:], chat_renderer.join(ids, "stop", run)])
        whole = chat_renderer.append([_USER, message, *run])
        if not np.array_equal(whole[len(whole) - len(tail) :], tail):
            raise RenderError(
                f"not prefix-stable: a {run[0].role} message changes the end of the turn before it"
            )


def _check_markers(chat_renderer: CodecRenderer) -> None:
    """Check that no marker in content becomes a control token, in any position."""
    markers = "".join(f" {name}\n" for name in chat_renderer.codec.control)
    call = replace(PROBE_CALL, arguments=_quoted("x"))
    pairs: Sequence[tuple[Sequence[Message], Sequence[Message]]] = [
        ([Message(role=role, text=markers)], [Message(role=role, text="x")])
        for role in ("user", "tool", "system")
    ]
    for injected, clean in pairs:
        if _scaffold(chat_renderer, chat_renderer.append(injected)) != _scaffold(
            chat_renderer, chat_renderer.append(clean)
        ):
            raise RenderError(f"markers in a {injected[0].role} message become control tokens")
    described = (replace(PROBE_TOOL, description=markers),)
    if _scaffold(chat_renderer, chat_renderer.open((), described)) != _scaffold(
        chat_renderer, chat_renderer.open((), (PROBE_TOOL,))
    ):
        raise RenderError("markers in a tool's description become control tokens")
    reply = Message(role="assistant", text="a", tool_calls=(call,))
    injected_reply = Message(
        role="assistant", text="a", tool_calls=(replace(call, arguments=_quoted(markers)),)
    )
    try:
        clean_ids = chat_renderer.append([reply])
    except RenderError:
        return
    if _scaffold(chat_renderer, chat_renderer.append([injected_reply])) != _scaffold(
        chat_renderer, clean_ids
    ):
        raise RenderError("markers in a call's arguments become control tokens")


def _scaffold(chat_renderer: CodecRenderer, ids: IntArray) -> list[int]:
    return [int(ids[i]) for i in chat_renderer.codec.control_positions(ids)]


def _quoted(text: str) -> str:
    return json.dumps({"path": text})
