"""A short run from the shipped warm start has to learn: held-out solve rate up by 0.15 or more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from insitu.agents.install import find
from insitu.agents.pi import RECIPE

pytestmark = pytest.mark.slow

TASKS = 96


def insitu(*arguments: str) -> dict[str, Any]:
    """Run to the end; the last line of stdout as JSON."""
    command = [sys.executable, "-m", "insitu", *arguments, "--plain"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.full
def test_a_short_run_learns(tmp_path: Path) -> None:
    settings = [
        f"run.dir={tmp_path / 'run'}",
        f"eval.count={TASKS}",
        "run.steps=12",
        "collect.groups_per_step=6",
    ]
    summary = insitu("demo", "--agent", "script", "--json", *settings)
    assert summary["heldout_before"] <= 0.35
    assert summary["heldout_after"] >= summary["heldout_before"] + 0.15
    assert summary["max_logprob_gap_seen"] <= 1e-4
    assert summary["mismatched"] == 0


@pytest.mark.full
def test_a_run_with_the_real_pi_replays_bit_for_bit(tmp_path: Path) -> None:
    if find(RECIPE) is None and not os.environ.get("INSITU_REQUIRE_PI"):
        pytest.skip("Pi is not installed; scripts/setup installs it")
    small = ["run.steps=2", "eval.count=4", "collect.groups_per_step=2", "harness.workers=4"]
    summary = insitu("demo", "--json", f"run.dir={tmp_path / 'pi'}", *small)
    assert summary["agent"] == "pi"
    assert summary["ledger"]["trained"] > 0
    result = insitu("replay", str(tmp_path / "pi"))
    assert result["identical"] is True
    assert result["weights"] == summary["weights"]
