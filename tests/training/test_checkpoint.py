"""Checkpoints: bit-identical continuation, and nothing half-written or damaged is ever loaded."""

from __future__ import annotations

import hashlib
import json
import re
import resource
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from train_lab import sampled_groups, small_model
from transformers import Qwen3ForCausalLM

from insitu.engines.safetensors_file import read_folder
from insitu.errors import TrainError
from insitu_train.options import OptimConfig, TrainConfig
from insitu_train.plan.step import PlanConfig, StepPlan, plan_step
from insitu_train.trainer import checkpoint
from insitu_train.trainer.checkpoint import CheckpointWriter, Snapshot
from insitu_train.trainer.trainer import Trainer

pytestmark = pytest.mark.slow


def trainer(muon_lr: float = 0.0) -> Trainer:
    optim = OptimConfig(lr=1e-3, muon_lr=muon_lr, warmup_steps=3)
    return Trainer(small_model(), TrainConfig(optim=optim))


def next_plan(t: Trainer) -> StepPlan:
    """A plan that depends on the weights, as sampling does."""
    groups = sampled_groups(t.model, seed=t.steps, version=t.version)
    return plan_step(groups, PlanConfig(token_budget=120))


def state(t: Trainer) -> dict[str, bytes]:
    tensors = {**dict(t.model.named_parameters()), **t.optimiser.tensors()}
    return {n: p.detach().numpy().tobytes() for n, p in tensors.items()}


@pytest.mark.parametrize("muon_lr", [0.0, 0.01])
def test_resume_continues_with_the_same_bits(tmp_path: Path, muon_lr: float) -> None:
    straight = trainer(muon_lr)
    for _ in range(4):
        straight.step(next_plan(straight))
    first = trainer(muon_lr)
    for _ in range(2):
        first.step(next_plan(first))
    checkpoint.save(first, tmp_path / "c")
    at_two = state(first)
    drawn = torch.rand(3)
    second = trainer(muon_lr)
    with torch.no_grad():
        second.model.lm_head.weight.zero_()
    checkpoint.load(second, tmp_path / "c")
    assert (second.steps, second.version) == (2, 2)
    assert state(second) == at_two
    assert torch.equal(torch.rand(3), drawn)
    for _ in range(2):
        second.step(next_plan(second))
    assert state(second) == state(straight)
    assert state(second) != at_two


def test_a_fresh_trainer_can_be_saved_and_a_checkpoint_replaced(tmp_path: Path) -> None:
    t = trainer()
    checkpoint.save(t, tmp_path / "c")
    t.step(next_plan(t))
    checkpoint.save(t, tmp_path / "c")
    again = trainer()
    checkpoint.load(again, tmp_path / "c")
    assert state(again) == state(t)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_it_is_a_model_folder_with_the_files_of_the_model_it_came_from(tmp_path: Path) -> None:
    assets = tmp_path / "model"
    assets.mkdir()
    (assets / "tokenizer.json").write_text("{}")
    (assets / "config.json").write_text("not this one")
    t = trainer()
    checkpoint.save(t, tmp_path / "c", assets)
    assert (tmp_path / "c" / "tokenizer.json").read_text() == "{}"
    theirs = Qwen3ForCausalLM.from_pretrained(tmp_path / "c", dtype=torch.float32)
    assert torch.equal(theirs.lm_head.weight, t.model.lm_head.weight)


@pytest.mark.parametrize("name", ["model.safetensors", "trainer/optimizer.safetensors", "trainer/state.json"])
def test_one_flipped_bit_is_refused_and_changes_nothing(tmp_path: Path, name: str) -> None:
    t = trainer()
    t.step(next_plan(t))
    checkpoint.save(t, tmp_path / "c")
    raw = bytearray((tmp_path / "c" / name).read_bytes())
    raw[-3] ^= 1
    (tmp_path / "c" / name).write_bytes(raw)
    other = trainer()
    before = state(other)
    with pytest.raises(TrainError, match=f"damaged: {name}"):
        checkpoint.load(other, tmp_path / "c")
    assert state(other) == before


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="load checkpoint .*No such file"):
        checkpoint.load(trainer(), tmp_path / "nothing")
    checkpoint.save(trainer(), tmp_path / "c")
    with pytest.raises(TrainError, match="different optimizer settings"):
        checkpoint.load(trainer(muon_lr=0.1), tmp_path / "c")
    sums = json.loads((tmp_path / "c" / "checksums.json").read_text())
    del sums["trainer/optimizer.safetensors"]
    (tmp_path / "c" / "checksums.json").write_text(json.dumps(sums))
    with pytest.raises(TrainError, match="incomplete: no checksum for trainer/optimizer"):
        checkpoint.load(trainer(), tmp_path / "c")
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match="save checkpoint"):
        checkpoint.save(trainer(), tmp_path / "file" / "c")


def rewrite_sums(folder: Path) -> None:
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != "checksums.json"]
    sums = {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    (folder / "checksums.json").write_text(json.dumps(sums))


def test_a_checkpoint_of_another_schema_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    checkpoint.save(trainer(), folder)
    path = folder / "trainer" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 3}))
    rewrite_sums(folder)
    with pytest.raises(TrainError, match="c has schema 3, this .* reads schema 2 only"):
        checkpoint.load(trainer(), folder)


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    t = trainer()
    checkpoint.save(t, tmp_path / "c")
    t.step(next_plan(t))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # What a full disk does: the library that writes tensors fails with an error of its own.
    resource.setrlimit(
        resource.RLIMIT_FSIZE, ((tmp_path / "c" / "model.safetensors").stat().st_size // 2, hard)
    )
    try:
        with pytest.raises(TrainError, match=r"save checkpoint .*File too large"):
            checkpoint.save(t, tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    again = trainer()
    checkpoint.load(again, tmp_path / "c")
    assert again.steps == 0
    assert np.isfinite(again.model.lm_head.weight.detach().numpy()).all()


def test_the_random_state_of_a_gpu_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There need be none here: two functions of torch are what is used of it."""
    held = {"now": torch.tensor([1, 2, 3], dtype=torch.uint8)}
    gpu = torch.device("cuda", 0)

    def set_state(state: torch.Tensor, device: torch.device) -> None:
        assert device == gpu
        held["now"] = state

    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: held["now"])
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_state)
    t = trainer()
    monkeypatch.setattr(type(t.model), "device", gpu)
    checkpoint.save(t, tmp_path / "gpu")
    held["now"] = torch.tensor([9], dtype=torch.uint8)
    checkpoint.load(t, tmp_path / "gpu")
    assert held["now"].tolist() == [1, 2, 3]
    monkeypatch.undo()
    checkpoint.save(trainer(), tmp_path / "cpu")
    checkpoint.load(trainer(), tmp_path / "gpu")
    monkeypatch.setattr(type(t.model), "device", gpu)
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_state)
    checkpoint.load(t, tmp_path / "cpu")
    assert held["now"].tolist() == [1, 2, 3]


def test_an_engine_finds_the_models_files_and_no_others(tmp_path: Path) -> None:
    """vLLM loads every safetensors file beside config.json, and may run as another user."""
    assets = tmp_path / "model"
    assets.mkdir()
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "recorded.npz",
        "job.json",
        "model-00001.safetensors",
    ):
        (assets / name).write_text("{}")
    checkpoint.save(trainer(), tmp_path / "c", assets)
    found = {p.relative_to(tmp_path / "c").as_posix() for p in (tmp_path / "c").rglob("*") if p.is_file()}
    assert found == {
        "config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "checksums.json",
        "trainer/optimizer.safetensors", "trainer/state.json",
    }  # fmt: skip
    assert read_folder(tmp_path / "c").keys() == set(dict(trainer().model.named_parameters()))
    (tmp_path / "ordinary").touch()
    mode = (tmp_path / "ordinary").stat().st_mode
    assert {p.stat().st_mode for p in (tmp_path / "c").rglob("*") if p.is_file()} == {mode}


# --------------------------------------------------------------------------- written by several ranks


def in_parts(t: Trainer) -> list[Snapshot]:
    """As two ranks have it that own every other tensor."""
    made = checkpoint.snapshot(t)
    return [
        replace(
            made,
            model=replace(made.model, tensors=every_other(made.model.tensors, part)),
            moments=every_other(made.moments, part),
            part=part,
            parts=2,
        )
        for part in range(2)
    ]


def every_other(tensors: Mapping[str, torch.Tensor], part: int) -> dict[str, torch.Tensor]:
    return {name: tensors[name] for name in sorted(tensors)[part::2]}


def test_parts_are_one_checkpoint_which_transformers_and_a_single_process_load(tmp_path: Path) -> None:
    t, folder = trainer(), tmp_path / "c"
    t.step(next_plan(t))
    checkpoint.prepare(folder)
    for made in reversed(in_parts(t)):
        made.write(folder)
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    both = [f"{n:05d}-of-00002.safetensors" for n in (1, 2)]
    assert names == {
        *(f"model-{end}" for end in both), "model.safetensors.index.json", "config.json", "checksums.json",
        *(f"trainer/optimizer-{end}" for end in both), "trainer/optimizer.safetensors.index.json",
        "trainer/state.json",
    }  # fmt: skip
    theirs = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(theirs.lm_head.weight, t.model.lm_head.weight)
    again = trainer()
    checkpoint.load(again, folder)
    assert state(again) == state(t)
    sums = json.loads((folder / "checksums.json").read_text())
    del sums["model-00001-of-00002.safetensors"]
    (folder / "checksums.json").write_text(json.dumps(sums))
    with pytest.raises(TrainError, match=r"incomplete: no checksum for model-00001-of-00002\.safetensors$"):
        checkpoint.load(again, folder)


@pytest.mark.parametrize(
    ("fails", "line"),
    [
        ("no file", r"^rank 1: write its part: .*No such file or directory.*"),
        ("dead", r"^rank 1 died \(exit status -9\) before it wrote its part$"),
    ],
)
def test_a_part_that_is_not_written_leaves_the_old_checkpoint(tmp_path: Path, fails: str, line: str) -> None:
    t, folder = trainer(), tmp_path / "c"
    checkpoint.save(t, folder)
    t.step(next_plan(t))
    checkpoint.prepare(folder)
    first, second = in_parts(t)
    if fails == "no file":
        shutil.rmtree(tmp_path / ".c.new" / "trainer")
        second.write(folder)
        (tmp_path / ".c.new" / "trainer").mkdir()
    writer = CheckpointWriter(20.0, lambda: "rank 1 died (exit status -9)")
    writer.begin(first, folder, owned=True)
    assert re.search(line, writer.wait())
    again = trainer()
    checkpoint.load(again, folder)
    assert again.steps == 0


def test_what_a_killed_checkpoint_left_goes_with_the_next_one(tmp_path: Path) -> None:
    others = [".step-00004.new", ".step-00003.old"]
    kept = [".notes.new", "step-00003", "step-old"]
    for name in (*others, *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    checkpoint.save(trainer(), tmp_path / "step-00006")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "step-00006"])


def test_a_folder_that_cannot_be_made_is_the_checkpoints_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = CheckpointWriter()
    writer.prepare(tmp_path / "file" / "c")
    writer.begin(in_parts(trainer())[0], tmp_path / "file" / "c", owned=True)
    assert writer.wait().startswith("save checkpoint")
    assert writer.wait() == ""
