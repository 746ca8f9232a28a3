"""Mask the prose of other authors in a recorded request: prompts and tool descriptions of agents.

Each word is replaced by a made-up one of the same length, always the same, so that equal texts stay equal,
and lengths and punctuation do not change. Text of the policy and of tools is kept,
as are names, types and ids.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

PROSE = ("system", "instructions", "systemInstruction", "system_instruction")
TURNS = ("messages", "input", "contents")
OTHERS = ("user", "system", "developer")
"""Roles of text that comes neither from the policy nor from a tool."""
_WORD = re.compile(r"[A-Za-z]{3,}")


def masked(body: Mapping[str, object]) -> dict[str, object]:
    """Return a decoded request body of any wire format with its prose masked."""
    kept = dict(body)
    for key in PROSE:
        if key in kept:
            kept[key] = _all_text(kept[key])
    for key in TURNS:
        turns = kept.get(key)
        if isinstance(turns, list):
            kept[key] = [_turn(turn) for turn in turns]
        elif isinstance(turns, str):
            kept[key] = _words(turns)
    if "tools" in kept:
        kept["tools"] = _descriptions(kept["tools"])
    return kept


def _turn(turn: object) -> object:
    if not isinstance(turn, dict) or turn.get("role") not in OTHERS:
        return turn
    return {key: _all_text(value) if key in ("content", "parts") else value for key, value in turn.items()}


def _all_text(value: object) -> object:
    """Mask a text, or the `text` of parts."""
    if isinstance(value, str):
        return _words(value)
    if isinstance(value, list):
        return [_all_text(each) if not isinstance(each, dict) else _part(each) for each in value]
    return _part(value) if isinstance(value, dict) else value


def _part(part: Mapping[str, object]) -> dict[str, object]:
    text = part.get("text")
    nested = {"parts": _all_text(part["parts"])} if "parts" in part else {}
    return {**part, **nested, **({"text": _words(text)} if isinstance(text, str) else {})}


def _descriptions(value: object) -> object:
    if isinstance(value, list):
        return [_descriptions(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _words(each) if key == "description" and isinstance(each, str) else _descriptions(each)
        for key, each in value.items()
    }


def _words(text: str) -> str:
    return _WORD.sub(lambda found: _made_up(found[0]), text)


def _made_up(word: str) -> str:
    digits = hashlib.shake_128(word.encode()).digest(len(word))
    letters = "".join("abcdefghijklmnopqrstuvwxyz"[digit % 26] for digit in digits)
    return letters.capitalize() if word[0].isupper() else letters
