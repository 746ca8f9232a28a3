"""Pairs in TRL's DPOTrainer (scripts/test-bridges)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from row_lab import rollout
from transformers import AutoModelForCausalLM
from trl_cpu import check_page_trains

from insitu.cli import main
from insitu.config import WARM_START
from insitu.errors import ConfigError
from insitu.types import Group
from insitu_bridges import trl
from insitu_bridges.rows import rows_of
from insitu_bridges.targets import write_payload
from insitu_bridges.to_dpo import to_dpo
from insitu_train.plan.step import PlanConfig

# The packages warn about one another.
pytestmark = [pytest.mark.bridge, pytest.mark.filterwarnings("default")]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """A file of two pairs of different lengths, each side with an observation between two sampled parts."""
    rng = np.random.default_rng(0)
    groups = []
    for number in range(2):
        prompt = rng.integers(5, 200, 8)
        rollouts = []
        for slot, reward in enumerate((1.0, 0.0)):
            one = rollout(f"train/1/{number}/{slot}", reward)
            size = 20 + 4 * number - 3 * slot
            ids = np.concatenate([prompt, rng.integers(5, 200, size)]).astype(np.int32)
            mask = np.zeros(len(ids), np.bool_)
            mask[8:12] = mask[16 : len(ids) - 1] = True
            zeros = np.zeros(len(ids), np.int32)
            row = replace(
                one.trajectory.segments[0],
                ids=ids, mask=mask, logprobs=np.where(mask, -0.5, 0).astype(np.float32), versions=zeros,
            )  # fmt: skip
            sampled = int(mask.sum())
            ledger = replace(one.trajectory.ledger, captured=sampled, trained=sampled)
            path = replace(one.trajectory, segments=(row,), ledger=ledger)
            rollouts.append(replace(one, trajectory=path))
        groups.append(Group(id=f"train/1/{number}", task_id="t", rollouts=tuple(rollouts)))
    path = tmp_path / "pairs.jsonl"
    write_payload(path, "dpo", to_dpo(rows_of(groups, PlanConfig())).payload)
    return path


def settings(folder: Path, **own: Any) -> Any:
    from trl import DPOConfig

    values = {
        "max_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-4, "report_to": "none",
        "use_cpu": True, "bf16": False, "logging_steps": 1, "save_strategy": "no",
        "remove_unused_columns": False,
    }  # fmt: skip
    return DPOConfig(output_dir=str(folder), **{**values, **own})


def sampled_logprob(model: Any, pair: dict[str, Any], side: str) -> float:
    """Sum of the log-probabilities of a side's sampled tokens."""
    ids = torch.tensor(pair["prompt_ids"] + pair[f"{side}_ids"])
    mask = torch.tensor([0] * len(pair["prompt_ids"]) + pair[f"{side}_mask"])
    with torch.no_grad():
        known = torch.log_softmax(model(ids[None]).logits[0, :-1].float(), -1)
    return float((known.gather(1, ids[1:, None])[:, 0] * mask[1:]).sum())


@pytest.mark.parametrize("before", [False, True], ids=["reference model", "sums computed before"])
def test_dpo_trainer_makes_a_step_on_sampled_tokens_only(pairs: Path, tmp_path: Path, before: bool) -> None:
    from trl import DPOTrainer

    args = settings(tmp_path / "trl", precompute_ref_log_probs=before)
    model = AutoModelForCausalLM.from_pretrained(WARM_START, dtype=torch.float32)
    read = [orjson.loads(line) for line in pairs.read_bytes().splitlines()]
    mean = {
        side: sum(sampled_logprob(model, pair, side) for pair in read) / len(read)
        for side in ("chosen", "rejected")
    }
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    trainer = DPOTrainer(model=model, args=args, **trl.preferences(pairs))
    batch = next(iter(trainer.get_train_dataloader()))
    kept = [
        row[known.bool()].tolist()
        for row, known in zip(*(batch[name] for name in ("input_ids", "attention_mask")), strict=True)
    ]
    masks = [row[row.cumsum(0).gt(0)].tolist() for row in batch["completion_mask"]]
    sides = [(pair["prompt_ids"] + pair[f"{s}_ids"], pair[f"{s}_mask"]) for s in mean for pair in read]
    assert sorted(kept) == sorted(ids for ids, _ in sides)
    assert {"".join(map(str, m)).rstrip("0") for m in masks} == {
        "".join(map(str, m)).rstrip("0") for _, m in sides
    }
    trainer.train()
    [step] = [line for line in trainer.state.log_history if "loss" in line]
    assert step["loss"] == pytest.approx(math.log(2), abs=1e-4), "policy and reference are the same model"
    assert step["logps/chosen"] == pytest.approx(mean["chosen"], abs=0.01)
    assert step["logps/rejected"] == pytest.approx(mean["rejected"], abs=0.01)
    assert math.isfinite(step["grad_norm"])
    assert any(not weight.equal(start[name]) for name, weight in trainer.model.named_parameters())


def test_columns_that_were_removed_are_named(pairs: Path, tmp_path: Path) -> None:
    from trl import DPOTrainer

    args = settings(tmp_path / "trl", remove_unused_columns=True)
    trainer = DPOTrainer(model=str(WARM_START), args=args, **trl.preferences(pairs))
    with pytest.raises(ConfigError, match="remove_unused_columns=False"):
        trainer.train()


def test_the_page_shows_code_that_trains_on_an_export(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block of docs/bridges.md about pairs, with a model of this machine on its CPU."""
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(run), "--to", "dpo", "--out", "pairs", "--check"]) == 0
    check_page_trains(monkeypatch, "trl.preferences(", "DPOConfig")
