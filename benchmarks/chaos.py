"""Is anything lost, or trained twice, when processes of a run are killed -9?

Run `python -m benchmarks chaos`. Whole runs of the toy tasks with the script agent, on CPU: one undisturbed;
ones that die at each failpoint (before and after each commit of the store, and between the writes that a
commit rests on), with tries that fail and, in the run ahead of the trainer, groups without a difference;
then as many random kills as asked for, of the controller, the learner, what runs in sandboxes, and an engine
that is a server of its own: vLLM's routes before a small model (_engine_process.py), started again as
whoever keeps a server does. Every run is continued until it ends. `lost`: graded rollouts that are not there
unchanged at the end, or have no fate: training and the planner's reasons are one, ahead of the trainer
staleness and time too, but neither the run's end nor a step with too few groups. `bit_identical`:
synchronous runs in which no sandbox was shot equal the undisturbed one with their engine in every token,
plan and weight, and every run of all replays from its own ledger with the same weights. A step that does not
counts as `trained_twice`, like a rollout in the accounts of two steps. (What is shot in a sandbox is its
agent's failure, which is graded: decision 0038.) Status 1 unless all is well and every failpoint was passed.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from benchmarks._arguments import Arguments, count, count_or_zero
from benchmarks._chaos_run import Run, StuckError, Victim
from benchmarks._engine_process import EngineProcess
from insitu import failpoint
from insitu.config import WARM_START, demo_preset, dump_toml, load_config

SMALL = (
    "harness.agent=script",
    "run.steps=6",
    "eval.count=4",
    "collect.groups_per_step=2",
    "collect.group_size=4",
    "harness.workers=4",
    "train.threads=1",
    "train.min_groups=1",
    "train.restarts=100",
    "run.checkpoint_every_steps=2",
)
AHEAD = ("collect.max_staleness=1",)
"""Makes a run asynchronous."""
SERVED = ("engine.publish_dtype=float32", "engine.start_timeout_s=60")
"""For an engine that is a server on a CPU."""
FEW = ("collect.group_size=2",)
"""Makes groups in which all get the same reward, which are dropped."""
VERDICT = ("verdict.before", "verdict.after")
"""Failpoints that `insitu grade --write` passes, and no run."""
SYNCHRONOUS = tuple(p for p in failpoint.POINTS if p not in VERDICT and not p.startswith("discard."))
"""Failpoints that a synchronous run passes; `discard` is the collector's, which works ahead."""
AHEAD_POINTS = (
    "graded.after",
    "score.after",
    "discard.before",
    "discard.after",
    "step.after",
    "learner.stepped",
    "checkpoint.between",
)
PER_LIFE = 3
"""Random kills of one process before it is let alone; a dead controller ends its life anyhow."""


class Chaos:
    """All runs of one benchmark."""

    def __init__(self, folder: Path, seed: int, steps: int) -> None:
        self._folder, self._chance = folder, random.Random(seed)
        self._small = [*SMALL, f"run.steps={steps}"]
        self.config = folder / "chaos.toml"
        self.config.write_text(dump_toml(load_config(None, self._small, demo_preset())))
        self.runs: list[Run] = []
        self.missed: list[str] = []
        """Failpoints that should have been passed and were not."""
        self.began = time.monotonic()

    def run(self, name: str, overrides: Sequence[str] = (), engine: EngineProcess | None = None) -> Run:
        synchronous = not set(AHEAD) & set(overrides)
        if engine is not None:
            overrides = [*overrides, "engine.kind=vllm", f"engine.urls={engine.url}", *SERVED]
        run = Run(
            folder=self._folder / name,
            config=self.config,
            overrides=list(overrides),
            synchronous=synchronous,
            engine=engine,
        )
        self.runs.append(run)
        return run

    def undisturbed(self, engine: EngineProcess | None = None) -> Run:
        run = self.run("undisturbed" if engine is None else "undisturbed-served", engine=engine)
        if not run.life():
            raise StuckError("the undisturbed run was disturbed")
        self.say(run, "ended")
        return run

    def at_failpoints(
        self, name: str, points: Sequence[str], more: Sequence[str] = (), tries: int = 2
    ) -> list[Run]:
        """Runs that die at each of these places: all that are left are armed in every life, so that each is
        passed as soon as the run comes to it. One try of each life fails besides. What no run came to is
        said."""
        runs: list[Run] = []
        left = list(points)
        while left and len(runs) < tries:
            run, ended = self.run(f"{name}{len(runs) + 1}", more), False
            while not ended:
                known = len(run.points)
                ended = run.life([*failpoint.FAILURES, *(p for p in left if p not in run.points)])
                self.say(run, "ended" if ended else f"died at {', '.join(run.points[known:])}")
            left = [point for point in left if point not in run.points]
            runs.append(run)
        if left:
            self.say(run, f"never came to {', '.join(left)}")
            self.missed += left
        return runs

    def regraded(self, run: Run) -> None:
        """Verdicts of an ended run are written again, with deaths at the commit."""
        run.regrade(VERDICT)
        self.missed += [point for point in VERDICT if point not in run.points]
        self.say(run, "graded again")

    def at_random(
        self,
        name: str,
        kills: int,
        victims: Sequence[Victim],
        more: Sequence[str] = (),
        engine: EngineProcess | None = None,
    ) -> list[Run]:
        """Runs with so many kills together, at random moments."""
        runs: list[Run] = []
        left = kills
        while left > 0:
            run, ended = self.run(f"{name}{len(runs) + 1}", more, engine), False
            while not ended:
                before = run.kills.total()
                chosen = [self._chance.choice(victims) for _ in range(min(left, PER_LIFE))]
                ended = run.life(kills=chosen, chance=self._chance)
                left -= run.kills.total() - before
            self.say(run, f"ended; killed {dict(run.kills)}")
            runs.append(run)
        return runs

    @contextmanager
    def server(self) -> Iterator[EngineProcess]:
        """An engine of its own, gone afterwards."""
        engine = EngineProcess(WARM_START, self._folder / "engine.log")
        engine.start()
        try:
            engine.answering()
            yield engine
        finally:
            engine.kill()

    def say(self, run: Run, text: str) -> None:
        print(f"{time.monotonic() - self.began:7.1f} s  {run.folder.name}: {text}", flush=True)


def judge(chaos: Chaos, same: Sequence[tuple[Run, Sequence[Run]]]) -> dict[str, Any]:
    """The result; what is wrong is said line by line. same: runs that should equal the first one."""
    lost = sum(len(run.lost()) for run in chaos.runs)
    differing = sum([run.differing() for run in chaos.runs])
    twice = differing + sum(run.trained_twice() for run in chaos.runs)
    balanced = all([run.balanced() for run in chaos.runs])
    identical = not differing
    for reference, run in ((first, run) for first, runs in same for run in runs):
        if run.bits() != reference.bits():
            identical = False
            run.wrong.append(f"{run.folder.name}: differs from the undisturbed run")
    for line in (line for run in chaos.runs for line in run.wrong):
        print(f"wrong: {line}")
    return {
        "kills": sum(run.kills.total() for run in chaos.runs),
        "lost": lost,
        "trained_twice": twice,
        "ledger_balanced": balanced,
        "bit_identical": identical,
    }


def whole(chaos: Chaos, kills: int) -> dict[str, Any]:
    """Every run, in the order of the module's text."""
    reference = chaos.undisturbed()
    same = chaos.at_failpoints("failpoints", SYNCHRONOUS)
    chaos.regraded(same[0])
    chaos.at_failpoints("failpoints-ahead", AHEAD_POINTS, (*AHEAD, *FEW))
    some = kills // 4
    same += chaos.at_random("killed", kills - 3 * some, ("controller", "learner"))
    chaos.at_random("shot", some, ("controller", "learner", "agent", "agent"))
    chaos.at_random("ahead", some, ("controller", "learner", "agent"), AHEAD)
    with chaos.server() as engine:
        served = chaos.undisturbed(engine)
        shot = chaos.at_random("served", some, ("engine", "engine", "controller", "learner"), engine=engine)
    return judge(chaos, [(reference, same), (served, shot)])


def broken_off(chaos: Chaos) -> dict[str, Any]:
    """The result when a run neither ended nor died: nothing is proved."""
    kills = sum(run.kills.total() for run in chaos.runs)
    return {
        "kills": kills,
        "lost": 0,
        "trained_twice": 0,
        "ledger_balanced": False,
        "bit_identical": False,
    }


def main(argv: list[str] | None = None) -> int:
    """Run and report; one JSON object as the last line of stdout."""
    parser = Arguments(prog="benchmarks chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--kills", type=count_or_zero, default=50, help="at random, besides those at failpoints"
    )
    parser.add_argument("--steps", type=count, default=6, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep", type=Path, default=None, metavar="DIR", help="leave the run directories here"
    )
    parser.add_argument("--json", action="store_true", help="the last line is JSON; it always is")
    args = parser.parse_args(argv)
    if args.keep is not None and args.keep.exists() and any(args.keep.iterdir()):
        parser.error(f"--keep {args.keep}: is not empty")
    with tempfile.TemporaryDirectory(prefix="insitu-chaos-") as scratch:
        folder = Path(scratch) if args.keep is None else args.keep
        folder.mkdir(parents=True, exist_ok=True)
        chaos = Chaos(folder, args.seed, args.steps)
        try:
            result = whole(chaos, args.kills)
        except StuckError as error:
            print(f"wrong: {error}")
            result = broken_off(chaos)
    print(orjson.dumps(result).decode())
    good = not result["lost"] and not result["trained_twice"] and not chaos.missed
    return 0 if good and result["ledger_balanced"] and result["bit_identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
