"""Diagnosis of an edited assistant message: cause, arguments and first differing token.

The forest stores no text, so the gateway decodes the stored turn, only for an edit. Spelling never counts:
key order, white space, escapes and dropped reasoning are no edit. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from insitu.capture.digests import canonical_arguments, canonical_json, read_arguments
from insitu.types import IntArray, Message, ToolCall

CAUSES = frozenset(
    {
        "missing",
        "foreign",
        "merged",
        "split",
        "reasoning",
        "text trimmed",
        "text",
        "call missing",
        "call added",
        "tool name",
        "invalid JSON repaired",
        "default added",
        "argument dropped",
        "type coerced",
        "arguments",
    }
)
"""Closed set of causes of an edit."""

MAX_DETAIL = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    cause: str
    """From CAUSES; the first difference in wire order: reasoning, text, calls."""
    detail: str = ""
    """Names of the arguments concerned."""
    token: int = -1
    """First sampled id that the edited message does not share; -1 if unknown."""


def diagnose(stored: Message, sent: Sequence[Message], *, turns_named: int = 0) -> Diagnosis:
    """Return the cause of an edit; `token` is determined by `first_token`.

    `sent` are the messages from the place of `stored` on; `turns_named`: number of stored turns that the
    first of them references.
    """
    if not sent or sent[0].role != "assistant":
        return Diagnosis(cause="missing")
    got = sent[0]
    if turns_named > 1:
        return Diagnosis(cause="merged")
    if _is_split(stored, sent):
        return Diagnosis(cause="split")
    if got.reasoning and got.reasoning != stored.reasoning:
        return Diagnosis(cause="reasoning")
    if got.text != stored.text:
        trimmed = got.text.strip() == stored.text.strip()
        return Diagnosis(cause="text trimmed" if trimmed else "text")
    return _calls(stored.tool_calls, got.tool_calls)


def _is_split(stored: Message, sent: Sequence[Message]) -> bool:
    """Return whether several assistant messages in a row together equal `stored`."""
    text, calls = "", []
    for count, message in enumerate(sent):
        if message.role != "assistant":
            return False
        text += message.text
        calls += [(c.name, canonical_arguments(c.arguments)) for c in message.tool_calls]
        if len(text) > len(stored.text) or len(calls) > len(stored.tool_calls):
            return False
        whole = [(c.name, canonical_arguments(c.arguments)) for c in stored.tool_calls]
        if count and text == stored.text and calls == whole:
            return True
    return False


def _calls(stored: Sequence[ToolCall], got: Sequence[ToolCall]) -> Diagnosis:
    if len(got) != len(stored):
        return Diagnosis(cause="call missing" if len(got) < len(stored) else "call added")
    for original, other in zip(stored, got, strict=True):
        if original.name != other.name:
            return Diagnosis(cause="tool name", detail=f"{original.name} -> {other.name}"[:MAX_DETAIL])
        if canonical_arguments(original.arguments) != canonical_arguments(other.arguments):
            cause, names = _arguments(original.arguments, other.arguments)
            return Diagnosis(cause=cause, detail=" ".join([original.name, *names])[:MAX_DETAIL])
    return Diagnosis(cause="arguments")


def _arguments(stored: str, got: str) -> tuple[str, Sequence[str]]:
    """Return (cause, names of the arguments concerned)."""
    try:
        original = read_arguments(stored)
    except (ValueError, RecursionError):
        return "invalid JSON repaired", ()
    try:
        other = read_arguments(got)
    except (ValueError, RecursionError):
        return "arguments", ()
    if not isinstance(original, dict) or not isinstance(other, dict):
        return "arguments", ()
    added, dropped = sorted(other.keys() - original.keys()), sorted(original.keys() - other.keys())
    shared = original.keys() & other.keys()
    changed = [name for name in shared if canonical_json(original[name]) != canonical_json(other[name])]
    return _cause(added, dropped, sorted(changed), original, other)


def _cause(
    added: Sequence[str],
    dropped: Sequence[str],
    changed: Sequence[str],
    stored: Mapping[str, object],
    got: Mapping[str, object],
) -> tuple[str, Sequence[str]]:
    if changed and all(_coerced(stored[name], got[name]) for name in changed):
        return "type coerced", changed
    if changed or (added and dropped):
        return "arguments", [*changed, *added, *dropped]
    return ("default added", added) if added else ("argument dropped", dropped)


def _coerced(stored: object, got: object) -> bool:
    """Return whether the same value has another JSON type: 5 and "5", true and "True"."""
    if type(stored) is type(got):
        return False
    return _bare(stored) == _bare(got) or got == [stored] or stored == [got]


def _bare(value: object) -> str:
    """Return the text of a value without its type."""
    text = value if isinstance(value, str) else canonical_json(value)
    return "".join(text.split()).lower().removesuffix(".0")


def first_token(
    stored: Message, got: Message, sampled: IntArray, render: Callable[[Message], IntArray | None]
) -> int:
    """Return the first id of `sampled` that the edited message does not share; -1 if it cannot be rendered.

    Equivalent spelling is taken from `stored`, so that only the edit itself differs.
    """
    other = render(_respelled(stored, got))
    if other is None:
        return -1
    original = render(stored)
    if original is not None:
        token = first_difference(original, other)
        if np.array_equal(sampled[:token], original[:token]):
            return min(token, len(sampled))
    return first_difference(sampled, other)


def _respelled(stored: Message, got: Message) -> Message:
    calls = list(got.tool_calls)
    for at, (original, other) in enumerate(zip(stored.tool_calls, got.tool_calls, strict=False)):
        if canonical_arguments(original.arguments) == canonical_arguments(other.arguments):
            calls[at] = replace(other, arguments=original.arguments)
    return replace(got, reasoning=got.reasoning or stored.reasoning, tool_calls=tuple(calls))


def first_difference(stored: IntArray, got: IntArray) -> int:
    """Return the index of the first differing id; the shorter length when one continues the other."""
    shared = min(len(stored), len(got))
    differing = np.flatnonzero(stored[:shared] != got[:shared])
    return int(differing[0]) if differing.size else shared
