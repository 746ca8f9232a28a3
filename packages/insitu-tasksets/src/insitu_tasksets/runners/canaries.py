"""Canary tests with a known outcome, drawn again for every run of a test file.

A candidate shares the process with the tests, so it can make every test look passed. `with_controls` adds
tests that must fail, in every way a test can fail, and tests that must pass, under names made of the file's
own words. A failing canary that is reported as passed proves forgery. The file's own lines stay unchanged.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

FAILING = (
    "assert {a} == {b}",
    "assert {a} != {a}",
    "raise RuntimeError({a})",
    "__import__('unittest').TestCase().assertEqual({a}, {b})",
    "__import__('unittest').TestCase().assertTrue({a} > {a})",
    "assert __import__('math').isclose({a}, {b})",
    "assert {a} == __import__('pytest').approx({b})",
    "assert object() == {a}",
    "assert [{a}, {b}] == [{b}, {a}]",
    "__import__('pytest').fail()",
)
PASSING = (
    "assert {a} == {a}",
    "assert {a} != {b}",
    "__import__('unittest').TestCase().assertNotEqual({a}, {b})",
    "assert {a} == __import__('pytest').approx({a})",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Controlled:
    """A test file with canaries."""

    source: bytes
    must_fail: frozenset[str]
    """Names of module-level functions."""
    must_pass: frozenset[str]


def with_controls(text: str, rng: random.Random) -> Controlled:
    """Add every kind of failing canary and two passing ones."""
    bodies = [(body, False) for body in FAILING] + [(body, True) for body in rng.sample(PASSING, 2)]
    rng.shuffle(bodies)
    names = _names(text, len(bodies), rng)
    added: list[str] = []
    fail: set[str] = set()
    passing: set[str] = set()
    for name, (body, good) in zip(names, bodies, strict=True):
        a, b = rng.sample(range(1000, 10_000_000), 2)
        added.append(f"def {name}():\n    {body.format(a=a, b=b)}\n")
        (passing if good else fail).add(name)
    return Controlled(
        source=_spread(text, added, rng).encode(), must_fail=frozenset(fail), must_pass=frozenset(passing)
    )


def text_of(source: bytes) -> str:
    """Return a test file as text. Raises ValueError when it is not Python."""
    try:
        text = source.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"not a Python file: {error}") from None
    return text


def _names(text: str, count: int, rng: random.Random) -> list[str]:
    """Draw unused test names from words of the file's own names."""
    words = sorted({word for name in re.findall(r"\bdef (\w+)", text) for word in name.split("_") if word})
    words = [word for word in words if word != "test"] or ["value"]
    taken = set(re.findall(r"\w+", text))
    names: list[str] = []
    while len(names) < count:
        parts = rng.choices(words, k=rng.randint(1, 3))
        if rng.random() < 0.3 or len(names) > 4 * len(words):
            parts.append(str(rng.randint(2, 999)))
        name = "test_" + "_".join(parts)
        if name not in taken and name.isidentifier():
            taken.add(name)
            names.append(name)
    return names


def _spread(text: str, added: Sequence[str], rng: random.Random) -> str:
    """Insert functions at random between the top-level definitions of a module."""
    lines = text.split("\n")
    body = ast.parse(text).body
    cuts = [_first_line(node) - 1 for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    after: dict[int, list[str]] = {}
    for piece in added:
        after.setdefault(rng.choice([*cuts, len(lines)]), []).append(piece)
    out: list[str] = []
    for number, line in enumerate([*lines, None]):
        for piece in after.get(number, []):
            out += ["", *piece.rstrip("\n").split("\n"), ""]
        if line is not None:
            out.append(line)
    made = "\n".join(out) + "\n"
    ast.parse(made)
    return made


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
