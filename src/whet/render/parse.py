"""Meaning of sampled ids in the Hermes form, found by control ids and never by decoded text.

`<think>` ... `</think>` is reasoning, `<tool_call>` ... `</tool_call>` holds one JSON object with exactly the
keys `name` and `arguments`. What does not fit stays in the text, for the agent to see, and sets `malformed`.
Marker text that the model spells with ordinary tokens is ordinary text. Caller: render/template.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from whet.render.encode import Codec
from whet.render.family import ParsedCall, ParsedReply
from whet.types import IntArray

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


@dataclass(slots=True)
class _Parts:
    """What has been read so far."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()
    malformed: bool = False
    thought: bool = False
    """A reasoning block was read, be it empty."""


def parse_hermes(codec: Codec, ids: IntArray, stop_ids: frozenset[int], in_reasoning: bool) -> ParsedReply:
    """Parse one reply. `in_reasoning`: the generation prompt already opened <think>."""
    if len(ids) and int(ids[-1]) in stop_ids:
        ids = ids[:-1]
    parts = _Parts()
    at = 0
    if in_reasoning:
        at = _read_reasoning(codec, ids, 0, parts)
    marks = codec.control_positions(ids)
    for mark in marks:
        if mark < at:
            continue
        name = codec.names[int(ids[mark])]
        if name == CALL_OPEN:
            parts.text += codec.decode(ids[at:mark])
            at = _read_call(codec, ids, mark, parts)
        elif name == THINK_OPEN and not parts.thought and not parts.calls:
            parts.text += codec.decode(ids[at:mark])
            at = _read_reasoning(codec, ids, mark + 1, parts)
    parts.text += codec.decode(ids[at:])
    return ParsedReply(
        text=_trim(parts), reasoning=parts.reasoning, calls=parts.calls, malformed=parts.malformed
    )


def is_open_reasoning(codec: Codec, ids: IntArray, in_reasoning: bool) -> bool:
    """True when a reply cut off at the end of `ids` stands inside <think>."""
    for mark in codec.control_positions(ids):
        name = codec.names[int(ids[mark])]
        if name in (THINK_OPEN, THINK_CLOSE):
            in_reasoning = name == THINK_OPEN
    return in_reasoning


def _trim(parts: _Parts) -> str:
    """The template puts line breaks between reasoning, text and calls; they are not the model's words."""
    text = parts.text
    if parts.thought:
        text = text.lstrip("\n")
    if parts.calls:
        text = text.rstrip("\n")
    return "" if parts.calls and text.isspace() else text


def _find(codec: Codec, ids: IntArray, start: int, name: str) -> int:
    """Position of the next control token `name` at or after start, else -1."""
    wanted = codec.control.get(name, -1)
    for mark in codec.control_positions(ids[start:]):
        if int(ids[start + mark]) == wanted:
            return start + mark
    return -1


def _read_reasoning(codec: Codec, ids: IntArray, start: int, parts: _Parts) -> int:
    """Read up to </think> or the end; returns the position after it."""
    end = _find(codec, ids, start, THINK_CLOSE)
    stop = len(ids) if end < 0 else end
    parts.thought = True
    parts.reasoning = codec.decode(ids[start:stop]).strip("\n")
    return stop if end < 0 else end + 1


def _read_call(codec: Codec, ids: IntArray, start: int, parts: _Parts) -> int:
    """Read one call that opens at `start`; returns the position after it."""
    end = _find(codec, ids, start + 1, CALL_CLOSE)
    nested = _find(codec, ids, start + 1, CALL_OPEN)
    if end < 0 or 0 <= nested < end:
        stop = len(ids) if nested < 0 else nested
        parts.malformed = True
        parts.text += codec.decode(ids[start:stop])
        return stop
    call = read_call(codec.decode(ids[start + 1 : end]))
    if call is None:
        parts.malformed = True
        parts.text += codec.decode(ids[start : end + 1])
    else:
        parts.calls += (call,)
        if parts.text and not parts.malformed:
            parts.text = parts.text.rstrip("\n")
    return end + 1


def read_call(text: str) -> ParsedCall | None:
    """A call from its JSON text, `arguments` kept as sampled; None when the shape is not exactly known."""
    text = text.strip()
    if not text.startswith("{"):
        return None
    try:
        members, end = _members(text)
    except (ValueError, IndexError, RecursionError):
        return None
    if text[end:].strip() or set(members) != {"name", "arguments"}:
        return None
    name, raw = members["name"], members["arguments"]
    if not name.startswith('"') or not raw.startswith("{"):
        return None
    parsed = str(json.loads(name))
    if not parsed or any("\ud800" <= c <= "\udfff" for c in parsed):
        return None
    return ParsedCall(name=parsed, arguments=raw)


def _members(text: str) -> tuple[dict[str, str], int]:
    """Raw JSON text of each member of the object at the start of `text`, and where the object ends.

    Raises ValueError or IndexError on bad JSON and on a key that comes twice.
    """
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    members: dict[str, str] = {}
    at = _skip(text, 1)
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        at = _skip(text, at)
        if not isinstance(key, str) or key in members or text[at] != ":":
            raise ValueError("not a plain object")
        start = _skip(text, at + 1)
        _, at = decoder.raw_decode(text, start)
        members[key] = text[start:at]
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
            if text[at] == "}":
                raise ValueError("comma before the end")
        elif text[at] != "}":
            raise ValueError("comma expected")
    return members, at + 1


def _skip(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
