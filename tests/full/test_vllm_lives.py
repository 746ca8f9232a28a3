"""`insitu train FILE` beside a real vLLM server that is killed -9, and beside one that computes in
bfloat16."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm_lab import train

from insitu.config import WARM_START
from insitu.storage.run_dir import read_store
from tests.fakes.vllm_server import installed_vllm, start_vllm, untied_copy

pytestmark = pytest.mark.full

SETUP = Path(__file__).parents[2] / "scripts" / "setup-vllm"


def steps_done(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_text().count('"event":"step"') if file.exists() else 0


def test_a_server_that_is_killed_9_in_a_run_samples_on_with_the_runs_weights(tmp_path: Path) -> None:
    """Whoever keeps it starts it again at its port, with the weights that it was first started with. Had it
    sampled with them, a step would have ended the run: the gap between two versions is over its limit."""
    model = untied_copy(WARM_START, tmp_path / "model")
    venv, steps = installed_vllm(SETUP), 5
    found: dict[str, Any] = {}
    tables = {
        "run": {"steps": steps},
        "eval": {"count": 8},
        "train": {"lr": 1e-3},
        "collect": {"max_staleness": 1},
        "engine": {"publish_dtype": "float32", "start_timeout_s": 600.0},
    }
    with contextlib.ExitStack() as lives:
        server = lives.enter_context(start_vllm(venv, model, tmp_path / "first.log"))
        work = threading.Thread(target=lambda: found.update(run=train(tmp_path / "t", server.url, tables)))
        work.start()
        while steps_done(tmp_path / "t" / "run") < 1 and work.is_alive():
            time.sleep(0.05)
        before = steps_done(tmp_path / "t" / "run")
        os.killpg(server.pid, signal.SIGKILL)
        port = int(server.url.rpartition(":")[2])
        again = lives.enter_context(start_vllm(venv, model, tmp_path / "second.log", port=port))
        work.join(900.0)
        assert not work.is_alive()
        assert 1 <= before < steps
        assert again.pid != server.pid
    run, summary = found["run"]
    assert summary["rl_steps"] == steps
    assert summary["max_logprob_gap"] < 1e-3
    with read_store(run) as store:
        store.ledger()
        assert not store.open_rollouts()
        taken = Counter(r.id for step in store.steps() for r in store.step_rollouts(step.step))
        versions = [step.metrics["version"] for step in store.steps()]
    assert max(taken.values()) == 1
    assert versions == sorted(versions)


def test_deltas_reach_a_server_in_bfloat16(tmp_path: Path) -> None:
    model = untied_copy(WARM_START, tmp_path / "model")
    tables = {
        "run": {"steps": 3},
        "eval": {"count": 8},
        "train": {"lr": 1e-3},
        "collect": {"max_staleness": 1},
        "engine": {"publish": "delta", "publish_dtype": "bfloat16"},
    }
    with start_vllm(installed_vllm(SETUP), model, tmp_path / "log", dtype="bfloat16") as server:
        run, summary = train(tmp_path / "t", server.url, tables)
    assert summary["rl_steps"] == 3
    assert 1e-4 < summary["max_logprob_gap"] < 1.0
    last = "v000003/model.safetensors"
    written, applied = run / "weights" / last, run / "weights" / "served" / last
    assert applied.read_bytes() == written.read_bytes()
    assert applied.stat().st_size < 0.6 * (model / "model.safetensors").stat().st_size
