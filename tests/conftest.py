"""A test that does not run proves nothing: under scripts/test, a skip for a reason not listed here fails."""

from __future__ import annotations

import os
import re

import pytest

KNOWN_SKIPS = (
    # Root and ordinary users are tested apart; no machine can do both.
    r"every other test already runs as an ordinary user",
    r"no Python that an ordinary user can run with whet's dependencies",
    r"unprivileged user namespaces are off here: .*",
    r"the namespaces mode needs root",
    r"mounting a small disk needs root",
    # Where root runs in a container: whet does without.
    r"bubblewrap is not installed",
    r"cannot mount a tmpfs: .*",
    r"no git in the box",
    # `make conformance` runs these agents; installing them takes gigabytes.
    r"real agents are started with WHET_REAL_AGENTS=1 only",
    r"\w+ is not installed: python -m whet\.harness\.known \w+",
)


def unknown_skips(config: pytest.Config) -> list[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or os.environ.get("WHET_KNOWN_SKIPS_ONLY", "") != "1":
        return []
    found = []
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not any(re.fullmatch(known, reason) for known in KNOWN_SKIPS):
            found.append(f"{report.nodeid}: {reason}")
    return found


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and unknown_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in unknown_skips(config):
        terminalreporter.write_line(f"unexpected skip: {line}", red=True)
