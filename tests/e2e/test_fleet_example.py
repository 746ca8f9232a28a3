"""examples/fleet.toml by `ray start --head` and one command, with a real Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from insitu.shutdown import descendants
from insitu.storage.run_dir import read_store
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


def test_the_example_runs_by_ray_start_and_one_command(variables: dict[str, str], tmp_path: Path) -> None:
    example = ROOT / "examples" / "fleet.toml"
    log, run = Path(variables["RAY_TMPDIR"], "log"), tmp_path / "run"
    head = start_ray(variables)
    try:
        ends = time.monotonic() + WAIT_S
        while "Ray runtime started" not in log.read_text():
            assert head.poll() is None, log.read_text()
            assert time.monotonic() < ends, log.read_text()
            time.sleep(0.1)
        doctor = insitu(variables, "doctor", "--fleet", str(example))
        assert doctor.returncode == 0, doctor.stdout + doctor.stderr
        assert "started script" in doctor.stdout
        done = insitu(variables, "train", str(example), *FEW, f"run.dir={run}", "run.plain=true")
        assert done.returncode == 0, done.stdout + done.stderr
        below = descendants(head.pid)
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait(60)
    with read_store(run) as store:
        rollouts = [one for phase, step in store.phases() for one in store.rollouts(phase, step)]
        assert store.check_balance().tokens.balanced
        assert len(store.steps()) == 1
    assert {one.status for one in rollouts} == {Status.OK}
    assert len(rollouts) == 4 + 2 * 2
    assert json.loads((run / "summary.json").read_text())["rl_steps"] == 1
    ends = time.monotonic() + WAIT_S
    while left := alive(below):
        assert time.monotonic() < ends, left
        time.sleep(0.1)
