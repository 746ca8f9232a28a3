"""SkyRL's server of the Tinker API on this CPU: a toy is learned over a kill -9, and Pi trains."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import insitu
from insitu.agents.install import find_node
from insitu.config import WARM_START
from sources import uninstalled

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
START_S, RUN_S = 300.0, 1800.0
STEPS, ROLLOUTS = 6, 48
LEARNED = 0.1
"""Rise of the mean reward over the run, first two steps to last two."""


@pytest.fixture(scope="module")
def environment() -> Path:
    done = subprocess.run(
        [ROOT / "scripts" / "setup-skyrl"], stdout=subprocess.PIPE, text=True, timeout=1800, check=True
    )
    return Path(done.stdout.strip())


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module")
def server(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of the warm start, with few shapes to compile."""
    folder, port = tmp_path_factory.mktemp("skyrl"), _free_port()
    limits = {
        "max_lora_adapters": 3,
        "max_lora_rank": 8,
        "train_micro_batch_size": 16,
        "sample_max_num_sequences": 16,
    }
    arguments = [
        *("-m", "tx.tinker.api", "--base-model", str(WARM_START), "--backend", "jax"),
        *("--checkpoints-base", str(folder), "--database-url", f"sqlite:///{folder}/t.db"),
        *("--host", "127.0.0.1", "--port", str(port), "--backend-config", json.dumps(limits)),
        *("--session-timeout-sec", "30", "--session-cleanup-interval-sec", "5"),
    ]
    path = os.pathsep.join([str(environment / "uv"), os.environ["PATH"]])
    variables = {**os.environ, "PATH": path, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    variables.pop("PYTHONPATH", None)
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [environment / "bin" / "python", *arguments],
            env=variables,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5):
                    break
            except OSError:
                assert process.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _insitu(environment: Path, arguments: Sequence[object], out: Path) -> subprocess.Popen[bytes]:
    command = [environment / "bin" / "python", "-m", "insitu", *map(str, arguments)]
    path = os.pathsep.join([str(find_node().parent), os.environ["PATH"]])  # that environment has none
    variables = {**os.environ, "PATH": path, "PYTHONPATH": uninstalled(out.parent / "entry-points")}
    with out.open("wb") as file:
        return subprocess.Popen(command, env=variables, stdout=file, stderr=file)


def _finish(process: subprocess.Popen[bytes], out: Path) -> dict[str, Any]:
    try:
        assert process.wait(RUN_S) == 0, out.read_text()[-3000:]
    finally:
        process.kill()
    summary: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return summary


def _arguments(server: str, run_dir: Path, agent: str, steps: int, rollouts: int) -> list[str]:
    return [
        *("demo", "--agent", agent, "--plain", "--json", f"run.dir={run_dir}", f"run.steps={steps}"),
        *(f"collect.groups_per_step={rollouts // 8}", "eval.count=4", "eval.every_steps=0"),
        *("train.lr=5e-3", "train.max_logprob_gap=1e-4", "limits.wall_s=1800"),
        "run.checkpoint_every_steps=1",
        *("engine.kind=tinker", f"engine.urls={server}", f"engine.model={WARM_START}"),
        *("policy.kind=tinker", "policy.lora_rank=8"),
    ]


def test_the_toy_task_is_learned_by_a_real_server_over_a_kill(
    environment: Path, server: str, tmp_path: Path
) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    arguments = _arguments(server, run_dir, "script", STEPS, ROLLOUTS)
    process, deadline = _insitu(environment, arguments, out), time.monotonic() + RUN_S
    try:
        while not (run_dir / "checkpoints" / "step-00002").exists():
            assert process.poll() is None, out.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        process.kill()
        process.wait()
    again = ["demo", "--plain", "--json", "--resume", run_dir]
    summary = _finish(_insitu(environment, again, out), out)
    assert (summary["rl_steps"], summary["mismatched"]) == (STEPS, 0)
    assert 0 < summary["max_logprob_gap"] <= 1e-4
    run = insitu.open_run(run_dir)
    assert run.ledger.balanced
    ids = [rollout.id for rollout in run.rollouts(phase="train")]
    assert len(set(ids)) == len(ids) == STEPS * ROLLOUTS
    means = [float(step.metrics["reward_mean"]) for step in run.steps]
    assert sum(means[-2:]) / 2 > sum(means[:2]) / 2 + LEARNED, means


def test_the_real_pi_trains_at_a_real_server(environment: Path, server: str, tmp_path: Path) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    summary = _finish(_insitu(environment, _arguments(server, run_dir, "pi", 2, 24), out), out)
    assert (summary["agent"], summary["rl_steps"], summary["mismatched"]) == ("pi", 2, 0)
    assert 0 < summary["max_logprob_gap"] <= 1e-4
    assert summary["service"]["trained_row_tokens"] > summary["ledger"]["trained"] > 0
    assert insitu.open_run(run_dir).ledger.balanced
