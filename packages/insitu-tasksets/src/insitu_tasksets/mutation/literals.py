"""Wrong literals for mutated tests.

A token's family holds the tokens that differ from it in one digit or character of the same kind: same quotes,
prefix, escapes, base, underscores, point, exponent and zeros. All members have the same family, so drawn
members do not reveal the right one. None and empty strings have no family.
"""

from __future__ import annotations

import ast
import itertools
import random
import re
import string
from collections.abc import Callable, Iterator, Sequence

TOLERANCE = 1e-11
"""Numbers no further apart may compare equal: ten times the absolute tolerance of `pytest.approx`."""
STEPS = 10**5
"""Numbers whose distance is no more than the larger one divided by this may compare equal: ten times the
relative tolerance of `pytest.approx`."""
_BASES = {"0x": 16, "0o": 8, "0b": 2}
_VOWELS = "aeiou"
_CONSONANTS = "".join(c for c in string.ascii_lowercase if c not in _VOWELS)
_KINDS = (
    "123456789", _CONSONANTS, _CONSONANTS.upper(), _VOWELS, _VOWELS.upper(),
    "-_.,:;!?/+*=#@|%&~^$", "()", "[]", "{}", "<>",
)  # fmt: skip
"""Interchangeable characters of a string; earlier kinds are less conspicuous."""
_HEX = (string.digits, "abcdef", "ABCDEF")
_STRING = re.compile(r"([A-Za-z]*)('''|\"\"\"|'|\")(.*)\2", re.DOTALL)
_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^}]*\}|[0-7]{1,3}|.)"
_UNIT = re.compile(_ESCAPE + "|.", re.DOTALL)


def wrong_literal(
    token: str, rng: random.Random, most: int, allowed: Callable[[str], bool] = lambda other: True
) -> list[str]:
    """Return up to `most` other members of a family of the token, all with different values.

    `allowed` must treat all members of a family alike. Raises ValueError for a token without a family.
    """
    for category in _kinds(token, rng):
        fitting = [other for other in category if other != token and _alike(token, other)]
        if _distinct([token, *fitting]) and (fitting := [other for other in fitting if allowed(other)]):
            return rng.sample(fitting, min(most, len(fitting)))
    raise ValueError(f"no other form of {token!a}")


def _alike(token: str, other: str) -> bool:
    """Return whether both have the same type, and both or neither are written as repr does."""
    try:
        old, new = ast.literal_eval(token), ast.literal_eval(other)
    except (SyntaxError, ValueError):
        return False
    return type(old) is type(new) and (
        not isinstance(old, float) or (repr(old) == token) == (repr(new) == other)
    )


def _distinct(tokens: Sequence[str]) -> bool:
    values = [ast.literal_eval(token) for token in tokens]
    if isinstance(values[0], str | bytes):  # some tests compare case-insensitively
        return len({value.lower() for value in values}) == len(values)
    # inf - inf is nan, which is not greater. An int may be too large for a float: no division.
    pairs = itertools.pairwise(sorted(map(abs, values)))
    return all(b - a > TOLERANCE and (b - a) * STEPS > b for a, b in pairs)


def _kinds(token: str, rng: random.Random) -> Iterator[list[str]]:
    if token in ("True", "False"):
        yield ["True", "False"]
    elif (found := _STRING.fullmatch(token)) is not None:
        head = found[1] + found[2]
        for category in _texts(found[3], rng, raw="r" in found[1].lower()):
            yield [head + content + found[2] for content in category]
    elif token[:1] in "0123456789.":
        yield from _numbers(token, rng)


def _numbers(token: str, rng: random.Random) -> Iterator[list[str]]:
    """Yield the number with another digit at one place; leading and trailing zeros stay."""
    prefix = token[:2].lower() if token[:2].lower() in _BASES else ""
    base = _BASES.get(prefix, 10)
    end = len(token) if prefix else re.match(r"[\d_.]*", token).end()  # type: ignore[union-attr]
    places = [at for at in range(len(prefix), end) if token[at] not in "_."]
    written = "".join(token[at] for at in places)
    core = written.strip("0")
    first = written.index(core) if core else len(written) - 1
    last = first + max(1, len(core)) - 1
    # A single last digit may be zero, unless there is an exponent: 0e5 is unusual.
    zero = first == last == len(written) - 1 and not re.search("[eEjJ]", token[end:])
    spots = list(range(first, last + 1)) if core or zero else []
    for spot in rng.sample(spots, len(spots)):
        inside = first < spot < last
        digits = next(kind for kind in _HEX if written[spot] in kind)[:base]
        at = places[spot]
        yield [token[:at] + d + token[at + 1 :] for d in digits if d != "0" or inside or zero]


def _texts(content: str, rng: random.Random, *, raw: bool) -> Iterator[list[str]]:
    """Yield the string with another character at one place, least conspicuous first."""
    units = list(content) if raw else _UNIT.findall(content)
    if len(units) == 1 and content in string.digits:  # elsewhere a zero may lead or trail
        yield list(string.digits)
    at = [sum(map(len, units[:n])) for n in range(len(units))]
    order = [(_kind(unit)[0], n) for n, unit in enumerate(units)]
    rng.shuffle(order)
    for _, n in sorted(order, key=lambda each: each[0]):
        # A character after a backslash in a raw string looks like an escape.
        if raw and (units[n] == "\\" or content[at[n] - 1 : at[n]] == "\\"):
            continue
        behind = content[at[n] + len(units[n]) :]
        yield [content[: at[n]] + unit + behind for unit in _kind(units[n])[1]]


def _kind(unit: str) -> tuple[int, list[str]]:
    """Return a rank and the interchangeable forms of one character or escape."""
    if len(unit) > 1:
        if unit[1] in "xuU":
            digits = next(kind for kind in _HEX if unit[-1] in kind)
            return 3, [unit[:-1] + digit for digit in digits]
        return 9, ["\\n", "\\t"] if unit[1] in "nt" else []
    for rank, kind in enumerate(_KINDS):
        if unit in kind:
            return rank, list(kind)
    if unit.isascii() or not unit.isalpha():
        return 9, []
    block = ord(unit) // 8 * 8
    around = [chr(block + n) for n in range(8)]
    case = (unit.islower(), unit.isupper())
    return 4, [other for other in around if other.isalpha() and (other.islower(), other.isupper()) == case]
