"""Parse sampled ids of formats whose calls stand between two control tokens.

Markers are found by id, never in decoded text. `<think>` ... `</think>` is reasoning. A call that is not
complete and exactly of its format stays in the text, where the agent sees it, and sets `malformed`; nothing
is repaired. Marker text that the model spells with ordinary tokens is ordinary text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from insitu.chat.codec import Codec
from insitu.chat.renderer import ParsedCall, ParsedReply
from insitu.types import IntArray

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

ReadCall = Callable[[IntArray], ParsedCall | None]
"""Parses the ids between two markers; returns None unless they are exactly one call."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Control tokens around calls."""

    open: str = "<tool_call>"
    close: str = "</tool_call>"
    section_open: str = ""
    """Set where a format puts all calls of a reply into one section."""
    section_close: str = ""


@dataclass(slots=True)
class _Parts:
    """Parts of the reply parsed so far."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()
    malformed: bool = False
    has_reasoning: bool = False
    """A reasoning block was read, possibly empty."""
    outside: bool = False
    """Outside the section where this format puts calls; call markers are invalid here."""


def without_stop(ids: IntArray, stop_ids: frozenset[int]) -> IntArray:
    return ids[:-1] if len(ids) and int(ids[-1]) in stop_ids else ids


def parse_blocks(
    codec: Codec, ids: IntArray, in_reasoning: bool, blocks: Blocks, read: ReadCall
) -> ParsedReply:
    """Parse one reply without its stop id.

    `in_reasoning`: the generation prompt already opened <think>.
    """
    parts = _Parts(outside=bool(blocks.section_open))

    def reasoning(start: int) -> int:
        return _read_reasoning(codec, ids, start, parts, blocks, read)

    at = reasoning(0) if in_reasoning else 0
    marks = codec.control_positions(ids)
    for mark in marks:
        if mark < at:
            continue
        name = codec.names[int(ids[mark])]
        if name == blocks.open:
            parts.text += codec.decode(ids[at:mark])
            at = _read_call(codec, ids, mark, parts, blocks, read)
        elif name == THINK_OPEN and not parts.has_reasoning and not parts.calls:
            parts.text += codec.decode(ids[at:mark])
            at = reasoning(mark + 1)
        elif name == blocks.close:
            parts.malformed = True
        elif name in (blocks.section_open, blocks.section_close):
            parts.text += codec.decode(ids[at:mark])
            at = mark + 1
            parts.outside = name == blocks.section_close
            if not _section_in_place(codec, ids, mark, blocks, not parts.outside):
                parts.malformed = True
                parts.text += name
    parts.text += codec.decode(ids[at:])
    return ParsedReply(
        text=_trim(parts), reasoning=parts.reasoning, calls=parts.calls, malformed=parts.malformed
    )


def _section_in_place(codec: Codec, ids: IntArray, mark: int, blocks: Blocks, opens: bool) -> bool:
    """Return whether a section begins right before a call, or ends right behind one."""
    step, expected = (1, blocks.open) if opens else (-1, blocks.close)
    at = mark + step
    while 0 <= at < len(ids):
        if int(ids[at]) in codec.names:
            return codec.names[int(ids[at])] == expected
        if codec.decode(ids[at : at + 1]).strip():
            return False
        at += step
    return False


def is_open_reasoning(codec: Codec, ids: IntArray, in_reasoning: bool) -> bool:
    """Return whether a reply cut off at the end of `ids` is inside <think>."""
    for mark in codec.control_positions(ids):
        name = codec.names[int(ids[mark])]
        if name in (THINK_OPEN, THINK_CLOSE):
            in_reasoning = name == THINK_OPEN
    return in_reasoning


def _trim(parts: _Parts) -> str:
    """Strip the line breaks that the template puts between reasoning, text and calls."""
    text = parts.text
    if parts.has_reasoning:
        text = text.lstrip("\n")
    if parts.calls:
        text = text.rstrip("\n")
    return "" if parts.calls and text.isspace() else text


def find(codec: Codec, ids: IntArray, start: int, name: str) -> int:
    """Return the position of the next control token `name` at or after start, else -1."""
    expected = codec.control.get(name)
    if expected is None:
        return -1
    found = (ids[start:] == expected).nonzero()[0]
    return start + int(found[0]) if len(found) else -1


def _read_reasoning(
    codec: Codec, ids: IntArray, start: int, parts: _Parts, blocks: Blocks, read: ReadCall
) -> int:
    """Read up to </think> or the end; return the position after it.

    Reasoning that was never closed ends before whole calls that end the reply. Any other call in reasoning is
    part of it, and malformed.
    """
    end = find(codec, ids, start, THINK_CLOSE)
    stop = len(ids) if end < 0 else end
    after = stop if end < 0 else end + 1
    opened = find(codec, ids[:stop], start, blocks.section_open or blocks.open)
    if opened >= 0 and end < 0:
        rest = parse_blocks(codec, ids[opened:], False, blocks, read)
        if rest.calls and not rest.malformed and not rest.text:
            stop = after = opened
    parts.has_reasoning = True
    parts.malformed |= find(codec, ids[:stop], start, blocks.open) >= 0
    parts.reasoning = codec.decode(ids[start:stop]).strip("\n")
    return after


def _read_call(codec: Codec, ids: IntArray, start: int, parts: _Parts, blocks: Blocks, read: ReadCall) -> int:
    """Read one call that opens at `start`; return the position after it."""
    end = find(codec, ids, start + 1, blocks.close)
    nested = find(codec, ids, start + 1, blocks.open)
    if end < 0 or 0 <= nested < end:
        stop = len(ids) if nested < 0 else nested
        parts.malformed = True
        parts.text += codec.decode(ids[start:stop])
        return stop
    call = None if parts.outside else read(ids[start + 1 : end])
    if call is None:
        parts.outside |= find(codec, ids[:end], start, blocks.section_close) >= 0
        parts.malformed = True
        parts.text += codec.decode(ids[start : end + 1])
    else:
        parts.calls += (call,)
        if parts.text and not parts.malformed:
            parts.text = parts.text.rstrip("\n")
    return end + 1


def read_call(text: str, arguments: str = "arguments") -> ParsedCall | None:
    """Parse a text that is one call in JSON and nothing else."""
    text = text.strip()
    call, end = call_at(text, 0, arguments)
    return call if end == len(text) else None


def call_at(text: str, at: int, arguments: str = "arguments") -> tuple[ParsedCall | None, int]:
    """Parse a call in JSON at a position: an object with `name` and the member named by `arguments`.

    A member `type` may say "function". The arguments keep their sampled text. Returns the call and where it
    ends, (None, at) for any other shape.
    """
    try:
        members, end = _members(text, at)
    except (ValueError, IndexError, RecursionError):
        return None, at
    kind = members.pop("type", '"function"')
    if set(members) != {"name", arguments} or kind != '"function"':
        return None, at
    name, raw = members["name"], members[arguments]
    if not name.startswith('"') or not raw.startswith("{"):
        return None, at
    parsed = str(json.loads(name))
    return (ParsedCall(name=parsed, arguments=raw), end) if is_name(parsed) else (None, at)


def is_name(name: str) -> bool:
    """Return whether the text can be sent as a tool's name."""
    return bool(name) and not any("\ud800" <= c <= "\udfff" for c in name)


def decode_json(text: str) -> tuple[object] | None:
    """Return the value of a text that is one JSON value; None if it is not."""
    text = text.strip(" \t\r\n")
    try:
        value, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return (value,) if end == len(text) else None


def is_object(text: str) -> bool:
    """Return whether the whole text is one JSON object."""
    return text.lstrip(" \t\r\n").startswith("{") and decode_json(text) is not None


def _members(text: str, at: int) -> tuple[dict[str, str], int]:
    """Return the raw JSON text of each member of the object that begins at `at`, and the object's end.

    Raises ValueError or IndexError on invalid JSON and on a duplicate key.
    """
    members: dict[str, str] = {}
    if text[at] != "{":
        raise ValueError("not an object")
    at = _skip(text, at + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        at = _skip(text, at)
        if not isinstance(key, str) or key in members or text[at] != ":":
            raise ValueError("not a plain object")
        start = _skip(text, at + 1)
        _, at = _DECODER.raw_decode(text, start)
        members[key] = text[start:at]
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
            if text[at] == "}":
                raise ValueError("trailing comma")
        elif text[at] != "}":
            raise ValueError("comma expected")
    return members, at + 1


def _skip(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
