"""`whet train` with a real vLLM server on this CPU: trainer and engine are processes of their own, rollouts
are collected ahead of the trainer, and weights change while agents are at work."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from whet.record.run import read_store
from whet.testing.vllm_server import RealVllm

pytestmark = pytest.mark.full

STEPS, STALENESS = 12, 1


@pytest.fixture(scope="module")
def finished(real_vllm: RealVllm, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of the demo's warm start, from the toy tasks, with the scripted agent: (directory, summary)."""
    run_dir = tmp_path_factory.mktemp("run") / "vllm"
    settings = [
        f"run.dir={run_dir}", f"run.steps={STEPS}", "run.eval_tasks=64", "tasks.groups_per_step=8",
        "harness.workers=8", "train.min_groups=1", "train.lr=1e-3", "engine.publish_dtype=float32",
        f"collect.max_staleness={STALENESS}", "engine.kind=vllm", f"engine.url={real_vllm.url}",
        "run.keep_checkpoints=12",
    ]  # fmt: skip
    command = [sys.executable, "-m", "whet.cli", "demo", "--agent", "script", "--plain", "--json", *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return run_dir, json.loads(done.stdout.splitlines()[-1])


def test_the_solve_rate_rises(finished: tuple[Path, dict[str, Any]]) -> None:
    _, summary = finished
    assert summary["heldout_before"] <= 0.4
    assert summary["heldout_after"] >= summary["heldout_before"] + 0.2
    assert summary["max_logprob_gap"] < 1e-3


def test_staleness_stays_in_bounds_and_is_not_always_zero(finished: tuple[Path, dict[str, Any]]) -> None:
    """By the steps' own account, and by the versions that stand at the trained tokens."""
    run_dir, _ = finished
    with read_store(run_dir) as store:
        steps = store.steps()
        found = []
        for at, step in enumerate(steps):
            version = steps[at - 1].metrics["version"] if at else 0
            for rollout in store.step_rollouts(step.step):
                for segment in rollout.trajectory.segments:
                    found.append(version - int(segment.versions[segment.mask].min()))
    assert max(step.metrics["staleness_max"] for step in steps) == STALENESS
    assert (min(found), max(found)) == (0, STALENESS)


def test_weights_change_in_the_server(finished: tuple[Path, dict[str, Any]], real_vllm: RealVllm) -> None:
    run_dir, summary = finished
    with read_store(run_dir) as store:
        last = store.steps()[-1].metrics
        versions = {
            version
            for step in store.steps()
            for rollout in store.step_rollouts(step.step)
            for turn in rollout.trajectory.turns
            for _, version in turn.version_runs
        }
    assert summary["weights"] == last["weights"]
    assert len(versions) >= STEPS - 2
    with urllib.request.urlopen(f"{real_vllm.url}/weight_info", timeout=10) as answer:
        assert json.loads(answer.read())["weight_version"] == str(last["version"])
