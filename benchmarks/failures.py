"""`python -m benchmarks failures`: what failures of the infrastructure do to advantages, by what is made of
them.

A world of tasks with known outcomes goes through the real collector and planner: insitu's rule (reward None,
out of the mean, tried again), the same without another try, reward 0, and dropping the whole group. Each is
compared with the same rollouts in a world without failures; intervals are 95 %, from a bootstrap over groups.
The same world then goes through the asynchronous collector, where a group has a deadline and sandboxes die
late. `--real` adds real rollouts whose engine and grader are made to fail. See docs/internals/failures.md.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from benchmarks._arguments import Arguments, count
from benchmarks._failures_ahead import GROUPS, Rule, ahead, credits_ahead
from benchmarks._failures_world import (
    GROUPS_PER_STEP,
    MOST_TRIES,
    TRIES,
    Chances,
    Credit,
    Setting,
    Treatment,
    World,
    collected,
    credits_of,
)
from insitu.errors import InsituError
from insitu.types import Group, Status
from insitu_train.plan.step import PlanConfig

RATES = (0.0, 0.05, 0.15)
RESAMPLED = 2000
"""Bootstrap samples."""
MEASURES = ("solved", "unsolved", "length", "hard", "kept")
"""What is compared: see `Sums`."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Per group [groups], numerator and denominator of each measure.

    solved, unsolved: mean advantage of trained rollouts that were in truth solved, or not. length: mean of
    advantage x log duration (in standard deviations), the credit for taking long. hard: share of all
    |advantage| in the hardest third of the tasks. kept: trained rollouts.
    """

    above: Mapping[str, Floats]
    below: Mapping[str, Floats]

    def means(self, weights: Floats) -> dict[str, Floats]:
        """Each measure under `weights` [samples, groups] on the groups."""
        return {name: (weights @ self.above[name]) / (weights @ self.below[name]) for name in MEASURES}


def sums_of(world: World, credits: Sequence[Credit]) -> Sums:
    at = np.array([c.group for c in credits], np.int64)
    advantage = np.array([c.advantage for c in credits])
    solved = np.array([c.solved for c in credits])
    length = np.array([c.log_length for c in credits])
    hard = (world.chance < np.quantile(world.chance, 1 / 3))[at]

    def by_group(values: Floats) -> Floats:
        return np.bincount(at, weights=values, minlength=world.groups).astype(np.float64)

    ones = np.ones(len(at))
    above = {
        "solved": by_group(advantage * solved),
        "unsolved": by_group(advantage * ~solved),
        "length": by_group(advantage * length),
        "hard": by_group(np.abs(advantage) * hard),
        "kept": by_group(ones),
    }
    below = {
        "solved": by_group(ones * solved),
        "unsolved": by_group(ones * ~solved),
        "length": by_group(ones),
        "hard": by_group(np.abs(advantage)),
        "kept": np.full(world.groups, len(at) / world.groups),
    }
    return Sums(above=above, below=below)


def compare(sums: Sums, truth: Sums, seed: int) -> dict[str, dict[str, float]]:
    """Each measure: value, and its difference from the truth with a 95 % interval; the same resampled groups
    on both sides. kept is relative to the truth."""
    groups = len(sums.above["kept"])
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(groups, np.full(groups, 1 / groups), size=RESAMPLED).astype(np.float64)
    both = {}
    for name, weights in (("all", np.ones((1, groups))), ("drawn", drawn)):
        ours, true = sums.means(weights), truth.means(weights)
        kept = (weights @ sums.above["kept"]) / (weights @ truth.above["kept"])
        both[name] = {m: ours[m] - true[m] for m in MEASURES} | {"kept": kept}
        if name == "all":
            value = {m: float(ours[m][0]) for m in MEASURES}
    reported = {}
    for m in MEASURES:
        low, high = np.quantile(both["drawn"][m], (0.025, 0.975))
        bias = float(both["all"][m][0])
        reported[m] = {"low": round(float(low), 4), "high": round(float(high), 4)}
        reported[m] |= (
            {"share": round(bias, 4)}
            if m == "kept"
            else {"value": round(value[m], 4), "bias": round(bias, 4)}
        )
    return reported


def failed_share(steps: Sequence[Sequence[Group]]) -> float:
    held = [r.status is Status.INFRA_FAILED for step in steps for g in step for r in g.rollouts]
    return sum(held) / len(held)


async def simulated(groups: int, seed: int, plan: PlanConfig) -> list[dict[str, Any]]:
    """Every setting and treatment."""
    world = World(groups, seed)
    calm = Setting(rate=0.0, chances="uncorrelated")
    truth = sums_of(world, credits_of(world, calm, await collected(world, calm, TRIES), "insitu", plan))
    cases = []
    for rate in RATES:
        for chances in ("uncorrelated", "correlated") if rate else ("uncorrelated",):
            cases += await _cases(world, truth, rate, chances, seed, plan)
    return cases


async def _cases(
    world: World, truth: Sums, rate: float, chances: Chances, seed: int, plan: PlanConfig
) -> list[dict[str, Any]]:
    same = Setting(rate=rate, chances=chances)
    again = Setting(rate=rate, chances=chances, redraw=True)
    once = await collected(world, same, 1)
    ways: list[tuple[Treatment, Setting, int, list[list[Group]]]] = [
        ("insitu", same, TRIES, await collected(world, same, TRIES)),
        ("reward_0", same, 1, once),
        ("drop_group", same, 1, once),
    ]
    if rate:
        ways.insert(1, ("insitu", same, MOST_TRIES, await collected(world, same, MOST_TRIES)))
        ways.insert(2, ("insitu", again, TRIES, await collected(world, again, TRIES)))
        ways.insert(3, ("no_retry", same, 1, once))
    cases = []
    for treatment, setting, tries, steps in ways:
        credits = credits_of(world, setting, steps, treatment, plan)
        case = {"rate": rate, "chances": chances, "treatment": treatment, "tries": tries}
        case |= {"redraw": setting.redraw, "failed_first": round(failed_share(once), 4)}
        case |= {"ungraded": round(failed_share(steps), 4)}
        cases.append({**case, **compare(sums_of(world, credits), truth, seed)})
    return cases


def simulated_ahead(groups: int, seed: int, plan: PlanConfig) -> list[dict[str, Any]]:
    """Every setting through the asynchronous collector, compared with the same one at rate 0."""
    world = World(groups, seed)
    calm = Setting(rate=0.0, chances="uncorrelated")
    truth = sums_of(world, credits_ahead(world, calm, ahead(world, calm), plan))
    cases = []
    for rate in RATES:
        for chances in ("uncorrelated", "correlated") if rate else ("uncorrelated",):
            ways: list[tuple[Rule, bool]] = [("insitu", False)]
            if rate:
                ways += [("insitu", True), ("leave", False), ("leave", True), ("shared_time", False)]
            for rule, redraw in ways:
                cases.append(
                    _case_ahead(world, truth, rate, chances, rule, redraw=redraw, seed=seed, plan=plan)
                )
    return cases


def _case_ahead(
    world: World,
    truth: Sums,
    rate: float,
    chances: Chances,
    rule: Rule,
    *,
    redraw: bool,
    seed: int,
    plan: PlanConfig,
) -> dict[str, Any]:
    setting = Setting(rate=rate, chances=chances, redraw=redraw)
    found = ahead(world, setting, rule)
    case: dict[str, Any] = {"rate": rate, "chances": chances, "treatment": rule, "tries": TRIES}
    case |= {"redraw": redraw, "failed_first": round(found.failed_first, 4)}
    case |= {"ungraded": round(found.ungraded, 4), "stopped": round(found.stopped, 4)}
    case["trainer_idle"] = round(found.idle, 4)
    return {**case, **compare(sums_of(world, credits_ahead(world, setting, found, plan)), truth, seed)}


def worst(cases: Sequence[Mapping[str, Any]], treatment: str) -> float:
    """Largest |bias| of a treatment over settings and measures of advantage, as insitu is set by default."""
    found: list[float] = [
        abs(case[m]["bias"])
        for case in cases
        if case["treatment"] == treatment and not case["redraw"] and case["tries"] <= TRIES
        for m in MEASURES
        if m != "kept"
    ]
    return max(found)


def table(cases: Sequence[Mapping[str, Any]]) -> str:
    """For people: the bias of each measure."""
    lines = [f"{'rate':<6}{'chances':<14}{'treatment':<22}" + "".join(f"{m:<26}" for m in MEASURES)]
    for case in cases:
        name = case["treatment"] + (f", {case['tries']} tries" if case["tries"] > 1 else "")
        cells = ""
        for m in MEASURES:
            value = case[m]["share" if m == "kept" else "bias"]
            cells += f"{value:+.4f} [{case[m]['low']:+.4f} {case[m]['high']:+.4f}]  "
        star = "*" if case["redraw"] else ""
        lines.append(f"{case['rate']:<6.2f}{case['chances']:<14}{name + star:<22}{cells}".rstrip())
    return "\n".join([*lines, "* a further try is another draw"])


def main(argv: Sequence[str] | None = None) -> int:
    """One JSON object as the last line of stdout."""
    parser = Arguments(prog="benchmarks failures", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--groups", type=count, default=4000, help="tasks of the world (default: 4000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--advantage", default="dr_grpo", choices=("dr_grpo", "grpo", "rloo", "maxrl"))
    parser.add_argument("--real", action="store_true", help="real rollouts too; some minutes")
    parser.add_argument("--json", action="store_true", help="no table")
    args = parser.parse_args(argv)
    groups = max(GROUPS_PER_STEP, args.groups // GROUPS_PER_STEP * GROUPS_PER_STEP)
    groups_ahead = max(GROUPS, args.groups // GROUPS * GROUPS)
    try:
        cases = asyncio.run(simulated(groups, args.seed, PlanConfig(advantage=args.advantage)))
        reported: dict[str, Any] = {"groups": groups, "advantage": args.advantage, "cases": cases}
        reported["worst_bias"] = {
            t: worst(cases, t) for t in ("insitu", "no_retry", "reward_0", "drop_group")
        }
        reported["ahead"] = simulated_ahead(groups_ahead, args.seed, PlanConfig(advantage=args.advantage))
        if args.real:
            from benchmarks._failures_run import real

            reported["real"] = real(args.seed)
    except InsituError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    if not args.json:
        print(table(cases), "ahead of the trainer, with a deadline", table(reported["ahead"]), sep="\n")
    print(orjson.dumps(reported).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
