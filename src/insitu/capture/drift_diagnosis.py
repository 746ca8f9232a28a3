"""Why an echoed assistant message is not the turn that was sampled: cause, arguments and first token.

The forest holds no text, so the gateway decodes the held turn and calls this while the request is at hand,
only for an edit. Spelling never counts: key order, white space, escapes and dropped reasoning are no edit.
Pure. Caller: gateway/edits.
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
    """First sampled id that the echo does not share; -1 when not known."""


def diagnose(held: Message, echo: Sequence[Message], *, turns_named: int = 0) -> Diagnosis:
    """`echo` are the messages that stand where `held` should, with all that follow; `turns_named` says how
    many held turns the first of them names. `token` is left to `first_token`."""
    if not echo or echo[0].role != "assistant":
        return Diagnosis(cause="missing")
    got = echo[0]
    if turns_named > 1:
        return Diagnosis(cause="merged")
    if _is_split(held, echo):
        return Diagnosis(cause="split")
    if got.reasoning and got.reasoning != held.reasoning:
        return Diagnosis(cause="reasoning")
    if got.text != held.text:
        trimmed = got.text.strip() == held.text.strip()
        return Diagnosis(cause="text trimmed" if trimmed else "text")
    return _calls(held.tool_calls, got.tool_calls)


def _is_split(held: Message, echo: Sequence[Message]) -> bool:
    """Several assistant messages in a row that say together what `held` says."""
    text, calls = "", []
    for count, message in enumerate(echo):
        if message.role != "assistant":
            return False
        text += message.text
        calls += [(c.name, canonical_arguments(c.arguments)) for c in message.tool_calls]
        if len(text) > len(held.text) or len(calls) > len(held.tool_calls):
            return False
        whole = [(c.name, canonical_arguments(c.arguments)) for c in held.tool_calls]
        if count and text == held.text and calls == whole:
            return True
    return False


def _calls(held: Sequence[ToolCall], got: Sequence[ToolCall]) -> Diagnosis:
    if len(got) != len(held):
        return Diagnosis(cause="call missing" if len(got) < len(held) else "call added")
    for mine, theirs in zip(held, got, strict=True):
        if mine.name != theirs.name:
            return Diagnosis(cause="tool name", detail=f"{mine.name} -> {theirs.name}"[:MAX_DETAIL])
        if canonical_arguments(mine.arguments) != canonical_arguments(theirs.arguments):
            cause, names = _arguments(mine.arguments, theirs.arguments)
            return Diagnosis(cause=cause, detail=" ".join([mine.name, *names])[:MAX_DETAIL])
    return Diagnosis(cause="arguments")


def _arguments(held: str, got: str) -> tuple[str, Sequence[str]]:
    """(cause, names of the arguments concerned)."""
    try:
        mine = read_arguments(held)
    except (ValueError, RecursionError):
        return "invalid JSON repaired", ()
    try:
        theirs = read_arguments(got)
    except (ValueError, RecursionError):
        return "arguments", ()
    if not isinstance(mine, dict) or not isinstance(theirs, dict):
        return "arguments", ()
    added, dropped = sorted(theirs.keys() - mine.keys()), sorted(mine.keys() - theirs.keys())
    changed = [name for name in mine.keys() & theirs.keys() if _spell(mine[name]) != _spell(theirs[name])]
    return _cause(added, dropped, sorted(changed), mine, theirs)


def _cause(
    added: Sequence[str],
    dropped: Sequence[str],
    changed: Sequence[str],
    held: Mapping[str, object],
    got: Mapping[str, object],
) -> tuple[str, Sequence[str]]:
    if changed and all(_coerced(held[name], got[name]) for name in changed):
        return "type coerced", changed
    if changed or (added and dropped):
        return "arguments", [*changed, *added, *dropped]
    return ("default added", added) if added else ("argument dropped", dropped)


def _spell(value: object) -> str:
    return canonical_json(value)


def _coerced(held: object, got: object) -> bool:
    """The same value told as another JSON type: 5 and "5", true and "True", a list and its JSON text."""
    if type(held) is type(got):
        return False
    return _bare(held) == _bare(got) or got == [held] or held == [got]


def _bare(value: object) -> str:
    """What a value looks like without its type."""
    text = value if isinstance(value, str) else canonical_json(value)
    return "".join(text.split()).lower().removesuffix(".0")


def first_token(
    held: Message, got: Message, sampled: IntArray, render: Callable[[Message], IntArray | None]
) -> int:
    """First id of `sampled` that the echo does not share, as the family would write it; -1 when it cannot.

    Spelling that means the same is taken over from `held`, so that only the edit itself shows.
    """
    theirs = render(_respelled(held, got))
    if theirs is None:
        return -1
    mine = render(held)
    if mine is not None:
        token = first_difference(mine, theirs)
        if np.array_equal(sampled[:token], mine[:token]):
            return min(token, len(sampled))
    return first_difference(sampled, theirs)


def _respelled(held: Message, got: Message) -> Message:
    calls = list(got.tool_calls)
    for at, (mine, theirs) in enumerate(zip(held.tool_calls, got.tool_calls, strict=False)):
        if canonical_arguments(mine.arguments) == canonical_arguments(theirs.arguments):
            calls[at] = replace(theirs, arguments=mine.arguments)
    return replace(got, reasoning=got.reasoning or held.reasoning, tool_calls=tuple(calls))


def first_difference(held: IntArray, got: IntArray) -> int:
    """Index of the first differing id; the length of the shorter when one continues the other."""
    shared = min(len(held), len(got))
    differing = np.flatnonzero(held[:shared] != got[:shared])
    return int(differing[0]) if differing.size else shared
