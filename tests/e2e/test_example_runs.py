"""Examples run as their comments say, with fewer steps: teachers, a curriculum, several evaluations."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from insitu.config import WARM_START
from insitu.storage.metrics import read_metrics
from insitu.storage.run_dir import read_store
from insitu_train.embedded.model import load_model, save_model
from tests.e2e.test_runs import command, finish

pytestmark = pytest.mark.full

SMALL = [
    "run.steps=2", "collect.groups_per_step=2", "collect.group_size=4", "harness.workers=4",
    "train.threads=1", "train.min_groups=1",
]  # fmt: skip
TWO_TEACHERS = """
[[tasks]]
name = "fixes"
kinds = ["operator"]
reference = "TEACHER"

[[tasks]]
name = "swaps"
kinds = ["swapped"]
reference = "OTHER"

[eval]
count = 0

[harness]
agent = "script"

[train]
advantage = "zero"
degenerate = "keep"
kl = "k3"
kl_weight = 1.0
"""


def train(config: Path | str, run_dir: Path, *overrides: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the summary and the steps of a run."""
    arguments = command("train", config, "--plain", "--json", f"run.dir={run_dir}", *SMALL, *overrides)
    summary = finish(arguments)
    return summary, [line for line in read_metrics(run_dir / "metrics.jsonl") if line["event"] == "step"]


def teacher(folder: Path, noise: float) -> Path:
    """Return the warm start with other weights."""
    shutil.copytree(WARM_START, folder)
    model = load_model(WARM_START)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * weight.std() * torch.randn_like(weight)
    save_model(model, folder)
    return folder


def test_a_student_is_trained_on_its_own_tokens_towards_a_teacher(tmp_path: Path) -> None:
    folder = teacher(tmp_path / "teacher", 0.05)
    overrides = (f"train.reference={folder}", "eval.count=0", "train.lr=3e-3", "run.steps=4")
    summary, steps = train("examples/distill.toml", tmp_path / "run", *overrides)
    ledger = summary["ledger"]
    # Rewards train nothing here, and groups of equal rewards are trained too.
    assert ledger["trained"] == ledger["captured"] > 0
    assert steps[0]["ref_kl"] > steps[-1]["ref_kl"] > 0


def test_each_set_has_its_teacher(tmp_path: Path) -> None:
    same, other = teacher(tmp_path / "same", 0.0), teacher(tmp_path / "other", 0.2)
    config = tmp_path / "two.toml"
    config.write_text(TWO_TEACHERS.replace("TEACHER", str(same)).replace("OTHER", str(other)))
    _, steps = train(config, tmp_path / "run")
    assert steps[0]["fixes/ref_kl"] == pytest.approx(0.0, abs=1e-6)
    assert steps[0]["swaps/ref_kl"] > 0.01


def test_a_curriculum_draws_tasks_of_a_file(tmp_path: Path) -> None:
    rows = tmp_path / "tasks.jsonl"
    exported = command("tasks", "export", "tasks.source=toy", "--limit", "40", "--out", rows)
    subprocess.run(exported, check=True, capture_output=True, timeout=120)
    summary, _ = train("examples/curriculum.toml", tmp_path / "run", f"tasks.path={rows}", "eval.count=4")
    with read_store(tmp_path / "run") as store:
        assert store.check_balance().pending == 0
        drawn = [rollout.task_id for step in (1, 2) for rollout in store.rollouts("train", step)[::4]]
    assert len(set(drawn)) == 4
    assert summary["rollouts"] == 2 * 8 + 2 * 4


def test_several_evaluations_in_another_agent_too(tmp_path: Path) -> None:
    summary, _ = train("examples/evaluation.toml", tmp_path / "run", "eval.count=2", "eval.samples=2")
    assert summary["evaluations"].keys() == {"heldout", "transfer", "inside_pi"}
    for found in summary["evaluations"].values():
        assert found["tasks"] == found["samples"] == 2
        gain = found["gain"]
        assert gain["low"] <= gain["value"] <= gain["high"]
        assert gain["low"] < gain["high"]
