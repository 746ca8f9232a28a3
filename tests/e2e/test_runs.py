"""Whole runs through the command line with the script agent: repeatable, killable, resumable, replayable."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from insitu.shutdown import descendants
from insitu.storage.run_dir import RunDir, has_rollouts, read_store
from insitu.types import Status
from insitu_train.loop import START_MODEL

pytestmark = pytest.mark.slow

SMALL = [
    "run.steps=3", "eval.count=4", "collect.groups_per_step=2", "collect.group_size=4",
    "harness.workers=4", "train.threads=1", "train.min_groups=1",
]  # fmt: skip
DEADLINE_S = 240


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "insitu", *map(str, arguments)]


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


@pytest.mark.full
def test_the_summary_says_what_was_asked_for(reference: tuple[Path, dict[str, Any]]) -> None:
    run_dir, summary = reference
    wanted = {
        "heldout_before", "heldout_after", "wall_s", "rl_steps", "rollouts", "agent", "agent_version",
        "max_logprob_gap", "max_logprob_gap_seen", "mismatched", "ledger", "seed",
    }  # fmt: skip
    assert wanted <= set(summary)
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    assert (summary["rl_steps"], summary["rollouts"]) == (3, 3 * 8 + 2 * 4)
    ledger = summary["ledger"]
    assert ledger["captured"] == ledger["trained"] + sum(ledger["excluded"].values())
    assert ledger["trained"] > 0
    assert 0 < summary["max_logprob_gap_seen"] <= 1e-4
    assert summary["mismatched"] == 0
    assert (run_dir / "curve.svg").read_text().startswith("<svg")
    assert "after training" in (run_dir / "report.txt").read_text()


def test_the_same_seed_gives_the_same_bits(reference: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    again = finish(demo(tmp_path / "again", "harness.workers=2"))
    assert again["weights"] == reference[1]["weights"]
    assert plans(tmp_path / "again") == plans(reference[0])


@pytest.mark.parametrize("damaged", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_finished_run_goes_on_for_more_steps(
    reference: tuple[Path, dict[str, Any]], tmp_path: Path, *, damaged: bool
) -> None:
    """Also when its newest checkpoint is damaged: the steps are trained again to the same bits."""
    run_dir = tmp_path / "longer"
    shorter = finish(demo(run_dir, "run.steps=2"))
    assert (shorter["rl_steps"], shorter["weights"] != reference[1]["weights"]) == (2, True)
    if damaged:
        model = run_dir / "checkpoints" / "step-00002" / "model.safetensors"
        raw = bytearray(model.read_bytes())
        raw[len(raw) // 2] ^= 16
        model.write_bytes(raw)
    longer = finish(
        command(
            "train",
            "--plain",
            "--json",
            "--resume",
            run_dir,
            "run.steps=3",
            "harness.workers=2",
            "train.step_timeout_s=900",
        )
    )
    assert (run_dir / "checkpoints" / "damaged-step-00002").exists() is damaged
    assert (longer["rl_steps"], longer["weights"]) == (3, reference[1]["weights"])
    assert longer["heldout_after"] == reference[1]["heldout_after"]
    assert plans(run_dir) == plans(reference[0])
    again = finish(command("train", "--plain", "--json", "--resume", run_dir))
    assert again == longer


@pytest.mark.full
def test_kill_9_at_any_moment_loses_and_repeats_nothing(
    reference: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    rng, run_dir = random.Random(0), tmp_path / "killed"
    arguments = demo(run_dir)
    for _ in range(3):
        child = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _wait_for_rollouts(run_dir, child)
        time.sleep(rng.uniform(0.0, 3.0))
        renderer = descendants(child.pid)
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        assert gone(renderer, 10.0), "a child outlived its killed controller"
        arguments = command("demo", "--plain", "--json", "--resume", run_dir)
    summary = finish(arguments)
    assert summary["weights"] == reference[1]["weights"]
    assert summary["rollouts"] == reference[1]["rollouts"]
    assert plans(run_dir) == plans(reference[0])
    tries = summary["attempts_by_end"]
    assert (tries["decided"], tries["running"]) == (summary["rollouts"], 0)


def test_kill_9_of_the_learner_does_not_show(reference: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run_dir = tmp_path / "dead"
    child = subprocess.Popen(demo(run_dir), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(run_dir, child, ("train", 2), 1)
    (learner,) = [pid for pid in descendants(child.pid) if is_learner(pid)]
    os.kill(learner, signal.SIGKILL)
    said, errors = child.communicate(timeout=DEADLINE_S)
    assert child.returncode == 0, errors[-2000:]
    assert "the learner died (killed by signal 9)" in errors
    summary = json.loads(said.splitlines()[-1])
    for same in ("weights", "rollouts", "ledger", "heldout_after"):
        assert summary[same] == reference[1][same]
    assert plans(run_dir) == plans(reference[0])
    with read_store(run_dir) as store:
        places = store.phases()
        held = [r for phase, step in places for r in store.rollouts(phase, step)]
        assert store.check_balance().pending == 0
    assert not [r.id for r in held if r.status is Status.INFRA_FAILED], "a slot was burnt by a dead learner"


@pytest.mark.full
def test_a_learner_that_may_not_come_back_ends_the_run_at_once_with_one_line(tmp_path: Path) -> None:
    run_dir = tmp_path / "dead"
    arguments = demo(run_dir, "train.restarts=0")
    child = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(run_dir, child, ("eval_before", 0), 1)
    (learner,) = [pid for pid in descendants(child.pid) if is_learner(pid)]
    os.kill(learner, signal.SIGKILL)
    began = time.monotonic()
    _, errors = child.communicate(timeout=60)
    assert time.monotonic() - began < 15
    assert child.returncode == 1
    (line,) = [line for line in errors.splitlines() if line.startswith("insitu: ")]
    assert "Traceback" not in errors
    assert "the learner died (killed by signal 9)" in line
    assert line.endswith(f"continue with: insitu demo --resume {run_dir}")
    with read_store(run_dir) as store:
        places, wall_s = store.phases(), float(store.meta()["wall_s"])
        held = [r for phase, step in places for r in store.rollouts(phase, step)]
    assert not [r.id for r in held if r.status is Status.INFRA_FAILED], "a slot was burnt by a dead learner"
    assert wall_s > 0


def is_learner(pid: int) -> bool:
    try:
        return b"insitu_train.learner.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.full
def test_an_evaluation_that_a_kill_cut_short_is_finished_on_resume(
    reference: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run_dir = tmp_path / "cut"
    arguments = demo(run_dir, "eval.every_steps=1", "harness.workers=1")
    child = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(run_dir, child, ("eval_during", 1), 2)
    child.kill()
    child.wait(10)
    with read_store(run_dir) as store:
        assert 0 < store.phases()["eval_during", 1] < 4, "the kill came too late to tell"
        assert float(store.meta()["wall_s"]) > 0, "the time until the last commit survives a kill"
    summary = finish(command("demo", "--plain", "--json", "--resume", run_dir))
    with read_store(run_dir) as store:
        places = store.phases()
        stored = [r for phase, step in places for r in store.rollouts(phase, step)]
    assert (places["eval_during", 1], places["eval_during", 2]) == (4, 4)
    assert summary["weights"] == reference[1]["weights"]
    assert summary["ledger"]["captured"] >= sum(r.trajectory.ledger.captured for r in stored)
    assert summary["ledger"]["trained"] == reference[1]["ledger"]["trained"]


TIMED = """
import asyncio, json, sys, time
from insitu.config import demo_preset, load_config
from insitu_train.run import run_training
from insitu_train.loop import TrainOptions
from insitu.progress.plain import PlainView
config = load_config(None, sys.argv[1:], demo_preset())
options = TrainOptions(began=time.monotonic() - 100, extra={"warm_start_s": 1.5})
print(json.dumps(dict(asyncio.run(run_training(config, PlainView(sys.stderr), options)))))
"""


@pytest.mark.full
def test_another_seed_gives_other_bits_and_the_time_counts_from_the_start(
    reference: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    short = [*SMALL, "run.steps=1", "eval.count=0", "run.seed=1"]
    settings = [f"run.dir={tmp_path / 'r'}", "harness.agent=script", *short]
    summary = finish([sys.executable, "-c", TIMED, *settings])
    assert summary["weights"] != reference[1]["weights"]
    assert plans(tmp_path / "r") != plans(reference[0])[:1]
    assert json.loads((tmp_path / "r" / "summary.json").read_text()) == summary
    assert summary["wall_s"] >= 100
    assert summary["warm_start_s"] == 1.5


@pytest.mark.full
def test_another_start_model_is_refused(reference: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run_dir = tmp_path / "copy"
    shutil.copytree(reference[0], run_dir)
    with RunDir.open(run_dir) as run, run.store() as store:
        store.set_meta(START_MODEL, "0" * 64)
    (run_dir / "summary.json").unlink()
    longer = re.sub(r"(?m)^steps = 3$", "steps = 4", (run_dir / "config.toml").read_text())
    (run_dir / "config.toml").write_text(longer)
    for arguments in (
        ["replay", run_dir, "--plain"],
        ["demo", "--plain", "--resume", run_dir],
    ):
        done = subprocess.run(
            command(*arguments), capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 1
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("insitu: ")]
        assert "is not the start model of the run" in line


def wait_for(run_dir: Path, child: subprocess.Popen[Any], place: tuple[str, int], count: int) -> None:
    """Until this many rollouts of a phase and step are stored."""
    end = time.monotonic() + 120
    while time.monotonic() < end and child.poll() is None:
        if has_rollouts(run_dir):
            with read_store(run_dir) as store:
                if store.phases().get(place, 0) >= count:
                    return
        time.sleep(0.02)
    pytest.fail(f"the run did not come to {place}")


def _wait_for_rollouts(run_dir: Path, child: subprocess.Popen[bytes]) -> None:
    """Until the run has stored something new."""
    before = _stored(run_dir)
    end = time.monotonic() + 60
    while _stored(run_dir) <= before and time.monotonic() < end and child.poll() is None:
        time.sleep(0.05)


def _stored(run_dir: Path) -> int:
    if not has_rollouts(run_dir):
        return 0
    with read_store(run_dir) as store:
        return sum(store.phases().values())


def test_replay_gives_the_same_weights(reference: tuple[Path, dict[str, Any]]) -> None:
    result = finish(command("replay", reference[0], "--plain"))
    assert result["identical"] is True
    assert (result["steps"], result["weights"]) == (3, reference[1]["weights"])


@pytest.mark.full
def test_ctrl_c_stops_cleanly_and_resumes(reference: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run_dir = tmp_path / "stopped"
    # A session of its own, signalled as a terminal does it: the whole foreground group at once.
    child = subprocess.Popen(
        demo(run_dir), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    _wait_for_rollouts(run_dir, child)  # type: ignore[arg-type]
    time.sleep(1.0)
    renderer = descendants(child.pid)
    began = time.monotonic()
    os.killpg(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=20)
    assert time.monotonic() - began <= 5.5
    assert child.returncode == 130
    assert errors.splitlines()[-1].startswith("insitu: stopped; continue with: insitu demo --resume")
    assert "Traceback" not in errors
    assert renderer
    assert gone(renderer, 2.0)
    summary = finish(command("demo", "--plain", "--json", "--resume", run_dir))
    assert summary["weights"] == reference[1]["weights"]
