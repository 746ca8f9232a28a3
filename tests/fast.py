"""Rules of `scripts/test --fast`: tests without a mark of LEFT_OUT, which start no process."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"}
"""Audit events of a process start."""
LEFT_OUT = ("slow", "full", "bridge", "ray")
"""Marks of the tests that `--fast` does not run; those of the last two have environments of their own."""
MARKED_FILE = re.compile(rf"^pytestmark = .*\bmark\.({'|'.join(LEFT_OUT)})\b", re.MULTILINE)


class ProcessRule:
    """pytest plug-in: a test without a mark that starts a process fails, even if it catches the exception.

    Active in every run, so that a missing mark is found before somebody calls `--fast`.
    """

    def __init__(self) -> None:
        self._running = False
        self._started = ""
        sys.addaudithook(self._audit)

    def _audit(self, event: str, _arguments: tuple[Any, ...]) -> None:
        if self._running and event in STARTS:
            self._started = f"starts a process ({event}): mark it with pytest.mark.slow"
            pytest.fail(self._started)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        marked = any(item.get_closest_marker(name) for name in LEFT_OUT)
        self._running, self._started = not marked, ""
        try:
            return (yield)
        finally:
            self._running = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[Any]:
        report = yield
        if self._started:
            report.outcome, report.longrepr = "failed", self._started
        return report


class FastTests:
    """pytest plug-in of the selection: files that are marked as a whole are not imported."""

    def __init__(self) -> None:
        settings.register_profile("fast", deadline=None, max_examples=10)
        settings.load_profile("fast")

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            asked = " (or -k names none)" if config.option.keyword else ""
            terminalreporter.write_line(
                f"0 tests: all are slow{asked}; scripts/test without --fast runs them"
            )

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if collection_path.name.startswith("test_") and MARKED_FILE.search(collection_path.read_text()):
            return True
        return None
