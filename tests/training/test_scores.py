"""Scores of trained tokens: what is written is what the step computed, and writing it changes nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from train_lab import sampled_groups, slow_logprobs, small_model

from insitu.config.tables import Config
from insitu.config.training import LossConfig
from insitu.errors import RecordError
from insitu_train.embedded.weights import checksum
from insitu_train.options import TrainConfig
from insitu_train.plan.step import PlanConfig, StepPlan, plan_step
from insitu_train.scores import CLIPPED, MISMATCHED, prune_scores, read_row, score_file
from insitu_train.trainer.trainer import Trainer

LOOSE = TrainConfig(max_logprob_gap=10.0, max_staleness=4)


def other_plan(seed: int = 3) -> StepPlan:
    """Return a plan whose rollouts another model sampled, so that gaps are large, in several batches."""
    return plan_step(sampled_groups(small_model(seed)), PlanConfig(token_budget=120))


def test_a_row_has_the_gap_and_the_entropy_of_a_pass_over_the_whole_sequence(tmp_path: Path) -> None:
    model, plan = small_model(0), other_plan()
    assert len(plan.batches) > 1
    expected = []
    for row in plan.rows:
        with torch.no_grad():
            ids = torch.from_numpy(row.ids.astype(np.int64))
            logp = slow_logprobs(model, row.ids).numpy()[row.mask]
            probabilities = torch.softmax(model.logits(model.hidden(ids[:0], ids[None]))[0], -1)
            entropy = torch.special.entr(probabilities).sum(-1).numpy()[np.flatnonzero(row.mask) - 1]
        expected.append((logp - row.logprobs[row.mask], entropy))
    Trainer(model, LOOSE, version=1).step(plan, score_file(tmp_path / "scores", 7))
    for row, (gap, entropy) in zip(plan.rows, expected, strict=True):
        found = read_row(tmp_path / "scores", 7, plan.digest, row.rollout_id, row.segment)
        assert (found.mask == row.mask).all()
        np.testing.assert_allclose(found.gap, gap, atol=2e-5)
        np.testing.assert_allclose(found.entropy, entropy, atol=2e-3)


def test_clipped_tokens_are_those_that_the_step_counts(tmp_path: Path) -> None:
    plan = other_plan()
    config = LOOSE.changed(loss=LossConfig(loss="ppo_clip"))
    result = Trainer(small_model(0), config, version=1).step(plan, score_file(tmp_path, 1))
    flags = np.concatenate(
        [read_row(tmp_path, 1, plan.digest, row.rollout_id, row.segment).flags for row in plan.rows]
    )
    assert 0 < (flags & CLIPPED).astype(bool).mean() == pytest.approx(result.clip_fraction)


def test_a_token_that_is_excluded_for_its_gap_is_marked(tmp_path: Path) -> None:
    plan = plan_step(sampled_groups(small_model(0)), PlanConfig())
    row = plan.rows[0]
    wrong = row.logprobs.copy()
    token = int(row.mask.argmax())
    wrong[token] -= 2e-4
    plan = dataclasses.replace(plan, rows=(dataclasses.replace(row, logprobs=wrong), *plan.rows[1:]))
    result = Trainer(small_model(0), TrainConfig()).step(plan, score_file(tmp_path, 1))
    flags = read_row(tmp_path, 1, plan.digest, row.rollout_id, row.segment).flags
    assert result.mismatched == 1
    assert np.flatnonzero(flags & MISMATCHED).tolist() == [0]


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_weights_are_the_same_with_and_without_scores(tmp_path: Path, epochs: int) -> None:
    digests = []
    for path in (None, score_file(tmp_path, 1)):
        trainer = Trainer(small_model(0), LOOSE.changed(epochs=epochs), version=1)
        result = trainer.step(other_plan(), path)
        digests.append((checksum(trainer.model), dataclasses.replace(result, seconds=0.0)))
    assert digests[0] == digests[1]
    assert score_file(tmp_path, 1).is_file()


def test_a_file_that_cannot_be_written_is_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "scores").write_text("not a folder")
    result = Trainer(small_model(0), LOOSE, version=1).step(other_plan(), score_file(tmp_path / "scores", 1))
    assert not result.skipped
    assert "scores not written file=step-00001.bin" in caplog.text


def test_scores_of_another_plan_or_row_are_refused_with_the_reason(tmp_path: Path) -> None:
    plan = other_plan()
    Trainer(small_model(0), LOOSE, version=1).step(plan, score_file(tmp_path, 1))
    row = plan.rows[0]

    def refused(step: int, digest: str, rollout: str) -> str:
        with pytest.raises(RecordError) as caught:
            read_row(tmp_path, step, digest, rollout, row.segment)
        return str(caught.value)

    assert "another attempt" in refused(1, "other", row.rollout_id)
    assert "did not train this row" in refused(1, plan.digest, "train/9/9/9")
    assert "record.scores was off" in refused(2, plan.digest, row.rollout_id)
    file = score_file(tmp_path, 1)
    for damaged in (b"", b"\xff\xff\xff\x7f", file.read_bytes()[:-20], b"\x02\x00\x00\x00[]"):
        file.write_bytes(damaged)
        last = plan.rows[-1]
        with pytest.raises(RecordError, match=r"step-00001\.bin cannot be read"):
            read_row(tmp_path, 1, plan.digest, last.rollout_id, last.segment)


def test_files_of_earlier_steps_go_and_foreign_files_stay(tmp_path: Path) -> None:
    for step in range(1, 7):
        score_file(tmp_path, step).touch()
    (tmp_path / "step-00001.1.bin").touch()
    (tmp_path / "step-notes.bin").touch()
    prune_scores(tmp_path, 6, None)
    assert len(list(tmp_path.iterdir())) == 8
    prune_scores(tmp_path, 6, 2)
    assert {file.name for file in tmp_path.iterdir()} == {
        "step-00005.bin", "step-00006.bin", "step-notes.bin",
    }  # fmt: skip


def test_the_key_says_how_many_steps_are_kept() -> None:
    kept = {text: Config(record={"scores": text}).record.steps_kept for text in ("all", "last:3")}  # type: ignore[arg-type]
    assert kept == {"all": None, "last:3": 3}
    assert Config().record.scores == "last:50"
    with pytest.raises(ValidationError):
        Config(record={"scores": "last:0"})  # type: ignore[arg-type]
