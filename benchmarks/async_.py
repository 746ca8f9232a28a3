"""How much faster do updates come when rollouts run while the trainer trains?

Run `python -m benchmarks async` (--json: one object on the last line). The collector of training runs, with
its real admission, window, deadline and cancelling, is given simulated agents: log-normal latencies with
sigma 1, a fixed number of workers, a fixed time to train and to publish. The baseline is the same collector
at S = 0, with the same rollouts, workers and deadline. Time is virtual: an event loop whose clock jumps, so
that the schedule alone is measured and hours take seconds; --real N runs the same on the real clock, N times
faster. --vary adds lines that vary what the result rests on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks._arguments import Arguments, amount, amount_or_zero, count, count_or_zero
from insitu.collect.breaker import Breaker
from insitu.collect.collector import Collector
from insitu.collect.options import CollectOptions
from insitu.errors import InsituError
from insitu.tasks.toy import ToySource
from insitu.types import Group, Limits
from tests.fakes.memory_sink import MemorySink
from tests.fakes.simulated_attempts import Chances, SimulatedAttempts
from tests.fakes.virtual_time import run_virtual


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is simulated. Times are those of a run, in seconds."""

    groups: int = 8
    group_size: int = 8
    workers: int = 64
    median_s: float = 60.0
    sigma: float = 1.0
    train_s: float = 240.0
    publish_s: float = 2.0
    deadline_s: float = 480.0
    updates: int = 100
    staleness: int = 2
    late_groups: Literal["wait", "skip", "cancel"] = "wait"
    """What a batch does about a group that no later one could train."""
    failed: float = 0.0
    """Share of tries that the infrastructure fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run."""

    wall_s: float
    idle: float
    """Share of it that the trainer waited for groups, the first batch included."""
    wasted: float
    """Share of the rollout-seconds that nothing was trained with: failed, cancelled or dropped."""
    staleness_max: int
    truncated: float
    """Share of the rollouts that the deadline stopped."""


def useless(group: Group) -> str:
    return "degenerate" if group.degenerate else ""


class _Silent:
    def rollout_started(self, rollout_id: str) -> None: ...

    def rollout_finished(self, rollout_id: str, *, reward: float | None, tokens: int) -> None: ...


class Trainer:
    """Takes a batch, trains for a fixed time, publishes, takes the next."""

    def __init__(self, case: Case, seed: int, speed: float) -> None:
        self.version = 0
        self._case, self._speed = case, speed
        chances = Chances(seed=seed, median_s=case.median_s / speed, sigma=case.sigma, failed=case.failed)
        self._attempts = SimulatedAttempts(case.workers, chances, lambda: self.version)
        self._sink = MemorySink()
        (self._task,) = ToySource(Limits(wall_s=1e9)).tasks("train", 0, 1)

    def _options(self) -> CollectOptions:
        case = self._case
        return CollectOptions(
            seed=0,
            group_size=case.group_size,
            pause_s=1.0 / self._speed,
            groups=case.groups,
            max_staleness=case.staleness,
            total=case.updates * case.groups,
            late_groups=case.late_groups,
            group_deadline_s=case.deadline_s / self._speed,
            replace_degenerate=1.0,
            stall_timeout_s=1e9,
        )

    async def run(self) -> Outcome:
        """Raises InsituError when a rollout has no fate at the end."""
        case, clock = self._case, asyncio.get_running_loop().time
        began, waited, useful, wasted, oldest = clock(), 0.0, 0.0, 0.0, 0
        collector = Collector(
            self._attempts,
            self._sink,
            _Silent(),
            Breaker(1000),
            self._options(),
            lambda number: self._task,
            reject_reason=useless,
        )
        async with collector.open() as under_way:
            for _ in range(case.updates):
                batch = await under_way.next_batch()
                waited += batch.waited_s
                useful, wasted = useful + batch.useful_s, wasted + batch.wasted_s
                oldest = max(oldest, batch.staleness_max)
                await asyncio.sleep(case.train_s / self._speed)
                under_way.version_pending(self.version + 1)
                await asyncio.sleep(case.publish_s / self._speed)
                self.version += 1
                under_way.version_published(self.version)
        if self._sink.undecided:
            raise InsituError(f"{len(self._sink.undecided)} rollouts were planned and never decided")
        wall_s = clock() - began
        stopped = sum(r.status == "truncated" for r in self._sink.rollouts.values())
        return Outcome(
            wall_s=wall_s * self._speed,
            idle=waited / wall_s,
            wasted=wasted / (useful + wasted),
            staleness_max=oldest,
            truncated=stopped / len(self._sink.rollouts),
        )


def simulate(case: Case, seed: int, speed: float = 0.0) -> Outcome:
    """`speed` 0 = in virtual time."""
    if speed:
        return asyncio.run(Trainer(case, seed, speed).run())
    return run_virtual(Trainer(case, seed, 1.0).run())


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A case against the same one at S = 0; medians over the seeds."""

    speedup: float
    idle: float
    idle_sync: float
    wasted: float
    staleness_max: int
    truncated: float
    update_s: float


def compare(case: Case, seeds: Sequence[int], speed: float = 0.0) -> Compared:
    ahead = [simulate(case, seed, speed) for seed in seeds]
    sync = [simulate(replace(case, staleness=0), seed, speed) for seed in seeds]
    ratios = [s.wall_s / a.wall_s for s, a in zip(sync, ahead, strict=True)]
    return Compared(
        speedup=statistics.median(ratios),
        idle=statistics.median(a.idle for a in ahead),
        idle_sync=statistics.median(s.idle for s in sync),
        wasted=statistics.median(a.wasted for a in ahead),
        staleness_max=max(a.staleness_max for a in ahead),
        truncated=statistics.median(a.truncated for a in ahead),
        update_s=statistics.median(a.wall_s for a in ahead) / case.updates,
    )


def variations(case: Case) -> list[tuple[str, Case]]:
    return [
        (f"S = {case.staleness}", case),
        ("S = 1", replace(case, staleness=1)),
        ("half the workers", replace(case, workers=max(1, case.workers // 2))),
        ("train time 3 medians", replace(case, train_s=3 * case.median_s)),
        ("train time 5 medians", replace(case, train_s=5 * case.median_s)),
        ("train time 6 medians", replace(case, train_s=6 * case.median_s)),
        ("no deadline", replace(case, deadline_s=0.0)),
        ("slow groups given up", replace(case, late_groups="cancel")),
        ("5 % of tries fail", replace(case, failed=0.05)),
        ("  late tries left", replace(case, failed=0.05, late_groups="skip")),
        ("  S = 3", replace(case, failed=0.05, staleness=3)),
    ]


WIDTHS = (10, 10, 10, 10, 7, 11, 10)


def line(name: str, found: Compared) -> str:
    return (
        f"{name:24}{found.speedup:8.2f} x{found.idle:10.1%}{found.idle_sync:10.1%}{found.wasted:10.1%}"
        f"{found.staleness_max:7}{found.truncated:11.1%}{found.update_s:10.0f}"
    )


def main(argv: list[str]) -> int:
    """0, or 1 when a rollout was lost."""
    parser = Arguments(prog="benchmarks async", description=__doc__)
    parser.add_argument("--updates", type=count, default=Case().updates)
    parser.add_argument("--workers", type=count, default=Case().workers)
    parser.add_argument("--train-s", type=amount_or_zero, default=Case().train_s)
    parser.add_argument("--deadline-s", type=amount, default=Case().deadline_s)
    parser.add_argument("--staleness", type=count_or_zero, default=Case().staleness)
    parser.add_argument("--seeds", type=count, default=3)
    parser.add_argument(
        "--real", type=amount_or_zero, default=0.0, metavar="N", help="real clock, N times faster"
    )
    parser.add_argument("--vary", action="store_true", help="vary train time, deadline, workers, S ...")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args(argv)
    case = Case(
        updates=options.updates,
        workers=options.workers,
        train_s=options.train_s,
        deadline_s=options.deadline_s,
        staleness=options.staleness,
    )
    logging.getLogger("insitu.collect").setLevel(logging.ERROR)
    began, seeds = time.process_time(), range(options.seeds)
    clock = f"real clock, {options.real:g} times faster" if options.real else "virtual time"
    print(
        f"P = {case.groups}, G = {case.group_size}, {case.workers} workers, latency of {case.median_s:g} s"
        f" (median), sigma {case.sigma:g}, training {case.train_s:g} s, publishing {case.publish_s:g} s,"
        f" deadline {case.deadline_s:g} s; {case.updates} updates, medians of {options.seeds} seeds; {clock}"
    )
    heads = ("to S = 0", "idle", "at S = 0", "wasted", "stale", "stopped", "s/update")
    print(" " * 24 + "".join(f"{name:>{w}}" for name, w in zip(heads, WIDTHS, strict=True)))
    reported: list[Compared] = []
    try:
        for name, each in variations(case)[: None if options.vary else 1]:
            reported.append(compare(each, seeds, options.real))
            print(line(name, reported[-1]), flush=True)
    except InsituError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    print(f"{time.process_time() - began:.1f} s of CPU time for all of it")
    if options.json:
        found = reported[0]
        result = {
            "speedup": round(found.speedup, 3),
            "trainer_idle": round(found.idle, 4),
            "wasted": round(found.wasted, 4),
            "staleness_max": found.staleness_max,
        }
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
