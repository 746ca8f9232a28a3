"""What the loop says aloud of a step: tampered verdicts, a reward that leaps, tokens that are lost."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from insitu import failpoint
from insitu.attempt import AttemptSpec
from insitu.capture.ledger import reassign
from insitu.config import Config, load_config
from insitu.errors import SetupError
from insitu.storage.metrics import MetricsFile
from insitu.storage.run_dir import RunDir, read_store
from insitu.storage.store import Store
from insitu.storage.wall_clock import WallClock
from insitu.types import Group, Ledger, Outcome, Rollout, Task, Turn, Verdict
from insitu_train.alarms import SpikeDetector, lost_share, why_untrained
from insitu_train.evaluations import counts, heldout_summary, result_of
from insitu_train.learner.supervisor import LearnerSupervisor
from insitu_train.loop import RunParts, TrainingLoop, TrainOptions
from insitu_train.options import StepResult, gaps
from insitu_train.plan.step import PlanConfig, StepPlan
from insitu_train.run import run_training
from insitu_train.step_metrics import step_metrics
from insitu_view.tracking.names import EVALUATION
from tests.fakes.attempts import fake_rollout
from tests.fakes.learner import FakeLearner
from tests.fakes.simulated_attempts import with_tokens

SIZE, GROUPS = 4, 4


def rollout(step: int, group: int, slot: int, *, solved: bool, tampered: bool, lost: bool) -> Rollout:
    name = f"train/{step:05d}/{group:03d}/{slot:02d}"
    made = fake_rollout(
        AttemptSpec(rollout_id=name, task=Task(id=f"t{group}", prompt="", files={}), seed=0), 0.0
    )
    outcome = Outcome.TAMPERED if tampered else Outcome.RESOLVED if solved else Outcome.UNRESOLVED
    verdict = Verdict(outcome=outcome, reward=float(solved), trust="standard")
    made = with_tokens(replace(made, reward=float(solved), verdict=verdict), 0, 0)
    if not lost:
        return made
    (segment,) = made.trajectory.segments
    nothing = replace(
        segment, mask=segment.mask & False, logprobs=segment.logprobs * 0, versions=segment.versions * 0
    )
    ledger = reassign(made.trajectory.ledger, "edited")
    return replace(made, trajectory=replace(made.trajectory, segments=(nothing,), ledger=ledger))


class Given:
    """Batches with groups of which `solved`, `tampered` and `lost` of 4 rollouts are so."""

    rollouts = 0

    def __init__(self, store: Store) -> None:
        self.store, self.solved, self.tampered, self.lost = store, 1, 0, 0
        self.step = 0

    def draw(self) -> None: ...

    async def next(self) -> tuple[Sequence[Group], Mapping[str, Any]]:
        made, step = [], self.step
        for g in range(GROUPS):
            members = [
                rollout(
                    step, g, s, solved=s < self.solved, tampered=s >= SIZE - self.tampered, lost=s < self.lost
                )
                for s in range(SIZE)
            ]
            for s, member in enumerate(members):
                self.store.put_rollout("train", step, g, s, member)
            made.append(Group(id=f"train/{step:05d}/{g:03d}", task_id=f"t{g}", rollouts=tuple(members)))
        return made, {}

    def pending(self, version: int) -> None: ...

    def published(self, version: int) -> None: ...


class Reports:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def begin(self, title: str, rollouts: int) -> None: ...

    def stage(self, name: str, total: int = 0) -> None: ...

    def step_done(self, step: int, steps: int, metrics: Mapping[str, Any]) -> None: ...


def config(path: Path) -> Config:
    return load_config(None, [f"run.dir={path}", "run.steps=20", "train.min_groups=1"])


class Run:
    """The real loop's step, store, plan and metrics; the learner and the rollouts are given."""

    def __init__(self, run: RunDir, store: Store, metrics: MetricsFile, version: int = 0) -> None:
        self.reported, self.batches, learner = Reports(), Given(store), FakeLearner()
        learner.version = version
        parts = RunParts(
            agents=None, learner=cast(Any, learner),
            supervisor=LearnerSupervisor(learner, learner, lambda: (None, []), restarts=0),
            plan_config=PlanConfig.of(run.config),
        )  # fmt: skip
        self.loop = TrainingLoop(run, store, metrics, parts, cast(Any, self.reported), WallClock(store, 0.0))

    async def step(self, number: int) -> None:
        self.batches.step = number
        await self.loop._step(number, self.batches)


def written(path: Path, step: int) -> dict[str, Any]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    (found,) = [line for line in lines if line["event"] == "step" and line["step"] == step]
    return cast(dict[str, Any], found)


async def test_the_loop_tells_of_tampering_of_a_leap_and_of_lost_tokens(tmp_path: Path) -> None:
    path = tmp_path / "r"
    with RunDir.create(config(path)) as run, run.store() as store, run.metrics() as metrics:
        made = Run(run, store, metrics)
        for step in range(1, 5):
            await made.step(step)
        assert made.reported.notes == []
        quiet = written(path, 4)
        assert not quiet["tamper_alarm"] | quiet["reward_alarm"] | quiet["tokens_lost_alarm"]
        assert (quiet["tampered"], quiet["reward_rise"], quiet["excluded_share"]) == (0, 0.0, 0.0)

        made.batches.tampered = 1
        await made.step(5)
        loud = written(path, 5)
        assert (loud["tampered"], loud["tamper_rate"], loud["tamper_alarm"]) == (4, 0.25, True)
        (line,) = made.reported.notes
        assert line.startswith("step 5: 4 of 16 rollouts were judged tampered; most of task t0 (1)")

        made.batches.tampered, made.batches.solved = 0, 3
        await made.step(6)
    with RunDir.open(path) as run, run.store() as store, run.metrics() as metrics:
        again = Run(run, store, metrics, version=6)
        again.batches.solved, again.batches.lost = 3, 1
        await again.step(7)
    loud = written(path, 6)
    assert (loud["reward_mean"], loud["reward_rise"], loud["reward_alarm"]) == (0.75, 0.5, True)
    assert "the mean reward jumped from 0.25 to 0.75 (run.alarms.reward = 0.4)" in made.reported.notes[1]
    loud = written(path, 7)
    assert loud["reward_rise"] == pytest.approx(0.75 - (5 * 0.25 + 0.75) / 6), "earlier processes count"
    assert (loud["excluded_share"], loud["tokens_lost_alarm"]) == (0.25, True)
    (line,) = again.reported.notes
    assert "25% of the sampled tokens are excluded due to agent behaviour, 0% before" in line
    assert line.endswith("edited 16")


def with_calls(made: Rollout, *labels: str) -> Rollout:
    """The rollout with four replies, of which the last ones have these labels."""
    nothing = np.empty(0, dtype=np.int32)
    given = [(), (), (), ()] + [(("label", label),) for label in labels]
    plain = Turn(
        index=0, parent=-1, context_ids=nothing, ids=nothing, logprobs=None, finish="stop", version_runs=()
    )
    turns = tuple(replace(plain, index=n, hints=hints) for n, hints in enumerate(given[-4:]))
    return replace(made, trajectory=replace(made.trajectory, turns=turns))


async def test_calls_that_do_not_parse_are_in_the_metrics_and_their_rise_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain = tmp_path / "r", rollout
    labels: tuple[str, ...] = ()
    monkeypatch.setitem(globals(), "rollout", lambda *at, **how: with_calls(plain(*at, **how), *labels))
    with RunDir.create(config(path)) as run, run.store() as store, run.metrics() as metrics:
        made = Run(run, store, metrics)
        await made.step(1)
        assert made.reported.notes == []
    labels = ("malformed", "unknown_tool")
    with RunDir.open(path) as run, run.store() as store, run.metrics() as metrics:
        again = Run(run, store, metrics, version=1)
        for step in (2, 3):
            await again.step(step)
        (line,) = again.reported.notes
        (_, _, kept) = store.steps()
    assert line.startswith(
        "step 2: 50% of the replies have a malformed call or one of an unknown tool, 0% before"
    )
    assert "16 malformed, 16 unknown; most of agent pi (50%), there of call 3 (16 of 16)" in line
    names = ("malformed_calls", "unknown_tools", "unparsed_share", "unparsed_alarm")
    assert [written(path, 1)[name] for name in names] == [0, 0, 0.0, False]
    assert [written(path, 2)[name] for name in names] == [16, 16, 0.5, True]
    assert [kept.metrics[name] for name in names] == [16, 16, 0.5, False]
    with read_store(path) as store:
        assert store.rollout("train/00002/000/00").turns[2].labels == {"malformed"}


def test_a_summary_tells_of_the_gaps_that_were_left_out() -> None:
    small = {"max_logprob_gap": 2e-5, "max_logprob_gap_seen": 2e-5, "mismatched": 0}
    large = {"max_logprob_gap": 9e-5, "max_logprob_gap_seen": 1.36e-4, "mismatched": 1}
    assert gaps([small, large]) == large
    assert gaps([small]) == small


async def test_a_token_apart_by_rounding_is_in_the_account_as_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = FakeLearner.step

    async def step(self: FakeLearner, plan: StepPlan, scores: Path | None = None) -> StepResult:
        return replace(await plain(self, plan), mismatched=1)

    monkeypatch.setattr(FakeLearner, "step", step)
    path = tmp_path / "r"
    with RunDir.create(config(path)) as run, run.store() as store, run.metrics() as metrics:
        made = Run(run, store, metrics)
        await made.step(1)
        ledger = store.ledger()
        assert (ledger.excluded["mismatch"], ledger.balanced) == (1, True)
        assert written(path, 1)["tokens_trained"] == ledger.trained
        (line,) = made.reported.notes
    notice = "1 token excluded: sampler/trainer logprob gap exceeds train.max_logprob_gap"
    assert line == f"step 1: {notice}"


async def test_a_line_has_the_runs_step_and_beside_it_how_often_the_optimiser_stepped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = FakeLearner.step

    async def step(self: FakeLearner, plan: StepPlan, scores: Path | None = None) -> StepResult:
        """Forty epochs; the second step is skipped."""
        asked.append(plan.digest)
        if len(asked) == 2:
            return StepResult(optimizer_steps=40, version=1, skipped="nothing to train")
        return replace(await plain(self, plan), optimizer_steps=40 * self.version)

    asked: list[str] = []
    monkeypatch.setattr(FakeLearner, "step", step)
    path = tmp_path / "r"
    with RunDir.create(config(path)) as run, run.store() as store, run.metrics() as metrics:
        made = Run(run, store, metrics)
        for number in (1, 2, 3):
            await made.step(number)
    assert [written(path, number)["optimizer_steps"] for number in (1, 2, 3)] == [40, 40, 80]


def steps_of(path: Path) -> list[int]:
    lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["event"] == "step"]


@pytest.mark.slow
def test_a_kill_between_a_commit_and_its_line_costs_the_line_until_the_resume_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r"

    async def until_killed() -> None:
        with RunDir.create(config(path)) as run, run.store() as store, run.metrics() as metrics:
            made = Run(run, store, metrics)
            await made.step(1)
            with failpoint.armed("loop.committed"), pytest.raises(failpoint.FailpointHit):
                await made.step(2)

    asyncio.run(until_killed())
    assert steps_of(path) == [1]
    stops = SetupError("the test stops here")
    monkeypatch.setattr("insitu_train.run.assemble", Mock(side_effect=stops))
    for _ in range(2):
        with pytest.raises(SetupError):
            asyncio.run(run_training(config(path), cast(Any, Reports()), TrainOptions(resume=path)))
        assert steps_of(path) == [1, 2]
    with read_store(path) as store:
        (_, kept) = store.steps()
    line = written(path, 2)
    assert {**kept.metrics, "time_s": kept.committed_s}.items() <= line.items()
    assert set(written(path, 1)) - set(line) == {"publish_s", "checkpoint_s"}
    (path / "metrics.jsonl").write_bytes(b"{damaged\n")
    with pytest.raises(SetupError):
        asyncio.run(run_training(config(path), cast(Any, Reports()), TrainOptions(resume=path)))


def test_a_leap_is_told_once_and_learning_never(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="insitu.collect")
    reported = SpikeDetector("reward", 0.4)
    seen = [reported.look(value, 8).alarm for value in [0.2] * 8 + [0.8] * 8]
    assert seen == [False] * 8 + [True] + [False] * 7
    (record,) = caplog.records
    assert record.getMessage() == "spike of=reward value=0.800 mean=0.200 steps=8"
    learning = SpikeDetector("reward", 0.4)
    assert not any(learning.look(0.1 + 0.05 * step, 8).alarm for step in range(18))
    noisy = SpikeDetector("reward", 0.4)
    assert not any(noisy.look(value, 8).alarm for value in [0.1, 0.6, 0.2, 0.5, 0.1, 0.7, 0.2, 0.75])
    for at, groups in ((0.0, 8), (0.4, 3)):
        assert not [x for x in map(SpikeDetector("r", at, [0.0] * 8).look, [0.9], [groups]) if x.alarm]


def test_the_reward_s_fates_and_the_infrastructure_are_no_lost_path() -> None:
    ledger = Ledger(captured=10, trained=2, excluded={"degenerate": 4, "infra": 2, "undelivered": 2})
    assert lost_share(ledger) == 0.2
    assert lost_share(Ledger()) == 0.0


def graded_group(*rewards: float | None) -> Group:
    spec = AttemptSpec(rollout_id="train/00001/000/00", task=Task(id="t", prompt="", files={}), seed=1)
    made = [fake_rollout(spec, "sandbox lost" if reward is None else reward) for reward in rewards]
    return Group(id="g", task_id="t", rollouts=tuple(made))


def test_a_step_without_an_update_says_why() -> None:
    zero, one, useful = graded_group(0.0, 0.0), graded_group(1.0, None), graded_group(0.0, 1.0)
    none = "0 useful groups of 2; 1 are needed"
    said = "no update: all groups have equal rewards, "
    assert why_untrained([zero, zero], none) == f"{said}4 of 4 rollouts earned 0"
    assert why_untrained([zero, one], none) == f"{said}of 3 rollouts 2 earned 0, 1 earned 1"
    assert why_untrained([graded_group(None)], none) == f"{said}no rollout was graded"
    few = "1 useful groups of 2; 2 are needed"
    assert why_untrained([zero, useful], few) == f"no update: {few}"
    assert why_untrained([useful], "") == ""


def test_a_step_without_an_update_has_measured_nothing_of_training() -> None:
    nothing = StepResult(optimizer_steps=3, version=3, skipped="0 useful groups of 1; 1 are needed")
    metrics = step_metrics([graded_group(0.0, 0.0)], Ledger(captured=9, excluded={"degenerate": 9}), nothing)
    for name in ("entropy", "loss", "max_logprob_gap", "max_logprob_gap_seen", "grad_norm", "ess"):
        assert metrics[name] is None, name
    assert (metrics["version"], metrics["tokens_trained"], metrics["reward_mean"]) == (3, 0, 0.0)
    assert gaps([metrics]) == {"max_logprob_gap": None, "max_logprob_gap_seen": None, "mismatched": 0}
    update = StepResult(optimizer_steps=4, version=4)
    done = step_metrics([graded_group(0.0, 0.5)], Ledger(captured=9, trained=9), update)
    assert (done["entropy"], done["reward_mean"], done["solve_rate"]) == (0.0, 0.25, 0.0)
    assert gaps([metrics, done | {"max_logprob_gap": 2e-5}])["max_logprob_gap"] == 2e-5
    ungraded = step_metrics([graded_group(None, None)], Ledger(), nothing)
    assert ungraded["reward_mean"] is None
    empty = {"heldout_after": None, "heldout_reward_after": None}
    assert heldout_summary("after", None) == heldout_summary("after", result_of([], 1)) == empty


def test_an_evaluation_counts_calls_that_do_not_parse() -> None:
    group = graded_group(0.0, 1.0)
    rollouts = tuple(with_calls(one, "malformed", "unknown_tool") for one in group.rollouts)
    found = counts(result_of([replace(group, rollouts=rollouts)], 1))
    names = ("malformed_calls", "unknown_tools", "unparsed_share")
    assert [found[name] for name in names] == [2, 2, 0.5]
    assert {*found} <= {*EVALUATION}
    assert counts(result_of([], 1))["unparsed_share"] is None
