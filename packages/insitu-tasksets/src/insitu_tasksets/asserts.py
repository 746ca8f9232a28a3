"""Turns asserts, or a `check(candidate)` of asserts, into json_io cases, where these say exactly the same.

Exactly: every assert is `candidate(values) == value`, all of them literals, compared as Python compares.
Anything else (a loop, a tolerance, a helper, mere truth) stays a test that pytest runs.
"""

from __future__ import annotations

import ast
import math

from insitu.types import Case

MAX_POWER = 64


class NotPlain(Exception):
    """The test says more than calls and values."""


def parse_python(text: str, what: str) -> ast.Module:
    """Parse code of a row; raise ValueError. what: name of the code for the message."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{what} is not Python: {' '.join(str(error).split())[:100]}") from None


def cases_of(test: str, function: str) -> tuple[Case, ...]:
    """Return the cases of a test with a function check(candidate), or () when they would differ."""
    checks = [n for n in ast.parse(test).body if isinstance(n, ast.FunctionDef) and n.name == "check"]
    others = [n for n in ast.parse(test).body if not _harmless(n) and not isinstance(n, ast.FunctionDef)]
    if len(checks) != 1 or others or len(checks[0].args.args) != 1:
        return ()
    name = checks[0].args.args[0].arg
    try:
        found = [assert_case(statement, name, function) for statement in checks[0].body]
    except NotPlain:
        return ()
    return tuple(case for case in found if case is not None)


def _harmless(node: ast.stmt) -> bool:
    """Return whether a statement is a constant assigned to a name or a bare string."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    try:
        return isinstance(node, ast.Assign) and ast.literal_eval(node.value) is not NotPlain
    except ValueError:
        return False


def assert_case(node: ast.stmt, candidate: str, function: str) -> Case | None:
    """Return the case of an assert on a call of `candidate`; None without an assertion; raise NotPlain."""
    if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return None
    if not isinstance(node, ast.Assert):
        raise NotPlain
    test = node.test
    if isinstance(test, ast.Constant) and test.value:
        return None
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
        raise NotPlain
    call = test.left
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == candidate):
        raise NotPlain
    if call.keywords:
        raise NotPlain
    args = tuple(literal_value(arg) for arg in call.args)
    return Case(function=function, args=args, expected=literal_value(test.comparators[0]), exact=False)


def literal_value(node: ast.expr) -> object:
    """Return the value of an expression of literals; raise NotPlain."""
    if isinstance(node, ast.Constant):
        return _scalar(node.value)
    if isinstance(node, ast.List):
        return [literal_value(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(literal_value(item) for item in node.elts)
    if isinstance(node, ast.Set):
        return set(map(_key, node.elts))
    if isinstance(node, ast.Dict):
        return dict(zip(map(_key, node.keys), map(literal_value, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = literal_value(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    if isinstance(node, ast.BinOp):
        return _scalar(_folded(node.op, literal_value(node.left), literal_value(node.right)))
    raise NotPlain


def _key(node: ast.expr | None) -> object:
    """Return a value that may be in a set."""
    value = literal_value(node) if node is not None else []
    try:
        hash(value)
    except TypeError:
        raise NotPlain from None
    return value


def _scalar(value: object) -> object:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise NotPlain


def _folded(op: ast.operator, left: object, right: object) -> object:
    """Arithmetic on literals as Python does it, bounded."""
    if isinstance(op, ast.Add) and isinstance(left, str) and isinstance(right, str):
        return left + right
    if not _number(left) or not _number(right):
        raise NotPlain
    a, b = left, right
    if isinstance(op, ast.Add):
        return a + b  # type: ignore[operator]
    if isinstance(op, ast.Sub):
        return a - b  # type: ignore[operator]
    if isinstance(op, ast.Mult) and _small(a, b):
        return a * b  # type: ignore[operator]
    if isinstance(op, ast.Pow) and _small(a, b) and isinstance(b, int) and 0 <= b <= MAX_POWER:
        return a**b  # type: ignore[operator]
    raise NotPlain


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _small(*values: object) -> bool:
    return all(not isinstance(value, int) or abs(value) < 2**64 for value in values)


def plain_tests(test: str) -> list[str] | None:
    """Return the names of the tests of a file where only plain functions can be tests.

    None where only pytest can list them: classes, parameters, other decorators, tests made or imported at run
    time.
    """
    names: list[str] = []
    for node in ast.parse(test).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            if node.decorator_list or node.name in names:
                return None
            names.append(node.name)
        elif not _no_test(node):
            return None
    return names


def _no_test(node: ast.stmt) -> bool:
    """Whether a statement of a module surely brings no test."""
    if isinstance(node, ast.FunctionDef):
        # A fixture with parameters multiplies the tests that use it.
        return node.name != "pytest_generate_tests" and "params" not in map(_argument, ast.walk(node))
    if isinstance(node, ast.ClassDef):
        return not node.bases and not node.decorator_list and not node.name.startswith("Test")
    if isinstance(node, ast.Import | ast.ImportFrom):
        return not any(alias.name == "*" or "test" in (alias.asname or alias.name) for alias in node.names)
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "__name__ == '__main__'"
    if isinstance(node, ast.Assign):
        return not any("test" in ast.unparse(target).lower() for target in node.targets)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _argument(node: ast.AST) -> str:
    return (node.arg or "") if isinstance(node, ast.keyword) else ""
