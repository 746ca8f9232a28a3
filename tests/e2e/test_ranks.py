"""A run whose learner is two processes: one is killed, the run goes on, and replays to the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from insitu.shutdown import descendants

pytestmark = pytest.mark.slow

SMALL = [
    "run.steps=2", "eval.count=2", "collect.groups_per_step=3", "collect.group_size=4", "harness.workers=4",
    "train.threads=1", "train.min_groups=1", "train.ranks=2",
]  # fmt: skip
DEADLINE_S = 300.0


def started(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "insitu", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err[-2000:]
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def peers(root: int) -> list[int]:
    found = []
    for pid in descendants(root):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"insitu_train.learner.ranks" in command:
            found.append(pid)
    return found


def kill_a_peer_after_a_step(process: subprocess.Popen[str], metrics: Path) -> None:
    end = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < end:
        if metrics.exists() and '"event":"step"' in metrics.read_text():
            for pid in peers(process.pid):
                os.kill(pid, signal.SIGKILL)
                return
        time.sleep(0.05)
    raise AssertionError("no peer was there to be killed")


@pytest.mark.full
def test_a_killed_rank_costs_nothing_and_a_replay_has_as_many_ranks(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    demo = ("demo", "--agent", "script", "--plain", "--json")
    process = started(*demo, f"run.dir={run_dir}", *SMALL)
    kill_a_peer_after_a_step(process, run_dir / "metrics.jsonl")
    summary = result_of(process)
    ledger = summary["ledger"]
    assert summary["rl_steps"] == 2
    assert ledger["captured"] == ledger["trained"] + sum(ledger["excluded"].values())
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [s["learner_restarts"] for s in steps if s["event"] == "step"] == [0, 1]
    replay = result_of(started("replay", run_dir))
    assert (replay["identical"], replay["weights"]) == (True, summary["weights"])
