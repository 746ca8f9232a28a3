"""Controls: tests whose outcome the host knows beforehand, drawn anew for every run of a test file.

A candidate shares the process with the tests that judge it, so it can make every test look passed. It cannot
tell which of them must not pass: `with_controls` adds tests that must fail, in every way a test can fail, and
tests that must pass, under names made of the file's own words; `inverted` turns the last assertion of some
real tests round, under their real names, for a second run of the whole file. What reports a pass forges.
The file is changed as text on the host; its own tests stay as they are, line by line.
"""

from __future__ import annotations

import ast
import random
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_INVERTED = 4
OPPOSITE = {
    "assertEqual": "assertNotEqual", "assertNotEqual": "assertEqual", "assertTrue": "assertFalse",
    "assertFalse": "assertTrue", "assertIs": "assertIsNot", "assertIsNot": "assertIs",
    "assertIsNone": "assertIsNotNone", "assertIsNotNone": "assertIsNone", "assertIn": "assertNotIn",
    "assertNotIn": "assertIn",
}  # fmt: skip

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
    """A test file with controls in it."""

    source: bytes
    must_fail: frozenset[str]
    """Function names, at the top of the module."""
    must_pass: frozenset[str]
    inverted: frozenset[str] = frozenset()
    """Names like `Class::test` of real tests turned round: each may pass in one run, not in both."""


def with_controls(source: bytes, rng: random.Random) -> Controlled:
    """Every kind of failing control and some passing ones. Raises ValueError when the file is no Python."""
    text = _text(source)
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


def _text(source: bytes) -> str:
    try:
        text = source.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"not a Python file: {error}") from None
    return text


def _names(text: str, count: int, rng: random.Random) -> list[str]:
    """Fresh test names of words that the file itself uses in its own."""
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
    """Functions put between the top-level statements of a module, at random, none before the imports."""
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


def inverted(source: bytes, wanted: Sequence[str], rng: random.Random) -> Controlled:
    """The file with up to MAX_INVERTED of the `wanted` tests (`Class::test`) turned round, and controls."""
    text = _text(source)
    found = [(name, node) for name, node in _tests(ast.parse(text)) if name in wanted]
    rng.shuffle(found)
    lines = text.split("\n")
    chosen: list[str] = []
    edits: list[tuple[int, int, str]] = []
    for name, node in found:
        last = node.body[-1]
        alone = not lines[last.lineno - 1].encode()[: last.col_offset].strip()
        turned = _turned(last, rng) if alone and _straight(node) else None
        if turned is not None and len(chosen) < MAX_INVERTED:
            edits.append((last.lineno, last.end_lineno or last.lineno, turned))
            chosen.append(name)
    made = _edited(text, edits)
    base = with_controls(made.encode(), rng)
    return Controlled(
        source=base.source, must_fail=base.must_fail, must_pass=base.must_pass, inverted=frozenset(chosen)
    )


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _tests(module: ast.Module) -> Iterator[tuple[str, Function]]:
    """(name, node) of the tests in a module and its classes whose name is defined once."""
    for prefix, body in [("", module.body)] + [
        (f"{node.name}::", node.body) for node in module.body if isinstance(node, ast.ClassDef)
    ]:
        tests = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        names = [node.name for node in tests]
        yield from ((prefix + node.name, node) for node in tests if names.count(node.name) == 1)


def _straight(test: Function) -> bool:
    """Whether a pass of this test means that its last statement was run, alone on its lines."""
    last = test.body[-1]
    before = test.body[-2].end_lineno or 0 if len(test.body) > 1 else test.lineno
    leaves = (ast.Return, ast.Yield, ast.YieldFrom)
    return last.lineno > before and not any(isinstance(node, leaves) for node in ast.walk(test))


def _turned(last: ast.stmt, rng: random.Random) -> str | None:
    """The statement that fails where `last` passes; None for one we do not know how to turn."""
    if isinstance(last, ast.Assert):
        test = _unequal(last.test, rng) or ast.UnaryOp(op=ast.Not(), operand=last.test)
        return ast.unparse(ast.Assert(test=test, msg=None))
    if not isinstance(last, ast.Expr) or not isinstance(last.value, ast.Call):
        return None
    call = last.value
    if not isinstance(call.func, ast.Attribute) or ast.unparse(call.func.value) != "self":
        return None
    name = OPPOSITE.get(call.func.attr)
    if name is None or len(call.args) > 2 or call.keywords:
        return None
    if call.func.attr == "assertEqual" and len(call.args) == 2:
        equal = ast.Compare(left=call.args[0], ops=[ast.Eq()], comparators=[call.args[1]])
        unequal = _unequal(equal, rng)
        if unequal is not None:
            return f"self.assertTrue({ast.unparse(unequal)})"
    return f"self.{name}({', '.join(ast.unparse(arg) for arg in call.args)})"


def _unequal(test: ast.expr, rng: random.Random) -> ast.expr | None:
    """For `value == right`: whether the value differs from what is right, or equals a number that nobody can
    know, as an object does that equals everything. The value is taken once, as in the real test."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return None
    value, right = test.left, test.comparators[0]
    if isinstance(value, ast.Constant):
        value, right = right, value
    held = (ast.Await, ast.NamedExpr, ast.Yield, ast.YieldFrom)
    if any(isinstance(node, held) for node in ast.walk(test)):
        return None
    other = rng.randint(10**6, 10**9)
    it = f"value_{other}"
    text = f"(lambda {it}: not {it} == ({ast.unparse(right)}) or {it} == {other})({ast.unparse(value)})"
    return ast.parse(text, mode="eval").body


def _edited(text: str, edits: Sequence[tuple[int, int, str]]) -> str:
    lines = text.split("\n")
    for first, last, statement in sorted(edits, reverse=True):
        indent = re.match(r"\s*", lines[first - 1])
        lines[first - 1 : last] = textwrap.indent(statement, indent[0] if indent else "").split("\n")
    return "\n".join(lines)
