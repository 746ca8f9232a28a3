"""Mutated tests: real tests changed so that they must fail where the real ones pass.

A candidate that passes both forged. A mutated test keeps its name and its shape: where the expected value is
a literal (in the assertion, in rows of a loop or of `parametrize`, in an assignment), one token of it is
replaced by one of the same form, so only knowledge of the answer reveals the mutation. A comparison gets the
opposite operator. Any other assertion is negated, which is visible. Edits are made in the text at syntax tree
positions.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from insitu_tasksets.mutation.expectations import Expectation, Function, Module, is_literal, runs_to_end
from insitu_tasksets.mutation.source_edits import Edit, Source, end_of, in_place

QUESTIONS = {
    "assertTrue": "assertFalse", "assertFalse": "assertTrue", "assertIs": "assertIsNot",
    "assertIsNot": "assertIs",
    "assertIsNone": "assertIsNotNone", "assertIsNotNone": "assertIsNone", "assertIn": "assertNotIn",
    "assertNotIn": "assertIn", "assertLess": "assertGreaterEqual", "assertGreaterEqual": "assertLess",
    "assertGreater": "assertLessEqual", "assertLessEqual": "assertGreater",
}  # fmt: skip
"""Assertions whose opposite is as usual."""
OPPOSITE = {**QUESTIONS, "assertEqual": "assertNotEqual", "assertNotEqual": "assertEqual"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One mutation of a test."""

    edits: tuple[Edit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MutableTest:
    """A test with mutations, or one row of a parametrized test."""

    name: str
    """`Class::test` or `test`, as in the file."""
    hidden: bool
    """Whether its mutations look real."""
    ways: tuple[Mutation, ...]
    """Different mutations at the same place of the file."""
    nothing: bool = False
    """Whether all that it asserts is that something is None or empty; it may have no mutation."""
    row: int | None = None
    """Which row of `parametrize`; None for a whole test."""

    @property
    def key(self) -> str:
        return self.name if self.row is None else f"{self.name}[{self.row}]"


def mutable_tests(
    text: str,
    wanted: Sequence[str],
    seed: str,
    *,
    cases: Mapping[str, int],
    ways: int = 1,
) -> tuple[Source | None, list[MutableTest]]:
    """Return the editable source and the mutable tests of `wanted`, those that look real first.

    Each has up to `ways` mutations, the same for the same `seed`. `cases`: required cases of a parametrized
    test, 0 where all are; if they are its rows, each row is mutated by itself. Rows mutated together do not
    look real: a case that the candidate solves reveals the others.
    """
    tree = ast.parse(text)
    try:
        module = Module(tree, Source(text))
    except (SyntaxError, IndexError):
        return None, []
    nodes = dict(_tests(tree))
    hidden: list[MutableTest] = []
    seen: list[MutableTest] = []
    for name in wanted:
        if name not in nodes:
            continue
        rng = random.Random(f"{seed}/{name}")
        if rows := _rows(name, nodes[name], module, f"{seed}/{name}", ways, cases.get(name, 0)):
            hidden += rows
            continue
        alone = cases.get(name, 0) <= 1 and not _is_parametrized(name, nodes[name], tree)
        if drawn := _hidden_ways(nodes[name], module, f"{seed}/{name}", ways):
            (hidden if alone else seen).append(MutableTest(name=name, hidden=alone, ways=drawn))
            continue
        edits = _visible_mutation(nodes[name], module.source, rng)
        nothing = module.expects_nothing(nodes[name])
        if edits or nothing:
            way = (Mutation(edits=tuple(edits)),) if edits else ()
            seen.append(MutableTest(name=name, hidden=False, ways=way, nothing=nothing))
    return module.source, [*hidden, *seen]


def _tests(module: ast.Module) -> Iterator[tuple[str, Function]]:
    """Yield (name, node) of the tests of a module and its classes with a unique name."""
    for prefix, body in [("", module.body)] + [
        (f"{node.name}::", node.body) for node in module.body if isinstance(node, ast.ClassDef)
    ]:
        tests = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        names = [node.name for node in tests]
        yield from ((prefix + node.name, node) for node in tests if names.count(node.name) == 1)


def _is_parametrized(name: str, node: Function, module: ast.Module) -> bool:
    """Return whether a decorator of a test, of its class or of a fixture gives it several cases."""
    owner = name.rpartition("::")[0]
    wanted = {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
    around = [
        each
        for each in module.body
        if (isinstance(each, ast.ClassDef) and each.name == owner)
        or (isinstance(each, Function) and each.name in wanted)
    ]
    marks = [ast.unparse(mark) for each in (node, *around) for mark in each.decorator_list]
    return any("parametrize" in mark or "params=" in mark for mark in marks)


# --------------------------------------------------------------------------- mutated values


def _rows(name: str, test: Function, module: Module, seed: str, most: int, cases: int) -> list[MutableTest]:
    """Return the rows of a parametrized test, of the expected value with most mutable rows; else []."""
    revealed = module.revealing_words(test)
    best: list[MutableTest] = []
    for place in module.expectations(test):
        if not place.tests or cases not in (0, len(place.rows)):
            continue
        found: list[MutableTest] = []
        for number, row in enumerate(place.rows):
            try:
                edits = module.source.others(row, revealed, seed, most)[0]
            except ValueError:
                edits = ()
            ways = tuple(Mutation(edits=(edit,)) for edit in edits)
            nothing = module.expects_nothing(test, row)
            found.append(MutableTest(name=name, hidden=bool(ways), ways=ways, nothing=nothing, row=number))
        if sum(each.hidden for each in found) > sum(each.hidden for each in best):
            best = found
    return best


def _hidden_ways(test: Function, module: Module, seed: str, most: int) -> tuple[Mutation, ...]:
    """Return up to `most` mutations of one expected value, else one of a comparison.

    An expectation that the rest of the file reveals is a fallback.
    """
    rng = random.Random(seed)
    revealed = module.revealing_words(test)
    places = list(module.expectations(test))
    rng.shuffle(places)
    best: tuple[tuple[bool, int], tuple[Mutation, ...]] | None = None
    for place in places:
        for ways, shown in _value_ways(place, module.source, revealed, rng, seed, most):
            rank = (shown or place.repeated, -len(ways))
            if best is None or rank < best[0]:
                best = rank, ways
            if not shown:
                break
        if best is not None and best[0] == (False, -most):
            break
    if best is not None:
        return best[1]
    statements = [statement for owner in module.owners(test) for statement in owner.body]
    rng.shuffle(statements)
    for statement in statements:
        if errors := _other_errors(statement, test, module.source, rng):
            return tuple(Mutation(edits=(edit,)) for edit in errors[:most])
    flips = (_flipped(each, module.source) for each in statements)
    return next(((Mutation(edits=tuple(edits)),) for edits in flips if edits), ())


def _value_ways(
    place: Expectation,
    source: Source,
    revealed: frozenset[str],
    rng: random.Random,
    seed: str,
    most: int,
) -> Iterator[tuple[tuple[Mutation, ...], bool]]:
    """Yield sets of mutations of an expectation, and whether words of the test reveal the right value."""
    rows = list(place.rows)
    # One row of a loop only: the candidate may know the right answer of another one.
    for row in rng.sample(rows, len(rows)):
        try:
            edits, shown = source.others(row, revealed, seed, most)
            if place.tests:
                every = [source.others(each, revealed, seed, most)[0] for each in rows]
                yield tuple(Mutation(edits=together) for together in zip(*every, strict=False)), shown
                return
        except ValueError:
            continue
        yield tuple(Mutation(edits=(edit,)) for edit in edits), shown


ERRORS = (
    "ValueError", "TypeError", "KeyError", "IndexError", "AttributeError", "ZeroDivisionError",
    "RuntimeError",
)  # fmt: skip
"""Errors of which none is a kind of another."""


def _other_errors(statement: ast.stmt, test: Function, source: Source, rng: random.Random) -> list[Edit]:
    """Return edits of `with pytest.raises(ValueError)` or of unittest's to other errors, shuffled."""
    if not isinstance(statement, ast.With) or len(statement.items) != 1:
        return []
    call = statement.items[0].context_expr
    if not isinstance(call, ast.Call) or not call.args or not isinstance(call.args[0], ast.Name):
        return []
    name = ast.unparse(call.func).rpartition(".")[2]
    words = Counter(node.id for node in ast.walk(test) if isinstance(node, ast.Name))
    expected = call.args[0]
    # A second error that the test names would tell which one is meant.
    known = name == "raises" or name.startswith("assertRaises")
    if not known or expected.id not in ERRORS or sum(words[error] for error in ERRORS) != 1:
        return []
    return [in_place(expected, other) for other in rng.sample(ERRORS, len(ERRORS)) if other != expected.id]


FLIPPED: Mapping[type[ast.cmpop], tuple[str, str]] = {
    ast.Is: ("is", "is not"), ast.IsNot: ("not", ""), ast.In: ("in", "not in"), ast.NotIn: ("not", ""),
    ast.Lt: ("<", ">="), ast.GtE: (">=", "<"), ast.Gt: (">", "<="), ast.LtE: ("<=", ">"),
}  # fmt: skip
"""Operator -> a token of it, and the token of the opposite operator. Equality is mutated by its value."""


def _flipped(statement: ast.stmt, source: Source) -> list[Edit]:
    """Return edits that invert a comparison; weaker than another value."""
    if not isinstance(statement, ast.Assert):
        return _other_method(statement, QUESTIONS, source)
    test = statement.test
    start = (test.lineno, test.col_offset)
    plain = (ast.Call, ast.Name, ast.Attribute, ast.Subscript)
    if isinstance(test, plain):
        return [Edit(start=start, end=start, text="not ")] if source.parted(test) else []
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and isinstance(test.operand, plain):
        _, after = source.between(start, end_of(test))[:2]
        return [Edit(start=start, end=after.start, text="")] if after.start[0] == start[0] else []
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in FLIPPED:
        right, op = test.comparators[0], test.ops[0]
        if (
            isinstance(op, ast.Is | ast.IsNot)
            and isinstance(right, ast.Constant)
            and isinstance(right.value, bool)
        ):
            return [in_place(right, str(not right.value))]
        return _operator(test, *FLIPPED[type(op)], source)
    return []


def _operator(test: ast.Compare, old: str, new: str, source: Source) -> list[Edit]:
    left, right = test.left, test.comparators[0]
    tokens = source.between(end_of(left), (right.lineno, right.col_offset))
    at = next((n for n, token in enumerate(tokens) if token.text == old), None)
    if at is None:
        return []
    if new:
        return [tokens[at].instead(new)]
    # With the blank beside it: after `is`, or before `in`.
    before = tokens[at - 1] if at and tokens[at - 1].text == "is" else None
    if before is not None and before.end[0] == tokens[at].start[0]:
        return [Edit(start=before.end, end=tokens[at].end, text="")]
    behind = tokens[at + 1] if at + 1 < len(tokens) else None
    if behind is not None and behind.text == "in" and behind.start[0] == tokens[at].end[0]:
        return [Edit(start=tokens[at].start, end=behind.start, text="")]
    return []


# --------------------------------------------------------------------------- negated assertions


def _visible_mutation(test: Function, source: Source, rng: random.Random) -> list[Edit]:
    """Return edits that negate the last statement; none for an unknown form."""
    last = test.body[-1]
    before = test.body[-2].end_lineno or 0 if len(test.body) > 1 else test.lineno
    if not source.alone(last) or last.lineno <= before or not runs_to_end(test):
        return []
    if isinstance(last, ast.Assert):
        if not source.parted(last.test):
            return []
        text = _unequal(last.test, source, rng) or f"not ({source.of(last.test)})"
        return [in_place(last.test, text)]
    if not isinstance(last, ast.Expr) or not isinstance(last.value, ast.Call):
        return []
    call = last.value
    if not isinstance(call.func, ast.Attribute) or ast.unparse(call.func.value) != "self":
        return []
    if len(call.args) > 2 or call.keywords:
        return []
    if call.func.attr == "assertEqual" and len(call.args) == 2:
        equal = ast.Compare(left=call.args[0], ops=[ast.Eq()], comparators=[call.args[1]])
        unequal = _unequal(equal, source, rng)
        if unequal is not None:
            return [in_place(call, f"self.assertTrue({unequal})")]
    return _other_method(last, OPPOSITE, source)


def _other_method(statement: ast.stmt, opposite: Mapping[str, str], source: Source) -> list[Edit]:
    """Return the edit of `self.assertTrue(...)` to the opposite assertion, if there is one."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return []
    func = statement.value.func
    if not isinstance(func, ast.Attribute) or ast.unparse(func.value) != "self":
        return []
    named = source.between((func.lineno, func.col_offset), end_of(func))
    return [named[-1].instead(opposite[func.attr])] if named and func.attr in opposite else []


def _unequal(test: ast.expr, source: Source, rng: random.Random) -> str | None:
    """Return the negation of `value == right` that also catches an object that equals everything.

    The value is evaluated once, as in the real test; it fails by equality with a random number.
    """
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return None
    value, right = test.left, test.comparators[0]
    if is_literal(value):
        value, right = right, value
    held = (ast.Await, ast.NamedExpr, ast.Yield, ast.YieldFrom)
    if any(isinstance(node, held) for node in ast.walk(test)):
        return None
    other = rng.randint(10**6, 10**9)
    it = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7)) + "_"
    actual, expected = source.of(value), source.of(right)
    return f"(lambda {it}: {it} == {other} or not {it} == ({expected}))({actual})"
