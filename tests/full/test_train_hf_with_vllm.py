"""`whet train` of a model of transformers beside a real vLLM server: its steps move the weights there, and
its log-probabilities are the server's."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from whet.testing.vllm_server import RealVllm

pytestmark = pytest.mark.full


def test_a_run_trains_and_publishes(real_vllm: RealVllm, tmp_path: Path) -> None:
    settings = [
        f"run.dir={tmp_path / 'run'}", "run.steps=2", "run.eval_tasks=4", "tasks.groups_per_step=4",
        "harness.workers=4", "train.min_groups=1", "train.lr=1e-3", "engine.publish_dtype=float32",
        "engine.kind=vllm", f"engine.url={real_vllm.url}", "policy.kind=hf", "policy.device=cpu",
    ]  # fmt: skip
    command = [sys.executable, "-m", "whet.cli", "demo", "--agent", "script", "--plain", "--json", *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["rl_steps"] == 2
    assert 0 < summary["max_logprob_gap"] < 1e-3
    with urllib.request.urlopen(f"{real_vllm.url}/weight_info", timeout=10) as answer:
        assert int(json.loads(answer.read())["weight_version"]) >= 1
