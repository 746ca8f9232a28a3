"""scripts/newest: which releases are tried, what becomes of each, and the page that it writes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import newest as module

    yield module
    sys.modules.pop("newest")


def test_only_what_is_newer_is_tried_and_the_page_says_how_it_went(newest: ModuleType) -> None:
    subject = newest.Subject
    subjects = [
        subject("agent", "same", "npm", "same", "1.0"),
        subject("agent", "pi", "npm", "pi", "0.87.1", ("run",)),
        subject("peer", "broken", "pip", "broken", "1.0", ("run",)),
        subject("peer", "gone", "pip", "gone", "1.0", ("run",)),
        subject("engine", "vllm", "pip", "vllm", "0.32.0", reason="no build for CPUs"),
    ]
    offered = {"same": "1.0", "pi": "1.6.0", "broken": "2.0", "gone": "", "vllm": "0.33.0"}
    tried = []

    def attempt(one: object, version: str) -> str:
        tried.append((one.name, version))
        return "passed" if one.name == "pi" else "failed: 1 test"

    rows = list(newest.rows(subjects, lambda one: offered[one.name], attempt))
    assert tried == [("pi", "1.6.0"), ("broken", "2.0")]
    assert [row.failed for row in rows] == [False, False, True, False, False]
    lines = newest.page(rows, "2026-11-29").splitlines()[-5:]
    assert lines == [
        "| agent | same | 1.0 | 1.0 | is the pin | 2026-11-29 |",
        "| agent | pi | 0.87.1, 1.6.0, 0.86.1, 0.85.1 | 1.6.0 | passed | 2026-11-29 |",
        "| peer | broken | 1.0 | 2.0 | failed: 1 test | 2026-11-29 |",
        "| peer | gone | 1.0 | - | no release to be had here | 2026-11-29 |",
        "| engine | vllm | 0.32.0, 0.26 | 0.33.0 | not tried: no build for CPUs | 2026-11-29 |",
    ]


def test_every_agent_and_package_has_a_pin_and_tests_that_exist(newest: ModuleType) -> None:
    subjects = [*newest.agents(), *newest.packages()]
    assert {"pi", "codex", "cline", "trl", "openai", "vllm"} <= {one.name for one in subjects}
    for one in subjects:
        assert one.pin
        assert bool(one.tests) != bool(one.reason)
        assert all((ROOT / text).exists() for text in one.tests if text.startswith(("scripts/", "tests/")))


def test_an_unknown_name_is_one_line(
    newest: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["newest", "no_such"])
    with pytest.raises(SystemExit, match="2"):
        newest.main()
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("newest: error: unknown: no_such (known: aider, ")


def test_what_a_failed_command_said_last_fits_a_cell(newest: ModuleType) -> None:
    done = subprocess.CompletedProcess((), 1, "one\n", "a | b " + "x" * 200 + "\n\n")
    assert newest.last(done).startswith("a / b xxx")
    assert len(newest.last(done)) == 120
