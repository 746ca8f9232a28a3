"""Is anything lost, or trained twice, when processes of a run are killed -9?

Run `whet bench chaos`. Whole runs of the toy tasks with the script agent, on CPU: one undisturbed; ones that
die at each failpoint in turn (before and after each commit of the store, and between the writes that a commit
rests on); then as many random kills as asked for, of the controller, the learner (the engine is in its
process) and what runs in boxes. Every run is continued until it ends. `bit_identical`: synchronous runs in
which no box was shot equal the undisturbed one in every token, plan and weight, and every run of all replays
from its own ledger with the same weights. A step that does not counts as `trained_twice`, like a rollout in
the accounts of two steps. (What is shot in a box is its agent's failure, which is
graded: decision 0038.) Status 1 unless all is well.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from whet import failpoint
from whet.bench._arguments import Arguments, count, count_or_zero
from whet.bench._chaos_run import Run, Victim
from whet.config import demo_preset, dump_toml, load_config

SMALL = (
    "harness.agent=script",
    "run.steps=6",
    "run.eval_tasks=4",
    "tasks.groups_per_step=2",
    "collect.group_size=4",
    "harness.workers=4",
    "train.threads=1",
    "train.min_groups=1",
    "train.restarts=100",
)
AHEAD = ("collect.max_staleness=1",)
"""Makes a run asynchronous."""
RARE = ("attempt.", "discard.")
"""Failpoints that an undisturbed synchronous run does not pass."""
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

    def run(self, name: str, overrides: Sequence[str] = ()) -> Run:
        self.runs.append(Run(folder=self._folder / name, config=self.config, overrides=list(overrides)))
        return self.runs[-1]

    def undisturbed(self) -> Run:
        run = self.run("undisturbed")
        if not run.life():
            raise RuntimeError("the undisturbed run was disturbed")
        self.say(run, "ended")
        return run

    def at_failpoints(
        self, name: str, points: Sequence[str], more: Sequence[str] = (), tries: int = 3
    ) -> list[Run]:
        """Runs that die at these places in turn, until each was passed; what no run came to is said."""
        runs: list[Run] = []
        left = list(points)
        while left and len(runs) < tries:
            run, ended = self.run(f"{name}{len(runs) + 1}", more), False
            for armed in (*deaths(left), ()):
                if not ended:
                    ended = run.life(armed)
                    self.say(
                        run, f"{'ended' if ended else 'died'} with {', '.join(armed) or 'nothing'} armed"
                    )
            left = [point for point in left if point not in run.points]
            runs.append(run)
        if left:
            self.say(run, f"never came to {', '.join(left)}")
            self.missed += [point for point in left if not point.startswith(RARE)]
        return runs

    def at_random(
        self, name: str, kills: int, victims: Sequence[Victim], more: Sequence[str] = ()
    ) -> list[Run]:
        """Runs with so many kills together, at random moments."""
        runs: list[Run] = []
        left = kills
        while left > 0:
            run, ended = self.run(f"{name}{len(runs) + 1}", more), False
            while not ended:
                before = run.kills.total()
                chosen = [self._chance.choice(victims) for _ in range(min(left, PER_LIFE))]
                ended = run.life(kills=chosen, chance=self._chance)
                left -= run.kills.total() - before
            self.say(run, f"ended; killed {dict(run.kills)}")
            runs.append(run)
        return runs

    def say(self, run: Run, text: str) -> None:
        print(f"{time.monotonic() - self.began:7.1f} s  {run.folder.name}: {text}", flush=True)


def deaths(points: Sequence[str]) -> list[list[str]]:
    """What is armed in each life: one place of the controller, which ends it, and while there are any one of
    the learner, which comes back."""
    own = [p for p in points if not p.startswith(("learner.", "checkpoint."))]
    learners = [p for p in points if p not in own]
    own.sort(key=lambda p: (p.startswith("loop."), not p.startswith("step.")))
    # the learner's places are passed once a step, so they go with those that let a step end
    late = iter(learners)
    return [[p, *islice(late, 1 if p.startswith(("step.", "loop.")) else 0)] for p in own]


def judge(chaos: Chaos, reference: Run, same: Sequence[Run]) -> dict[str, Any]:
    """The result; what is wrong is said line by line."""
    lost = sum(len(run.lost()) for run in chaos.runs)
    differing = sum([run.differing() for run in chaos.runs])
    twice = differing + sum(run.trained_twice() for run in chaos.runs)
    balanced = all([run.balanced() for run in chaos.runs])
    identical = not differing
    for run in same:
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
    never = [p for p in failpoint.POINTS if p.startswith(RARE)]
    same = chaos.at_failpoints("failpoints", [p for p in failpoint.POINTS if p not in never])
    ahead = [*never, "step.after", "learner.stepped", "checkpoint.between", "graded.after"]
    chaos.at_failpoints("failpoints-ahead", ahead, AHEAD, tries=1)
    some = kills // 3
    same += chaos.at_random("killed", kills - 2 * some, ("controller", "learner"))
    chaos.at_random("shot", some, ("controller", "learner", "agent", "agent"))
    chaos.at_random("ahead", some, ("controller", "learner", "agent"), AHEAD)
    return judge(chaos, reference, same)


def main(argv: list[str] | None = None) -> int:
    """Run and report; one JSON object as the last line of stdout."""
    parser = Arguments(prog="whet bench chaos", description=(__doc__ or "").splitlines()[0])
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
    with tempfile.TemporaryDirectory(prefix="whet-chaos-") as scratch:
        folder = Path(scratch) if args.keep is None else args.keep
        folder.mkdir(parents=True, exist_ok=True)
        chaos = Chaos(folder, args.seed, args.steps)
        result = whole(chaos, args.kills)
    print(orjson.dumps(result).decode())
    good = not result["lost"] and not result["trained_twice"] and not chaos.missed
    return 0 if good and result["ledger_balanced"] and result["bit_identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
