"""The marks of tests, and the selection of `scripts/test --fast`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fast import MARKED_FILE

TESTS = Path(__file__).parents[1]
CONFTEST = """
from fast import FastTests, ProcessRule

def pytest_configure(config):
    config.pluginmanager.register(ProcessRule())
    config.pluginmanager.register(FastTests())
"""
SUITE = """
import subprocess
import sys

import pytest

def start():
    return subprocess.run([sys.executable, "-c", ""], check=True)

def test_plain():
    pass

def test_process():
    start()

def test_caught():
    try:
        start()
    except BaseException:
        pass

@pytest.mark.slow
def test_marked():
    start()

@pytest.mark.bridge
def test_bridge():
    start()
"""


@pytest.mark.slow
def test_a_process_without_a_mark_fails_and_marked_files_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_suite.py").write_text(SUITE)
    marks = (
        "pytest.mark.slow",
        "[pytest.mark.numeric, pytest.mark.slow]",
        "pytest.mark.full",
        "pytest.mark.ray",
    )
    for number, mark in enumerate(marks):
        (tmp_path / f"test_marked_{number}.py").write_text(f"pytestmark = {mark}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "2 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert "starts a process (subprocess.Popen): mark it with pytest.mark.slow" in done.stdout
    (tmp_path / "test_suite.py").unlink()
    for options in ((), ("-n", "2")):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(tmp_path)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
        assert "0 tests: all are slow; scripts/test without --fast runs them" in done.stdout


@pytest.mark.parametrize("name", ["losses", "advantage"])
def test_fast_tests_guard_what_is_learned(name: str) -> None:
    """A wrong sign there is no error of any program."""
    file = {"losses": "test_loss.py", "advantage": "test_advantage.py"}[name]
    assert not MARKED_FILE.search((TESTS / "training" / file).read_text())
