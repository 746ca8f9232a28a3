"""`insitu train FILE` with a real vLLM server on this CPU: trainer and engine are processes of their own,
rollouts are collected ahead of the trainer, and weights change while agents are at work."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from vllm_lab import CLOSE, ask, gap, train

from insitu.engines.http import HttpOptions
from insitu.engines.vllm import open_vllm
from insitu.storage.run_dir import read_store
from insitu_train.embedded.model import load_model
from tests.fakes.vllm_server import RealVllm, installed_vllm, start_vllm

pytestmark = pytest.mark.full

STEPS, STALENESS = 12, 1


@pytest.fixture(scope="module")
def finished(real_vllm: RealVllm, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of the demo's warm start, from the toy tasks, with the scripted agent: (directory, summary)."""
    tables = {
        "run": {"steps": STEPS, "keep_checkpoints": STEPS},
        "eval": {"count": 64},
        "train": {"lr": 1e-3},
        "collect": {"max_staleness": STALENESS},
    }
    return train(tmp_path_factory.mktemp("async"), real_vllm.url, tables)


def test_the_solve_rate_rises(finished: tuple[Path, dict[str, Any]]) -> None:
    _, summary = finished
    assert summary["heldout_before"] <= 0.4
    assert summary["heldout_after"] >= summary["heldout_before"] + 0.2
    assert summary["max_logprob_gap"] < 1e-3


def test_staleness_stays_in_bounds_and_is_not_always_zero(finished: tuple[Path, dict[str, Any]]) -> None:
    """By the steps' own account, and by the versions that stand at the trained tokens."""
    run_dir, _ = finished
    with read_store(run_dir) as store:
        steps = store.steps()
        found = []
        for at, step in enumerate(steps):
            version = steps[at - 1].metrics["version"] if at else 0
            for rollout in store.step_rollouts(step.step):
                for segment in rollout.trajectory.segments:
                    found.append(version - int(segment.versions[segment.mask].min()))
    assert max(step.metrics["staleness_max"] for step in steps) == STALENESS
    assert (min(found), max(found)) == (0, STALENESS)


def test_weights_change_in_the_server(finished: tuple[Path, dict[str, Any]], real_vllm: RealVllm) -> None:
    run_dir, summary = finished
    with read_store(run_dir) as store:
        last = store.steps()[-1].metrics
        versions = {
            version
            for step in store.steps()
            for rollout in store.step_rollouts(step.step)
            for turn in rollout.trajectory.turns
            for _, version in turn.version_runs
        }
    assert summary["weights"] == last["weights"]
    assert len(versions) >= STEPS - 2
    with urllib.request.urlopen(f"{real_vllm.url}/weight_info", timeout=10) as answer:
        assert json.loads(answer.read())["weight_version"] == str(last["version"])


def test_a_checkpoint_is_served_as_it_is(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run_dir, _ = finished
    checkpoint = run_dir / "checkpoints" / f"step-{STEPS:05d}"
    venv = installed_vllm(Path(__file__).parents[2] / "scripts" / "setup-vllm")

    async def sampled(url: str) -> float:
        async with open_vllm(HttpOptions(url=url, call_deadline_s=120.0)) as engine:
            return gap(load_model(checkpoint), await ask(engine, 0, 48), 1.0)

    with start_vllm(venv, checkpoint, tmp_path / "server.log") as server:
        assert asyncio.run(sampled(server.url)) < CLOSE
