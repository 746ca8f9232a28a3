"""Runs that the tests of this folder read and never change."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_lab import make_run


@pytest.fixture(scope="session")
def lab_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "lab")


@pytest.fixture(scope="session")
def mixed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two agents on the same tasks."""
    return make_run(tmp_path_factory.mktemp("runs") / "mixed", agents={"s": "script", "o": "single_turn"})


@pytest.fixture(scope="session")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "<img src=x onerror=alert(1)>", hostile=True)
