"""Sharded ranks (FSDP2) by gloo on a CPU: loss, gradient and update are those of one process in float32, a
checkpoint is the one that one process writes, and it goes on with any number of ranks. NCCL: not tested."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import shard_lab
import torch
from model_zoo import BASE, DELTA, FEW, GEMMA4, HEAD, MLA, MOE, TWO, saved
from model_zoo import SHARED as WITH_SHARED
from safetensors.torch import load_file, save_file
from shard_lab import (
    CONFIG,
    LORA,
    Found,
    adapted,
    on_processes,
    opened,
    resumed,
    spread,
    steps,
    trainer_on,
)
from test_distributed import made_plan
from train_lab import small_model
from transformers import CONFIG_MAPPING

from insitu.config import load_config
from insitu.config.training import LossConfig
from insitu.engines.safetensors_file import read_manifest
from insitu.errors import ConfigError, TrainError
from insitu_train.embedded.model import save_model
from insitu_train.embedded.model_files import read_tensors
from insitu_train.learner.client import Learner
from insitu_train.learner.process import LearnerSpec
from insitu_train.memory.plan import LADDER
from insitu_train.model.hf import HfPolicy, decoder_layers, empty_model, read_model
from insitu_train.model.load import device_of
from insitu_train.model.parts import PartFiles, enough, kinds
from insitu_train.options import Lora, OptimConfig, PolicyConfig, TrainConfig
from insitu_train.plan.step import StepPlan
from insitu_train.trainer import checkpoint
from insitu_train.trainer.checksum import WeightChecksum
from insitu_train.trainer.distributed import Sharded
from insitu_train.trainer.optimizer import Optimiser
from insitu_train.weights.files import ExportRequest

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

SHARED = TrainConfig(
    policy=PolicyConfig(kind="hf"), ranks=2, shard=True, max_logprob_gap=100.0, max_staleness=9
)
HARD = CONFIG.changed(loss=LossConfig(loss="gspo", clip=(0.5, 9.0), ratio="trainer"), epochs=2)
"""Passes without a gradient before those with one, and a way back over two updates."""


def uneven(world: int) -> StepPlan:
    """The last rank has nothing to compute, the first one most."""
    plan = made_plan(world, budget=60)
    busy = max(1, world - 1)
    turns = [dataclasses.replace(b, rank=max(0, n % (busy + 1) - 1)) for n, b in enumerate(plan.batches)]
    assert len(turns) > world
    assert {b.rank for b in turns} == set(range(busy))
    return dataclasses.replace(plan, batches=tuple(turns))


def relative(found: Found, expected: Found) -> float:
    """Largest difference of any tensor, against that tensor's own largest entry."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - t).abs().max() / t.abs().max().clamp(min=1e-9)) for n, t in expected.items())


def same(found: Found, expected: Found) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], t) for n, t in expected.items())


def check_steps(found: Found, alone: Found, world: int, parts: int = 0) -> None:
    assert found["gradients"]["loss"] == pytest.approx(alone["gradients"]["loss"], rel=1e-6)
    assert relative(found["gradients"]["grads"], alone["gradients"]["grads"]) < 1e-5
    assert relative(found["steps 0"]["weights"], alone["steps 0"]["weights"]) < 1e-5
    assert same(found["steps 1"]["weights"], found["steps 0"]["weights"]), "the same bits again"
    assert found["refused"].startswith("rollout ")
    assert "trainer and sampler differ by" in found["refused"]
    for mine, theirs in zip(found["steps 0"]["results"], alone["steps 0"]["results"], strict=True):
        for key, value in theirs.items():
            near = isinstance(value, float)
            assert mine[key] == (pytest.approx(value, rel=1e-4, abs=1e-6) if near else value), key
    # rows that do not divide evenly are the first ranks'
    assert found["parts"] == pytest.approx(alone["parts"] / (parts or world), rel=0.1)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found, list[Found]]:
    """(folder, what one process found, what each of two ranks found)."""
    folder = tmp_path_factory.mktemp("two")
    save_model(small_model(1), folder / "model")
    plan: dict[str, Any] = {"plan": uneven(2)}
    alone: Found = {
        "steps": steps(None, folder, **plan),
        "float32": adapted(None, folder, made_plan(2), torch.float32),
        "bfloat16": adapted(None, folder, made_plan(2), torch.bfloat16),
    }
    jobs: dict[str, tuple[str, Found]] = {
        "steps": ("steps", plan),
        "resumed": ("resumed", {**plan, "source": "checkpoint-1-0"}),
        "resumed adapters": ("resumed", {**plan, "source": "adapted-1-float32", "lora": LORA}),
        "float32": ("adapted", {"plan": made_plan(2), "dtype": torch.float32}),
        "bfloat16": ("adapted", {"plan": made_plan(2), "dtype": torch.bfloat16}),
    }
    return folder, alone, on_processes(2, folder, jobs)


Two = tuple[Path, Found, list[Found]]


@pytest.mark.full
def test_two_shards_train_as_one_process(two: Two) -> None:
    _, alone, ranks = two
    for found in ranks:
        check_steps(found["steps"], alone["steps"], 2)
    assert ranks[0]["steps"]["refused"] == ranks[1]["steps"]["refused"]


@pytest.mark.full
def test_four_shards_with_all_techniques_two_epochs_and_a_first_look(tmp_path: Path) -> None:
    save_model(small_model(1), tmp_path / "model")
    tiled = dataclasses.replace(LADDER[-1], tile_mlp=16, offload_activations=False, offload_optimizer=False)
    plan = uneven(4)
    alone = steps(None, tmp_path, plan, HARD)
    given = {"plan": plan, "config": HARD, "techniques": tiled}
    for found in on_processes(4, tmp_path, {"steps": ("steps", given)}):
        check_steps(found["steps"], alone, 4)


@pytest.mark.full
def test_a_checkpoint_of_two_shards_is_one_of_one_process_and_goes_on_there(two: Two, tmp_path: Path) -> None:
    folder, alone, _ = two
    found = resumed(None, folder, uneven(2), "checkpoint-2-0")
    assert found["version"] == 2
    assert relative(found["weights"], alone["steps"]["steps 0"]["weights"]) < 1e-5
    ours, theirs = folder / "checkpoint-2-0", folder / "checkpoint-1-0"
    assert {p.name for p in ours.rglob("*")} == {p.name for p in theirs.rglob("*")}
    assert (ours / "config.json").read_bytes() == (theirs / "config.json").read_bytes()
    again = trainer_on(opened(folder / "model"), CONFIG, None)
    checkpoint.load(again, ours)
    checkpoint.save(again, tmp_path / "again")
    for path in (p for p in ours.rglob("*") if p.is_file()):
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(ours)).read_bytes(), path.name


@pytest.mark.full
def test_two_copies_of_two_shards_train_as_one_process(tmp_path: Path) -> None:
    """As two hosts of two ranks: gradients are summed inside a copy, then over both."""
    save_model(small_model(1), tmp_path / "model")
    plan = uneven(4)
    alone: Found = {
        "steps": steps(None, tmp_path, plan),
        "adapters": adapted(None, tmp_path, made_plan(4), torch.float32),
    }
    jobs: dict[str, tuple[str, Found]] = {
        "steps": ("steps", {"plan": plan}),
        "adapters": ("adapted", {"plan": made_plan(4), "dtype": torch.float32}),
    }
    for found in on_processes(4, tmp_path, jobs, shards=2):
        check_steps(found["steps"], alone["steps"], 4, parts=2)
        mine, theirs = found["adapters"]["steps"], alone["adapters"]["steps"]
        assert relative(mine["weights"], theirs["weights"]) < 1e-4
        assert mine["results"][1]["loss"] == pytest.approx(theirs["results"][1]["loss"], rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_each_rank_writes_its_part_of_a_checkpoint_and_of_a_publication(tmp_path: Path, kind: str) -> None:
    """Experts are one parameter here and a tensor each in the files."""
    changed = {**HEAD, **MOE} if kind == "qwen3_moe" else {**HEAD, "tie_word_embeddings": True}
    saved(tmp_path, kind, **{**TWO, **changed, "num_hidden_layers": 4, "vocab_size": 130}).rename(
        tmp_path / "model"
    )
    given = {"plan": made_plan(2), "name": "parts", "owners": 2}
    alone = spread(None, tmp_path, **{**given, "name": "whole"})
    ranks = on_processes(2, tmp_path, {"spread": ("spread", given)})
    for found in (rank["spread"] for rank in ranks):
        assert found["sum"] == ranks[0]["spread"]["sum"]
        assert relative(found["weights"], alone["weights"]) < 1e-5
        assert found["moments"].keys() == alone["moments"].keys()
        assert 0 < found["held"] < 0.8 * sum(t.nbytes for t in found["weights"].values())
    for name, one in (("parts", "whole"), ("parts-served", "whole-served")):
        assert sorted(path.name for path in (tmp_path / name).glob("*.safetensors*")) == [
            "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ]  # fmt: skip
        mine, theirs = read_tensors(tmp_path / name), read_tensors(tmp_path / one)
        assert {n: (t.dtype, t.shape) for n, t in mine.items()} == {
            n: (t.dtype, t.shape) for n, t in theirs.items()
        }
        with PartFiles(tmp_path / name) as files:
            assert set(files) == set(mine)
    assert read_manifest(tmp_path / "parts-served") is not None
    theirs = dict(read_model(tmp_path / "parts").named_parameters())
    assert same({n: t.detach() for n, t in theirs.items()}, ranks[0]["spread"]["weights"])
    again = trainer_on(opened(tmp_path / "model"), CONFIG, None)
    checkpoint.load(again, tmp_path / "parts")
    assert WeightChecksum(again.model).now() == ranks[0]["spread"]["sum"]
    assert same(dict(again.optimiser.tensors()), ranks[0]["spread"]["moments"])
    lost = tmp_path / "parts" / "model-00002-of-00002.safetensors"
    raw = bytearray(lost.read_bytes())
    raw[-3] ^= 1
    lost.write_bytes(raw)
    with pytest.raises(TrainError, match="damaged: model-00002-of-00002.safetensors has a wrong checksum"):
        checkpoint.load(again, tmp_path / "parts")
    lost.unlink()
    with pytest.raises(TrainError, match=f"load checkpoint .*No such file.*{lost.name}"):
        checkpoint.load(again, tmp_path / "parts")


@pytest.mark.full
@pytest.mark.parametrize(("job", "steps"), [("resumed", "steps"), ("resumed adapters", "float32")])
def test_a_checkpoint_of_one_process_goes_on_in_two_shards(two: Two, job: str, steps: str) -> None:
    _, alone, ranks = two
    expected = alone["steps"]["steps 0"] if steps == "steps" else alone["float32"]["steps"]
    for found in ranks:
        assert relative(found[job]["weights"], expected["weights"]) < 1e-5
        assert found[job]["loss"] == pytest.approx(expected["results"][1]["loss"], rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_adapters_of_two_shards_are_those_of_one_process(two: Two, dtype: str, near: float) -> None:
    """In bfloat16 single products are added up in another order, so only the size of errors is known."""
    folder, alone, ranks = two
    for found in ranks:
        mine, theirs = found[dtype]["gradients"], alone[dtype]["gradients"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=near)
        moved = {n: g for n, g in theirs["grads"].items() if float(g.abs().max()) > 0}
        assert moved
        assert all("lora_" in n for n in theirs["grads"])
        assert relative({n: mine["grads"][n] for n in moved}, moved) < near
    names = {"": "adapter_model.safetensors", "-merged": "model.safetensors"}
    for end, name in names.items():
        one, shards = (load_file(folder / f"adapted-{n}-{dtype}{end}" / name) for n in (1, 2))
        assert {n: (t.dtype, t.shape) for n, t in shards.items()} == {
            n: (t.dtype, t.shape) for n, t in one.items()
        }
        if dtype == "float32":
            # AdamW's first step moves an entry by lr whatever its gradient's size
            assert max(float((shards[n] - t).abs().max()) for n, t in one.items()) < 1e-5


@pytest.mark.full
async def test_a_learner_of_two_shards_trains_exports_and_goes_on_alone(tmp_path: Path) -> None:
    save_model(small_model(1), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    spec = LearnerSpec(model=tmp_path / "model", samples=False, train=SHARED)
    async with Learner.start(spec) as learner:
        start = learner.weights
        await learner.save(tmp_path / "start")
        assert not await learner.written()
        await learner.step(made_plan(2))
        once = learner.weights
        await learner.export(ExportRequest(folder=tmp_path / "v1", version=1))
        await learner.save(tmp_path / "checkpoint")
        assert not await learner.written()
        with pytest.raises(TrainError, match="as files only"):
            await learner.transfer("describe")
        await learner.load(tmp_path / "start")
        assert learner.weights == start != once
        await learner.step(made_plan(2))
        assert learner.weights == once
    alone = dataclasses.replace(spec, train=SHARED.changed(ranks=1, shard=False))
    async with Learner.start(alone) as learner:
        await learner.load(tmp_path / "checkpoint")
        assert learner.weights == once
        await learner.export(ExportRequest(folder=tmp_path / "v1-alone", version=1))
    one, other = read_tensors(tmp_path / "v1"), read_tensors(tmp_path / "v1-alone")
    assert same(one, other)
    ours, theirs = read_manifest(tmp_path / "v1"), read_manifest(tmp_path / "v1-alone")
    assert ours == theirs
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "v1" / name).read_bytes() == (tmp_path / "v1-alone" / name).read_bytes()


# --------------------------------------------------------------------------- opening in parts


SIX: dict[str, Any] = {"num_hidden_layers": 6}
MIXED = {**SIX, "sliding_window": 16, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 4}
IN_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen2", SIX),
    "one matrix for embedding and head": ("qwen3", {**HEAD, **SIX, "tie_word_embeddings": True}),
    "experts": ("qwen3_moe", {**HEAD, **MOE, **SIX}),
    "experts in one tensor": ("gpt_oss", {**HEAD, **FEW, **MIXED}),
    "a dense layer first, and stored buffers": ("deepseek_v3", {**MLA, **SIX}),
    "windows": ("gemma3_text", {**HEAD, **MIXED}),
    "fewer rows than ranks": ("qwen3_next", {**HEAD, **WITH_SHARED, **DELTA}),
}
"""Name -> architecture."""


def check_in_parts(found: Found, world: int) -> None:
    assert found["differ"] == []
    assert found["names"]
    assert found["configs"]
    assert found["gap"] < 1e-6
    assert found["by_rows"][0] == found["by_rows"][1]
    assert found["notices"] == []
    # rows that do not divide evenly are the first ranks'
    assert found["held"] == pytest.approx(1 / world, rel=0.1)
    assert found["bytes"] - found["buffers"] == pytest.approx(found["of"] / world, rel=0.1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[str, Found]]]:
    folder = tmp_path_factory.mktemp("parts")
    jobs: dict[str, tuple[str, Found]] = {}
    for name, (kind, changed) in IN_PARTS.items():
        place = saved(folder / name.replace(" ", "-"), kind, **{**TWO, **changed})
        jobs[name] = ("in_parts", {"name": str(place.relative_to(folder))})
    jobs["adapters"] = ("in_parts", {**jobs["experts"][1], "lora": Lora(rank=2, alpha=4.0)})
    return folder, jobs


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_reads_its_part_and_has_the_weights_of_a_whole_opening(
    made: tuple[Path, dict[str, tuple[str, Found]]], world: int
) -> None:
    folder, jobs = made
    for found in on_processes(world, folder, jobs):
        for name in jobs:
            try:
                check_in_parts(found[name], world)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


@pytest.mark.full
def test_a_folder_that_is_laid_out_otherwise_is_opened_whole_and_a_notice_says_so(tmp_path: Path) -> None:
    """Gemma 4 has a matrix whose width depends on the number of layers, so its first layers are no check."""
    saved(tmp_path, "gemma4_text", **{**HEAD, **GEMMA4, **MIXED})
    save_model(small_model(1), tmp_path / "old")
    tensors = load_file(tmp_path / "old" / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    jobs: dict[str, tuple[str, Found]] = {
        name: ("in_parts", {"name": name}) for name in ("gemma4_text", "old")
    }
    for found in on_processes(2, tmp_path, jobs):
        for name in jobs:
            assert (found[name]["differ"], found[name]["configs"]) == ([], True)
            assert found[name]["gap"] < 1e-6
            (notice,) = found[name]["notices"]
            assert notice.startswith(f"{tmp_path / name} cannot be opened in parts")


def test_the_first_layers_with_every_kind_are_checked() -> None:
    assert enough(["a", "a", "a", "a"]) == 2
    assert enough(["a", "b", "b", "c", "a"]) == 4
    assert enough(["a"]) == 1
    config = CONFIG_MAPPING["smollm3"](**{**BASE, **SIX})
    found = kinds(config, decoder_layers(empty_model(config, "eager")))
    assert enough(found) == 4, "its fourth layer has no positions"


# --------------------------------------------------------------------------- without processes


def rank_of(rank: int, world: int) -> Sharded:
    return Sharded(SimpleNamespace(rank=lambda: rank, size=lambda: world))


def test_all_ranks_run_equally_many_passes_and_each_counts_once() -> None:
    batches = uneven(4).batches
    shares = [(rank, rank.mine(batches)) for rank in (rank_of(r, 4) for r in range(4))]
    assert len({len(mine) for _, mine in shares}) == 1
    counted = [b for rank, mine in shares for b in mine if rank.counts(b)]
    assert sorted(counted, key=batches.index) == list(batches)
    idle, company = shares[3]
    assert not any(idle.counts(b) for b in company)


def test_what_cannot_be_sharded_is_refused_with_its_key() -> None:
    hf = ["policy.kind=hf", "engine.kind=vllm", "engine.urls=http://x"]
    assert TrainConfig.of(load_config(None, [*hf, "train.ranks=2", "train.shard=true"])).shard
    for overrides, match in [
        ([*hf, "train.shard=true"], "shard has no effect with ranks = 1"),
        (["train.shard=true", "train.ranks=2"], "train.shard needs policy.kind = 'hf'"),
        ([*hf, "train.shard=true", "train.ranks=2", "engine.publish=nccl"], "as files, not by nccl"),
    ]:
        with pytest.raises(ConfigError, match=match):
            load_config(None, overrides)
    with pytest.raises(ValueError, match=r"train\.shard needs ranks > 1"):
        TrainConfig(shard=True)


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    policy = PolicyConfig(kind="hf")
    assert [device_of(policy, rank, 2) for rank in range(2)] == [torch.device("cuda", n) for n in range(2)]
    assert chosen == [0, 1]
    with pytest.raises(
        ConfigError, match=r"train\.ranks = 3: each rank needs a GPU of its own, torch sees 2"
    ):
        device_of(policy, 0, 3)
    assert device_of(policy, 0, 1) is None
    assert device_of(policy.changed(device="cpu"), 1, 2) == torch.device("cpu")


def test_muon_is_refused(tmp_path: Path) -> None:
    save_model(small_model(1), tmp_path / "model")
    policy = opened(tmp_path / "model")
    for _, p in policy.named_parameters():
        p.full_tensor = p.detach  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="Muon needs whole matrices"):
        Optimiser(policy, OptimConfig(muon_lr=0.1))


def test_sharded_weights_are_not_read_in_part(tmp_path: Path) -> None:
    save_model(small_model(1), tmp_path / "model")
    policy: HfPolicy = opened(tmp_path / "model")
    policy.shards = 2
    for read in (policy.stored, lambda: dict(policy.published())):
        with pytest.raises(TrainError, match="must be gathered"):
            read()
    assert shard_lab.weights(policy).keys() == dict(policy.named_parameters()).keys()
