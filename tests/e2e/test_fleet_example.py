"""examples/fleet.toml by `ray start --head` and one command, with a real Ray, and with its head killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from insitu.shutdown import descendants
from insitu.storage.run_dir import has_rollouts, read_store
from insitu.types import Status
from tests.e2e.test_fleet import alive

pytestmark = [pytest.mark.slow, pytest.mark.ray]

ROOT = Path(__file__).parents[2]
FEW = (
    "run.steps=1", "eval.count=2", "collect.groups_per_step=2", "collect.group_size=2", "train.min_groups=1",
    "harness.workers=2", "train.threads=1",
)  # fmt: skip
WAIT_S = 120.0


@pytest.fixture
def variables() -> Iterator[dict[str, str]]:
    """Variables with which commands find the Ray cluster of this test and no other."""
    # pytest's folders are too long for Ray's sockets
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield os.environ | {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}


def insitu(variables: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "insitu", *words]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)


def start_ray(variables: dict[str, str]) -> subprocess.Popen[Any]:
    """Run `ray start --head`, with `--block` so that this test ends it and no other cluster."""
    program = Path(sys.executable).with_name("ray")
    memory = ["--object-store-memory", str(80 << 20)]
    options = ["--port", "0", "--include-dashboard", "false", *memory, "--block"]
    with Path(variables["RAY_TMPDIR"], "log").open("wb") as log:
        return subprocess.Popen([program, "start", "--head", *options], env=variables, stdout=log, stderr=log)


@contextmanager
def cluster(variables: dict[str, str]) -> Iterator[subprocess.Popen[Any]]:
    """A started cluster of this machine; yields `ray start`."""
    log = Path(variables["RAY_TMPDIR"], "log")
    head = start_ray(variables)
    try:
        until(lambda: head.poll() is not None or "Ray runtime started" in log.read_text())
        assert head.poll() is None, log.read_text()
        yield head
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait(60)


def until(true: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    """Wait for a condition."""
    ends = time.monotonic() + wait_s
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.1)


def test_the_example_runs_by_ray_start_and_one_command(variables: dict[str, str], tmp_path: Path) -> None:
    example, run = ROOT / "examples" / "fleet.toml", tmp_path / "run"
    with cluster(variables) as head:
        doctor = insitu(variables, "doctor", "--fleet", str(example))
        assert doctor.returncode == 0, doctor.stdout + doctor.stderr
        assert "started script" in doctor.stdout
        done = insitu(variables, "train", str(example), *FEW, f"run.dir={run}", "--plain")
        assert done.returncode == 0, done.stdout + done.stderr
        below = descendants(head.pid)
    with read_store(run) as store:
        rollouts = [one for phase, step in store.phases() for one in store.rollouts(phase, step)]
        assert store.check_balance().tokens.balanced
        assert len(store.steps()) == 1
    assert {one.status for one in rollouts} == {Status.OK}
    assert len(rollouts) == 4 + 2 * 2
    assert json.loads((run / "summary.json").read_text())["rl_steps"] == 1
    until(lambda: not alive(below))


def test_a_run_whose_ray_head_is_killed_ends_in_one_line_and_leaves_nothing(
    variables: dict[str, str], tmp_path: Path
) -> None:
    """Ray itself ends a process whose head has not answered for a minute."""
    run, output = tmp_path / "run", tmp_path / "output"
    words = ["train", str(ROOT / "examples" / "fleet.toml"), *FEW, "run.steps=1000", f"run.dir={run}"]
    command = [sys.executable, "-m", "insitu", *words, "--plain"]
    with cluster(variables) as head:
        with output.open("wb") as log:
            training = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
        until(lambda: training.poll() is not None or (run.exists() and has_rollouts(run)))
        assert training.poll() is None, output.read_text()
        below = [*descendants(head.pid), *descendants(training.pid)]
        (server,) = [pid for pid in below if b"/gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(server, signal.SIGKILL)
        assert training.wait(WAIT_S)
    said = output.read_text()
    lines = [line for line in said.strip().splitlines() if not re.match(r"\[ +[\d.]+ s\]", line)]
    assert len(lines) == 1, said
    assert "GCS may have been killed" in lines[0] or "the Ray cluster does not answer" in lines[0]
    until(lambda: not alive(below))
    with read_store(run) as store:
        assert store.check_balance().tokens.balanced
