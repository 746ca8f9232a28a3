"""Selection of `scripts/test --fast`: quick tests that start no process, what a change touches first.

Nothing is marked by hand. Files that import HEAVY modules are not collected. An audit hook skips a test where
it starts a process, a timer where it runs too long; if the code under test catches the skip, the test is
reported as skipped all the same. After SECONDS no further test starts.
"""

from __future__ import annotations

import ast
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from time_budget import TimeBudget

SECONDS = 70.0
"""From the start of pytest, collection included."""
TEST_SECONDS = 5.0
"""Most of one test."""
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"}
"""Audit events of a process start."""
HEAVY = {"torch", "transformers", "trl", "benchmarks", "insitu.training.trainer", "insitu.training.model"}
"""Modules whose import takes seconds."""


def imports_heavy(path: Path) -> bool:
    """Return whether a file, or a helper beside it that it imports, imports one of HEAVY at its start."""
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            helper = path.parent / f"{name}.py"
            heavy = any(f"{name}.".startswith(f"{module}.") for module in HEAVY)
            if heavy or (helper.is_file() and imports_heavy(helper)):
                return True
    return False


class FastTests(TimeBudget):
    """pytest plug-in of the selection."""

    def __init__(self) -> None:
        # Workers inherit the end from the process that started them.
        end = float(os.environ.setdefault("INSITU_FAST_END", str(time.time() + SECONDS)))
        super().__init__(end - time.time(), touched_share=1.0)
        self._running = False
        self._reason = ""
        sys.addaudithook(self._audit)
        settings.register_profile("fast", deadline=None, max_examples=10)
        settings.load_profile("fast")

    def _skip(self, reason: str) -> None:
        self._reason = reason
        pytest.skip(reason)

    def _audit(self, event: str, _arguments: tuple[Any, ...]) -> None:
        if self._running and event in STARTS:
            self._skip("starts a process")

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return True if collection_path.name.startswith("test_") and imports_heavy(collection_path) else None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._running, self._reason = True, ""
        signal.signal(signal.SIGALRM, lambda *_: self._skip(f"takes over {TEST_SECONDS:g} s"))
        signal.setitimer(signal.ITIMER_REAL, TEST_SECONDS)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._running = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[Any]:
        report = yield
        if self._reason and report.failed:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 0, f"Skipped: {self._reason}")
        return report
