"""A learner process whose policy is a model of transformers: what `whet train` with an engine apart runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from test_policy_hf import LORA, a_plan
from train_lab import CONFIG, small_model
from transformers import Qwen3ForCausalLM

from whet.config import load_config
from whet.engine.embedded_model import load_model, save_model
from whet.errors import ConfigError, TrainError
from whet.train.learner.client import Export, Learner, LearnerSpec
from whet.train.options import Lora, OptimConfig, PolicyConfig, TrainConfig
from whet.train.policy.opening import open_policy


def spec(folder: Path, **policy: object) -> LearnerSpec:
    train = TrainConfig(
        optim=OptimConfig(lr=1e-2),
        policy=PolicyConfig(kind="hf", **policy),  # type: ignore[arg-type]
        max_logprob_gap=100.0,
        max_staleness=9,
    )
    return LearnerSpec(model=folder, samples=False, train=train)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(small_model(1), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


@pytest.mark.parametrize("lora", [None, pytest.param(LORA, marks=pytest.mark.full)], ids=["full", "lora"])
async def test_it_trains_exports_what_engines_load_and_resumes(
    folder: Path, tmp_path: Path, lora: Lora | None
) -> None:
    plan = a_plan()
    async with Learner.start(spec(folder, lora=lora)) as learner:
        assert (await learner.step(plan)).version == 1
        await learner.export(Export(folder=tmp_path / "v1", version=1))
        await learner.save(tmp_path / "checkpoint")
        second = await learner.step(plan)
        ends = learner.weights
    async with Learner.start(spec(folder, lora=lora)) as again:
        await again.load(tmp_path / "checkpoint")
        assert (await again.step(plan)).loss == second.loss
        assert again.weights == ends
    start, found = load_model(folder), load_model(tmp_path / "v1")
    assert found.config == CONFIG
    moved = {n for n, p in found.named_parameters() if not torch.equal(p, dict(start.named_parameters())[n])}
    assert all(any(t in n for t in LORA.targets) for n in moved) == (lora is not None)
    assert moved
    ids = torch.arange(20)[None]
    theirs = Qwen3ForCausalLM.from_pretrained(tmp_path / "v1")(ids).logits
    ours = found.logits(found.hidden(ids[0, :0], ids))
    assert float((theirs - ours).detach().abs().max()) < 1e-4


async def test_too_little_memory_is_said_and_the_learner_lives(folder: Path) -> None:
    async with Learner.start(spec(folder, memory_gib=1e-5)) as learner:
        with pytest.raises(TrainError, match=r"needs .* GiB on cpu .* GiB are there"):
            await learner.step(a_plan())
        await learner.check()
        assert learner.version == 0


def test_the_configuration_reaches_the_learner(folder: Path) -> None:
    overrides = [
        *(f"model.path={folder}", "engine.kind=vllm", "engine.url=http://127.0.0.1:1"),
        *("policy.kind=hf", "policy.lora_rank=3", "policy.memory_gib=2.5", "policy.device=cpu"),
    ]
    made = LearnerSpec.of(load_config(None, overrides), model=folder)
    assert made.train.policy.lora is not None
    assert made.train.policy == dataclasses.replace(
        PolicyConfig(kind="hf", device="cpu", memory_gib=2.5), lora=made.train.policy.lora
    )
    assert not made.samples


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in make test-full")
def test_a_device_that_is_not_there_is_said(folder: Path) -> None:
    with pytest.raises(ConfigError, match="torch sees no GPU here"):
        open_policy(folder, PolicyConfig(kind="hf", device="cuda"))
