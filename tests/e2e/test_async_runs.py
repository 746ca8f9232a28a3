"""Whole runs whose rollouts run while the trainer trains: they learn, stay in bounds, and survive kill -9."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import insitu
from insitu.errors import RecordError
from insitu.storage.run_dir import read_store

pytestmark = pytest.mark.full
DEADLINE_S = 900
SMALL = [
    "run.steps=4", "eval.count=8", "collect.groups_per_step=3", "collect.group_size=4", "harness.workers=4",
    "train.threads=1", "train.min_groups=1", "collect.max_staleness=2",
]  # fmt: skip


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "insitu", *map(str, arguments)]


def finish(*arguments: object) -> dict[str, Any]:
    """Run to the end; the last line of stdout as JSON."""
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_short_run_learns_and_its_rollouts_are_one_version_old_at_most(tmp_path: Path) -> None:
    settings = [f"run.dir={tmp_path / 'run'}", "eval.count=128", "run.steps=12"]
    summary = finish("demo", "--agent", "script", "--plain", "--json", *settings, "collect.max_staleness=1")
    assert summary["heldout_after"] >= summary["heldout_before"] + 0.15
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if line["event"] == "step"]
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert {step["staleness_max"] for step in steps} == {0, 1}
    assert summary["staleness_max"] == 1
    assert 0 < summary["trainer_idle"] < 1
    assert summary["max_logprob_gap_seen"] <= 1e-4
    assert summary["mismatched"] == 0
    assert finish("replay", tmp_path / "run", "--plain")["identical"] is True


def committed(run_dir: Path) -> int:
    """Steps of a run that another process works on; 0 as long as it has no store."""
    try:
        with read_store(run_dir) as store:
            return len(store.steps())
    except RecordError:
        return 0


def test_kill_9_between_steps_loses_nothing_and_trains_nothing_twice(tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    arguments = command("demo", "--agent", "script", "--plain", "--json", f"run.dir={run_dir}", *SMALL)
    child = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + DEADLINE_S
    while committed(run_dir) < 2 and child.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    with read_store(run_dir) as store:
        graded = {state.rollout_id for state in store.unused_graded()}
        trained = {r.id for step in store.steps() for r in store.step_rollouts(step.step)}
    summary = finish("demo", "--plain", "--json", "--resume", run_dir)
    assert summary["rl_steps"] == 4
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if line["event"] == "step"] == [1, 2, 3, 4]
    with read_store(run_dir) as store:
        assert store.check_balance().pending == 0
        groups = [{r.id for r in store.step_rollouts(step.step)} for step in store.steps()]
        assert sum(map(len, groups)) == len(set().union(*groups)), "a rollout was trained twice"
        assert trained <= set().union(*groups)
        assert graded <= {r.id for step in range(1, 20) for r in store.rollouts("train", step)}
    insitu.export_run(run_dir, tmp_path / "out", check=True)
    copy = insitu.import_run(tmp_path / "out", tmp_path / "copy")
    assert finish("replay", copy.path, "--plain")["identical"] is True
