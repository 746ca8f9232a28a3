"""Publishers of files against a fake server: what is sent, what is verified, and how it can fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from insitu.config import load_config
from insitu.engines.base import PauseMode, Receipt
from insitu.engines.http import HttpOptions
from insitu.engines.replicas import EngineSet
from insitu.engines.safetensors_file import read_folder, read_manifest, sums_of
from insitu.engines.vllm import VllmEngine, open_vllm
from insitu.errors import EngineError
from insitu.types import RequestKey, SamplingParams
from insitu_train.weights.files import DeltaPublisher, DiskPublisher, PublishOptions
from insitu_train.weights.gpu import TransferPublisher, Transport
from tests.fakes.exporter import FakeExporter, FakeTransfers
from tests.fakes.sglang import serve_sglang
from tests.fakes.vllm import FakeVllm, serve_vllm
from tests.fakes.weight_folders import chance_tensors, served_sums

VOCAB = 40


@asynccontextmanager
async def server(**given: float) -> AsyncIterator[tuple[FakeVllm, VllmEngine]]:
    options = {"call_deadline_s": 5.0, "control_deadline_s": 2.0, **given}
    async with serve_vllm(VOCAB) as fake, open_vllm(HttpOptions(url=fake.url, **options)) as engine:
        fake.sums = served_sums(FakeExporter().tensors)
        yield fake, engine


def to(folder: Path, mode: PauseMode = "keep") -> PublishOptions:
    return PublishOptions(folder=folder, mode=mode)


async def sampled_by(engine: VllmEngine) -> int:
    key = RequestKey(seed=1, rollout_id="r", turn=0)
    said = await engine.generate(np.arange(4, dtype=np.int32), SamplingParams(max_tokens=3), key)
    return said.version_runs[0][1]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_each_version_is_loaded_proven_and_its_predecessors_go(tmp_path: Path) -> None:
    async with server() as (fake, engine):
        exporter = FakeExporter()
        publisher = DiskPublisher(exporter, engine, to(tmp_path))
        for version in range(4):
            receipt = await publisher.publish(version)
            assert (receipt.version, receipt.tensors) == (version, sums_of(exporter.tensors))
            assert fake.sums == served_sums(exporter.tensors)
            assert await sampled_by(engine) == version
    assert names(tmp_path) == ["v000002", "v000003"]


async def test_a_server_with_a_head_of_its_own_gets_one(tmp_path: Path) -> None:
    async with server() as (fake, engine):
        fake.sums["lm_head.weight"] = "as it was"
        receipt = await DiskPublisher(FakeExporter(), engine, to(tmp_path)).publish(1)
        assert receipt.tensors["lm_head.weight"] == receipt.tensors["model.embed_tokens.weight"]


async def test_a_delta_leads_to_the_same_weights_with_fewer_bytes(tmp_path: Path) -> None:
    async with server() as (fake, engine):
        exporter = FakeExporter(share=0.01, vocab=4096)
        publisher = DeltaPublisher(exporter, engine, to(tmp_path / "there"), tmp_path / "spool")
        await publisher.publish(0)
        whole = publisher.sent_bytes
        for version in (1, 2, 5):
            receipt = await publisher.publish(version)
            assert fake.sums == served_sums(exporter.tensors)
            assert receipt.tensors == sums_of(read_folder(tmp_path / "there" / f"v{version:06d}"))
        assert publisher.sent_bytes < whole / 4
        assert not list((tmp_path / "there").glob("*.delta"))


async def test_a_delta_whose_base_is_gone_travels_whole(tmp_path: Path) -> None:
    async with server() as (fake, engine):
        exporter = FakeExporter()
        publisher = DeltaPublisher(exporter, engine, to(tmp_path / "there"), tmp_path / "spool")
        await publisher.publish(0)
        (tmp_path / "there" / "v000000" / "model.safetensors").unlink()
        await publisher.publish(1)
        assert exporter.wanted[-1].delta is None
        assert fake.sums == served_sums(exporter.tensors)
        await publisher.publish(2)
        assert exporter.wanted[-1].delta is not None


async def test_sglang_takes_the_same_files(tmp_path: Path) -> None:
    from insitu.engines.sglang import open_sglang

    async with serve_sglang(VOCAB) as fake, open_sglang(HttpOptions(url=fake.url)) as engine:
        publisher = DeltaPublisher(FakeExporter(), engine, to(tmp_path / "there"), tmp_path / "spool")
        for version in range(3):
            assert (await publisher.publish(version)).version == version == await engine.version()


class Liar:
    """A server whose receipts are for something else."""

    def __init__(self, engine: VllmEngine, lie: Receipt) -> None:
        self._engine, self._lie = engine, lie

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    async def load(self, folder: Path, version: int, *, mode: PauseMode = "wait") -> Receipt:
        await self._engine.load(folder, version, mode=mode)
        return self._lie


async def test_a_receipt_for_something_else_is_refused(tmp_path: Path) -> None:
    held = sums_of(FakeExporter().tensors)
    wrong = {**held, "model.norm.weight": "0" * 64}
    lies = {
        "receipt is for version 3, published was 0": Receipt(version=3, checksum="x", tensors=held),
        "checksum 000000000000 for model.norm.weight, published was": Receipt(
            version=0, checksum="x", tensors=wrong
        ),
        "checksum none for model.embed": Receipt(version=0, checksum="x"),
    }
    async with server() as (_, engine):
        for said, lie in lies.items():
            publisher = DiskPublisher(FakeExporter(), Liar(engine, lie), to(tmp_path))  # type: ignore[arg-type]
            with pytest.raises(EngineError, match=said):
                await publisher.publish(0)


async def test_one_refusal_is_tried_again_and_two_are_one_clear_error(tmp_path: Path) -> None:
    async with server() as (fake, engine):
        publisher = DiskPublisher(FakeExporter(), engine, to(tmp_path))
        fake.refusals = 1
        assert (await publisher.publish(1)).version == 1
        fake.refusals = 2
        with pytest.raises(EngineError, match=r"refused /collective_rpc \(HTTP 500\)") as caught:
            await publisher.publish(2)
        assert "\n" not in str(caught.value)
        with pytest.raises(EngineError, match="was to load version 2 and has not"):
            await sampled_by(engine)
        assert (await publisher.publish(2)).version == 2
        assert await sampled_by(engine) == 2


async def test_an_engine_that_never_answers_ends_in_time(tmp_path: Path) -> None:
    async with server(call_deadline_s=0.2) as (fake, engine):
        publisher = DiskPublisher(FakeExporter(), engine, to(tmp_path))
        fake.hangs = {"/collective_rpc"}
        async with asyncio.timeout(5):
            with pytest.raises(EngineError, match="did not answer /collective_rpc within 0.2 s"):
                await publisher.publish(1)


async def test_a_restarted_server_gets_its_weights_back(tmp_path: Path) -> None:
    async with server() as (fake, engine):
        publisher = DiskPublisher(FakeExporter(), engine, to(tmp_path))
        await publisher.publish(3)
        fake.restart()
        with pytest.raises(EngineError, match="'default', which no publication of ours set"):
            await sampled_by(engine)
        await publisher.publish(3)
        assert await sampled_by(engine) == 3
        manifest = read_manifest(tmp_path / "v000003")
        assert manifest is not None
        assert manifest.version == 3


@pytest.mark.parametrize(
    ("more", "adapters"),
    [
        ("engine.kind=vllm policy.lora_rank=4", True),
        ("engine.kind=vllm policy.lora_rank=4 engine.publish_lora=merged engine.publish_mode=wait", False),
        ("engine.kind=vllm policy.lora_rank=4 engine.publish_lora=merged engine.publish=delta", False),
        ("engine.kind=sglang policy.lora_rank=4 engine.publish=delta", False),
        ("engine.kind=vllm", False),
    ],
)
def test_adapters_go_to_vllm_as_they_are_unless_they_are_to_be_merged(
    more: str, adapters: bool, tmp_path: Path
) -> None:
    config = load_config(overrides=["policy.kind=hf", "engine.urls=http://x", *more.split()])
    assert PublishOptions.of(config, tmp_path).adapter == adapters


# --------------------------------------------------------------------------- without files


def alone(engine: VllmEngine) -> EngineSet:
    return EngineSet({"server": engine}, max_wait_s=1.0)


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
async def test_tensors_reach_a_server_without_files(transport: Transport, tmp_path: Path) -> None:
    async with server() as (fake, engine):
        fake.workers = 2 if transport == "nccl" else 1
        learner = FakeTransfers(fake)
        publisher = TransferPublisher(learner, alone(engine), to(tmp_path), transport)
        for version, seed in enumerate(["start", "one", "two"]):
            learner.tensors = chance_tensors(seed)
            receipt = await publisher.publish(version)
            assert (receipt.version, receipt.tensors) == (version, sums_of(learner.tensors))
            assert fake.sums == served_sums(learner.tensors)
            assert await sampled_by(engine) == version
        first = fake.transfers[0]["init_info"]
        assert first["packed"] is False
        assert (first.get("world_size"), first.get("rank_offset")) == (
            (3, 1) if transport == "nccl" else (None, None)
        )
        assert sum("init_info" in body for body in fake.transfers) == 1
        assert [body["start"] for body in fake.transfers if "start" in body] == [True] * 3
        assert learner.asked[-1] == "release"
        assert publisher.sent_bytes == sum(len(t.data) for t in learner.tensors.values())


async def test_a_restarted_server_gets_what_crossed_a_gpu_again(tmp_path: Path) -> None:
    async with server() as (fake, engine), alone(engine) as engines:
        await TransferPublisher(FakeTransfers(fake), engines, to(tmp_path), "ipc").publish(4)
        fake.restart()
        key = RequestKey(seed=1, rollout_id="a", turn=0)
        reply = await engines.generate(np.arange(4, dtype=np.int32), SamplingParams(max_tokens=4), key)
        assert reply.version_runs == ((0, 4),)
        assert sum("init_info" in body for body in fake.transfers) == 2


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
async def test_what_crossed_a_gpu_and_arrived_as_something_else_is_noticed(
    transport: Transport, tmp_path: Path
) -> None:
    async with server() as (fake, engine):
        learner = FakeTransfers(fake)
        publisher = TransferPublisher(learner, alone(engine), to(tmp_path), transport)
        await publisher.publish(0)
        learner.tensors, fake.spoils = chance_tensors("one"), "model.norm.weight"
        with pytest.raises(EngineError, match="model.norm.weight has other weights than were published"):
            await publisher.publish(1)


async def test_an_update_whose_trainer_never_sends_ends_in_time_and_joins_anew(tmp_path: Path) -> None:
    async with server(call_deadline_s=0.3) as (fake, engine):
        learner = FakeTransfers(fake)
        publisher = TransferPublisher(learner, alone(engine), to(tmp_path), "nccl")
        await publisher.publish(0)
        learner.sends = False
        async with asyncio.timeout(5):
            with pytest.raises(EngineError, match="did not answer /update_weights within 0.3 s"):
                await publisher.publish(1)
        with pytest.raises(EngineError, match="its weights are unknown"):
            await sampled_by(engine)
        learner.sends = True
        assert (await publisher.publish(1)).version == 1
        assert learner.asked.count("join") == 2


async def test_tensors_that_the_server_does_not_have_are_refused_before_anything_stops(
    tmp_path: Path,
) -> None:
    async with server() as (fake, engine):
        learner = FakeTransfers(fake)
        learner.tensors = {n: t for n, t in chance_tensors("one").items() if "k_proj" not in n}
        publisher = TransferPublisher(learner, alone(engine), to(tmp_path), "ipc")
        with pytest.raises(EngineError, match=r"qkv_proj\.weight would receive none"):
            await publisher.publish(1)
        assert await sampled_by(engine) == 0
        assert learner.asked[-1] == "release"


async def test_handles_of_one_gpu_are_not_given_to_a_server_on_two(tmp_path: Path) -> None:
    async with server() as (fake, engine):
        fake.workers = 2
        learner = FakeTransfers(fake)
        publisher = TransferPublisher(learner, alone(engine), to(tmp_path), "ipc")
        with pytest.raises(EngineError, match="engine.publish ipc: the server uses 2 GPUs"):
            await publisher.publish(1)
        assert await sampled_by(engine) == 0  # nothing was paused
        assert not fake.transfers
