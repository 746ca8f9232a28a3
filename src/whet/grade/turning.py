"""Turned tests: real tests changed so that they must fail where the real ones pass.

What passes both ways was not run, or is an object that equals what it is asked for. A turned test keeps its
name and its shape: where the expected value is a literal (in the assertion, in the rows of a loop over it, in
an assignment or in the rows of `parametrize`), a near one stands in its place, and nothing tells it from a
real test but knowing the answer. Elsewhere the assertion itself is turned round, which can be seen.
Text is changed on the host, at the places that the syntax tree names.
"""

from __future__ import annotations

import ast
import random
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from whet.grade.near import near

MAX_TURNED = 4
"""Tests of one file that are turned in one run."""
EQUALITIES = frozenset(
    {"assertEqual", "assertListEqual", "assertTupleEqual", "assertDictEqual", "assertSetEqual",
     "assertSequenceEqual", "assertMultiLineEqual", "assertCountEqual"}
)  # fmt: skip
WRAPPERS = frozenset({"approx", "pytest.approx", "tuple", "list"})
"""What gives another value for each other literal."""
OPPOSITE = {
    "assertEqual": "assertNotEqual", "assertNotEqual": "assertEqual", "assertTrue": "assertFalse",
    "assertFalse": "assertTrue", "assertIs": "assertIsNot", "assertIsNot": "assertIs",
    "assertIsNone": "assertIsNotNone", "assertIsNotNone": "assertIsNone", "assertIn": "assertNotIn",
    "assertNotIn": "assertIn",
}  # fmt: skip

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A piece of the file and what stands there instead. Lines from 1, columns in bytes, as ast counts."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """A test file with some tests turned."""

    text: str
    names: frozenset[str]
    """`Class::test` or `test`, as in the file."""
    hidden: frozenset[str]
    """Those of `names` that look like real ones."""


def turned(text: str, wanted: Sequence[str], rng: random.Random) -> Turned:
    """`text` with up to MAX_TURNED of the `wanted` tests turned, those that look real first."""
    module = ast.parse(text)
    helpers = _helpers(module)
    found = [(name, node) for name, node in _tests(module) if name in wanted]
    rng.shuffle(found)
    lines = text.split("\n")
    edits: list[Edit] = []
    hidden: list[str] = []
    for name, node in found:
        near_edits = _hidden_turn(node, helpers, rng)
        if near_edits and len(hidden) < MAX_TURNED:
            hidden.append(name)
            edits += near_edits
    seen: list[str] = []
    for name, node in found:
        open_edit = _open_turn(node, lines, rng) if name not in hidden else None
        if open_edit is not None and len(hidden) + len(seen) < MAX_TURNED:
            seen.append(name)
            edits.append(open_edit)
    return Turned(text=_edited(text, edits), names=frozenset((*hidden, *seen)), hidden=frozenset(hidden))


def _tests(module: ast.Module) -> Iterator[tuple[str, Function]]:
    """(name, node) of the tests in a module and its classes whose name is defined once."""
    for prefix, body in [("", module.body)] + [
        (f"{node.name}::", node.body) for node in module.body if isinstance(node, ast.ClassDef)
    ]:
        tests = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        names = [node.name for node in tests]
        yield from ((prefix + node.name, node) for node in tests if names.count(node.name) == 1)


def _runs_its_end(test: Function) -> bool:
    """Whether a pass of this test means that its last statement was run."""
    leaves = (ast.Return, ast.Yield, ast.YieldFrom)
    return not any(isinstance(node, leaves) for node in ast.walk(test))


# --------------------------------------------------------------------------- near values for right ones


def _hidden_turn(test: Function, helpers: Mapping[str, Function], rng: random.Random) -> list[Edit]:
    """Edits of literals by which one assertion of the test expects another value; empty where none can."""
    places = [(owner, statement) for owner in _owners(test, helpers) for statement in owner.body]
    rng.shuffle(places)
    near_ones = (edits for owner, statement in places if (edits := _expecting(owner, statement, rng)))
    flips = (edits for _, statement in places if (edits := _flipped(statement)))
    return next(near_ones, None) or next(flips, [])


def _owners(test: Function, helpers: Mapping[str, Function]) -> list[Function]:
    """Functions of which each statement was run when the test passes: itself, and helpers that it calls."""
    if not _runs_its_end(test):
        return []
    called = [
        helpers[statement.value.func.id]
        for statement in test.body
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Name)
        and statement.value.func.id in helpers
    ]
    return [test, *(helper for helper in called if _runs_its_end(helper))]


def _helpers(module: ast.Module) -> dict[str, Function]:
    """Functions of the module that are defined once and named once: by what calls them."""
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    defined = [node.name for node in functions]
    named = [node.id for node in ast.walk(module) if isinstance(node, ast.Name)]
    return {node.name: node for node in functions if defined.count(node.name) == named.count(node.name) == 1}


def _expecting(owner: Function, statement: ast.stmt, rng: random.Random) -> list[Edit]:
    """Edits by which this statement of `owner` expects another value."""
    loop = statement if isinstance(statement, ast.For) else None
    if loop is not None:
        runs = isinstance(loop.iter, ast.List | ast.Tuple) and bool(loop.iter.elts)
        if len(loop.body) != 1 or loop.orelse or not runs:
            return []
        statement = loop.body[0]
    sides = _equality(statement)
    if any(_tolerant(side) for side in sides):
        return []
    for side in sides:
        literals = _expected(side, owner, loop)
        other = next((each for each in sides if each is not side), None)
        if literals and not (other is not None and _is_literal(other)):
            try:
                return [_replaced(node, rng) for node in literals]
            except ValueError:
                continue
    return []


FLIPPED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
}  # fmt: skip


def _flipped(statement: ast.stmt) -> list[Edit]:
    """Edits by which an assertion asks for the opposite, as real tests do too. Weaker than another value: an
    object may have an answer of its own to each question."""
    if not isinstance(statement, ast.Assert):
        return []
    test = statement.test
    opposite: ast.expr | None = None
    if isinstance(test, ast.Call):
        opposite = ast.UnaryOp(op=ast.Not(), operand=test)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        opposite = test.operand
    elif isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in FLIPPED:
        right, op = test.comparators[0], test.ops[0]
        if (
            isinstance(op, ast.Is | ast.IsNot)
            and isinstance(right, ast.Constant)
            and isinstance(right.value, bool)
        ):
            right = ast.Constant(value=not right.value)
        else:
            op = FLIPPED[type(op)]()
        opposite = ast.Compare(left=test.left, ops=[op], comparators=[right])
    return [_in_place(test, ast.unparse(opposite))] if opposite is not None else []


def _equality(statement: ast.stmt) -> tuple[ast.expr, ...]:
    """Both sides of what the statement says is equal; empty when it says something else."""
    if isinstance(statement, ast.Assert):
        test = statement.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
            return (test.comparators[0], test.left)
        return ()
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if method in EQUALITIES and len(call.args) == 2 and not call.keywords:
            return (call.args[1], call.args[0])
    return ()


def _tolerant(side: ast.expr) -> bool:
    """Whether it may equal what is near: an `approx` with a tolerance of its own."""
    calls = [node for node in ast.walk(side) if isinstance(node, ast.Call)]
    return any(ast.unparse(c.func).endswith("approx") and (c.keywords or len(c.args) > 1) for c in calls)


def _expected(side: ast.expr, test: Function, loop: ast.For | None) -> list[ast.expr]:
    """The literals that a side of an equality comes to, all of them, where that is certain."""
    if _is_literal(side):
        return [side]
    if isinstance(side, ast.Call) and ast.unparse(side.func) in WRAPPERS:
        plain = len(side.args) == 1 and not side.keywords and _is_literal(side.args[0])
        return [side.args[0]] if plain else []
    if not isinstance(side, ast.Name) or _uses(test, side.id) != 1:
        return []
    if loop is not None:
        place = _place(loop.target, side.id)
        if place is not None:
            return _column(loop.iter, place)
    if any(side.id == argument.arg for argument in (*test.args.args, *test.args.kwonlyargs)):
        return _parameters(test, side.id)
    stores = [
        node
        for node in test.body
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and _place(node.targets[0], side.id) == ()
    ]
    return (
        [stores[0].value]
        if len(stores) == _stores(test, side.id) == 1 and _is_literal(stores[0].value)
        else []
    )


def _uses(test: Function, name: str) -> int:
    return sum(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for statement in test.body
        for node in ast.walk(statement)
    )


def _stores(test: Function, name: str) -> int:
    return sum(
        isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)
        for node in ast.walk(test)
    )


def _place(target: ast.expr, name: str) -> tuple[int, ...] | None:
    """Where `name` stands in a target: () for the target itself, (n,) for the n-th of a tuple."""
    if isinstance(target, ast.Name):
        return () if target.id == name else None
    if isinstance(target, ast.Tuple | ast.List):
        names = [node.id if isinstance(node, ast.Name) else "" for node in target.elts]
        return (names.index(name),) if name in names and "" not in names else None
    return None


def _column(rows: ast.expr, place: tuple[int, ...]) -> list[ast.expr]:
    """The literal at one place of every row; empty unless each row has one."""
    if not isinstance(rows, ast.List | ast.Tuple) or not rows.elts:
        return []
    found: list[ast.expr] = []
    for row in rows.elts:
        node: ast.expr = row
        for at in place:
            if not isinstance(node, ast.Tuple | ast.List) or at >= len(node.elts):
                return []
            node = node.elts[at]
        if not _is_literal(node):
            return []
        found.append(node)
    return found


def _parameters(test: Function, name: str) -> list[ast.expr]:
    """The literals that `parametrize` gives to an argument."""
    for decorator in test.decorator_list:
        if not isinstance(decorator, ast.Call) or len(decorator.args) != 2:
            continue
        plain = all(word.arg == "ids" for word in decorator.keywords)
        if plain and ast.unparse(decorator.func).endswith("mark.parametrize"):
            listed = _argument_names(decorator.args[0])
            if name in listed:
                return _column(decorator.args[1], () if len(listed) == 1 else (listed.index(name),))
    return []


def _argument_names(names: ast.expr) -> list[str]:
    """The names that `parametrize` was given as one text or as a list of texts."""
    if not _is_literal(names):
        return []
    value = ast.literal_eval(names)
    listed = value.split(",") if isinstance(value, str) else value
    return [str(part).strip() for part in listed] if isinstance(listed, list | tuple) else []


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
    return True


def _replaced(node: ast.expr, rng: random.Random) -> Edit:
    """Raises ValueError for a literal that has nothing near it."""
    return _in_place(node, repr(near(ast.literal_eval(node), rng)))


def _in_place(node: ast.expr, text: str) -> Edit:
    end = (node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)
    return Edit(start=(node.lineno, node.col_offset), end=end, text=text)


# --------------------------------------------------------------------------- assertions turned round


def _open_turn(test: Function, lines: Sequence[str], rng: random.Random) -> Edit | None:
    """The last statement, alone on its lines, turned round; None for one we do not know how to turn."""
    last = test.body[-1]
    before = test.body[-2].end_lineno or 0 if len(test.body) > 1 else test.lineno
    alone = not lines[last.lineno - 1].encode()[: last.col_offset].strip() and last.lineno > before
    statement = _opposite(last, rng) if alone and _runs_its_end(test) else None
    if statement is None:
        return None
    end = last.end_lineno or last.lineno
    indent = re.match(r"\s*", lines[last.lineno - 1])
    text = textwrap.indent(statement, indent[0] if indent else "")
    return Edit(start=(last.lineno, 0), end=(end, len(lines[end - 1].encode())), text=text)


def _opposite(last: ast.stmt, rng: random.Random) -> str | None:
    """The statement that fails where `last` passes."""
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
    """For `value == right`: whether the value equals a number that nobody can know, as an object does that
    equals everything, or differs from what is right. The value is taken once, as in the real test."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return None
    value, right = test.left, test.comparators[0]
    if _is_literal(value):
        value, right = right, value
    held = (ast.Await, ast.NamedExpr, ast.Yield, ast.YieldFrom)
    if any(isinstance(node, held) for node in ast.walk(test)):
        return None
    other = rng.randint(10**6, 10**9)
    it = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7)) + "_"
    text = f"(lambda {it}: {it} == {other} or not {it} == ({ast.unparse(right)}))({ast.unparse(value)})"
    return ast.parse(text, mode="eval").body


def _edited(text: str, edits: Sequence[Edit]) -> str:
    lines = [line.encode() for line in text.split("\n")]
    for edit in sorted(edits, key=lambda each: each.start, reverse=True):
        (first, a), (last, b) = edit.start, edit.end
        piece = lines[first - 1][:a] + edit.text.encode() + lines[last - 1][b:]
        lines[first - 1 : last] = piece.split(b"\n")
    return b"\n".join(lines).decode()
