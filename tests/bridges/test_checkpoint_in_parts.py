"""Where a checkpoint goes that sharded ranks wrote, two files of weights and an index: every way leads on."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
import torch

import insitu
from insitu.config import load_config
from insitu.engines.launch import _start_model
from insitu.engines.safetensors_file import read_folder
from insitu.engines.server_command import server_command
from insitu.errors import ConfigError
from insitu.runtime.preflight import check_weights
from insitu.storage.run_dir import RunDir
from insitu.types import Ledger
from insitu_train.channel.installed import weights_digest
from insitu_train.checkpoint_files import verify
from insitu_train.embedded.core import EmbeddedCore, EngineOptions
from insitu_train.gguf.read import gguf_folder
from insitu_train.hub_runs import fetch_run, push_run
from insitu_train.learner.probe import probe_engine
from insitu_train.model.load import open_policy
from insitu_train.options import PolicyConfig
from insitu_train.trainer import checkpoint
from tests.bridges.test_model_export import logits, moved
from tests.fakes.hub import FakeHub
from tests.training.gguf_lab import model_folder as tiny_model

pytestmark = [
    pytest.mark.slow,
    # The hub's own client passes `data=` to its HTTP library.
    pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning"),
]
HF = ["policy.kind=hf", "policy.device=cpu", "engine.kind=vllm", 'engine.urls=["http://x"]']
PARTS = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint, written as two ranks write it that own every other tensor."""
    place = tmp_path_factory.mktemp("parts")
    model = tiny_model(place / "model", "llama")
    config = load_config(None, [f"run.dir={place / 'run'}", f"model.path={model}", "run.steps=1", *HF])
    with RunDir.create(config) as made, made.store() as store:
        store.commit_step(1, {"skipped": "", "reward_mean": 0.5}, "checkpoints/step-00001", "h", Ledger())
        (made.path / "metrics.jsonl").touch()
        folder = made.checkpoints / "step-00001"
        whole = checkpoint.snapshot(moved(config, 1e-2, model), model)
        checkpoint.prepare(folder)
        for part in (1, 0):
            tensors = {name: whole.model.tensors[name] for name in sorted(whole.model.tensors)[part::2]}
            moments = {name: whole.moments[name] for name in sorted(whole.moments)[part::2]}
            named = dataclasses.replace(whole.model, tensors=tensors)
            dataclasses.replace(whole, model=named, moments=moments, part=part, parts=2).write(folder)
    return place / "run"


@pytest.fixture(scope="module")
def parts(run: Path) -> Path:
    folder = run / "checkpoints" / "step-00001"
    assert sorted(path.name for path in folder.glob("model*")) == [*PARTS, INDEX]
    return folder


def test_a_folder_for_other_programs_is_one_file_without_an_index(
    run: Path, parts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "model"
    insitu.export_model(run, out, dtype="float32")
    assert {path.name for path in out.glob("model*")} == {"model.safetensors"}
    assert torch.equal(logits(out), logits(parts))


def test_a_gguf_file(run: Path, parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "cache"))
    insitu.export_model(run, tmp_path / "gguf", to="gguf", dtype="float32")
    again = gguf_folder(str(tmp_path / "gguf" / "model.gguf"), lambda text: None)
    assert torch.equal(logits(again), logits(parts))


def test_the_hub_gets_both_files_and_the_index(parts: Path, hub: FakeHub) -> None:
    report = insitu.push(parts, "hub:me/model")
    assert (report["kind"], report["left_out"]) == ("model", [])
    assert {name for name in hub.files if name.startswith("model")} == {*PARTS, INDEX}
    for name in (*PARTS, INDEX):
        assert hub.files[name] == (parts / name).read_bytes()
    assert not any("trainer" in name for name in hub.files)


async def test_a_run_that_is_resumed_from_the_hub_has_every_part(
    run: Path, parts: Path, hub: FakeHub, tmp_path: Path
) -> None:
    await push_run(run, "me/run")
    assert await asyncio.to_thread(fetch_run, "hub:me/run", tmp_path / "again")
    again = tmp_path / "again" / "checkpoints" / "step-00001"
    verify(again)
    names = [{path.relative_to(one) for path in one.rglob("*")} for one in (parts, again)]
    assert names[0] == names[1]


def test_the_embedded_engine_samples_and_a_run_begins_with_it(parts: Path) -> None:
    """What the learner of `insitu train` and `insitu serve` does with model.path."""
    config = load_config(None, [f"model.path={parts}", "policy.kind=hf", "policy.device=cpu"])
    check_weights(config)
    model = open_policy(parts, PolicyConfig.of(config))
    core = EmbeddedCore(model, EngineOptions(max_rows=4, max_context=256, threads=1))
    assert probe_engine(core, model, temperature=1.0, limit=1e-3) <= 1e-3
    assert len(weights_digest(parts)) == 64, "what other hosts compare"


def test_a_part_that_is_missing_is_one_line_before_a_run_begins(parts: Path, tmp_path: Path) -> None:
    for path in parts.iterdir():
        if path.is_file() and path.name != PARTS[1]:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = load_config(None, [f"model.path={tmp_path}", "policy.kind=hf", "policy.device=cpu"])
    with pytest.raises(ConfigError, match=rf"^model\.path: .*{PARTS[1]} is missing, which {INDEX} names"):
        check_weights(config)


def test_vllm_gets_the_folder_and_on_a_cpu_a_copy_of_one_file(parts: Path, tmp_path: Path) -> None:
    config = load_config(None, [f"model.path={parts}", f"run.dir={tmp_path / 'run'}", *HF])
    started = server_command(config, str(_start_model(config, on_cpu=False)), cpu=False)
    assert started.arguments[:2] == ("serve", str(parts))
    copy = _start_model(config, on_cpu=True)
    assert {path.name for path in copy.glob("model*")} == {"model.safetensors"}
    assert read_folder(copy).keys() == {*read_folder(parts), "lm_head.weight"}
    assert torch.equal(logits(copy), logits(parts))
