"""Values that are wrong but look right: what a turned test expects instead of the right answer.

A near value has the type and about the size of the right one, so that nothing in the process that is tested
can tell a turned test from a real one unless it knows the answer.
"""

from __future__ import annotations

import random
import string

TRIES = 50
_SETS = (string.ascii_lowercase, string.ascii_uppercase, string.digits)


def near(value: object, rng: random.Random) -> object:
    """Something of the literal's type that does not equal it, nor nearly. Raises ValueError for a
    value of no literal's type."""
    for _ in range(TRIES):
        other = _near(value, rng)
        if other != value:
            return other
    raise ValueError(f"nothing is near {value!a}")


def _near(value: object, rng: random.Random) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice((-1, 1)) * (abs(value) // 10 + rng.randint(1, 9))
    if isinstance(value, float):
        return _near_float(value, rng)
    if isinstance(value, str):
        return _near_text(value, rng)
    if isinstance(value, bytes):
        return _near_text(value.decode("latin-1"), rng).encode("latin-1", "replace")
    if value is None:
        return rng.choice((0, False, ""))
    return _near_container(value, rng)


def _near_float(value: float, rng: random.Random) -> float:
    digits = len(repr(value).partition(".")[2]) if "e" not in repr(value) else 6
    moved = value + rng.choice((-1, 1)) * (abs(value) * rng.uniform(0.3, 0.8) + rng.uniform(0.5, 2.0))
    return round(moved, max(1, digits))


def _near_text(value: str, rng: random.Random) -> str:
    if not value:
        return rng.choice(string.ascii_lowercase)
    at = rng.randrange(len(value))
    letters = next((letters for letters in _SETS if value[at] in letters), string.ascii_lowercase)
    # Letters in another case do not count as another answer everywhere.
    other = rng.choice([letter for letter in letters if letter.lower() != value[at].lower()])
    return value[:at] + other + value[at + 1 :]


def _near_container(value: object, rng: random.Random) -> object:
    if isinstance(value, dict):
        if not value:
            return {rng.choice(string.ascii_lowercase): rng.randint(1, 9)}
        key = rng.choice(list(value))
        return {**value, key: near(value[key], rng)}
    if not isinstance(value, list | tuple | set):
        raise ValueError(f"{value!a} is of no literal's type")
    # A set has no order of its own that a seed could repeat.
    items = sorted(value, key=repr) if isinstance(value, set) else list(value)
    at = rng.randrange(max(1, len(items)))
    items[at : at + 1] = [near(items[at], rng) if items else rng.randint(1, 9)]
    return type(value)(items)
