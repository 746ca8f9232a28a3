"""Input that a trainer meets and must not swallow: one clear error or the documented way out, nothing lost.

Here are those that cross folders. A receipt for other weights, an engine that refuses an update or never
answers: tests/training/test_weights.py. A group that never fills: tests/collect/test_collector.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sft_lab import FAMILY, said, stored_run, student
from train_lab import group, sampled_groups, slow_logprobs, small_model

from insitu import cli
from insitu.capture.forest import Forest
from insitu.errors import TrainError
from insitu.types import Generation, Message, ModelRequest, Rollout
from insitu_train.embedded.model import Qwen3, load_model
from insitu_train.options import OptimConfig, TrainConfig
from insitu_train.plan.step import PlanConfig, StepPlan, plan_step
from insitu_train.trainer import checkpoint
from insitu_train.trainer.trainer import Trainer

pytestmark = pytest.mark.slow

SMALL = TrainConfig(optim=OptimConfig(lr=1e-3))


def line_of(code: int, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The only line on stderr of a command that ends with `code`."""
    assert cli.main(arguments) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


# --------------------------------------------------------------------------- configuration


@pytest.mark.parametrize("correction", ["tis", "mask", "icepop"])
def test_a_corrected_ratio_without_its_log_probabilities_is_a_wrong_configuration(
    correction: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = [
        f"train.correction={correction}",
        "train.loss=ppo_clip",
        f"run.dir={tmp_path / 'run'}",
        "--plain",
    ]
    line = line_of(2, capsys, "train", "examples/demo.toml", *options)
    assert f"correction = '{correction}' corrects ratio = 'trainer', which" in line
    assert not (tmp_path / "run").exists()


def test_imitating_what_cannot_be_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "give the run directory with the rollouts" in line_of(2, capsys, "sft", "--plain")
    nowhere = str(tmp_path / "nowhere")
    assert "is not a run directory" in line_of(1, capsys, "sft", nowhere, "--plain")
    source = stored_run(tmp_path / "source", [said("train/1/0/0", "a", "wrong", 0.0)])
    target = tmp_path / "run"
    assert cli.main(["sft", str(source), f"run.dir={target}", "--plain"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == (
        f"insitu: no rollout of {source} was selected: 1 rollouts, 0 chosen; 1 below sft.min_reward"
    )
    assert "give another run.dir" not in line_of(1, capsys, "sft", nowhere, f"run.dir={target}", "--plain")


def test_an_imitation_keeps_its_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = stored_run(tmp_path / "source", [said("train/1/0/0", "a", "right")])
    line = line_of(1, capsys, "sft", str(source), f"run.dir={source}", "--plain")
    assert "holds a run already" in line
    assert line.count("continue") == 1
    assert "resumed run keeps its configuration" in line_of(
        2, capsys, "sft", str(source), "--resume", str(source), "--plain"
    )


# --------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("name", ["model.safetensors", "trainer/optimizer.safetensors", "trainer/state.json"])
@pytest.mark.parametrize("left", ["half", "nothing", "no file"])
def test_a_half_written_checkpoint_is_refused_and_changes_nothing(
    tmp_path: Path, name: str, left: str
) -> None:
    trainer = Trainer(small_model(), SMALL)
    trainer.step(plan_step(sampled_groups(trainer.model), PlanConfig()))
    folder = tmp_path / "step-00001"
    checkpoint.save(trainer, folder)
    file = folder / name
    whole = file.read_bytes()
    if left == "no file":
        file.unlink()
    else:
        file.write_bytes(whole[: len(whole) // 2] if left == "half" else b"")
    fresh = Trainer(small_model(seed=5), SMALL)
    before = weights(fresh.model)
    with pytest.raises(TrainError, match=rf"checkpoint .*{name}|{name}.*"):
        checkpoint.load(fresh, folder)
    assert all(torch.equal(before[n], w) for n, w in weights(fresh.model).items())
    assert (fresh.steps, fresh.version) == (0, 0)


def test_what_a_crash_left_of_a_checkpoint_is_not_taken_for_one(tmp_path: Path) -> None:
    """A save writes beside the folder and renames: a part of one has another name and goes with the next."""
    trainer = Trainer(small_model(), SMALL)
    part = tmp_path / ".step-00001.new"
    part.mkdir()
    (part / "model.safetensors").write_bytes(b"half")
    with pytest.raises(TrainError, match="load checkpoint"):
        checkpoint.load(trainer, tmp_path / "step-00001")
    checkpoint.save(trainer, tmp_path / "step-00001")
    checkpoint.load(trainer, tmp_path / "step-00001")
    assert [p.name for p in tmp_path.iterdir()] == ["step-00001"]


def weights(model: Qwen3) -> Mapping[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


# --------------------------------------------------------------------------- an update mid-call


def updated_rollouts(model: Qwen3) -> list[Rollout]:
    """Two rollouts whose only call began at version 0 and went on at version 1 from its third token: the
    older tokens have the log-probabilities of another policy."""
    made = []
    for slot, text in enumerate(("left and right", "right and left")):
        name = f"train/00001/000/{slot:02d}"
        request = ModelRequest(messages=(Message(role="user", text="Which?"),))
        forest = Forest(name)
        opened = np.concatenate(
            [FAMILY.open((), ()), FAMILY.append(request.messages), FAMILY.generation_prompt()]
        )
        node = forest.extend(forest.plan(request, FAMILY.fingerprint), opened.astype(np.int32))
        reply = Message(role="assistant", text=text)
        ids = FAMILY.render_reply(reply).astype(np.int32)
        with torch.no_grad():
            mu = slow_logprobs(model, np.concatenate([opened, ids]).astype(np.int32)).numpy()[-len(ids) :]
        mu = np.where(np.arange(len(ids)) < 2, mu - 0.7, mu).astype(np.float32)
        runs = ((0, 0), (2, 1))
        answer = Generation(ids=ids, logprobs=mu, finish="stop", version_runs=runs)
        forest.mark_delivered(forest.commit(node, answer, reply, turn=0))
        made.append(replace(said(name, "t", text, float(slot)), trajectory=forest.trajectory()))
    return made


@pytest.fixture
def updated(tmp_path: Path) -> tuple[Qwen3, StepPlan]:
    model = load_model(student(tmp_path / "student"))
    return model, plan_step([group("train/00001/000", updated_rollouts(model))], PlanConfig(group_min=2))


def test_an_update_in_the_middle_of_a_call_keeps_each_tokens_version(
    updated: tuple[Qwen3, StepPlan],
) -> None:
    for row in updated[1].rows:
        versions = row.versions[row.mask].tolist()
        assert versions == [0, 0] + [1] * (len(versions) - 2)


def test_tokens_from_before_the_update_train_and_are_not_held_against_the_sampler(
    updated: tuple[Qwen3, StepPlan],
) -> None:
    trainer = Trainer(updated[0], SMALL.changed(max_staleness=1), version=1)
    result = trainer.step(updated[1])
    assert result.tokens == sum(int(row.mask.sum()) for row in updated[1].rows)
    assert result.max_logprob_gap < 1e-4, "0.7 is staleness, not a fault of the path"


def test_where_no_staleness_is_allowed_the_token_is_named(updated: tuple[Qwen3, StepPlan]) -> None:
    trainer = Trainer(updated[0], SMALL, version=1)
    row = updated[1].rows[0]
    first = int(row.mask.argmax())
    with pytest.raises(
        TrainError, match=f"segment 0 token {first} was sampled by version 0, the trainer is at 1"
    ):
        trainer.step(updated[1])


def test_a_token_from_after_the_update_must_agree(updated: tuple[Qwen3, StepPlan]) -> None:
    """The same record, had it been stamped with one version: the gap of 0.7 is a fault then."""
    rows = tuple(replace(row, versions=np.where(row.mask, 1, 0).astype(np.int32)) for row in updated[1].rows)
    trainer = Trainer(updated[0], SMALL, version=1)
    with pytest.raises(TrainError, match="trainer and sampler differ by 0.7 in log"):
        trainer.step(replace(updated[1], rows=rows))
