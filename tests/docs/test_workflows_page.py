"""docs/workflows.md has every line and row of the four systems, each with a status, and tests that exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "workflows.md").read_text()
LINES = [*(f"S0.{n}" for n in range(1, 8)), *(f"S1.{n}" for n in range(1, 9)), "S2.1", "S3.1"]
COMMANDS = {match[1]: match[0] for match in re.finditer(r"^\| (S\d\.\d) \|.*\|$", PAGE, re.M)}
NAMED = re.compile(r"`((?:tests|scripts)/[\w/.-]+)`")


@pytest.fixture(scope="module")
def results() -> ModuleType:
    """scripts/results.py, which counts the rows."""
    spec = importlib.util.spec_from_file_location("results", ROOT / "scripts" / "results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("line", LINES)
def test_a_line_has_a_status(line: str) -> None:
    status = COMMANDS[line].split("|")[-2].strip()
    assert status.startswith(("run", "contract", "needs", "Python run", "start script run")), status
    if not status.startswith("needs"):
        assert "`tests/" in status, status


def test_the_tests_exist() -> None:
    named = set(NAMED.findall(PAGE))
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_each_row_has_a_status_and_a_test_or_a_reason(results: ModuleType) -> None:
    rows = results.ROW.findall(PAGE)
    assert [int(number) for number, *_ in rows] == list(range(1, 189))
    for number, what, status, why in rows:
        assert status in results.STATUSES, number
        assert PAGE.count(f"\n| {status} | ") == 1, f"{status} is not explained"
        if status in ("run", "contract"):
            assert NAMED.search(why), f"row {number} ({what}) is {status} by no test"
        else:
            assert len(re.sub(r"\(.*?\)|`.*?`", "", why).split()) >= 2, f"row {number} has no reason"


def test_the_counts_are_those_of_the_rows(results: ModuleType) -> None:
    assert results.counted(PAGE) == PAGE, "run python scripts/results.py"
    assert results.counted(re.sub(r"(?m)^(\| \d+ \| .* \|) needs \|", r"\1 run |", PAGE, count=1)) != PAGE
