"""`insitu export RUN --checkpoint`: a model folder that transformers loads, chosen by held-out results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import insitu
from insitu import cli
from insitu.config import WARM_START, Config, load_config
from insitu.errors import ConfigError, RecordError
from insitu.storage.run_dir import RunDir
from insitu.storage.store import Store
from insitu.types import Ledger
from insitu_train.gguf.read import gguf_folder
from insitu_train.model.load import open_policy
from insitu_train.options import TrainConfig
from insitu_train.recovery import prune, written_steps
from insitu_train.trainer import checkpoint
from insitu_train.trainer.trainer import Trainer
from tests.storage.helpers_record import make_rollout
from tests.training.gguf_lab import model_folder as tiny_model

pytestmark = pytest.mark.slow

LORA = [
    "policy.kind=hf",
    "policy.device=cpu",
    "policy.lora_rank=2",
    "engine.kind=vllm",
    'engine.urls=["http://x"]',
]


def moved(config: Config, scale: float, model: Path = WARM_START) -> Trainer:
    """A trainer whose trained weights are not those of the start model."""
    train = TrainConfig.of(config)
    trainer = Trainer(open_policy(model, train.policy), train)
    with torch.no_grad():
        for number, weight in enumerate(trainer.optimiser.named.values()):
            weight.add_(scale * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
    return trainer


def run_of(path: Path, overrides: list[str], heldout: Mapping[int, float], model: Path = WARM_START) -> Path:
    """A run with a checkpoint per step; heldout: mean reward of the held-out tasks after a step."""
    config = load_config(None, [f"run.dir={path}", f"model.path={model}", "run.steps=3", *overrides])
    with RunDir.create(config) as run, run.store() as store:
        for step in (1, 2, 3):
            store.commit_step(step, {"skipped": "", "reward_mean": 0.5}, "", "h", Ledger())
            checkpoint.save(moved(config, 1e-3 * step, model), run.checkpoints / f"step-{step:05d}", model)
            if step in heldout:
                evaluated(store, "eval_after" if step == 3 else "eval_during", step, heldout[step])
    return path


def evaluated(store: Store, phase: str, step: int, reward: float) -> None:
    name = f"{phase}/{step:05d}/000/00"
    store.put_rollout(phase, step, 0, 0, make_rollout(name, reward=reward))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("full") / "run", [], {1: 0.25, 2: 1.0, 3: 0.5})


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("lora") / "run", LORA, {})


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(3, 19)[None]).logits[0]
    return found


@pytest.mark.full
def test_the_best_checkpoint_is_a_model_of_transformers(
    full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    arguments = ["export", str(full), "--checkpoint", "best", "--to", "hf", "--out", str(out), "--json"]
    assert cli.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["step"], report["dtype"]) == (2, "float32")
    assert torch.equal(logits(out), logits(full / "checkpoints" / "step-00002"))
    assert AutoTokenizer.from_pretrained(out).encode("x")
    card = (out / "README.md").read_text()
    assert "| held-out solve rate after it | 1.000, 1 of 1 rollouts |" in card
    assert "| optimizer steps | 2 of 3 |" in card
    texts = [p.read_text() for p in out.iterdir() if p.suffix in (".md", ".json")]
    assert not any(str(full) in text or str(WARM_START) in text for text in texts)
    assert not (out / "trainer").exists()
    again = insitu.export_model(full, tmp_path / "small", checkpoint=1, dtype="bfloat16")
    assert again["bytes"] < 0.7 * report["bytes"]
    assert logits(tmp_path / "small").isfinite().all()


@pytest.mark.full
def test_adapters_are_merged_or_given_to_peft(adapted: Path, tmp_path: Path) -> None:
    insitu.export_model(adapted, tmp_path / "whole")
    insitu.export_model(adapted, tmp_path / "adapters", to="peft", checkpoint=3)
    config = load_config(adapted / "config.toml")
    policy = moved(config, 3e-3).model
    ids = torch.arange(3, 19)
    with torch.no_grad():
        ours = policy.hidden(ids[:0], ids[None])[0] @ policy.head_weight.T
    assert (logits(tmp_path / "whole") - ours).abs().max() < 1e-4
    described = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == WARM_START.name
    assert f"Adapters of `{WARM_START.name}`" in (tmp_path / "adapters" / "README.md").read_text()


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_checkpoint_is_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "cache"))
    model = tiny_model(tmp_path / "model", "llama")
    overrides = LORA if lora else [text for text in LORA if "lora" not in text]
    run = run_of(tmp_path / "run", overrides, {}, model)
    report = insitu.export_model(run, tmp_path / "gguf", to="gguf", dtype="float32")
    assert [path.name for path in sorted((tmp_path / "gguf").iterdir())] == ["README.md", "model.gguf"]
    insitu.export_model(run, tmp_path / "folder")
    again = gguf_folder(str(tmp_path / "gguf" / "model.gguf"), lambda text: None)
    assert torch.equal(logits(again), logits(tmp_path / "folder"))
    assert not torch.equal(logits(again), logits(model)), "trained"
    small = insitu.export_model(run, tmp_path / "small", to="gguf", dtype="q8_0")
    assert small["bytes"] < 0.4 * report["bytes"]


def test_wrong_choices_are_one_line(full: Path, adapted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RecordError, match="keeps no checkpoint of step 7: there are 1, 2, 3"):
        insitu.export_model(full, out, checkpoint=7)
    with pytest.raises(RecordError, match="no held-out result of a checkpoint"):
        insitu.export_model(adapted, out, checkpoint="best")
    with pytest.raises(RecordError, match="has no adapters"):
        insitu.export_model(full, out, to="peft")
    with pytest.raises(ConfigError, match="needs --to hf or peft or gguf, got parquet"):
        insitu.export_model(full, out, to="parquet")
    with pytest.raises(ConfigError, match="--dtype of --to hf takes auto, float32, bfloat16, got q8_0"):
        insitu.export_model(full, out, dtype="q8_0")
    with pytest.raises(RecordError, match="the tokenizer cuts text in a way"):
        insitu.export_model(full, out, to="gguf")
    with pytest.raises(ConfigError, match="takes best, last or the number"):
        insitu.export_model(full, out, checkpoint="newest")
    assert not out.exists()
    out.mkdir()
    with pytest.raises(ConfigError, match="exists: give a new folder"):
        insitu.export_model(full, out)


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        (tmp_path / f"step-{step:05d}").mkdir()
    prune(tmp_path, 1, best=2)
    assert written_steps(tmp_path) == [2, 4]
