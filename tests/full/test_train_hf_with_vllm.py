"""`insitu train FILE` of a model of transformers beside a real vLLM server: its steps move the weights there,
or give it adapters, and its log-probabilities are the server's."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from vllm_lab import train

from insitu.config import WARM_START
from insitu.storage.run_dir import read_store
from tests.fakes.vllm_server import RealVllm, installed_vllm, start_vllm

pytestmark = pytest.mark.full

HF = {"kind": "hf", "device": "cpu"}


def test_a_run_trains_and_publishes(real_vllm: RealVllm, tmp_path: Path) -> None:
    tables = {
        "run": {"steps": 2},
        "eval": {"count": 4},
        "collect": {"groups_per_step": 4},
        "harness": {"workers": 4},
        "train": {"lr": 1e-3},
        "policy": HF,
    }
    _, summary = train(tmp_path, real_vllm.url, tables)
    assert summary["rl_steps"] == 2
    assert 0 < summary["max_logprob_gap"] < 1e-3
    with urllib.request.urlopen(f"{real_vllm.url}/weight_info", timeout=10) as answer:
        assert int(json.loads(answer.read())["weight_version"]) >= 1


def test_two_shards_train_and_publish(real_vllm: RealVllm, tmp_path: Path) -> None:
    """Each rank holds a part of the model; the server gets all of it and samples what they compute."""
    tables = {
        "run": {"steps": 2},
        "eval": {"count": 4},
        "collect": {"groups_per_step": 4},
        "harness": {"workers": 4},
        "train": {"lr": 1e-3, "ranks": 2, "shard": True, "threads": 1},
        "policy": HF,
    }
    _, summary = train(tmp_path, real_vllm.url, tables)
    assert summary["rl_steps"] == 2
    assert 0 < summary["max_logprob_gap"] < 1e-3


@pytest.fixture(scope="module")
def adapted_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealVllm]:
    """A server of the warm start as it is: its own weights never change."""
    venv = installed_vllm(Path(__file__).parents[2] / "scripts" / "setup-vllm")
    log = tmp_path_factory.mktemp("adapted") / "server.log"
    with start_vllm(venv, WARM_START, log, adapters=3) as server:
        yield server


def test_adapters_are_trained_published_and_sampled_with(adapted_vllm: RealVllm, tmp_path: Path) -> None:
    """In turn, so that every token of a step is of the trainer's own version: its log-probability at the
    server is that of the trainer's adapter, which has moved it."""
    steps = 4
    tables = {
        "run": {"steps": steps},
        "eval": {"count": 16},
        "train": {"lr": 1e-2},
        "policy": {**HF, "lora_rank": 8, "lora_alpha": 16.0},
    }
    run, summary = train(tmp_path, adapted_vllm.url, tables)
    assert summary["rl_steps"] == steps
    with read_store(run) as store:
        metrics = [step.metrics for step in store.steps()]
        versions = {
            version
            for step in store.steps()
            for rollout in store.step_rollouts(step.step)
            for turn in rollout.trajectory.turns
            for _, version in turn.version_runs
        }
    assert len(versions) == steps
    assert all(0 < m["max_logprob_gap"] < 1e-3 for m in metrics)
    served = run / "weights" / "served"
    for folder in served.iterdir():
        assert {path.name for path in folder.iterdir()} == {
            "adapter_config.json", "adapter_model.safetensors", "weights.json"
        }  # fmt: skip
    sent = load_file(served / f"v{metrics[-1]['version']:06d}" / "adapter_model.safetensors")
    assert all(float(abs(tensor).max()) > 1e-3 for name, tensor in sent.items() if "lora_B" in name)
    with urllib.request.urlopen(f"{adapted_vllm.url}/v1/models", timeout=10) as answer:
        names = [card["id"] for card in json.loads(answer.read())["data"]]
    last = metrics[-1]["version"]
    assert [name.split("-")[1] for name in names if name.startswith("insitu-v")] == [
        f"v{last - 1}",
        f"v{last}",
    ]
    with urllib.request.urlopen(f"{adapted_vllm.url}/weight_info", timeout=10) as answer:
        assert json.loads(answer.read())["weight_version"] == "0"
