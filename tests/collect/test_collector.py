"""The asynchronous collector, in virtual time: how far ahead it runs, what it drops and when it stops."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from insitu.attempt import AttemptSpec, OnStart
from insitu.collect.breaker import Breaker
from insitu.collect.collector import Collector
from insitu.collect.options import CollectOptions, RejectReason, accept_all
from insitu.collect.pending_group import ResumedGroup, ResumeState
from insitu.errors import EngineError, SandboxError, TrainError
from insitu.tasks.toy import ToySource
from insitu.types import Group, Limits, Rollout, Status, Task
from tests.fakes.attempts import FakeAttempts, fake_rollout
from tests.fakes.memory_sink import MemorySink
from tests.fakes.simulated_attempts import Chances, SimulatedAttempts, with_tokens
from tests.fakes.virtual_time import run_virtual

SOURCE = ToySource(Limits(wall_s=1000.0))
GROUPS, SIZE = 3, 2


def supply(number: int) -> Task:
    return SOURCE.tasks("train", number, 1)[0]


class Quiet:
    def rollout_started(self, rollout_id: str) -> None: ...

    def rollout_finished(self, rollout_id: str, *, reward: float | None, tokens: int) -> None: ...


class Versions(FakeAttempts):
    """Fake attempts whose tokens carry the version in force when they began and ended."""

    version = 0

    async def run(
        self, spec: AttemptSpec, on_start: Callable[[], None], on_cancelled: Any = None, ready: Any = None
    ) -> Rollout:
        first: list[int] = []

        def begin() -> None:
            first.append(self.version)
            on_start()

        def cancel(rollout: Rollout) -> None:
            on_cancelled(with_tokens(rollout, first[0], self.version))

        rollout = await super().run(spec, begin, cancel, ready)
        return with_tokens(rollout, first[0], self.version)


def options(**changes: Any) -> CollectOptions:
    base = {"seed": 5, "group_size": SIZE, "attempts": 2, "pause_s": 1.0, "groups": GROUPS, "total": 30}
    base |= {"max_staleness": 1, "replace_degenerate": 0.0, "stall_timeout_s": 100.0, "group_grace_s": 300.0}
    return CollectOptions(**{**base, **changes})


def draw_of(spec: AttemptSpec) -> int:
    _, step, group, _ = spec.rollout_id.split("/")
    return (int(step) - 1) * GROUPS + int(group)


def ids_of(number: int) -> list[str]:
    return [f"train/{1 + number // GROUPS:05d}/{number % GROUPS:03d}/{s:02d}" for s in range(SIZE)]


def collector(
    attempts: FakeAttempts | SimulatedAttempts,
    sink: MemorySink,
    o: CollectOptions,
    *,
    use: RejectReason = accept_all,
    **more: Any,
) -> Collector:
    return Collector(attempts, sink, Quiet(), Breaker(6), o, supply, reject_reason=use, **more)


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        run_virtual(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def now() -> float:
    return asyncio.get_running_loop().time()


@virtual
async def test_admission_is_strict_and_a_place_is_free_when_the_version_is_live() -> None:
    attempts, sink = Versions(lambda spec: 1.0, delay_s=lambda spec: 1.0), MemorySink()
    async with collector(attempts, sink, options(max_staleness=2)).open() as c:
        await asyncio.sleep(50.0)
        assert len(sink.planned) == 3 * GROUPS * SIZE, "nobody trains: not one more than (S + 1) * P groups"
        batch = await c.next_batch()
        assert [g.id for g in batch.groups] == [f"train/00001/00{g}" for g in range(3)]
        await asyncio.sleep(50.0)
        assert len(sink.planned) == 3 * GROUPS * SIZE, "what is taken keeps its place while it is trained"
        c.version_pending(1)
        await asyncio.sleep(50.0)
        assert len(sink.planned) == 3 * GROUPS * SIZE, "the new weights are not live yet"
        c.version_published(1)
        await asyncio.sleep(50.0)
        assert len(sink.planned) == 4 * GROUPS * SIZE
        assert (batch.waited_s, batch.running, batch.ready) == (0.0, 0, 6)


@virtual
async def test_the_demand_is_met_and_not_exceeded() -> None:
    attempts, sink = Versions(lambda spec: 1.0, delay_s=lambda spec: 1.0), MemorySink()
    async with collector(attempts, sink, options(max_staleness=2, total=12)).open() as c:
        for version in range(1, 5):
            assert len((await c.next_batch()).groups) == 3
            c.version_published(version)
        assert not (await c.next_batch()).groups
    assert len(sink.planned) == len(sink.rollouts) == 12 * SIZE


@virtual
async def test_with_no_staleness_each_batch_is_made_by_the_version_that_it_trains() -> None:
    attempts = Versions(lambda spec: 1.0, delay_s=lambda spec: 1.0 + draw_of(spec) % 3)
    async with collector(attempts, MemorySink(), options(max_staleness=0)).open() as c:
        for version in range(4):
            batch = await c.next_batch()
            assert batch.version == version
            assert batch.staleness == [0] * 6
            assert [g.id for g in sorted(batch.groups, key=lambda g: g.id)] == [
                f"train/{version + 1:05d}/00{g}" for g in range(3)
            ]
            await asyncio.sleep(5.0)
            attempts.version = version + 1
            c.version_published(version + 1)


@virtual
async def test_a_straggler_is_overtaken_within_the_window_only() -> None:
    def delay(spec: AttemptSpec) -> float:
        return 100.0 if draw_of(spec) == 0 else 1.0

    # 6 places and a window of 4: draws 1, 2 and 3 may go before draw 0, draw 4 may not.
    async with collector(
        Versions(lambda s: 1.0, delay_s=delay), MemorySink(), options(lookahead=0.7)
    ).open() as c:
        first = await c.next_batch()
        assert [g.id[-3:] for g in first.groups] == ["001", "002", "000"]
        assert first.groups[2].id == "train/00002/000"
        assert now() < 2.0
        c.version_published(1)
        second = await c.next_batch()
        assert second.groups[0].id == "train/00001/000", "draw 0 is due and is waited for"
        assert now() == pytest.approx(100.0)
        assert (second.staleness_max, second.dropped) == (1, {})


@virtual
async def test_late_groups_cancel_never_waits_and_loses_the_slow_group_with_its_tokens_accounted() -> None:
    def delay(spec: AttemptSpec) -> float:
        return 100.0 if spec.rollout_id == "train/00001/002/01" else 1.0

    attempts, sink = Versions(lambda s: 1.0, delay_s=delay), MemorySink()
    async with collector(attempts, sink, options(lookahead=1.0, late_groups="cancel")).open() as c:
        for version in (1, 2):
            await c.next_batch()
            attempts.version = version
            c.version_pending(version)
            await asyncio.sleep(0.0)
            c.version_published(version)
        await asyncio.sleep(0.01)
        assert now() < 10.0
        slow = ["train/00001/002/00", "train/00001/002/01"]
        assert sink.discarded == dict.fromkeys(slow, "stale"), "a whole group goes, its graded member too"
        assert slow[0] in sink.rollouts
        assert sink.lost["stale"] > 0
        batch = await c.next_batch()
        assert batch.dropped == {"stale": 1}
        assert batch.wasted_s == pytest.approx(1.0 + 2.0), "a second of the graded one, two of the other"
        assert batch.staleness_max <= 1


@pytest.mark.parametrize(("least", "waits", "members"), [(1, 0.0, 1), (2, 43.0, 2)])
def test_late_groups_skip_goes_without_a_late_further_try_if_enough_are_graded(
    least: int, waits: float, members: int
) -> None:
    async def run() -> None:
        late = "train/00001/000/00"
        attempts = Versions(
            lambda spec: "sandbox lost" if (spec.rollout_id, spec.attempt) == (late, 1) else 1.0,
            delay_s=lambda spec: 50.0 if (spec.rollout_id, spec.attempt) == (late, 2) else 1.0,
        )
        sink, o = MemorySink(), options(late_groups="skip", lookahead=1.0, group_min=least)
        async with collector(attempts, sink, o).open() as c:
            await asyncio.sleep(4.0)
            await c.next_batch()
            attempts.version = 1
            c.version_pending(1)
            c.version_published(1)
            assert attempts.running > 0, "what may be trained later still has its time"
            await asyncio.sleep(5.0)
            batch = await c.next_batch()
            (group,) = [g for g in batch.groups if g.id == "train/00001/000"]
            assert batch.waited_s == waits
            assert len(group.rollouts) == members
        assert sink.discarded == ({late: "deadline"} if least == 1 else {})
        assert sink.lost["deadline"] == (4 if least == 1 else 0)
        assert batch.late == len(sink.discarded)

    run_virtual(run())


@virtual
async def test_late_groups_skip_waits_for_a_first_try() -> None:
    slow = "train/00001/000/00"
    attempts = Versions(lambda spec: 1.0, delay_s=lambda spec: 50.0 if spec.rollout_id == slow else 1.0)
    sink, o = MemorySink(), options(late_groups="skip", lookahead=1.0, group_min=1)
    async with collector(attempts, sink, o).open() as c:
        await c.next_batch()
        c.version_published(1)
        batch = await c.next_batch()
    assert slow in [r.id for g in batch.groups for r in g.rollouts]
    assert not sink.discarded


@virtual
async def test_a_group_without_a_gradient_is_replaced_at_once_and_boundedly() -> None:
    def even(group: Group) -> str:
        return "degenerate" if int(group.id[-3:]) == 1 else ""

    attempts, sink = Versions(lambda spec: 1.0, delay_s=lambda spec: 1.0), MemorySink()
    o = options(lookahead=1.0, replace_degenerate=1 / 3, total=6)
    async with collector(attempts, sink, o, use=even).open() as c:
        batch = await c.next_batch()
        assert [g.id for g in batch.groups] == ["train/00001/000", "train/00001/002", "train/00002/000"]
        assert batch.dropped == {"degenerate": 1}
        assert set(sink.discarded) == {"train/00001/001/00", "train/00001/001/01"}
        c.version_published(1)
        # 4 is no better than 1 was, but the bound of one was reached
        batch = await c.next_batch()
        assert [g.id for g in batch.groups] == ["train/00002/001", "train/00002/002", "train/00003/000"]
    assert sink.undecided == set()


@virtual
async def test_failed_tries_are_repeated_boundedly_and_only_they_shrink_a_group() -> None:
    def fate(spec: AttemptSpec) -> float | str:
        if spec.rollout_id == "train/00001/000/00":
            return "sandbox lost"
        return "sandbox lost" if spec.rollout_id == "train/00001/001/00" and spec.attempt == 1 else 1.0

    sink = MemorySink()
    async with collector(Versions(fate), sink, options()).open() as c:
        batch = await c.next_batch()
    first = batch.groups[0].rollouts[0]
    assert (first.status, first.attempt, first.reward) == (Status.INFRA_FAILED, 2, None)
    assert batch.groups[1].rollouts[0].attempt == 2
    assert sorted(sink.failed) == [
        ("train/00001/000/00", 1), ("train/00001/000/00", 2), ("train/00001/001/00", 1),
    ]  # fmt: skip


@virtual
async def test_at_its_deadline_an_agent_is_stopped_and_graded_and_each_try_has_all_its_time() -> None:
    """A retry with what its lost sibling left would be stopped early and graded for a sandbox that died."""
    seen: dict[tuple[str, int], float] = {}

    def fate(spec: AttemptSpec) -> float | str:
        seen[spec.rollout_id, spec.attempt] = spec.task.limits.wall_s
        return "sandbox lost" if spec.rollout_id.endswith("000/00") and spec.attempt == 1 else 1.0

    attempts = Versions(fate, delay_s=lambda spec: min(40.0, spec.task.limits.wall_s))
    async with collector(attempts, MemorySink(), options(group_deadline_s=60.0)).open() as c:
        await c.next_batch()
    assert seen["train/00001/001/00", 1] == 60.0
    assert seen["train/00001/000/00", 1] == 60.0
    assert seen["train/00001/000/00", 2] == 60.0


@virtual
async def test_a_sandbox_lost_late_costs_its_rollout_no_reward() -> None:
    """Every solution takes 400 s of 480 and is right; one sandbox is lost at 390 s."""

    class Late(FakeAttempts):
        async def run(
            self, spec: AttemptSpec, on_start: Callable[[], None], on_cancelled: Any = None, ready: Any = None
        ) -> Rollout:
            rollout = await super().run(spec, on_start, on_cancelled, ready)
            stopped = spec.task.limits.wall_s < 400.0
            return replace(rollout, status=Status.TRUNCATED, reward=0.0) if stopped else rollout

    def first(spec: AttemptSpec) -> bool:
        return spec.rollout_id.endswith("000/00") and spec.attempt == 1

    attempts = Late(
        lambda spec: "sandbox lost" if first(spec) else 1.0,
        delay_s=lambda spec: 390.0 if first(spec) else min(400.0, spec.task.limits.wall_s),
    )
    o = options(group_deadline_s=480.0, max_staleness=0, stall_timeout_s=1e4)
    async with collector(attempts, MemorySink(), o).open() as c:
        batch = await c.next_batch()
    rollouts = [r for g in batch.groups for r in g.rollouts]
    assert {r.attempt for r in rollouts} == {1, 2}
    assert {(r.status, r.reward) for r in rollouts} == {(Status.OK, 1.0)}


@virtual
async def test_nothing_begins_while_weights_are_on_their_way_also_not_what_waited_for_a_worker() -> None:
    version, sink = [0], MemorySink()
    attempts = SimulatedAttempts(2, Chances(seed=1), lambda: version[0])
    async with collector(attempts, sink, options(stall_timeout_s=1e4)).open() as c:
        await c.next_batch()
        began_at = len(sink.started)
        assert began_at < len(sink.planned), "there are more rollouts than workers"
        c.version_pending(1)
        await asyncio.sleep(20.0)
        assert len(sink.started) == began_at
        assert attempts.running == 0
        version[0] = 1
        c.version_published(1)
        await asyncio.sleep(0.0)
        assert [at for _, _, at in sink.started[began_at:]] == [1, 1]


@virtual
async def test_what_hangs_is_cut_without_a_deadline_too() -> None:
    """A grading that hangs: the task's own limit (1000 s) and the grace are all the time there is."""

    def delay(spec: AttemptSpec) -> float:
        return math.inf if spec.rollout_id == "train/00001/000/01" else 1.0

    sink, o = MemorySink(), options(total=3, group_grace_s=30.0, stall_timeout_s=1e4)
    async with collector(Versions(lambda s: 1.0, delay_s=delay), sink, o).open() as c:
        batch = await c.next_batch()
    assert now() == pytest.approx(1030.0)
    assert sink.discarded == {"train/00001/000/01": "deadline"}
    assert sorted(len(g.rollouts) for g in batch.groups) == [1, 2, 2]


@virtual
async def test_no_try_is_given_up_for_the_time_in_which_the_engine_was_away() -> None:
    """It may wait for weights, a mended engine or one that sleeps: 500 s here, which it is notified of."""

    class Away(Versions):
        async def run(
            self, spec: AttemptSpec, on_start: OnStart, on_cancelled: Any = None, ready: Any = None
        ) -> Rollout:
            return await super().run(
                spec, lambda: on_start(lambda: now() - min(500.0, now())), on_cancelled, ready
            )

    attempts, sink = Away(lambda s: 1.0, delay_s=lambda s: 1500.0), MemorySink()
    o = options(max_staleness=0, total=3, group_grace_s=30.0, stall_timeout_s=1e4)
    async with collector(attempts, sink, o).open() as c:
        batch = await c.next_batch()
    assert now() == pytest.approx(1500.0)
    assert sink.discarded == {}
    assert [len(g.rollouts) for g in batch.groups] == [2, 2, 2]


@virtual
async def test_the_grace_of_one_try_is_not_used_up_by_another() -> None:
    """A further try that begins after its group's others would be over has its whole time."""

    def delay(spec: AttemptSpec) -> float:
        return 19.0 if spec.attempt == 1 else 49.0

    def fate(spec: AttemptSpec) -> float | str:
        return "sandbox lost" if spec.attempt == 1 and spec.rollout_id == "train/00001/000/01" else 1.0

    sink, o = MemorySink(), options(max_staleness=0, total=3, group_deadline_s=20.0, group_grace_s=30.0)
    async with collector(Versions(fate, delay_s=delay), sink, o).open() as c:
        batch = await c.next_batch()
    assert now() == pytest.approx(19.0 + 1.0 + 49.0)
    assert [len(g.rollouts) for g in batch.groups] == [2, 2, 2]
    assert sink.discarded == {}


@virtual
async def test_a_group_goes_on_without_who_is_undecided_after_its_grace() -> None:
    def delay(spec: AttemptSpec) -> float:
        return math.inf if spec.rollout_id == "train/00001/000/01" else 1.0

    attempts, sink = Versions(lambda s: 1.0, delay_s=delay), MemorySink()
    o = options(group_deadline_s=20.0, group_grace_s=30.0, total=3)
    async with collector(attempts, sink, o).open() as c:
        batch = await c.next_batch()
    assert now() == pytest.approx(50.0)
    assert [len(g.rollouts) for g in sorted(batch.groups, key=lambda g: g.id)] == [1, 2, 2]
    assert sink.discarded == {"train/00001/000/01": "deadline"}
    assert (batch.late, batch.wasted_s) == (1, pytest.approx(50.0))


@virtual
async def test_groups_that_never_fill_end_the_run_with_their_cause() -> None:
    attempts, sink = Versions(lambda s: 1.0, delay_s=lambda s: math.inf), MemorySink()
    with pytest.raises(SandboxError, match="the last: train/.*: timeout: the attempt did not"):
        async with collector(attempts, sink, options(group_deadline_s=20.0, group_grace_s=30.0)).open() as c:
            await c.next_batch()
    assert now() == pytest.approx(50.0)
    assert attempts.running == 0
    assert set(sink.discarded.values()) == {"deadline"}


@virtual
async def test_a_group_of_which_nobody_was_decided_is_replaced_whatever_the_bound() -> None:
    def delay(spec: AttemptSpec) -> float:
        return math.inf if draw_of(spec) == 1 else 1.0

    sink = MemorySink()
    o = options(group_deadline_s=20.0, group_grace_s=30.0, total=3, lookahead=1.0)
    async with collector(Versions(lambda s: 1.0, delay_s=delay), sink, o).open() as c:
        batch = await c.next_batch()
    assert [g.id for g in batch.groups] == ["train/00001/000", "train/00001/002", "train/00002/000"]
    assert sink.undecided == set()


def test_starvation_is_said_and_ends_the_run_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    run_virtual(starve(caplog))


async def starve(caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    caplog.set_level(logging.WARNING, logger="insitu.collect")
    attempts = Versions(lambda s: 1.0, delay_s=lambda s: math.inf)
    with pytest.raises(TrainError, match=r"for 100 s: 12 rollouts run, 0 wait for a worker, 0 of 6 groups"):
        o = options(group_deadline_s=50.0)
        async with collector(attempts, MemorySink(), o, warn=said.append).open() as c:
            await c.next_batch()
    assert now() == pytest.approx(100.0)
    assert [line.split(" for groups")[0] for line in said] == ["the trainer has waited 30 s"]
    warned = [r.getMessage() for r in caplog.records]
    assert [line.split()[1] for line in warned] == ["waited_s=1", "waited_s=10", "waited_s=30"]
    assert attempts.running == 0


@virtual
async def test_a_wait_in_which_rollouts_end_is_no_starvation() -> None:
    attempts = Versions(lambda s: 1.0, delay_s=lambda s: 90.0 * (1 + draw_of(s)))
    async with collector(attempts, MemorySink(), options(max_staleness=0)).open() as c:
        await c.next_batch()
    assert now() == pytest.approx(270.0)


@virtual
async def test_no_task_seems_to_be_stuck_in_its_own_time() -> None:
    """Tasks of 1000 s, each rollout takes 900: the limit of 100 s is not theirs, twice their own is."""
    sink, o = MemorySink(), options(max_staleness=0, total=3)
    async with collector(Versions(lambda s: 1.0, delay_s=lambda s: 900.0), sink, o).open() as c:
        assert len((await c.next_batch()).groups) == 3
    stuck = Versions(lambda s: 1.0, delay_s=lambda s: math.inf)
    with pytest.raises(TrainError, match="for 2000 s: 6 rollouts run"):
        async with collector(stuck, MemorySink(), o.changed(group_grace_s=1e9)).open() as c:
            await c.next_batch()


@virtual
async def test_errors_in_a_row_stop_the_run_while_it_trains() -> None:
    async def train() -> None:
        async with collector(Versions(lambda s: "no space left"), MemorySink(), options()).open():
            await asyncio.sleep(1000.0)

    with pytest.raises(SandboxError, match="6 attempts in a row failed; the last: no space left"):
        await train()
    assert now() < 10.0


@virtual
async def test_a_dead_learner_ends_the_run_at_once() -> None:
    async def gone() -> None:
        raise EngineError("the learner died")

    sink = MemorySink()
    with pytest.raises(EngineError, match="the learner died"):
        async with collector(Versions(lambda s: "no engine"), sink, options(), check=gone).open() as c:
            await c.next_batch()
    assert sink.rollouts == {}
    assert sink.failed


@virtual
async def test_what_an_earlier_process_left_is_completed_first_and_the_too_old_is_dropped() -> None:
    def held(number: int, members: int, version: int) -> ResumedGroup:
        ids = [f"train/0000{1 + number // GROUPS}/00{number % GROUPS}/0{s}" for s in range(members)]
        task = supply(number)
        rollouts = {
            i: with_tokens(fake_rollout(AttemptSpec(rollout_id=i, task=task, seed=5), 1.0), version, version)
            for i in ids
        }
        return ResumedGroup(
            number=number, task=task, rollouts=rollouts, tried={f"train/00002/001/0{s}": 3 for s in range(2)}
        )

    attempts, sink = Versions(lambda s: 0.0, delay_s=lambda s: 1.0), MemorySink()
    attempts.version = 2
    before = ResumeState(draws=[held(2, 2, 0), held(3, 2, 1), held(4, 1, 1)], next_draw=5, delivered=2)
    for draw in before.draws:
        sink.plan([], "", 0)
        sink.planned |= {
            f"train/0000{1 + draw.number // GROUPS}/00{draw.number % GROUPS}/0{s}": 0 for s in range(2)
        }
    async with collector(attempts, sink, options(), version=2, resume=before).open() as c:
        batch = await c.next_batch()
    assert [g.id for g in batch.groups] == ["train/00002/000", "train/00002/001", "train/00002/002"]
    assert sink.discarded == {"train/00001/002/00": "stale", "train/00001/002/01": "stale"}
    ran = {(s.rollout_id, s.attempt) for s in attempts.specs if s.rollout_id.startswith("train/00002/00")}
    assert ("train/00002/001/01", 4) in ran
    assert not any(name.startswith("train/00002/000") for name, _ in ran)


@virtual
async def test_a_cancelled_run_leaves_what_ran_undecided_for_the_next_process() -> None:
    attempts, sink = Versions(lambda s: 1.0, delay_s=lambda s: 5.0), MemorySink()

    async def train() -> None:
        async with collector(attempts, sink, options()).open() as c:
            await c.next_batch()
            await asyncio.sleep(math.inf)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.0):
            await train()
    assert (attempts.running, sink.discarded) == (0, {})
    assert sink.lost["unused"] == 4 * 6 * SIZE, "what was sampled until then is accounted for"
    assert len(sink.undecided) == len(sink.planned) == 6 * SIZE


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("late_groups", ["wait", "skip", "cancel"])
def test_every_planned_rollout_has_one_fate_and_no_batch_is_older_than_the_bound(
    seed: int, late_groups: Any
) -> None:
    async def run() -> None:
        version, sink = [0], MemorySink()
        chances = Chances(seed=seed, failed=0.1, solved=0.8)
        attempts = SimulatedAttempts(10, chances, lambda: version[0])
        o = options(
            max_staleness=1,
            total=45,
            replace_degenerate=2 / 3,
            group_deadline_s=6.0,
            late_groups=late_groups,
            stall_timeout_s=1e4,
        )
        o = o.changed(attempts=3)
        trained: list[str] = []

        def use(group: Group) -> str:
            return "infra" if len(group.rewards) < 2 else "degenerate" if group.degenerate else ""

        async with collector(attempts, sink, o, use=use).open() as c:
            for step in range(15):
                batch = await c.next_batch()
                assert len(batch.groups) == GROUPS
                assert batch.staleness_max <= 1
                trained += [r.id for g in batch.groups for r in g.rollouts]
                await asyncio.sleep(1.0)
                version[0] = step + 1
                c.version_pending(step + 1)
                await asyncio.sleep(0.1)
                c.version_published(step + 1)
        assert sink.undecided == set()
        assert len(set(trained)) == len(trained)
        assert set(trained).isdisjoint(sink.discarded)
        assert set(trained) | set(sink.discarded) == set(sink.planned)
        assert late_groups == "cancel" or "stale" not in sink.discarded.values()
        assert attempts.running == 0

    run_virtual(run())
