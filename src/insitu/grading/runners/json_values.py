"""JSON values of runner `json_io`: how an answer is read, compared and shown.

The answer is the candidate's, so nothing here may take long: what Python does with integers of many digits
takes time that grows with the square of their number, and holds the interpreter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from insitu.grading.runners.common import MAX_CHECK_CHARS, unique_pairs
from insitu.grading.runners.json_io_worker import MAX_DEPTH, MAX_NODES, encode
from insitu.tasks.row_files import MAX_DIGITS
from insitu.types import Case

RELATIVE = 1e-7
LONG = 1000
"""Digits above which an integer is kept as text. No float is as large."""
TOO_LONG = 10**MAX_DIGITS
BITS = math.log2(10)
"""Bits of a digit."""
MAX_FLOAT_CHARS = 32
"""Longest text of a float that the worker writes, and more."""


@dataclass(frozen=True, slots=True, eq=False)
class Digits:
    """An integer of many digits."""

    text: str

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Digits):
            return self.text == other.text
        if type(other) is not int or abs(other.bit_length() - len(self.text) * BITS) > 2 * BITS:
            return False
        return int(self.text) == other

    __hash__ = None  # type: ignore[assignment]


def parse(line: bytes | str) -> object:
    """Read a JSON value; raise ValueError or RecursionError for one that the worker does not write."""
    return json.loads(
        line,
        parse_int=_integer,
        parse_float=_float,
        parse_constant=_no_constant,
        object_pairs_hook=unique_pairs,
    )


def _integer(text: str) -> int | Digits:
    if len(text) <= LONG:
        return int(text)
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise ValueError("too many digits")
    return Digits(text)


def _float(text: str) -> float:
    # An infinity equals no expected value.
    return float(text) if len(text) <= MAX_FLOAT_CHARS else math.inf


def _no_constant(text: str) -> object:
    raise ValueError(text)


def shown(value: object) -> str:
    """Return the beginning of a value's text, without the work of writing the rest."""
    parts: list[str] = []
    room = MAX_CHECK_CHARS
    for part in _parts(value, 0):
        parts.append(part[:room])
        room -= len(part)
        if room <= 0:
            break
    return "".join(parts)


def _parts(value: object, depth: int) -> Iterator[str]:
    if isinstance(value, Digits):
        yield value.text
    elif isinstance(value, str):
        yield repr(value[:MAX_CHECK_CHARS])
    elif type(value) is int and value.bit_length() > 4 * LONG:
        yield f"an integer of {value.bit_length()} bits"
    elif depth > 2 * MAX_DEPTH:
        yield "..."
    elif isinstance(value, dict):
        pairs = ((one, ": ", other) for one, other in value.items())
        yield from _many("{", pairs, "}", depth)
    elif isinstance(value, list | tuple | set | frozenset):
        ends = {list: "[]", tuple: "()"}.get(type(value), "{}")
        yield from _many(ends[0], ((one,) for one in value), ends[1], depth)
    else:
        yield repr(value)


def _many(start: str, items: Iterable[tuple[object, ...]], end: str, depth: int) -> Iterator[str]:
    """Yield the parts of a container; every second part of an item is text between values."""
    yield start
    for number, item in enumerate(items):
        if number:
            yield ", "
        for place, one in enumerate(item):
            if place % 2:
                yield str(one)
            else:
                yield from _parts(one, depth + 1)
    yield end


def equal(claimed: object, case: Case) -> bool:
    expected = _plain(case.expected)
    if case.lists:
        claimed = _as_lists(claimed)
    ways = [expected]
    if case.wrapped and isinstance(expected, list) and len(expected) == 1:
        ways.append(expected[0])
    if case.tolerance:
        return any(_close(claimed, way, case.tolerance) for way in ways)
    return any(same(claimed, way) if case.exact else claimed == way for way in ways)


def _as_lists(claimed: object, depth: int = 0) -> object:
    """Replace tuples by lists, as deep as the worker nests values."""
    if depth > 2 * MAX_DEPTH:
        return claimed
    if isinstance(claimed, list):
        return [_as_lists(item, depth + 1) for item in claimed]
    if isinstance(claimed, dict):
        if claimed.keys() == {"\0tuple"}:
            return _as_lists(claimed["\0tuple"], depth + 1)
        return {key: _as_lists(item, depth + 1) for key, item in claimed.items()}
    return claimed


def _plain(value: object) -> object:
    """Return a value as it comes out of the sandbox; long integers stay as they are."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_plain(item) for item in value]
    if type(value) is tuple:
        return {"\0tuple": [_plain(item) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _plain(item) for key, item in value.items()}
    return parse(encode(value, 0, [MAX_NODES]))


def check_value(value: object) -> None:
    """Raise TypeError or ValueError for a value that the sandbox cannot be asked for or return."""
    encode(_without_long(value, 0), 0, [MAX_NODES])


def _without_long(value: object, depth: int) -> object:
    """Return a value with 0 in place of long integers, the text of which takes time."""
    if type(value) is int and value.bit_length() > LONG * BITS:
        if abs(value) >= TOO_LONG:
            raise ValueError(f"an integer of more than {MAX_DIGITS} digits")
        return 0
    if depth <= MAX_DEPTH and type(value) in (list, tuple):
        return type(value)(_without_long(item, depth + 1) for item in value)  # type: ignore[attr-defined, call-arg]
    if depth <= MAX_DEPTH and type(value) is dict:
        return {key: _without_long(item, depth + 1) for key, item in value.items()}
    return value


def _close(claimed: object, expected: object, tolerance: float) -> bool:
    """Compare as `==`, with numbers that may differ by `tolerance` plus RELATIVE of the expected one."""
    if isinstance(expected, int | float) and isinstance(claimed, int | float):
        try:
            return abs(claimed - expected) <= tolerance + RELATIVE * abs(expected)
        except OverflowError:  # an integer beyond the floats
            return claimed == expected
    if isinstance(claimed, list) and isinstance(expected, list):
        pairs = zip(claimed, expected, strict=False)
        return len(claimed) == len(expected) and all(_close(a, b, tolerance) for a, b in pairs)
    if isinstance(claimed, dict) and isinstance(expected, dict):
        keys = claimed.keys() == expected.keys()
        return keys and all(_close(claimed[key], expected[key], tolerance) for key in expected)
    return claimed == expected


def same(claimed: object, expected: object) -> bool:
    """Compare JSON values with types, only as deep as `expected`."""
    if isinstance(claimed, Digits):
        return claimed == expected
    if type(claimed) is not type(expected):
        return False
    if isinstance(claimed, list) and isinstance(expected, list):
        return len(claimed) == len(expected) and all(map(same, claimed, expected))
    if isinstance(claimed, dict) and isinstance(expected, dict):
        return claimed.keys() == expected.keys() and all(same(claimed[k], expected[k]) for k in expected)
    return claimed == expected
