"""The whole `insitu demo --model smollm2`: a real model learns, on tasks under other names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from insitu.errors import SetupError
from insitu_train.demo.smollm2 import fetch_file
from sources import SOURCES

LIMIT_S = 5400.0
pytestmark = [pytest.mark.full, pytest.mark.takes(LIMIT_S)]


def test_smollm2_learns_to_write_functions(tmp_path: Path) -> None:
    try:
        fetch_file()
    except SetupError as error:
        pytest.skip(f"no real model: {error}")
    command = [sys.executable, "-m", "insitu", "demo", "--model", "smollm2", "--plain", "--json"]
    done = subprocess.run(
        [*command, f"run.dir={tmp_path / 'run'}"],
        env={**os.environ, "PYTHONPATH": SOURCES},
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["heldout_after"] - summary["heldout_before"] >= 0.2
    assert summary["max_logprob_gap_seen"] < 1e-3
    report = (tmp_path / "run" / "report.txt").read_text()
    assert report.count("task | Write a Python function") == 4
