"""Selection of `scripts/test --changed`: a minute of tests that the change reaches, nearest first.

The change is what is not committed, else the newest commit. Run as a program it prints the test files in
order; as a plug-in it stops collecting and starting tests in time, and names how much it left out.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from fast import LEFT_OUT
from time_budget import ROOT, distance, git, reached

COLLECT_S, RUN_S = 20.0, 50.0
"""After the start: no further file is imported, no further test begins."""


def changed_now() -> set[str]:
    """Return the paths that are not committed, else those of the newest commit."""
    paths = [line[3:].split(" -> ")[-1] for line in git("status", "--porcelain", "-uall").splitlines()]
    return {*paths} or {*git("show", "--format=", "--name-only", "HEAD").split()}


def nearest(changed: set[str]) -> list[Path]:
    """Return the test files that the change reaches, by their number of imports from it."""
    paths = {ROOT / path for path in changed}
    tests = [path for path in ROOT.glob("tests/**/test_*.py") if distance(path, changed) < 2]
    return sorted(tests, key=lambda test: (min(reached(test).get(path, 99) for path in paths), test))


class ChangedTests:
    """pytest plug-in: within a minute, and tests that start processes only in files touched directly."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._changed = changed_now()
        self._left_out: Counter[str] = Counter()

    def _later_than(self, seconds: float) -> bool:
        return time.monotonic() - self._started > seconds

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if collection_path.name.startswith("test_") and self._later_than(COLLECT_S):
            self._left_out["files"] += 1
            return True
        return None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        away = {path: distance(path, self._changed) for path in {item.path for item in items}}
        kept = [
            item
            for item in items
            if not away[item.path] or not any(item.get_closest_marker(name) for name in LEFT_OUT)
        ]
        self._left_out["slow tests"] += len(items) - len(kept)
        items[:] = kept

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._later_than(RUN_S):
            self._left_out["tests"] += 1
            pytest.skip("out of time")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if left := [f"{count} {what}" for what, count in self._left_out.items() if count]:
            terminalreporter.write_line(f"left out: {', '.join(left)}; scripts/test runs all")


if __name__ == "__main__":
    print("\n".join(str(path.relative_to(ROOT)) for path in nearest(changed_now())))
