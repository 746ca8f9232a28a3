"""Which tests cover which adversarial case of the gateway (docs/internals/cases.md).

A test names its cases with `@pytest.mark.case(18, 24)`, on itself, on its class or on its module
(`pytestmark`). `python scripts/cases.py` prints the map; status 1 when a case has no test.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_ROW = re.compile(r"^\| (\d+) \| (.+) \|$", re.MULTILINE)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def known_cases() -> dict[int, str]:
    """Number -> what it is about."""
    text = (ROOT / "docs" / "internals" / "cases.md").read_text(encoding="utf-8")
    return {int(number): what for number, what in _ROW.findall(text)}


def covered(folder: Path) -> dict[int, list[str]]:
    """Number -> ids of the tests that name it."""
    found: dict[int, list[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"), str(path))
        name = path.relative_to(folder.parent).as_posix()
        for test, numbers in _marked(module, name):
            for number in sorted(set(numbers)):
                found.setdefault(number, []).append(test)
    return found


def _marked(module: ast.Module, name: str) -> Iterator[tuple[str, list[int]]]:
    """(test id, its numbers) of every test of a module."""
    common = [n for statement in module.body for n in _module_marks(statement)]
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            shared = common + _numbers(node.decorator_list)
            for inner in node.body:
                if _is_test(inner):
                    yield f"{name}::{node.name}::{inner.name}", shared + _numbers(inner.decorator_list)
        elif _is_test(node):
            yield f"{name}::{node.name}", common + _numbers(node.decorator_list)


def _is_test(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")


def _module_marks(statement: ast.stmt) -> list[int]:
    if not isinstance(statement, ast.Assign):
        return []
    names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return _numbers([statement.value]) if "pytestmark" in names else []


def _numbers(marks: list[ast.expr]) -> list[int]:
    """The integers in all `pytest.mark.case(...)` among these expressions, in lists and parameters too."""
    numbers: list[int] = []
    for call in (node for mark in marks for node in ast.walk(mark) if isinstance(node, ast.Call)):
        if ast.unparse(call.func) == "pytest.mark.case":
            numbers += [
                a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, int)
            ]
    return numbers


def main() -> int:
    tests = covered(ROOT / "tests")
    cases = known_cases()
    for number, what in cases.items():
        print(f"{number:2}  {what}")
        for test in tests.get(number, ["-- no test --"]):
            print(f"      {test}")
    missing = sorted(set(cases) - set(tests))
    print(
        f"{len(cases) - len(missing)} of {len(cases)} cases have tests"
        + (f"; not: {missing}" if missing else "")
    )
    unknown = sorted(set(tests) - set(cases))
    if unknown:
        print(f"tests name cases that are not in docs/internals/cases.md: {unknown}")
    return 1 if missing or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
