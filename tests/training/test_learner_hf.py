"""A learner process whose policy is a model of transformers: what `insitu train` with an engine apart
runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_hf_policy import LORA, a_plan, opened
from test_learner import collect
from train_lab import CONFIG, VOCAB, small_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3ForCausalLM

from insitu.config import load_config
from insitu.engines.http import HttpOptions
from insitu.engines.vllm import open_vllm
from insitu.errors import ConfigError, TrainError
from insitu.types import RequestKey, SamplingParams
from insitu_train.embedded.model import load_model, save_model
from insitu_train.learner.client import Learner
from insitu_train.learner.process import LearnerSpec
from insitu_train.memory.plan import MemoryPlanner
from insitu_train.model.load import open_policy
from insitu_train.options import Lora, OptimConfig, PolicyConfig, TrainConfig, dump_config, parse_config
from insitu_train.plan.step import PlanConfig, plan_step
from insitu_train.trainer.trainer import Trainer
from insitu_train.weights.export import export
from insitu_train.weights.files import DiskPublisher, ExportRequest, PublishOptions
from tests.fakes.vllm import serve_vllm

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize(
    ("lora", "dtype", "limit"),
    [
        pytest.param(None, "float32", 1e-4, id="full"),
        pytest.param(LORA.changed(merged="sampler"), "float32", 1e-4, id="lora", marks=pytest.mark.full),
        pytest.param(None, "bfloat16", 0.1, id="full-bfloat16", marks=pytest.mark.full),
        pytest.param(LORA.changed(merged="sampler"), "bfloat16", 0.1, id="lora-bfloat16"),
    ],
)
async def test_the_embedded_engine_samples_a_llama_while_it_is_trained(
    tmp_path: Path, lora: Lora | None, dtype: str, limit: float
) -> None:
    """Weights, or matrices with their adapters, reach the sampler in memory at each publication."""
    folder = tmp_path / "model"
    torch.manual_seed(0)
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6}
    config = LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=256, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    policy = PolicyConfig.model_validate({"kind": "hf", "lora": lora, "dtype": dtype})
    train = TrainConfig(optim=OptimConfig(lr=1e-2), policy=policy, max_logprob_gap=limit)
    async with Learner.start(LearnerSpec(model=folder, train=train, max_context=128)) as learner:
        assert 0 < learner.probe_gap < limit
        sums = {learner.weights}
        for step in range(3):
            plan = plan_step(await collect(learner.engine, step), PlanConfig())
            result = await learner.step(plan)
            assert (result.version, result.skipped) == (step + 1, "")
            assert 0 < result.max_logprob_gap < limit
            receipt = await learner.publish(result.version)
            assert (receipt.version, receipt.checksum) == (step + 1, learner.weights)
            sums.add(learner.weights)
        assert len(sums) == 4
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    }


@pytest.mark.full
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
async def test_it_trains_exports_what_engines_load_and_resumes(
    folder: Path, tmp_path: Path, lora: Lora | None
) -> None:
    plan = a_plan()
    async with Learner.start(spec(folder, lora=lora)) as learner:
        assert (await learner.step(plan)).version == 1
        await learner.export(ExportRequest(folder=tmp_path / "v1", version=1))
        await learner.save(tmp_path / "checkpoint")
        assert not await learner.written()
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


@pytest.mark.full
async def test_too_little_memory_is_said_and_the_learner_lives(folder: Path) -> None:
    async with Learner.start(spec(folder, memory_gib=1e-5)) as learner:
        with pytest.raises(TrainError, match=r"needs .* GiB on cpu .* GiB are available"):
            await learner.step(a_plan())
        await learner.check()
        assert learner.version == 0


def test_the_configuration_reaches_the_learner(folder: Path) -> None:
    overrides = [
        *(f"model.path={folder}", "engine.kind=vllm", "engine.urls=http://127.0.0.1:1"),
        *("policy.kind=hf", "policy.lora_rank=3", "policy.memory_gib=2.5", "policy.device=cpu"),
    ]
    made = LearnerSpec.of(load_config(None, overrides), model=folder)
    assert made.train.policy.lora is not None
    expected = PolicyConfig(kind="hf", device="cpu", memory_gib=2.5)
    assert made.train.policy == expected.changed(lora=made.train.policy.lora)
    assert not made.samples


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in make test-full")
def test_a_device_that_is_not_there_is_said(folder: Path) -> None:
    with pytest.raises(ConfigError, match="torch sees no GPU here"):
        open_policy(folder, PolicyConfig(kind="hf", device="cuda"))


# --------------------------------------------------------------------------- to an engine


@pytest.mark.full
async def test_a_lora_policy_brings_its_adapters_to_vllm(folder: Path, tmp_path: Path) -> None:
    """From the learner's process over files to a server's adapters, each version under a name of its own."""
    there = tmp_path / "there"
    overrides = [
        *("engine.kind=vllm", "engine.urls=http://x", f"engine.publish_dir={there}"),
        *("policy.kind=hf", "policy.lora_rank=3", "collect.max_staleness=1"),
    ]
    chosen = PublishOptions.of(load_config(None, overrides), tmp_path)
    key = RequestKey(seed=1, rollout_id="r", turn=0)
    async with serve_vllm(40) as fake, open_vllm(HttpOptions(url=fake.url)) as engine:
        async with Learner.start(spec(folder, lora=LORA)) as learner:
            publisher = DiskPublisher(learner, engine, chosen)
            for version in range(6):
                receipt = await publisher.publish(version)
                said = await engine.generate(np.arange(4, dtype=np.int32), SamplingParams(max_tokens=3), key)
                assert receipt.version == version == said.version_runs[0][1]
                if version < 5:
                    assert (await learner.step(a_plan())).version == version + 1
            await learner.save(tmp_path / "checkpoint")
            assert not await learner.written()
        assert [name.split("-")[1] for name in fake.adapters] == ["v4", "v5"]
        assert fake.sampler.label == "0", "its own weights stay"
    files = {path.name for path in (there / "v000005").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "weights.json"}
    assert publisher.sent_bytes == (there / "v000005" / "adapter_model.safetensors").stat().st_size
    assert sorted(path.name for path in there.iterdir()) == [f"v{n:06d}" for n in (2, 3, 4, 5)]
    trained = load_file(tmp_path / "checkpoint" / "adapter_model.safetensors")
    sent = load_file(there / "v000005" / "adapter_model.safetensors")
    assert sent.keys() == trained.keys() == receipt.tensors.keys()
    assert all(torch.equal(sent[name], trained[name]) for name in sent)
    first = load_file(there / "v000002" / "adapter_model.safetensors")
    assert any(not torch.equal(sent[name], first[name]) for name in sent)


def test_adapters_are_cast_on_demand_and_a_policy_without_any_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    policy = opened(folder, lora=LORA)
    export(policy, ExportRequest(folder=tmp_path / "a", version=1, adapter=True, dtype="bfloat16"), folder)
    assert {t.dtype for t in load_file(tmp_path / "a" / "adapter_model.safetensors").values()} == {
        torch.bfloat16
    }
    with pytest.raises(TrainError, match="no adapters to publish"):
        export(opened(folder), ExportRequest(folder=tmp_path / "b", version=1, adapter=True), folder)
    assert not (tmp_path / "b").exists()


def test_weights_of_the_start_model_are_not_published_beside_the_trainers(
    folder: Path, tmp_path: Path
) -> None:
    """Models from a hub lie in several files and more than one format."""
    policy = opened(folder)
    start = folder / "model.safetensors"
    start.rename(folder / "model-00001-of-00001.safetensors")
    for name in ("model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"):
        (folder / name).write_text("{}")
    export(policy, ExportRequest(folder=tmp_path / "v1", version=1), folder)
    files = {path.name for path in (tmp_path / "v1").iterdir()}
    assert files >= {"config.json", "model.safetensors", "tokenizer.json", "weights.json"}
    assert not [name for name in files if "00001" in name or "index" in name or ".bin" in name]


# --------------------------------------------------------------------------- one GPU for both


def test_the_room_on_a_gpu_is_measured_when_a_step_begins(folder: Path) -> None:
    """When the learner starts, the engine that shares it is awake and leaves next to nothing."""
    policy, plan = opened(folder), a_plan()
    room = iter([1000, 1 << 40])
    fit = MemoryPlanner(policy.model.config, policy, limit=1 << 40, host=1 << 40, measured=lambda: next(room))
    with pytest.raises(TrainError, match=r"0\.0000 GiB are available"):
        fit.plan(plan)
    assert len(fit.plan(plan)) == len(plan.batches)
    assert fit.limit == 1 << 40


@pytest.mark.parametrize("shared", [True, False])
def test_a_step_leaves_a_shared_gpu_to_the_engine(
    folder: Path, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    overrides = [f"engine.share_gpu={str(shared).lower()}", "engine.kind=vllm", "engine.urls=http://x"]
    made = TrainConfig.of(load_config(None, [*overrides, "policy.kind=hf"]))
    config = parse_config(dump_config(made.changed(max_logprob_gap=100.0)))
    trainer = Trainer(opened(folder), config)
    trainer.step(a_plan())
    assert all(p.grad is None for _, p in trainer.model.named_parameters())
    trainer.release_cache()
    assert not emptied, "nothing to give back on a CPU"
    trainer.model = SimpleNamespace(device=torch.device("cuda"))  # type: ignore[assignment]
    trainer.release_cache()
    assert bool(emptied) == shared
