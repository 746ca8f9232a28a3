"""The selection of `scripts/test --fast`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fast import imports_heavy

TESTS = Path(__file__).parents[1]
CONFTEST = """
from fast import FastTests

def pytest_configure(config):
    config.pluginmanager.register(FastTests())
"""
SUITE = """
import subprocess
import sys
import threading
import time

def start():
    return subprocess.run([sys.executable, "-c", ""], check=True)

def test_plain():
    pass

def test_process():
    start()

def test_caught():
    try:
        start()
    except BaseException as error:
        raise AssertionError("not the cause") from error

def test_slow():
    time.sleep(60)

def test_broken():
    raise AssertionError("seen")
"""


def test_processes_and_slow_tests_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "test_heavy.py").write_text("import torch\nraise AssertionError('collected')\n")
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    env.pop("INSITU_FAST_END", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "1 failed, 1 passed, 3 skipped" in done.stdout, done.stdout + done.stderr
    assert "test_broken - AssertionError: seen" in done.stdout
    assert "starts a process" in done.stdout
    assert "takes over 5 s" in done.stdout


@pytest.mark.parametrize(
    ("text", "heavy"),
    [
        ("import torch\n", True),
        ("from insitu.training.trainer.trainer import Trainer\n", True),
        ("from lab import x\n", True),
        ("from insitu.training.plan.step import plan\n", False),
        ("def f():\n    import torch\n", False),
    ],
)
def test_files_with_slow_imports_are_found(tmp_path: Path, text: str, heavy: bool) -> None:
    (tmp_path / "lab.py").write_text("import transformers\n")
    path = tmp_path / "test_a.py"
    path.write_text(text)
    assert imports_heavy(path) == heavy
