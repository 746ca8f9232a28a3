"""A learner that dies anywhere is replaced, and nothing of the run shows it."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from insitu.engines.downtime import on_downtime
from insitu.engines.replicas import EngineSet
from insitu.errors import EngineError, TrainError
from insitu.gateway.deadlines import CallDeadline, SessionClock
from insitu.gateway.session import SessionStats
from insitu.storage.files import sha256_of
from insitu.types import Ledger, RequestKey, SamplingParams
from insitu_train.checkpoint_files import verify
from insitu_train.learner.supervisor import LearnerSupervisor, Trained
from insitu_train.options import StepResult
from insitu_train.plan.step import StepPlan
from insitu_train.recovery import Committed, CommittedStep, prune, written_steps
from insitu_train.weights.files import OwnPublisher
from tests.fakes.learner import FakeLearner

STEPS = 3
REQUESTS = 4


def _same(plan: StepPlan) -> StepPlan:
    return plan


class Run:
    """Samples, trains and commits like the loop; a commit is an entry of a list.

    An async context, which ends its engine.
    """

    def __init__(
        self,
        folder: Path,
        dies_at: Collection[tuple[str, int]] = (),
        restarts: int = 2,
        every: int = 2,
        learner: FakeLearner | None = None,
    ) -> None:
        self.every, self.checkpoint = every, 0
        self.learner, self.folder = learner or FakeLearner(dies_at), folder
        self.steps = list[tuple[StepPlan, str]]()
        self.said = list[str]()
        self.engine = EngineSet(
            {"learner": self.learner.engine}, max_wait_s=math.inf, restarts=restarts, say=self.said.append
        )
        publisher = OwnPublisher(self.learner, self.engine)
        self.supervisor = LearnerSupervisor(
            self.learner, publisher, self.committed, restarts=restarts, say=self.said.append
        )
        self.engine.check = self.supervisor.check

    async def __aenter__(self) -> Self:
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.__aexit__()

    def committed(self) -> Committed:
        after = [
            CommittedStep(step=step, plan=partial(_same, plan), version=step, weights=weights)
            for step, (plan, weights) in enumerate(self.steps, 1)
            if step > self.checkpoint
        ]
        return self.folder / f"step{self.checkpoint}" if self.checkpoint else None, after

    async def commit(self, plan: StepPlan, trained: Trained) -> None:
        self.steps.append((plan, trained.weights))
        await self.supervisor.publish(trained)
        if len(self.steps) % self.every == 0:
            await self.supervisor.save(self.folder / f"step{len(self.steps)}")
            self.checkpoint = len(self.steps)

    async def generate(self, step: int, slot: int) -> tuple[list[int], tuple[tuple[int, int], ...]]:
        key = RequestKey(seed=0, rollout_id=f"{step}/{slot}", turn=0)
        made = await self.engine.generate(np.zeros(3, np.int32), SamplingParams(max_tokens=4), key)
        return made.ids.tolist(), made.version_runs

    async def whole(self) -> list[object]:
        """Everything that was sampled and trained, in order."""
        happened: list[object] = []
        for step in range(1, STEPS + 1):
            sampled = await asyncio.gather(*(self.generate(step, slot) for slot in range(REQUESTS)))
            plan = StepPlan(rows=(), batches=(), ledger=Ledger(), groups=0, digest=str(sampled))
            trained = await self.supervisor.train(plan)
            await self.commit(plan, trained)
            happened += [*sampled, trained.weights, trained.result.version]
        happened.append((self.engine.receipt, self.learner.version, self.learner.weights))
        return happened


PLACES = [
    *[("generate", n) for n in (1, 2, 6, 12)],
    *[("step", n) for n in (1, 2, 3)],
    ("save", 1),
    ("saved", 1),
    *[("publish", n) for n in (1, 3)],
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]}{place[1]}")
async def test_a_death_anywhere_does_not_show(tmp_path: Path, place: tuple[str, int]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with Run(tmp_path / "a") as run:
        undisturbed = await run.whole()
    async with Run(tmp_path / "b", [place]) as run:
        assert await run.whole() == undisturbed
    assert run.learner.lives == 2
    assert run.supervisor.restarts == 1
    assert run.said == ["the learner died (killed by signal 9); restarting it (1 of 2)"]


async def test_one_that_dies_while_it_is_brought_back_is_brought_back_again(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with Run(tmp_path / "a") as run:
        undisturbed = await run.whole()
    async with Run(tmp_path / "b", [("step", 3), ("load", 1)]) as run:
        assert await run.whole() == undisturbed
    assert run.learner.lives == 3


class Files:
    """A learner's load that reads files, as the real one: damaged ones are refused."""

    def __init__(self, learner: FakeLearner) -> None:
        self._loaded = learner.load

    async def load(self, folder: Path) -> None:
        verify(folder)
        await self._loaded(folder)


class DiskRun(Run):
    """A run whose checkpoints are folders with checksums, one after each step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, every=1)
        self.learner.load = Files(self.learner).load  # type: ignore[method-assign]

    def committed(self) -> Committed:
        self.checkpoint = max(written_steps(self.folder), default=0)
        _, after = super().committed()
        return self.at(self.checkpoint) if self.checkpoint else None, after

    def at(self, step: int) -> Path:
        return self.folder / f"step-{step:05d}"

    async def commit(self, plan: StepPlan, trained: Trained) -> None:
        self.steps.append((plan, trained.weights))
        await self.supervisor.publish(trained)
        folder = self.at(len(self.steps))
        await self.supervisor.save(folder)
        (folder / "trainer").mkdir(parents=True)
        names = ("config.json", "model.safetensors", "trainer/optimizer.safetensors", "trainer/state.json")
        for name in names:
            (folder / name).write_text(f"{name} of {folder.name}")
        sums = {name: sha256_of(folder / name) for name in names}
        (folder / "checksums.json").write_text(json.dumps(sums))


def _flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[3] ^= 16
    path.write_bytes(raw)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": _flip,
    "cut": lambda folder: (folder / "trainer/optimizer.safetensors").write_bytes(b""),
    "lost": lambda folder: (folder / "trainer/state.json").unlink(),
    "no sums": lambda folder: (folder / "checksums.json").unlink(),
    "cut sums": lambda folder: (folder / "checksums.json").write_text('{"model'),
    "odd sums": lambda folder: (folder / "checksums.json").write_text('["model"]'),
    "empty": shutil.rmtree,
}


@pytest.mark.parametrize("damaged", [(3,), (3, 2), (3, 2, 1)])
@pytest.mark.parametrize("kind", DAMAGES)
async def test_behind_a_damaged_checkpoint_the_one_before_is_loaded(
    tmp_path: Path, kind: str, damaged: tuple[int, ...]
) -> None:
    run = DiskRun(tmp_path)
    *_, end = await run.whole()
    for step in damaged:
        DAMAGES[kind](run.at(step))
        run.at(step).mkdir(exist_ok=True)
    await run.learner.restart()
    await run.supervisor.begin()
    assert (run.engine.receipt, run.learner.version, run.learner.weights) == end
    assert len(run.said) == len(damaged)
    for step, line in zip(damaged, run.said, strict=True):
        assert f"checkpoint {run.at(step)}" in line
        assert f"it is now damaged-step-{step:05d}, and steps are trained again" in line
        assert "\n" not in line
    assert written_steps(tmp_path) == [step for step in (1, 2, 3) if step not in damaged]
    assert (tmp_path / f"damaged-step-{damaged[-1]:05d}").is_dir()


async def test_a_copy_of_a_checkpoint_beside_it_is_left_alone(tmp_path: Path) -> None:
    run = DiskRun(tmp_path)
    await run.whole()
    copies = ("step-00002.bak", "step-00003 (copy)", "step-1_000")
    for name in copies:
        shutil.copytree(run.at(2), tmp_path / name)
    await run.learner.restart()
    await run.supervisor.begin()
    assert (run.learner.version, run.said) == (3, [])
    prune(tmp_path, 1)
    assert written_steps(tmp_path) == [3]
    assert all((tmp_path / name).is_dir() for name in copies)


async def test_a_whole_checkpoint_that_does_not_fit_is_not_set_aside(tmp_path: Path) -> None:
    run = DiskRun(tmp_path)
    await run.whole()

    async def refused(folder: Path) -> None:
        raise TrainError(f"checkpoint {folder} was made with different optimizer settings")

    run.learner.load = refused  # type: ignore[method-assign]
    with pytest.raises(TrainError, match="different optimizer settings"):
        await run.supervisor.begin()
    assert written_steps(tmp_path) == [1, 2, 3]
    assert run.said == []


async def test_a_death_before_the_commit_is_found_when_the_step_is_published(
    tmp_path: Path,
) -> None:
    """A request finds it dead and restarts it at the step before; the step is trained again then."""
    plan = StepPlan(rows=(), batches=(), ledger=Ledger(), groups=0, digest="x")
    async with Run(tmp_path) as run:
        trained = await run.supervisor.train(plan)
        run.learner.alive = False
        await run.generate(1, 0)
        assert run.learner.weights == "start"
        await run.commit(plan, trained)
    assert (run.learner.weights, run.engine.receipt.checksum) == (trained.weights, trained.weights)
    assert run.engine.receipt.version == trained.result.version == 1


async def test_deaths_without_a_step_in_between_end_the_run(tmp_path: Path) -> None:
    died = pytest.raises(EngineError, match=r"^the learner died \(killed by signal 9\)$")
    async with Run(tmp_path, [("step", 1), ("step", 2), ("step", 3)], restarts=2) as run:
        with died:
            await run.whole()
        assert len(run.said) == 2
        with died:  # nor does a request wait for it
            await run.generate(1, 0)
    async with Run(tmp_path, [("step", 1), ("step", 3), ("step", 5)], restarts=1, every=1) as run:
        await run.whole()
        assert run.supervisor.restarts == 3, "a committed step resets the count"
    async with Run(tmp_path, [("generate", 1)], restarts=0) as run:
        with pytest.raises(EngineError, match="the learner died"):
            await run.whole()


async def test_who_waits_for_a_new_one_may_go_away(tmp_path: Path) -> None:
    """At whatever moment the request that found it dead is cancelled, the next one gets the right weights."""
    plan = StepPlan(rows=(), batches=(), ledger=Ledger(), groups=0, digest="x")

    async def three_steps(run: Run) -> Run:
        for _ in range(3):
            await run.commit(plan, await run.supervisor.train(plan))
        return run

    async with Run(tmp_path) as run:
        wanted = await (await three_steps(run)).generate(1, 1)
    for moment, every in [(n, every) for n in range(40) for every in (2, 9)]:
        for who in ("request", "check"):
            async with Run(tmp_path, restarts=1, every=every) as run:
                await three_steps(run)
                run.learner.alive = False
                work = run.generate(1, 0) if who == "request" else run.supervisor.check()
                waiting = asyncio.create_task(work)  # type: ignore[arg-type]
                for _ in range(moment):
                    await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait([waiting])
                assert await run.generate(1, 1) == wanted


class Slow(FakeLearner):
    """Takes its time for what is named in `slow`."""

    def __init__(self, slow: str, dies_at: Collection[tuple[str, int]] = ()) -> None:
        super().__init__(dies_at)
        self.slow = slow
        self.began, self.ended = asyncio.Event(), False

    async def _asked(self, name: str, kind: type[EngineError] | type[TrainError]) -> None:
        if name == self.slow and not self.began.is_set():
            self.began.set()
            await asyncio.sleep(0.5)
            self.ended = True
        assert name != "generate" or self.ended, "it has one thread"
        await super()._asked(name, kind)


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["step", "save", "publish"])
@pytest.mark.parametrize("dies_at", [(), [("step", 1)]])
async def test_what_the_learner_does_beside_sampling_is_not_the_agents_time(
    tmp_path: Path, slow: str, dies_at: list[tuple[str, int]]
) -> None:
    """A call of a session with less wall time than a step takes, and an engine's deadline as short."""
    learner = Slow(slow, dies_at)
    async with Run(tmp_path, every=1, learner=learner) as run:

        async def work() -> None:
            plan = StepPlan(rows=(), batches=(), ledger=Ledger(), groups=0, digest="x")
            await run.commit(plan, await run.supervisor.train(plan))

        working = asyncio.create_task(work())
        await learner.began.wait()
        stats = SessionStats()
        clock = SessionClock(0.3, stats)
        call = CallDeadline(clock, 0.3)
        async with call:
            with on_downtime(call):
                _, runs = await run.generate(1, 0)
        await working
    assert (stats.away_s >= 0.4, stats.away_since, clock.over, call.cut) == (True, None, False, False)
    assert runs == ((0, 1),)


async def test_what_a_living_learner_refuses_is_refused(tmp_path: Path) -> None:
    class Refusing(FakeLearner):
        async def step(self, plan: StepPlan, scores: Path | None = None) -> StepResult:
            raise TrainError("no update")

    run = Run(tmp_path)
    learner = Refusing()
    supervisor = LearnerSupervisor(learner, learner, run.committed, restarts=3)
    plan = StepPlan(rows=(), batches=(), ledger=Ledger(), groups=0)
    with pytest.raises(TrainError, match="no update"):
        await supervisor.train(plan)
    assert learner.lives == 1
