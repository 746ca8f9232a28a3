"""Literals of a test that, replaced by another value, must make it fail.

Only in statements that a pass proves to have run.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from insitu_tasksets.mutation.source_edits import Source, words

EQUALITIES = frozenset(
    {"assertEqual", "assertListEqual", "assertTupleEqual", "assertDictEqual", "assertSetEqual",
     "assertSequenceEqual", "assertMultiLineEqual", "assertCountEqual", "assertIs"}
)  # fmt: skip
WRAPPERS = frozenset({"approx", "pytest.approx", "tuple", "list"})
"""Calls that keep different literals different."""

COLLECTIONS = frozenset({"set", "frozenset", "deque"})
DATES = frozenset({"date", "datetime", "time", "timedelta"})
"""Constructors in lower case; others begin with a capital letter."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The expected values of one statement."""

    rows: tuple[ast.expr, ...]
    """Literals, one for each execution of the statement."""
    tests: bool
    """Whether each row is a test of its own (`parametrize`)."""
    repeated: bool
    """Whether the same expression is asserted elsewhere: two answers would reveal the mutation."""


class Module:
    """A parsed test file."""

    def __init__(self, module: ast.Module, source: Source) -> None:
        self.source = source
        self.helpers = _helpers(module)
        self._functions = {node.name for node in ast.walk(module) if isinstance(node, Function)}
        statements = (node for node in ast.walk(module) if isinstance(node, ast.stmt))
        self._asked = Counter(ast.dump(side) for node in statements for side in _equality(node))

    def expectations(self, test: Function) -> Iterator[Expectation]:
        """Yield the expectations of a test and of the helpers that it calls."""
        for owner in self.owners(test):
            for statement in owner.body:
                found = self._expecting(owner, statement)
                if found is not None:
                    yield found

    def owners(self, test: Function) -> list[Function]:
        """Return the test and its helpers, if a pass means that all of their statements ran."""
        if not runs_to_end(test):
            return []
        called = [
            self.helpers[statement.value.func.id]
            for statement in test.body
            if isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Call)
            and isinstance(statement.value.func, ast.Name)
            and statement.value.func.id in self.helpers
        ]
        return [test, *(helper for helper in called if runs_to_end(helper))]

    def expects_nothing(self, test: Function, row: ast.expr | None = None) -> bool:
        """Return whether all that the test asserts is that something is None, empty or blank.

        `row`: the value in place of a parameter, which is then all that is asserted.

        No mutation of these looks real, but they are also what anybody guesses first: forging gains nothing.
        """
        if any(self._may_assert(node) for node in ast.walk(test)):
            return False
        asserts = sum(_asserts(node) for node in ast.walk(test))
        if row is not None:
            return asserts == 1 and _is_nothing(row)
        named = {
            node.targets[0].id: node.value
            for node in test.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        found = 0
        for statement in test.body:
            sides = [named.get(s.id, s) if isinstance(s, ast.Name) else s for s in _equality(statement)]
            found += any(_is_nothing(side) for side in sides)
        return 0 < asserts == found and runs_to_end(test)

    def _may_assert(self, node: ast.AST) -> bool:
        """Return whether a node calls a helper of the test file, which may assert more."""
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Name):
            return node.func.id in self._functions
        own = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in ("self", "cls")
        return own and not _asserts(node)

    def revealing_words(self, test: Function) -> frozenset[str]:
        """Return the words of name, docstring, comments, messages and case ids of a test."""
        texts: list[str] = []
        for owner in self.owners(test):
            texts += [owner.name, ast.get_docstring(owner) or "", self.source.comments(owner)]
            for node in ast.walk(owner):
                if isinstance(node, ast.Assert) and node.msg is not None:
                    texts.append(ast.unparse(node.msg))
                elif isinstance(node, ast.keyword) and node.arg in ("ids", "msg"):
                    texts.append(ast.unparse(node.value))
        return words(" ".join(texts))

    def _expecting(self, owner: Function, statement: ast.stmt) -> Expectation | None:
        loop = statement if isinstance(statement, ast.For) else None
        if loop is not None:
            runs = isinstance(loop.iter, ast.List | ast.Tuple) and bool(loop.iter.elts)
            if len(loop.body) != 1 or loop.orelse or not runs:
                return None
            statement = loop.body[0]
        sides = _equality(statement)
        if any(_tolerant(side) for side in sides):
            return None
        for side in sides:
            literals, tests = _expected(side, owner, loop)
            other = next((each for each in sides if each is not side), None)
            if literals and not (other is not None and is_literal(other)):
                again = loop is None and not tests and other is not None and self._asked[ast.dump(other)] > 1
                return Expectation(rows=tuple(literals), tests=tests, repeated=again)
        return None


def runs_to_end(test: Function) -> bool:
    """Return whether a pass means that the last statement ran."""
    leaves = (ast.Return, ast.Yield, ast.YieldFrom)
    return not any(isinstance(node, leaves) for node in ast.walk(test))


def _helpers(module: ast.Module) -> Mapping[str, Function]:
    """Return functions of the module that are defined once and referenced once."""
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    defined = [node.name for node in functions]
    named = [node.id for node in ast.walk(module) if isinstance(node, ast.Name)]
    return {node.name: node for node in functions if defined.count(node.name) == named.count(node.name) == 1}


def _equality(statement: ast.stmt) -> tuple[ast.expr, ...]:
    """Return both sides of an asserted equality, or ()."""
    if isinstance(statement, ast.Assert):
        test = statement.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
            return (test.comparators[0], test.left)
        return ()
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        plain = len(call.args) == 2 and all(word.arg == "msg" for word in call.keywords)
        if (method in EQUALITIES and plain) or (method == "assertAlmostEqual" and _is_close(call)):
            return (call.args[1], call.args[0])
    return ()


def _is_close(call: ast.Call) -> bool:
    """Return whether an assertAlmostEqual tells numbers apart that differ in one digit (literals.STEPS)."""
    numbers = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant)]
    places = [word.value for word in call.keywords]
    exact = all(isinstance(n, ast.Constant) and isinstance(n.value, int) and n.value >= 6 for n in places)
    plain = all(isinstance(n, int | float) and (n == 0 or abs(n) >= 0.1) for n in numbers)
    return len(call.args) == 2 and exact and plain and all(word.arg == "places" for word in call.keywords)


def _asserts(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        return name.startswith("assert") or name in ("raises", "fail")
    return isinstance(node, ast.Assert)


def _is_nothing(side: ast.expr) -> bool:
    if isinstance(side, ast.Call):
        return ast.unparse(side) in ("set()", "frozenset()", "list()", "dict()", "tuple()")
    leaves = [node.value for node in ast.walk(side) if isinstance(node, ast.Constant)]
    blank = all(leaf is None or (isinstance(leaf, str | bytes) and not leaf.strip()) for leaf in leaves)
    return is_literal(side) and blank


def _tolerant(side: ast.expr) -> bool:
    """Return whether it is an `approx` with its own tolerance."""
    calls = [node for node in ast.walk(side) if isinstance(node, ast.Call)]
    return any(ast.unparse(c.func).endswith("approx") and (c.keywords or len(c.args) > 1) for c in calls)


def _expected(side: ast.expr, test: Function, loop: ast.For | None) -> tuple[list[ast.expr], bool]:
    """Return all literals that a side of an equality evaluates to, and whether each is a test of its own."""
    if is_literal(side):
        return [side], False
    if isinstance(side, ast.Call) and ast.unparse(side.func) in WRAPPERS:
        plain = len(side.args) == 1 and not side.keywords and is_literal(side.args[0])
        return [side.args[0]] if plain else [], False
    if (argument := _constructed(side)) is not None:
        return [argument], False
    if not isinstance(side, ast.Name) or _uses(test, side.id) != 1:
        return [], False
    if loop is not None:
        place = _place(loop.target, side.id)
        if place is not None:
            return _column(loop.iter, place), False
    if any(side.id == argument.arg for argument in (*test.args.args, *test.args.kwonlyargs)):
        return _parameters(test, side.id), True
    stores = [
        node
        for node in test.body
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and _place(node.targets[0], side.id) == ()
    ]
    if not len(stores) == _stores(test, side.id) == 1:
        return [], False
    value = stores[0].value if is_literal(stores[0].value) else _constructed(stores[0].value)
    return [value] if value is not None else [], False


def _constructed(side: ast.expr) -> ast.expr | None:
    """Return a literal argument of the first constructor in an expression, such as 9 of `Point(9, x)`.

    An object made with another first argument is another one; of later arguments that is less sure
    (`Fraction(0, 1) == Fraction(0, 2)`).
    """
    if isinstance(side, ast.Tuple | ast.List):
        found = (_constructed(each) for each in side.elts)
        return next((each for each in found if each is not None), None)
    if not isinstance(side, ast.Call):
        return None
    name = ast.unparse(side.func).rpartition(".")[2]
    if not (name[:1].isupper() or name in COLLECTIONS or name in DATES):
        return None
    arguments = [*side.args, *(word.value for word in side.keywords)]
    first = arguments[-1 if name in DATES else 0] if arguments else None
    if first is None or isinstance(first, ast.Starred):
        return None
    if not is_literal(first):
        return _constructed(first)
    parts = [ast.dump(each) for each in getattr(first, "elts", ())]
    # In a collection that forgets repeated elements, another value of one of them may change nothing.
    return first if len(set(parts)) == len(parts) else None


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
    """Return the position of `name` in a target: () for the target itself, (n,) for the n-th of a tuple."""
    if isinstance(target, ast.Name):
        return () if target.id == name else None
    if isinstance(target, ast.Tuple | ast.List):
        names = [node.id if isinstance(node, ast.Name) else "" for node in target.elts]
        return (names.index(name),) if name in names and "" not in names else None
    return None


def _column(rows: ast.expr, place: tuple[int, ...]) -> list[ast.expr]:
    """Return the literal at one position of every row; empty unless each row has one."""
    if not isinstance(rows, ast.List | ast.Tuple) or not rows.elts:
        return []
    found: list[ast.expr] = []
    for row in rows.elts:
        node: ast.expr = row
        for at in place:
            if not isinstance(node, ast.Tuple | ast.List) or at >= len(node.elts):
                return []
            node = node.elts[at]
        if not is_literal(node):
            return []
        found.append(node)
    return found


def _parameters(test: Function, name: str) -> list[ast.expr]:
    """Return the literals of an argument in `parametrize`."""
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
    """Return the argument names of `parametrize`, given as one string or a list."""
    if not is_literal(names):
        return []
    value = ast.literal_eval(names)
    listed = value.split(",") if isinstance(value, str) else value
    return [str(part).strip() for part in listed] if isinstance(listed, list | tuple) else []


def is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
    return True
