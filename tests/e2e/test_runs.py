"""Whole runs through the command line with the script agent: repeatable, killable, resumable, replayable."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from whet.record.run import read_store
from whet.stop import descendants

SMALL = [
    "run.steps=3", "run.eval_tasks=8", "tasks.groups_per_step=3", "collect.group_size=4",
    "harness.workers=4", "train.threads=1", "train.min_groups=1",
]  # fmt: skip
DEADLINE_S = 240


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "whet.cli", *map(str, arguments)]


def demo(run_dir: Path, *overrides: str, agent: str = "script") -> list[str]:
    return command("demo", "--agent", agent, "--plain", "--json", f"run.dir={run_dir}", *SMALL, *overrides)


def finish(arguments: Sequence[str]) -> dict[str, Any]:
    """Run to the end; the summary is the last line of stdout."""
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


def plans(run_dir: Path) -> list[str]:
    with read_store(run_dir) as store:
        return [step.plan_hash for step in store.steps()]


def alive(pids: Sequence[int]) -> list[int]:
    def running(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return [pid for pid in pids if running(pid)]


def gone(pids: Sequence[int], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pids)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One undisturbed run."""
    run_dir = tmp_path_factory.mktemp("runs") / "reference"
    return run_dir, finish(demo(run_dir))


def test_the_summary_says_what_was_asked_for(reference: tuple[Path, dict[str, Any]]) -> None:
    run_dir, summary = reference
    wanted = {
        "heldout_before", "heldout_after", "wall_s", "rl_steps", "rollouts", "agent", "agent_version",
        "max_logprob_gap", "ledger", "seed",
    }  # fmt: skip
    assert wanted <= set(summary)
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    assert (summary["rl_steps"], summary["rollouts"]) == (3, 3 * 12 + 2 * 8)
    ledger = summary["ledger"]
    assert ledger["captured"] == ledger["trained"] + sum(ledger["excluded"].values())
    assert ledger["trained"] > 0
    assert 0 < summary["max_logprob_gap"] <= 1e-4
    assert (run_dir / "curve.svg").read_text().startswith("<svg")
    assert "after training" in (run_dir / "report.txt").read_text()


def test_the_same_seed_gives_the_same_bits(reference: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    again = finish(demo(tmp_path / "again", "harness.workers=2"))
    assert again["weights"] == reference[1]["weights"]
    assert plans(tmp_path / "again") == plans(reference[0])


def test_another_seed_gives_other_bits(reference: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    other = finish(demo(tmp_path / "other", "run.seed=1", "run.steps=1"))
    assert other["weights"] != reference[1]["weights"]
    assert plans(tmp_path / "other") != plans(reference[0])[:1]


def test_kill_9_at_any_moment_loses_and_repeats_nothing(
    reference: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    rng, run_dir = random.Random(0), tmp_path / "killed"
    arguments = demo(run_dir)
    for _ in range(4):
        child = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _wait_for_rollouts(run_dir, child)
        time.sleep(rng.uniform(0.0, 3.0))
        family = descendants(child.pid)
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        assert gone(family, 10.0), "a child outlived its killed controller"
        arguments = command("demo", "--plain", "--json", "--resume", run_dir)
    summary = finish(arguments)
    assert summary["weights"] == reference[1]["weights"]
    assert summary["rollouts"] == reference[1]["rollouts"]
    assert plans(run_dir) == plans(reference[0])


def _wait_for_rollouts(run_dir: Path, child: subprocess.Popen[bytes]) -> None:
    """Until the run has stored something new."""
    before = _stored(run_dir)
    end = time.monotonic() + 60
    while _stored(run_dir) <= before and time.monotonic() < end and child.poll() is None:
        time.sleep(0.05)


def _stored(run_dir: Path) -> int:
    if not (run_dir / "run.sqlite").exists():
        return 0
    with read_store(run_dir) as store:
        return sum(store.phases().values())


def test_replay_gives_the_same_weights(reference: tuple[Path, dict[str, Any]]) -> None:
    result = finish(command("replay", reference[0], "--plain"))
    assert result["identical"] is True
    assert (result["steps"], result["weights"]) == (3, reference[1]["weights"])


def test_ctrl_c_stops_cleanly_and_resumes(reference: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run_dir = tmp_path / "stopped"
    # A session of its own, signalled as a terminal does it: the whole foreground group at once.
    child = subprocess.Popen(
        demo(run_dir), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    _wait_for_rollouts(run_dir, child)  # type: ignore[arg-type]
    time.sleep(1.0)
    family = descendants(child.pid)
    began = time.monotonic()
    os.killpg(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=20)
    assert time.monotonic() - began <= 5.5
    assert child.returncode == 130
    assert errors.splitlines()[-1].startswith("whet: stopped; continue with: whet demo --resume")
    assert "Traceback" not in errors
    assert family
    assert gone(family, 2.0)
    summary = finish(command("demo", "--plain", "--json", "--resume", run_dir))
    assert summary["weights"] == reference[1]["weights"]
