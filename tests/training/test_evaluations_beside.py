"""Evaluations beside training: the real loop, store and collector; learner and attempts only take time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from insitu.attempt import AttemptSpec, ignore_cancelled, no_wait
from insitu.config import Config, load_config
from insitu.errors import ConfigError, SandboxError, TrainError
from insitu.storage.metrics import read_metrics
from insitu.storage.run_dir import RunDir, read_store
from insitu.storage.score import Score
from insitu.storage.wall_clock import WallClock
from insitu.tasks.mix import TaskMix, TaskSet
from insitu.tasks.toy import ToySource
from insitu.types import Limits, Rollout
from insitu_train.learner.supervisor import LearnerSupervisor
from insitu_train.loop import RunAgents, RunParts, TrainingLoop
from insitu_train.options import StepResult
from insitu_train.plan.step import PlanConfig, StepPlan
from insitu_train.recovery import committed
from tests.fakes.attempts import fake_rollout
from tests.fakes.learner import FakeLearner
from tests.fakes.simulated_attempts import Chances, SimulatedAttempts
from tests.fakes.virtual_time import run_virtual

BESIDE = "eval.beside_training=true"
WORKERS = 5
TRAIN_S = 6.0


class SlowLearner(FakeLearner):
    """Trains for some seconds; refuses a step of `bad`."""

    def __init__(self) -> None:
        super().__init__()
        self.bad = 0

    async def step(self, plan: StepPlan, scores: Path | None = None) -> StepResult:
        if self.version + 1 == self.bad:
            await asyncio.sleep(0.5)
            raise TrainError("loss nan")
        await asyncio.sleep(TRAIN_S)
        return await super().step(plan, scores)


class Attempts(SimulatedAttempts):
    """Keeps what began, and loses the sandbox of the rollouts that `lost` names."""

    def __init__(self, workers: int, version: Callable[[], int]) -> None:
        super().__init__(workers, Chances(seed=3, solved=0.6), version)
        self.begun: list[str] = []
        self.most = 0
        self.lost: Callable[[AttemptSpec], bool] = lambda spec: False

    async def run(
        self,
        spec: AttemptSpec,
        on_start: Callable[[], None],
        on_cancelled: Callable[[Rollout], None] = ignore_cancelled,
        ready: Callable[[], Awaitable[object]] = no_wait,
    ) -> Rollout:
        def started() -> None:
            on_start()
            self.begun.append(spec.rollout_id)
            self.most = max(self.most, self.running + 1)

        def cancelled(rollout: Rollout) -> None:
            on_cancelled(replace(rollout, attempt=spec.attempt))

        # as with a real sampler, a repeated attempt ends as the first one would have
        rollout = await super().run(replace(spec, attempt=1), started, cancelled, ready)
        if self.lost(spec):
            return fake_rollout(spec, "the sandbox was lost")
        return replace(rollout, attempt=spec.attempt)


class Said:
    def __init__(self) -> None:
        self.stages: list[tuple[str, int]] = []
        self.evals: list[str] = []
        self.notes: list[str] = []

    def begin(self, title: str, rollouts: int) -> None: ...

    def advance(self, done: int) -> None: ...

    def stage(self, name: str, total: int = 0) -> None:
        self.stages.append((name, total))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step_done(self, step: int, steps: int, metrics: Mapping[str, Any]) -> None: ...

    def eval_done(self, name: str, score: Score) -> None:
        self.evals.append(name)

    def rollout_started(self, rollout_id: str) -> None: ...

    def rollout_finished(self, rollout_id: str, *, reward: float | None, tokens: int) -> None: ...


def config(path: Path, *changes: str) -> Config:
    settings = [
        f"run.dir={path}", "run.steps=4", "collect.groups_per_step=2", "collect.group_size=3",
        "train.min_groups=1", "eval.count=4", "eval.every_steps=1", "limits.wall_s=8",
    ]  # fmt: skip
    return load_config(None, [*settings, *changes])


class World:
    """One process of a run; another one of the same path resumes it."""

    def __init__(self, c: Config, *, workers: int = WORKERS) -> None:
        self.config, self.path = c, Path(c.run.dir)
        self.learner, self.said = SlowLearner(), Said()
        self.attempts = Attempts(workers, lambda: self.learner.published.version)
        self.summary: Mapping[str, Any] = {}
        self.seconds = 0.0

    async def go(self, for_s: float | None = None) -> None:
        opened = RunDir.open(self.path) if self.path.exists() else RunDir.create(self.config)
        c = self.config
        with opened as run, run.store() as store, run.metrics() as metrics:
            store.recover()
            plan = PlanConfig.of(c)
            supervisor = LearnerSupervisor(
                cast(Any, self.learner), self.learner, lambda: committed(run, store, plan), restarts=2
            )
            await supervisor.begin()
            mix = TaskMix([TaskSet(arm=c.arms[""], source=ToySource(Limits(wall_s=8.0)))])
            agents = RunAgents(
                source=mix, names=("sim", "1"), attempts=self.attempts, engine=self.learner.engine
            )
            parts = RunParts(
                agents=agents, learner=cast(Any, self.learner), supervisor=supervisor, plan_config=plan
            )
            clock = WallClock(store, time.monotonic())
            loop = TrainingLoop(run, store, metrics, parts, cast(Any, self.said), clock)
            try:
                async with asyncio.timeout(for_s):
                    self.summary = await loop.run()
            finally:
                self.seconds = asyncio.get_running_loop().time()
                left = asyncio.all_tasks() - {asyncio.current_task()}
                assert (self.attempts.running, left) == (0, set()), "something runs on"


def ran(c: Config, workers: int = WORKERS) -> World:
    world = World(c, workers=workers)
    run_virtual(world.go())
    return world


def evaluated(path: Path) -> dict[str, tuple[str, float | None]]:
    """Task and reward of each rollout of an evaluation during training."""
    with read_store(path) as store:
        store.check_balance()
        places = [place for place in store.phases() if place[0].startswith("eval_during")]
        return {r.id: (r.task_id, r.reward) for place in places for r in store.rollouts(*place)}


def versions(path: Path) -> dict[int, set[int]]:
    """Versions that sampled the tokens of the evaluation after each step."""
    with read_store(path) as store:
        return {
            step: {
                int(v)
                for r in store.rollouts(phase, step)
                for s in r.trajectory.segments
                for v in s.versions[s.mask]
            }
            for phase, step in store.phases()
            if phase == "eval_during"
        }


def lines(path: Path, event: str) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in read_metrics(path / "metrics.jsonl") if line["event"] == event}


def test_training_is_the_same_and_waits_less(tmp_path: Path) -> None:
    alone = ran(config(tmp_path / "alone"))
    beside = ran(config(tmp_path / "beside", BESIDE))
    assert beside.summary["weights"] == alone.summary["weights"]
    assert beside.summary["ledger"] == alone.summary["ledger"]
    assert beside.summary["best_step"] == alone.summary["best_step"]
    assert beside.summary["evaluations"] == alone.summary["evaluations"]
    assert evaluated(tmp_path / "beside") == evaluated(tmp_path / "alone") != {}
    assert beside.seconds < alone.seconds, "an evaluation takes less than a step's training"
    assert versions(tmp_path / "beside") == {1: {1}, 2: {2}, 3: {3}}
    found = lines(tmp_path / "beside", "eval_during")
    assert {step: line["version"] for step, line in found.items()} == {1: 1, 2: 2, 3: 3}
    steps = lines(tmp_path / "beside", "step")
    assert ["evaluate_s" in steps[step] for step in (1, 2, 3, 4)] == [False, True, True, True]
    assert beside.summary["evaluate_s"] >= 0
    assert "evaluate_s" not in alone.summary


def test_the_steps_own_rollouts_get_workers_first_and_the_view_shows_both(tmp_path: Path) -> None:
    world = ran(config(tmp_path / "r", BESIDE))
    begun, own = world.attempts.begun, [f"train/00002/{g:03d}/{s:02d}" for g in range(2) for s in range(3)]
    first = min(begun.index(name) for name in begun if name.startswith("eval_during/00001"))
    assert max(map(begun.index, own)) < first
    assert world.attempts.most == WORKERS
    shown = [stage for stage in world.said.stages if stage[0].startswith("step")]
    assert shown[:2] == [
        ("step 1 of 4", 6),
        ("step 2 of 4, beside held-out tasks after step 1", 6 + 4),
    ]
    assert world.said.evals == [
        "held-out before", "held-out step 1", "held-out step 2", "held-out step 3", "held-out after",
    ]  # fmt: skip


@pytest.mark.parametrize("workers", [1, WORKERS])
def test_ahead_of_the_trainer_an_evaluation_has_one_version_too(tmp_path: Path, workers: int) -> None:
    """With one worker the step waits for rollouts drawn before the evaluation, longer than a stall takes."""
    ahead = ["collect.max_staleness=2", "collect.stall_timeout_s=1"]
    world = ran(config(tmp_path / "r", BESIDE, *ahead), workers)
    assert versions(tmp_path / "r") == {1: {1}, 2: {2}, 3: {3}}
    assert world.summary["staleness_max"] <= 2
    assert world.attempts.most == workers
    if workers == 1:
        assert max(
            line["evaluate_s"] for line in lines(tmp_path / "r", "step").values() if "evaluate_s" in line
        )
    assert len(evaluated(tmp_path / "r")) == 12


def test_some_evaluations_block_and_some_do_not(tmp_path: Path) -> None:
    base = {
        "eval": [
            {"count": 4, "every_steps": 2, "beside_training": True},
            {"name": "often", "count": 2, "samples": 2, "every_steps": 1, "beside_training": True},
            {"name": "blocking", "count": 3, "every_steps": 2},
        ]
    }
    kept = [f"run.dir={tmp_path / 'r'}", "run.steps=4", "collect.groups_per_step=2", "collect.group_size=3"]
    world = ran(load_config(None, [*kept, "train.min_groups=1", "limits.wall_s=8"], base))
    with read_store(tmp_path / "r") as store:
        during = {f"{phase} {step}": n for (phase, step), n in store.phases().items() if "during" in phase}
        assert store.check_balance().discarded["evaluation"] == 4 * 3 + 4 * 5 + 3 * 3
    assert during == {
        "eval_during 2": 4, "eval_during.blocking 2": 3,
        "eval_during.often 1": 4, "eval_during.often 2": 4, "eval_during.often 3": 4,
    }  # fmt: skip
    stages = [name for name, _ in world.said.stages]
    third = stages.index("step 3 of 4, beside held-out, often tasks after step 2")
    assert stages[third - 1] == "blocking tasks after step 2"
    assert [lines(tmp_path / "r", "eval_during.often")[step]["tries"] for step in (1, 2, 3)] == [4, 4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("share", [0.3, 0.45, 0.6, 0.75])
def test_a_run_that_is_cut_off_evaluates_once(tmp_path: Path, share: float, staleness: int) -> None:
    more = [BESIDE, f"collect.max_staleness={staleness}"]
    whole = ran(config(tmp_path / "whole", *more))
    cut = World(config(tmp_path / "cut", *more))
    with pytest.raises(TimeoutError):
        run_virtual(cut.go(share * whole.seconds))
    held = evaluated(tmp_path / "cut")
    resumed = ran(config(tmp_path / "cut", *more))
    assert {*held} & {*resumed.attempts.begun} == set(), "a decided rollout was run again"
    found = evaluated(tmp_path / "cut")
    assert held.items() <= found.items()
    assert found.keys() == evaluated(tmp_path / "whole").keys()
    assert versions(tmp_path / "cut") == {1: {1}, 2: {2}, 3: {3}}
    with read_store(tmp_path / "cut") as store:
        assert store.check_balance().pending == 0
    if not staleness:
        assert resumed.summary["weights"] == whole.summary["weights"]


def test_an_evaluation_that_fails_ends_the_run_and_a_resumed_one_repeats_it(tmp_path: Path) -> None:
    c = config(tmp_path / "r", BESIDE, "collect.max_consecutive_failures=3", "collect.attempts=4")
    world = World(c)
    world.attempts.lost = lambda spec: spec.rollout_id.startswith("eval_during/00002")
    with pytest.raises(SandboxError, match="3 attempts in a row failed; the last: the sandbox was lost"):
        run_virtual(world.go())
    with read_store(tmp_path / "r") as store:
        assert [step.step for step in store.steps()] == [1, 2], "the step beside it is not committed"
    resumed = ran(c)
    assert resumed.summary["rl_steps"] == 4
    assert resumed.summary["weights"] == ran(config(tmp_path / "alone")).summary["weights"]
    assert versions(tmp_path / "r") == {1: {1}, 2: {2}, 3: {3}}


def test_a_learner_that_dies_beside_an_evaluation_comes_back_with_its_version(tmp_path: Path) -> None:
    world, killed = World(config(tmp_path / "r", BESIDE, "limits.wall_s=30")), []

    def lost(spec: AttemptSpec) -> bool:
        """The first rollout of the evaluation that ends when the step beside it is trained."""
        if killed or not spec.rollout_id.startswith("eval_during/00002") or world.learner.version < 3:
            return False
        killed.append(spec.rollout_id)
        world.learner.alive = False
        return True

    world.attempts.lost = lost
    world.attempts._chances = Chances(seed=3, solved=0.6, median_s=12.0)
    run_virtual(world.go())
    assert killed, "the seed was chosen so that the evaluation is longer than the step"
    assert world.learner.lives == 2
    assert versions(tmp_path / "r") == {1: {1}, 2: {2}, 3: {3}}
    steps = lines(tmp_path / "r", "step")
    assert steps[3]["evaluate_s"] >= 0
    assert world.summary["weights"] == ran(config(tmp_path / "alone")).summary["weights"]


def test_a_refused_step_ends_the_evaluation_beside_it(tmp_path: Path) -> None:
    world = World(config(tmp_path / "r", BESIDE))
    world.learner.bad = 3
    with pytest.raises(TrainError, match="loss nan"):
        run_virtual(world.go())
    resumed = ran(config(tmp_path / "r", BESIDE))
    assert resumed.summary["weights"] == ran(config(tmp_path / "alone")).summary["weights"]
    assert len(evaluated(tmp_path / "r")) == 12


def test_a_run_ends_one_step_late_also_when_it_is_resumed(tmp_path: Path) -> None:
    stop = ["run.steps=9", "run.stop_after_evals=2"]

    alone, beside = (
        ran(config(tmp_path / name, *stop, *more)) for name, more in (("a", []), ("b", [BESIDE]))
    )
    assert alone.summary["stopped_early"]
    assert beside.summary["stopped_early"]
    assert beside.summary["rl_steps"] == alone.summary["rl_steps"] + 1
    (said,) = [note for note in beside.said.notes if "the run ends" in note]
    assert said == next(note for note in alone.said.notes if "the run ends" in note)
    cut = World(config(tmp_path / "cut", *stop, BESIDE))
    with pytest.raises(TimeoutError):
        run_virtual(cut.go(beside.seconds - 0.5))
    with read_store(tmp_path / "cut") as store:
        phase = ("eval_after", beside.summary["rl_steps"])
        assert 0 < store.phases().get(phase, 0) < 4, "the run was cut too early or too late"
    resumed = ran(config(tmp_path / "cut", *stop, BESIDE))
    for same in ("rl_steps", "weights", "best_step", "evaluations"):
        assert resumed.summary[same] == beside.summary[same]


def test_the_key_needs_evaluations_during_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="beside_training has no effect with every_steps = 0"):
        config(tmp_path / "r", BESIDE, "eval.every_steps=0")
    assert config(tmp_path / "r", BESIDE).samples_while_training
    assert not config(tmp_path / "r").samples_while_training
