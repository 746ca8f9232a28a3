"""The groups of a list of tasks: every slot decided once, in place, whatever order attempts end in."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from insitu.attempt import AttemptSpec, OnStart, ignore_cancelled, no_wait
from insitu.collect.breaker import Breaker
from insitu.collect.groups import open_groups
from insitu.collect.options import Check, CollectOptions, Phase, Slot, nothing_to_check
from insitu.errors import CaptureError, EngineError, SandboxError, TaskError, TrainError
from insitu.tasks.toy import ToySource
from insitu.types import MALFORMED, FileEntry, Group, Limits, Outcome, Rollout, Status, Task, Turn, Verdict
from tests.fakes.attempts import FakeAttempts, fake_rollout
from tests.fakes.simulated_attempts import with_tokens
from tests.fakes.virtual_time import run_virtual

TASKS = ToySource(Limits()).tasks("train", 0, 3)


class Memory:
    """A sink in memory that refuses a second rollout for one slot."""

    def __init__(self, held: Mapping[str, Rollout] | None = None) -> None:
        self.rollouts: dict[str, Rollout] = dict(held or {})
        self.failed: list[tuple[str, int]] = []
        self.tries: dict[str, int] = {}
        self.rescores: list[tuple[str, float | None]] = []
        self.planned: list[tuple[str, str, int]] = []
        self.started: list[tuple[str, int]] = []

    def plan(self, slots: Sequence[Slot], task_id: str, version: int) -> None:
        self.planned += [(slot.rollout_id, task_id, version) for slot in slots]

    def start(self, rollout_id: str, attempt: int, version: int) -> None:
        assert rollout_id in {name for name, _, _ in self.planned}
        assert rollout_id not in self.rollouts
        self.started.append((rollout_id, attempt))

    def put(self, slot: Slot, rollout: Rollout) -> None:
        assert slot.rollout_id == rollout.id
        assert rollout.id not in self.rollouts
        self.rollouts[rollout.id] = rollout

    def rescored(self, rollout: Rollout) -> None:
        self.rescores.append((rollout.id, rollout.reward))

    def attempted(self, slot: Slot, rollout: Rollout) -> None:
        self.failed.append((rollout.id, rollout.attempt))

    def cancelled(self, slot: Slot, rollout: Rollout, reason: str) -> None: ...

    def discard(self, rollout_ids: Sequence[str], reason: str) -> None:
        raise AssertionError("a synchronous batch gives no rollout up")

    def held(self, phase: Phase, step: int) -> Iterable[Rollout]:
        return list(self.rollouts.values())

    def tried(self, phase: Phase, step: int) -> Mapping[str, int]:
        return self.tries


class Quiet:
    def __init__(self) -> None:
        self.finished: list[str] = []

    def rollout_started(self, rollout_id: str) -> None: ...

    def rollout_finished(self, rollout_id: str, *, reward: float | None, tokens: int) -> None:
        self.finished.append(rollout_id)


async def collected(
    attempts: FakeAttempts,
    sink: Memory,
    tasks: Sequence[Task] = TASKS,
    breaker: int = 20,
    *,
    check: Check = nothing_to_check,
    version: int = 0,
    **changes: Any,
) -> Sequence[Group]:
    options = CollectOptions(**{"seed": 5, "group_size": 4, "pause_s": 0.001, **changes})
    running = open_groups(
        attempts, sink, Quiet(), Breaker(breaker), options, tasks, check=check, version=version
    )
    async with running as collector:
        return (await collector.next_batch()).groups


async def test_groups_keep_task_and_slot_order_although_attempts_end_in_another() -> None:
    attempts = FakeAttempts(
        lambda spec: float(spec.rollout_id[-1]), delay_s=lambda spec: 0.02 - int(spec.rollout_id[-1]) / 200
    )
    sink = Memory()
    groups = await collected(attempts, sink, first_step=2)
    assert [g.task_id for g in groups] == [t.id for t in TASKS]
    assert [list(g.rewards) for g in groups] == [[0.0, 1.0, 2.0, 3.0]] * 3
    assert [r.id for r in groups[1].rollouts] == [f"train/00002/001/{s:02d}" for s in range(4)]
    assert len(sink.rollouts) == 12
    assert attempts.most_running == 12
    assert {spec.seed for spec in attempts.specs} == {5}


async def test_only_infrastructure_failures_start_another_attempt_and_boundedly() -> None:
    def fate(spec: AttemptSpec) -> float | str:
        if spec.rollout_id == "train/00001/000/00":
            return "sandbox lost"
        if spec.rollout_id == "train/00001/000/01":
            return 1.0 if spec.attempt == 2 else "sandbox lost"
        return 0.0

    attempts, sink = FakeAttempts(fate), Memory()
    groups = await collected(attempts, sink, TASKS[:1])
    first, second, *others = groups[0].rollouts
    assert (first.status, first.reward, first.attempt) == (Status.INFRA_FAILED, None, 3)
    assert (second.status, second.reward, second.attempt) == (Status.OK, 1.0, 2)
    assert [r.attempt for r in others] == [1, 1]
    assert [name for name, _, _ in sink.planned] == [r.id for r in groups[0].rollouts]
    assert sorted(sink.started) == sorted((spec.rollout_id, spec.attempt) for spec in attempts.specs)
    assert list(groups[0].rewards) == [1.0, 0.0, 0.0]
    assert sorted(sink.failed) == [
        ("train/00001/000/00", 1),
        ("train/00001/000/00", 2),
        ("train/00001/000/00", 3),
        ("train/00001/000/01", 1),
    ]


async def test_a_slot_that_is_held_is_not_run_again() -> None:
    spec = AttemptSpec(rollout_id="train/00001/000/02", task=TASKS[0], seed=5)
    held = fake_rollout(spec, 0.5)
    attempts = FakeAttempts(lambda spec: 0.0)
    groups = await collected(attempts, Memory({held.id: held}), TASKS[:1])
    assert groups[0].rollouts[2] is held
    assert held.id not in {spec.rollout_id for spec in attempts.specs}
    assert len(attempts.specs) == 3


@pytest.mark.parametrize(
    ("other", "now"), [(True, "now [0-9a-z-]+; restore it$"), (False, "now with other content")]
)
async def test_a_held_slot_of_another_task_is_refused(other: bool, now: str) -> None:
    spec = AttemptSpec(rollout_id="train/00001/000/02", task=TASKS[other], seed=5)
    named = TASKS[other].content_hash if other else "0" * 64
    verdict = Verdict(outcome=Outcome.UNRESOLVED, reward=0.0, trust="strong", task_hash=named)
    held = dataclasses.replace(fake_rollout(spec, 0.5), verdict=verdict)
    with pytest.raises(TaskError, match=f"data set has changed .*: train/00001/000/02 was task .*, {now}"):
        await collected(FakeAttempts(lambda spec: 0.0), Memory({held.id: held}), TASKS[:1])


async def test_a_held_slot_counts_under_the_later_version_of_a_restarted_engine() -> None:
    spec = AttemptSpec(rollout_id="train/00001/000/02", task=TASKS[0], seed=5)
    held = with_tokens(fake_rollout(spec, 0.5), 0, 0)
    attempts = FakeAttempts(lambda spec: 0.0)
    groups = await collected(attempts, Memory({held.id: held}), TASKS[:1], version=1)
    assert groups[0].rollouts[2] is held
    assert len(attempts.specs) == 3


@pytest.mark.parametrize("resumed", [True, False])
async def test_of_an_evaluation_the_labels_of_its_replies_stay_and_no_tokens(resumed: bool) -> None:
    ids = np.arange(5, dtype=np.int32)
    turn = Turn(
        index=0, parent=-1, context_ids=ids, ids=ids, logprobs=None, finish="stop", version_runs=((0, 5),),
        hints=(("label", MALFORMED),),
    )  # fmt: skip

    def replied(rollout: Rollout) -> Rollout:
        made = with_tokens(rollout, 0, 0)
        return dataclasses.replace(made, trajectory=dataclasses.replace(made.trajectory, turns=(turn,)))

    class Replies(FakeAttempts):
        async def run(self, *given: Any) -> Rollout:
            return replied(await super().run(*given))

    spec = AttemptSpec(rollout_id="train/00001/000/00", task=TASKS[0], seed=5)
    held = {spec.rollout_id: replied(fake_rollout(spec, 0.5))} if resumed else {}
    [group] = await collected(
        Replies(lambda spec: 0.0), Memory(held), TASKS[:1], version=1, whole=False, group_size=2
    )
    for rollout in group.rollouts:
        [kept] = rollout.trajectory.turns
        assert kept.labels == {MALFORMED}
        assert (len(kept.ids), len(kept.context_ids), rollout.trajectory.segments) == (0, 0, ())


async def test_a_broken_infrastructure_stops_the_step_with_its_cause() -> None:
    attempts = FakeAttempts(lambda spec: "no space left")
    with pytest.raises(SandboxError, match="6 attempts in a row failed; the last: no space left"):
        await collected(attempts, Memory(), breaker=6)
    assert attempts.running == 0


async def test_a_dead_learner_ends_the_step_at_once_and_decides_no_slot() -> None:
    async def gone() -> None:
        raise EngineError("the learner died (killed by signal 9)")

    attempts, sink = FakeAttempts(lambda spec: "the learner is gone"), Memory()
    began_at = time.monotonic()
    with pytest.raises(EngineError, match=r"the learner died \(killed by signal 9\)"):
        await collected(attempts, sink, TASKS[:1], pause_s=5.0, check=gone)
    assert time.monotonic() - began_at < 1.0
    assert sink.rollouts == {}
    assert [spec.attempt for spec in attempts.specs] == [1] * 4
    assert sink.failed, "the tokens of a failed try must be accounted for"


async def test_a_pause_lies_between_tries_and_grows() -> None:
    attempts = FakeAttempts(lambda spec: "sandbox lost" if spec.attempt < 3 else 0.0)
    began_at = time.monotonic()
    await collected(attempts, Memory(), TASKS[:1], pause_s=0.05, group_size=1)
    assert 0.15 <= time.monotonic() - began_at < 1.0


async def test_tries_of_an_earlier_process_are_not_numbered_again() -> None:
    attempts, sink = FakeAttempts(lambda spec: "sandbox lost"), Memory()
    sink.tries = {"train/00001/000/00": 2}
    (group,) = await collected(attempts, sink, TASKS[:1], group_size=1)
    assert [spec.attempt for spec in attempts.specs] == [3, 4, 5]
    assert group.rollouts[0].attempt == 5


async def test_a_defect_ends_the_step_as_itself() -> None:
    def fate(spec: AttemptSpec) -> float | str:
        if spec.rollout_id.endswith("/03"):
            raise CaptureError("rollout x, turn 2, token 7: logprob missing")
        return 0.0

    attempts = FakeAttempts(fate)
    with pytest.raises(CaptureError, match="token 7"):
        await collected(attempts, Memory())
    assert attempts.running == 0


async def test_evaluation_is_said_to_the_attempt() -> None:
    attempts = FakeAttempts(lambda spec: 0.0)
    await collected(attempts, Memory(), phase="eval_before", first_step=0, group_size=1)
    assert [spec.evaluation for spec in attempts.specs] == [True] * 3
    assert [spec.rollout_id for spec in attempts.specs] == [f"eval_before/00000/00{g}/00" for g in range(3)]


class WithTokens(FakeAttempts):
    """What is cancelled has sampled something."""

    async def run(
        self, spec: AttemptSpec, on_start: Callable[[], None], on_cancelled: Any = None, ready: Any = None
    ) -> Rollout:
        return await super().run(spec, on_start, lambda rollout: on_cancelled(with_tokens(rollout, 0, 0)))


def test_a_try_that_hangs_after_its_agent_has_failed_and_is_repeated() -> None:
    async def run() -> None:
        attempts = WithTokens(lambda s: 1.0, delay_s=lambda s: math.inf if s.attempt == 1 else 1.0)
        sink = Memory()
        stuck: list[Rollout] = []
        sink.attempted = lambda slot, rollout: stuck.append(rollout)  # type: ignore[method-assign]
        groups = await collected(attempts, sink, TASKS[:1], group_size=2, group_grace_s=30.0, pause_s=0.5)
        assert [(r.attempt, r.reward) for r in groups[0].rollouts] == [(2, 1.0)] * 2
        assert asyncio.get_running_loop().time() == pytest.approx(Limits().wall_s + 30.0 + 0.5 + 1.0)
        assert [r.status for r in stuck] == [Status.INFRA_FAILED] * 2
        assert all("timeout" in r.error and r.trajectory.ledger.excluded == {"infra": 4} for r in stuck)

    run_virtual(run())


class Outage(FakeAttempts):
    """Their engine is away for half an hour, from 100 s on."""

    async def run(
        self, spec: AttemptSpec, on_start: OnStart, on_cancelled: Any = ignore_cancelled, ready: Any = no_wait
    ) -> Rollout:
        now = asyncio.get_running_loop().time

        def clock() -> float:
            return now() - min(1800.0, max(0.0, now() - 100.0))

        return await super().run(spec, lambda: on_start(clock), on_cancelled, ready)


@pytest.mark.parametrize(("takes_s", "tries"), [(Limits().wall_s + 1800.0, 1), (math.inf, 2)])
def test_a_try_is_not_cut_for_an_outage_and_hangs_only_that_much_later(takes_s: float, tries: int) -> None:
    async def run() -> None:
        attempts = Outage(lambda s: 1.0, delay_s=lambda s: takes_s if s.attempt == 1 else 1.0)
        options = {"group_size": 2, "group_grace_s": 30.0, "pause_s": 0.5}
        (group,) = await collected(attempts, Memory(), TASKS[:1], **options)
        assert [(r.attempt, r.reward) for r in group.rollouts] == [(tries, 1.0)] * 2
        cut = Limits().wall_s + 1800.0 + 30.0 + 0.5 + 1.0
        ends = takes_s if tries == 1 else cut
        assert asyncio.get_running_loop().time() == pytest.approx(ends, abs=1.5)

    run_virtual(run())


def test_a_step_in_which_nothing_begins_ends_the_run() -> None:
    class NoWorker(FakeAttempts):
        async def run(
            self, spec: AttemptSpec, on_start: Callable[[], None], on_cancelled: Any = None, ready: Any = None
        ) -> Rollout:
            await asyncio.sleep(math.inf)
            raise AssertionError

    async def run() -> None:
        options = {"group_size": 2, "group_grace_s": 30.0, "stall_timeout_s": 4000.0}
        await collected(NoWorker(lambda s: 1.0), Memory(), **options)

    with pytest.raises(TrainError, match="for 4000 s: 0 rollouts run, 6 wait for a worker"):
        run_virtual(run())


def test_a_long_step_in_which_rollouts_end_is_no_starvation() -> None:
    async def run() -> None:
        attempts = FakeAttempts(lambda s: 1.0, delay_s=lambda s: 300.0 * (1 + int(s.rollout_id[-1])))
        await collected(attempts, Memory(), group_grace_s=1e9, stall_timeout_s=400.0)
        assert asyncio.get_running_loop().time() == pytest.approx(1200.0)

    run_virtual(run())


class RankedAttempts(FakeAttempts):
    """Rewards that depend on the whole group: the share of members that are worse."""

    scores_groups = True

    async def score_group(self, task: Task, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        lengths = [len(rollout.changed) for rollout in rollouts]
        return [
            dataclasses.replace(rollout, reward=sum(other < own for other in lengths) / len(rollouts))
            for rollout, own in zip(rollouts, lengths, strict=True)
        ]


@pytest.mark.parametrize("whole", [True, False])
async def test_a_reward_of_the_group_is_given_when_all_of_it_is_decided(whole: bool) -> None:
    attempts, sink = RankedAttempts(lambda spec: 0.0), Memory()
    run = attempts.run

    async def with_files(spec: AttemptSpec, *more: Any) -> Rollout:
        files = {f"{n}.py": FileEntry(content=b"") for n in range(int(spec.rollout_id[-1]))}
        return dataclasses.replace(await run(spec, *more), changed=files, reward=None)

    attempts.run = with_files  # type: ignore[method-assign]
    groups = await collected(attempts, sink, whole=whole)
    assert [list(group.rewards) for group in groups] == [[0.0, 0.25, 0.5, 0.75]] * 3
    assert {rollout.reward for rollout in sink.rollouts.values()} == {None}
    assert dict(sink.rescores)["train/00001/002/03"] == 0.75
    assert len(sink.rescores) == 12
    assert bool(groups[0].rollouts[3].changed) == whole
