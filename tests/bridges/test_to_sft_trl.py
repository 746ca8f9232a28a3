"""Examples in TRL's SFTTrainer (scripts/test-bridges)."""

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
from insitu.types import Group
from insitu_bridges.rows import rows_of
from insitu_bridges.targets import write_payload
from insitu_bridges.to_sft import to_sft
from insitu_train.plan.step import PlanConfig

# The packages warn about one another.
pytestmark = [pytest.mark.bridge, pytest.mark.filterwarnings("default")]


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """A file of three rows of different lengths, each with an observation between two sampled parts."""
    rng = np.random.default_rng(0)
    groups = []
    for number in range(3):
        one = rollout(f"train/1/{number}/0", 1.0)
        ids = rng.integers(5, 200, 24 + 5 * number).astype(np.int32)
        mask = np.zeros(len(ids), np.bool_)
        mask[8:12] = mask[16 : len(ids) - 1 - number] = True
        row = replace(
            one.trajectory.segments[0],
            ids=ids, mask=mask, logprobs=np.where(mask, -0.5, 0).astype(np.float32),
            versions=np.zeros(len(ids), np.int32),
        )  # fmt: skip
        sampled = int(mask.sum())
        ledger = replace(one.trajectory.ledger, captured=sampled, trained=sampled)
        one = replace(one, trajectory=replace(one.trajectory, segments=(row,), ledger=ledger))
        groups.append(Group(id=f"train/1/{number}", task_id="t", rollouts=(one,)))
    path = tmp_path / "sft" / "data" / "train-00001.jsonl"
    path.parent.mkdir(parents=True)
    write_payload(path, "sft", to_sft(rows_of(groups, PlanConfig())).payload)
    return path


def mean_loss(model: Any, rows: list[dict[str, Any]]) -> float:
    """Return the mean of -log p over all sampled tokens, row by row without padding."""
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor(row["input_ids"])
        mask = torch.tensor([label >= 0 for label in row["labels"]])
        with torch.no_grad():
            known = torch.log_softmax(model(ids[None]).logits[0, :-1].float(), -1)
        total -= float((known.gather(1, ids[1:, None])[:, 0] * mask[1:]).sum())
        count += int(mask.sum())
    return total / count


@pytest.mark.parametrize("accumulate", [1, 3], ids=["one batch", "a row at a time"])
def test_sft_trainer_makes_a_step_on_sampled_tokens_only(
    examples: Path, tmp_path: Path, accumulate: int
) -> None:
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        output_dir=str(tmp_path / "trl"), max_steps=1, per_device_train_batch_size=3 // accumulate,
        gradient_accumulation_steps=accumulate, learning_rate=1e-4, report_to="none", use_cpu=True,
        bf16=False, logging_steps=1, save_strategy="no", max_length=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(WARM_START, dtype=torch.float32)
    read = [orjson.loads(line) for line in examples.read_bytes().splitlines()]
    expected = mean_loss(model, read)
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    rows = load_dataset("json", data_files=str(examples), split="train", cache_dir=str(tmp_path / "hf"))
    trainer = SFTTrainer(model=model, args=args, train_dataset=rows)
    seen = [
        (row[known.bool()].tolist(), labels[known.bool()].tolist())
        for batch in trainer.get_train_dataloader()
        for row, known, labels in zip(
            *(batch[name] for name in ("input_ids", "attention_mask", "labels")), strict=True
        )
    ]
    assert sorted(seen) == sorted((row["input_ids"], row["labels"]) for row in read)
    trainer.train()
    [step] = [line for line in trainer.state.log_history if "loss" in line]
    assert step["loss"] == pytest.approx(expected, abs=1e-4)
    assert math.isfinite(step["grad_norm"])
    assert any(not weight.equal(start[name]) for name, weight in trainer.model.named_parameters())


def test_the_page_shows_code_that_trains_on_an_export(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block of docs/bridges.md about examples, with a model of this machine on its CPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert main(["export", str(run), "--to", "sft", "--out", "sft", "--check"]) == 0
    check_page_trains(monkeypatch, "SFTTrainer(", "SFTConfig")
