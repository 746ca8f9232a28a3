"""Offsets of the elements of a JSON array, where a body can be cut; pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Elements of a JSON array and their ends."""

    values: list[object]
    ends: list[int]
    """Number of characters before the end of each."""
    close: int
    """Number of characters before the closing bracket."""


def whole_list(text: str, name: str) -> Elements | None:
    """Return the array under the key `name` of a JSON object; None without one or with more than one."""
    found: Elements | None = None
    at = _after_space(text, _after_space(text, 0) + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        at = _after_space(text, _after_space(text, at) + 1)
        if key == name:
            if found is not None or text[at] != "[":
                return None
            found = elements(text, at + 1)
            at = found.close + 1
        else:
            _, at = _DECODER.raw_decode(text, at)
        at = _after_space(text, at)
        if text[at] == ",":
            at = _after_space(text, at + 1)
    return found


def elements(text: str, at: int) -> Elements:
    """Return the elements from `at`, after the bracket or an element, to the end of the array or text."""
    values: list[object] = []
    ends: list[int] = []
    while True:
        at = _after_space(text, at)
        if at == len(text) or text[at] == "]":
            return Elements(values=values, ends=ends, close=at)
        if text[at] == ",":
            at = _after_space(text, at + 1)
        value, at = _DECODER.raw_decode(text, at)
        values.append(value)
        ends.append(at)


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
