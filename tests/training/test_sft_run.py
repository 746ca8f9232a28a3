"""`insitu sft` from a stored run to a checkpoint: it learns what was chosen, resumes with the same bits, and
says why it cannot."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sft_lab import FAMILY, said, sft_config, stored_run, student

from insitu.attempt import NOTHING_SAMPLED
from insitu.chat.load import load_renderer
from insitu.config import Config
from insitu.errors import ConfigError, RecordError, TrainError
from insitu.storage.metrics import Metrics, read_metrics
from insitu.storage.run_dir import read_store
from insitu.types import Rollout, Status
from insitu_train.embedded.model import load_model
from insitu_train.embedded.weights import checksum
from insitu_train.loop import TrainOptions
from insitu_train.plan.step import PlanConfig
from insitu_train.replay import replay_run
from insitu_train.run_report import show_run
from insitu_train.sft.run import open_tokens, plan_examples, run_sft, schedule, train_config
from insitu_train.sft.selection import SelectionRules, choose, explain, stored_tokens
from insitu_train.trainer.trainer import Trainer

pytestmark = pytest.mark.slow

SCHEDULE = (
    "train.epochs=6",
    "sft.rollouts_per_step=4",
    "run.checkpoint_every_steps=4",
    "run.keep_checkpoints=1",
)


class Watcher:
    """Keeps its events; stops the run at a step when asked to."""

    def __init__(self, stop_at: int = 0) -> None:
        self.notes: list[str] = []
        self.losses: list[float] = []
        self._stop_at = stop_at

    def begin(self, title: str, rollouts: int) -> None: ...

    def stage(self, name: str, total: int = 0) -> None: ...

    def advance(self, done: int) -> None: ...

    def step_done(self, step: int, steps: int, metrics: Metrics) -> None:
        self.losses.append(float(metrics["loss"] or 0))
        if step == self._stop_at:
            raise RecordError("the test stops here")

    def note(self, text: str) -> None:
        self.notes.append(text)


def sft(config: Config, watcher: Watcher, options: TrainOptions | None = None) -> Mapping[str, Any]:
    return asyncio.run(run_sft(config, watcher, options or TrainOptions()))


def solved() -> list[Rollout]:
    return [said(f"train/1/{n // 4}/{n % 4}", f"task {n // 4}", f"answer {n}") for n in range(12)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored_run(tmp_path_factory.mktemp("source") / "run", solved())


@pytest.fixture(scope="module")
def finished(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Mapping[str, object], Watcher]:
    """A run that ended at step 6 of 18, of which 4 were in a checkpoint, and went on."""
    config, watcher = sft_config(source, tmp_path_factory.mktemp("target") / "run", *SCHEDULE), Watcher()
    with pytest.raises(RecordError, match="the test stops here"):
        sft(config, Watcher(stop_at=6))
    reported = Path(config.run.dir) / "metrics.jsonl"  # as if it had been killed at the commit of step 4
    reported.write_bytes(b"".join(reported.read_bytes().splitlines(keepends=True)[:3]))
    return sft(config, watcher, TrainOptions(resume=Path(config.run.dir))), watcher


def test_it_learns_what_was_chosen_and_leaves_a_model(
    source: Path, finished: tuple[Mapping[str, object], Watcher]
) -> None:
    summary, watcher = finished
    assert (summary["chosen"], summary["tasks"], summary["steps"]) == (12, 3, 18)
    run = Path(str(summary["run_dir"]))
    losses = {line["step"]: line["loss"] for line in read_metrics(run / "metrics.jsonl")}
    assert list(losses) == list(range(1, 19))
    assert losses[18] < 0.6 * losses[1]
    assert len(watcher.losses) == 14
    assert "12 rollouts, 12 chosen" in watcher.notes
    checkpoint = Path(str(summary["checkpoint"]))
    assert load_renderer(checkpoint).fingerprint == FAMILY.fingerprint
    before, after = load_model(source.parent / "student"), load_model(checkpoint)
    assert before.config == after.config
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-00018"]
    with read_store(run) as store:
        assert [s.step for s in store.steps()] == [4, 8, 12, 16, 18]
        assert store.ledger().captured == 0


def test_a_run_cut_short_ends_with_the_bits_of_one_that_was_not(
    source: Path, finished: tuple[Mapping[str, object], Watcher]
) -> None:
    config = sft_config(source, Path("/nowhere"), *SCHEDULE)
    with read_store(source) as store:
        held = choose(store, SelectionRules.of(config), stored_tokens(store), rollouts_held_out=False).lessons
    steps = schedule([x.rollout_id for x in held], per_step=4, epochs=6, seed=config.run.seed)
    trainer = Trainer(load_model(source.parent / "student"), train_config(config, len(steps)))
    for step in steps:
        plan = plan_examples([held[i] for i in step], PlanConfig.of(config))
        result = trainer.step(plan)
        assert (result.max_logprob_gap, result.mismatch_kl) == (0.0, 0.0)
    whole = load_model(Path(str(finished[0]["checkpoint"])))
    assert checksum(whole) == finished[0]["weights"] == checksum(trainer.model)


@pytest.mark.full
def test_a_tree_of_shared_tokens_teaches_the_same(
    source: Path, finished: tuple[Mapping[str, object], Watcher], tmp_path: Path
) -> None:
    config = sft_config(source, tmp_path / "run", *SCHEDULE, "train.epochs=1", "train.layout=tree")
    summary = sft(config, Watcher())
    line = next(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    linear = next(read_metrics(Path(str(finished[0]["run_dir"])) / "metrics.jsonl"))
    assert line["loss"] == pytest.approx(linear["loss"], rel=1e-5)
    assert summary["model"] == summary["checkpoint"]


@pytest.mark.full
def test_adapters_of_any_model_end_as_a_model_that_insitu_train_takes(source: Path, tmp_path: Path) -> None:
    """The rollouts were sampled by an embedded engine, which could not sample with this policy."""
    adapters = ("policy.kind=hf", "policy.lora_rank=2", "policy.device=cpu", "train.epochs=1")
    summary = sft(sft_config(source, tmp_path / "run", *adapters), Watcher())
    model, checkpoint = Path(str(summary["model"])), Path(str(summary["checkpoint"]))
    assert model == tmp_path / "run" / "model"
    assert f"insitu train CONFIG model.path={model}\n" in (tmp_path / "run" / "report.txt").read_text()
    assert (checkpoint / "adapter_config.json").exists()
    assert not (checkpoint / "model.safetensors").exists()
    assert load_renderer(model).fingerprint == FAMILY.fingerprint
    before = dict(load_model(source.parent / "student").named_parameters())
    after = dict(load_model(model).named_parameters())
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved
    assert all("_proj." in name for name in moved)


def test_nothing_worth_imitating_is_one_line_that_says_why(tmp_path: Path) -> None:
    held = [
        said("train/1/0/0", "a", "wrong", 0.0),
        said("train/1/0/1", "a", "lost", None, Status.INFRA_FAILED),
        said("eval_before/0/0/0", "b", "right"),
    ]
    source = stored_run(tmp_path / "source", held)
    with pytest.raises(TrainError) as error:
        sft(sft_config(source, tmp_path / "run"), Watcher())
    assert str(error.value) == (
        f"no rollout of {source} was selected: 3 rollouts, 0 chosen; 1 of held-out tasks"
        " (sft.held_out = true takes them); 1 below sft.min_reward; 1 not graded"
    )


def test_a_run_that_changed_under_a_resumed_one_is_refused(
    source: Path, finished: tuple[Mapping[str, object], Watcher], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(Path(str(finished[0]["run_dir"])), run)
    (run / "summary.json").unlink()
    other = stored_run(tmp_path / "other", [said(r.id, r.task_id, "else") for r in solved()])
    text = (run / "config.toml").read_text().replace(str(source), str(other))
    (run / "config.toml").write_text(text)
    with pytest.raises(RecordError, match="train/1/0/0 of .* has changed since this run began"):
        sft(sft_config(other, run), Watcher(), TrainOptions(resume=run))


def test_tokens_of_another_family_are_refused(source: Path, tmp_path: Path) -> None:
    other = student(tmp_path / "other")
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("<tool_response>", "<tool_answer>"))
    with pytest.raises(ConfigError, match="whose tokenizer or chat template differs from that of .*other"):
        sft(sft_config(source, tmp_path / "run", f"model.path={other}"), Watcher())


def test_what_a_teacher_wrote_is_told_in_the_students_tokens(tmp_path: Path) -> None:
    """The store of a run before a provider holds no token: its text is what there is."""
    silent = [
        replace(said(f"rollout/0/{n}/0", f"task {n}", ""), trajectory=NOTHING_SAMPLED) for n in range(3)
    ]
    upstream = {"engine__kind": "upstream", "engine__urls": "http://localhost:1", "engine__model": "big"}
    source = stored_run(tmp_path / "source", silent, rollout__split="train", **upstream)
    for n in (0, 1):
        body = {"model": "big", "messages": [{"role": "user", "content": f"task {n}"}]}
        if n == 1:
            body["messages"][0]["content"] = [{"type": "no such part"}]
        reply = {"choices": [{"message": {"content": f"answer {n}"}, "finish_reason": "stop"}]}
        line = {"turn": 0, "path": "chat/completions", "status": 200, "complete": True, "truncated": False}
        record = source / "sessions" / f"rollout-0-{n}-0.1.jsonl"
        record.parent.mkdir(exist_ok=True)
        record.write_text(json.dumps({**line, "request": body, "reply": reply}) + "\n")
    config = sft_config(source, tmp_path / "run")
    with read_store(source) as store:
        tokens = open_tokens(config, store, FAMILY)
        choice = choose(store, SelectionRules.of(config), tokens, rollouts_held_out=False)
    assert [x.rollout_id for x in choice.lessons] == ["rollout/0/0/0"]
    assert choice.left_out == {"not_rendered": 1, "no_tokens": 1}
    assert "rollout-0-1-0.1.jsonl turn 0: Content of type 'no such part'" in explain(choice)
    (segment,) = choice.lessons[0].segments
    assert FAMILY.parse(segment.ids[segment.mask]).text == "answer 0"


def test_a_retention_that_changes_nothing_of_a_teachers_text_is_refused(tmp_path: Path) -> None:
    upstream = {"engine__kind": "upstream", "engine__urls": "http://localhost:1", "engine__model": "big"}
    source = stored_run(tmp_path / "source", [], rollout__split="train", **upstream)
    keeps = student(tmp_path / "keeps")
    template = keeps / "chat_template.jinja"
    shown = (
        '("<think>\\n" + message.reasoning_content + "\\n</think>" if message.reasoning_content else "") + '
    )
    template.write_text(
        template.read_text().replace('(message.content or "")', shown + '(message.content or "")')
    )
    config = sft_config(source, tmp_path / "run", "model.keep_reasoning=template")
    with read_store(source) as store:
        open_tokens(config, store, FAMILY)  # whose rules write no reasoning
        with pytest.raises(ConfigError, match="keeps all reasoning"):
            open_tokens(config, store, load_renderer(keeps))


def test_a_finished_run_is_shown_and_cannot_be_replayed(
    finished: tuple[Mapping[str, object], Watcher],
) -> None:
    run = Path(str(finished[0]["run_dir"]))
    assert "18 steps over 12 rollouts of 3 tasks" in show_run(run)
    with pytest.raises(RecordError, match="holds a run of `insitu sft`"):
        asyncio.run(replay_run(run, Watcher()))


def test_a_directory_of_another_kind_is_not_continued(source: Path) -> None:
    with pytest.raises(RecordError, match="not of `insitu sft`"):
        sft(sft_config(source, source), Watcher(), TrainOptions(resume=source))


def test_the_warm_up_of_a_short_run_ends_before_its_last_step() -> None:
    config = sft_config(Path("/nowhere"), Path("/nowhere"), "train.warmup_steps=3")
    assert [train_config(config, steps).optim.warmup_steps for steps in (1, 2, 3, 4, 30)] == [0, 1, 2, 3, 3]
    chosen = train_config(config, 30)
    assert (chosen.loss.loss, chosen.optim.lr, chosen.optim.total_steps) == ("nll", 0.01, 30)
