"""docs/workflows.md has every line of the four systems, each with a status and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "workflows.md").read_text()
LINES = [*(f"S0.{n}" for n in range(1, 8)), *(f"S1.{n}" for n in range(1, 9)), "S2.1", "S3.1"]
ROWS = {match[1]: match[0] for match in re.finditer(r"^\| (S\d\.\d) \|.*\|$", PAGE, re.M)}


@pytest.mark.parametrize("line", LINES)
def test_a_line_has_a_status(line: str) -> None:
    status = ROWS[line].split("|")[-2].strip()
    assert status.startswith(("run", "contract", "needs", "Python run", "start script run")), status
    if not status.startswith("needs"):
        assert "`tests/" in status, status


def test_the_tests_exist() -> None:
    named = set(re.findall(r"`(tests/[\w/.]+)`", PAGE))
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).is_file()] == []
