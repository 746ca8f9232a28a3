"""Groups collected ahead, with the run's real store: what a resumed run finds, and that accounts balance."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from insitu.attempt import AttemptSpec
from insitu.collect.breaker import Breaker
from insitu.collect.store_sink import StoreSink
from insitu.config import Config, load_config
from insitu.errors import ConfigError, RecordError
from insitu.storage.run_dir import RunDir
from insitu.storage.store import Store
from insitu.tasks.mix import TaskMix, TaskSet
from insitu.tasks.toy import ToySource
from insitu.types import Group, Limits, Status
from insitu_train.alarms import InfraFailureRate
from insitu_train.batch_source import Batches, collect_options, open_batches, resume_state
from insitu_train.plan.step import PlanConfig, plan_step, use_of
from insitu_train.recovery import check_steps
from insitu_train.step_metrics import ahead_summary
from tests.fakes.attempts import fake_rollout
from tests.fakes.simulated_attempts import Chances, SimulatedAttempts, with_tokens
from tests.fakes.virtual_time import run_virtual

SOURCE = TaskMix([TaskSet(arm=load_config(None).arms[""], source=ToySource(Limits()))])
STEPS = 6


class Quiet:
    def rollout_started(self, rollout_id: str) -> None: ...

    def rollout_finished(self, rollout_id: str, *, reward: float | None, tokens: int) -> None: ...


async def fine() -> None: ...


def config(*changes: str) -> Config:
    settings = [
        f"run.steps={STEPS}", "collect.groups_per_step=3", "collect.group_size=3", "collect.max_staleness=1",
        "collect.group_deadline_s=8", "train.min_groups=1",
    ]  # fmt: skip
    return load_config(None, [*settings, *changes])


class Run:
    """A trainer that only commits: version = committed steps."""

    def __init__(self, c: Config, path: Path, seed: int = 3) -> None:
        self.c, self.path, self.seed = c, path, seed
        self.reported: list[Mapping[str, Any]] = []
        self.dies: tuple[int, float] | None = None
        """Step, and how many seconds into it the process is gone."""

    async def go(self) -> None:
        with Store(self.path) as store:
            store.recover()
            last = store.last_step()
            self.version = 0 if last is None else last.step
            chances = Chances(seed=self.seed, failed=0.1, solved=0.6)
            attempts = SimulatedAttempts(6, chances, lambda: self.version)
            sink = StoreSink(store, InfraFailureRate(0.0))
            ahead = open_batches(
                self.c, store, SOURCE, attempts, sink, Quiet(), Breaker(20),
                check=fine, warn=lambda line: None, version=self.version,
            )  # fmt: skip
            async with ahead as batches:
                for step in range(self.version + 1, STEPS + 1):
                    dies_in_s = self.dies[1] if self.dies and self.dies[0] == step else None
                    async with asyncio.timeout(dies_in_s):
                        await self._step(step, batches, store)

    async def _step(self, step: int, batches: Batches, store: Store) -> None:
        groups, reported = await batches.next()
        self.reported.append(reported)
        plan = plan_step(groups, PlanConfig.of(self.c))
        store.assign(step, [r.id for g in groups for r in g.rollouts if r.reward is not None])
        await asyncio.sleep(2.0)
        store.commit_step(
            step, {}, "", plan.digest, plan.ledger,
            trained=[name for name, reason in plan.exclusion_reasons.items() if not reason],
            discarded={name: reason for name, reason in plan.exclusion_reasons.items() if reason},
        )  # fmt: skip
        batches.pending(step)
        await asyncio.sleep(0.1)
        self.version = step
        batches.published(step)


def test_a_run_balances_and_its_steps_are_no_staler_than_the_bound(tmp_path: Path) -> None:
    run = Run(config(), tmp_path / "store")
    run_virtual(run.go())
    with Store(tmp_path / "store") as store:
        balance = store.check_balance()
        assert balance.pending == 0
        assert {state for state, n in balance.states.items() if n} <= {"trained", "discarded"}
        assert store.ledger().balanced
        assert max(reported["staleness_max"] for reported in run.reported) == 1
        drawn = sum(reported["groups_drawn"] for reported in run.reported)
        dropped = sum(n for reported in run.reported for k, n in reported.items() if k in DROPS)
        assert (drawn, dropped) == (3 * STEPS + dropped, dropped)
        assert dropped > 0, "the seed was chosen so that groups without a gradient come up"


LOSSES = {"degenerate", "stale", "zero_advantage"}
DROPS = ("groups_degenerate", "groups_truncated", "groups_infra", "groups_stale", "groups_zero_advantage")


@pytest.mark.parametrize("dies_after_s", [0.5, 2.2, 5.0])
def test_a_resumed_run_loses_no_graded_rollout_and_trains_none_twice(
    tmp_path: Path, dies_after_s: float
) -> None:
    dying = Run(config(), tmp_path / "store")
    dying.dies = (3, dies_after_s)
    with pytest.raises(TimeoutError):
        run_virtual(dying.go())
    with Store(tmp_path / "store") as store:
        store.recover()
        before = resume_state(store, lambda number, task_id: SOURCE.tasks("train", number, 1)[0], 3)
        graded = {name for draw in before.draws for name in draw.rollouts}
        assert before.delivered == 6
        assert before.next_draw > max(draw.number for draw in before.draws)
        assert [d.number for d in before.draws] == sorted(d.number for d in before.draws)
        assert {s.rollout_id for s in store.unused_graded()} == graded
        assert [d.task for d in before.draws] == [SOURCE.tasks("train", d.number, 1)[0] for d in before.draws]
    run_virtual(Run(config(), tmp_path / "store").go())
    with Store(tmp_path / "store") as store:
        balance = store.check_balance()
        assert balance.pending == 0
        assert [s.step for s in store.steps()] == list(range(1, STEPS + 1))
        for name in graded:
            state = store.state(name)
            assert state is not None
            assert state.attempt == store.rollout(name).attempt, "a graded rollout was run again"
            assert state.state == "trained" or state.reason in LOSSES


def group(*fates: float | None, status: Status = Status.OK) -> Group:
    made = []
    for slot, reward in enumerate(fates):
        spec = AttemptSpec(
            rollout_id=f"train/00001/000/{slot:02d}", task=SOURCE.tasks("train", 0, 1)[0], seed=1
        )
        rollout = with_tokens(fake_rollout(spec, "lost" if reward is None else reward), 0, 0)
        made.append(rollout if reward is None else replace(rollout, status=status))
    return Group(id="train/00001/000", task_id="t", rollouts=tuple(made))


def test_of_no_use_is_what_the_planner_would_not_train() -> None:
    keep, mask = (PlanConfig(truncated=policy, group_min=2) for policy in ("keep", "mask"))
    assert use_of(group(1.0, 0.0), keep) == ""
    assert use_of(group(1.0, 1.0), keep) == "degenerate"
    assert use_of(group(1.0, None), keep) == "infra"
    assert use_of(group(1.0, 0.0, status=Status.TRUNCATED), keep) == ""
    assert use_of(group(1.0, 0.0, status=Status.TRUNCATED), mask) == "truncated"


def test_a_group_whose_rewards_hardly_vary_is_left_out_at_a_threshold() -> None:
    rule = PlanConfig(degenerate=1e-3, group_min=2)
    assert use_of(group(1.0, 0.95), rule) == "degenerate"  # variance 6.25e-4
    assert use_of(group(1.0, 0.9), rule) == ""  # 2.5e-3
    assert use_of(group(1.0, 0.95), PlanConfig(group_min=2)) == ""
    assert use_of(group(1.0, 1.0), rule) == "degenerate"
    with pytest.raises(ConfigError, match="degenerate"):
        load_config(None, ["train.degenerate=0"])
    assert load_config(None, ["train.degenerate=1e-3"]).train.degenerate == 1e-3


def test_keys_that_mean_nothing_are_refused() -> None:
    for bad in ("late_groups=cancel", "group_deadline_s=9", "replace_degenerate=0"):
        with pytest.raises(ConfigError, match=f"{bad.split('=')[0]} has no effect with max_staleness = 0"):
            load_config(None, [f"collect.{bad}"])


def test_a_try_that_hangs_has_an_end_in_every_kind_of_run() -> None:
    found = collect_options(load_config(None, ["collect.max_staleness=1"]))
    assert (found.group_deadline_s, found.group_grace_s) == (0.0, 600.0)
    found = collect_options(load_config(None, ["limits.wall_s=5000"]))
    assert (found.group_grace_s, found.stall_timeout_s) == (600.0, 10000.0)


def test_of_a_group_thinned_by_its_time_nobody_is_said_to_have_failed() -> None:
    thin = group(1.0)
    assert use_of(thin, PlanConfig()) == "deadline"
    assert set(plan_step([thin], PlanConfig()).exclusion_reasons.values()) == {"deadline"}
    assert set(plan_step([group(1.0, None)], PlanConfig()).exclusion_reasons.values()) == {"infra"}


def test_idle_is_a_share_of_all_the_time_publishing_and_evaluations_included() -> None:
    reported = {"staleness_max": 1, "wasted_s": 0.0, "rollout_s": 9.0, "waited_s": 3.0, "step_s": 10.0}
    assert (
        ahead_summary([{**reported, "cycle_s": 10.0}, {**reported, "cycle_s": 20.0}])["trainer_idle"] == 0.2
    )


def test_a_store_that_knows_less_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    """Somebody put another run.sqlite there: going on would train from the start under old names."""
    with RunDir.create(load_config(None, [f"run.dir={tmp_path / 'r'}"])) as run, run.store() as store:
        (run.checkpoints / "step-00002").mkdir(parents=True)
        with pytest.raises(RecordError, match="has 0 steps, but checkpoints reach step 2"):
            check_steps(run, store)
