"""Every adversarial case of docs/internals/cases.md has a test; the script that says so reads marks right."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cases() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cases", ROOT / "scripts" / "cases.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_case_has_a_test() -> None:
    # In a process of its own: in a long one CPython 3.11 was seen to fail with "SystemError: AST constructor
    # recursion depth mismatch".
    script = [sys.executable, str(ROOT / "scripts" / "cases.py")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1] == "60 of 60 cases have tests", done.stdout[-1000:] + done.stderr
    assert done.returncode == 0


def test_marks_are_read_wherever_pytest_reads_them(cases: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text(
        "import pytest\n"
        "pytestmark = [pytest.mark.case(1), pytest.mark.slow]\n"
        "@pytest.mark.case(2, 3)\n"
        "async def test_a(): ...\n"
        "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.case(4))])\n"
        "def test_b(x): ...\n"
        "@pytest.mark.case(5)\n"
        "class TestC:\n"
        "    def test_d(self): ...\n"
        "    def helper(self): ...\n"
        "@pytest.mark.case(6)\n"
        "def not_a_test(): ...\n"
    )
    found = cases.covered(tmp_path / "tests")
    assert sorted(found) == [1, 2, 3, 4, 5]
    assert found[5] == ["tests/test_one.py::TestC::test_d"]
    assert found[4] == ["tests/test_one.py::test_b"]
    assert len(found[1]) == 3
