"""What does an export cost, and does an import return the same bits?

Run `python -m benchmarks export` (--json: one object on the last line). A run of `--rollouts` rollouts is
made in a temporary folder: ids by Zipf's law over 150,000 words without a shared prompt, 29 % of them
sampled, half of the rollouts with a sub-agent. `insitu export RUN --to parquet` runs as a process:
`tokens_per_s` counts its CPU time from start to end, `peak_gib` is its resident memory.
Tokens are those of all rows.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._arguments import Arguments, count
from insitu.config import load_config
from insitu.storage.run_dir import RunDir, read_store
from insitu.storage.store import Store
from insitu.types import Group, IntArray, Ledger, Rollout, Segment, Status, Timings, Trajectory, Turn
from insitu_bridges.equality import difference
from insitu_bridges.imports import import_folder
from insitu_train.plan.step import PlanConfig, plan_step

GROUPS, SLOTS = 16, 16
SAMPLED = 200
"""Ids of one reply; 500 of context come before each."""


def turn(rng: np.random.Generator, index: int, parent: int, version: int) -> Turn:
    ids = rng.zipf(1.3, 700).clip(0, 150_000).astype(np.int32)
    logprobs = -rng.exponential(0.3, SAMPLED).astype(np.float32)
    return Turn(
        index=index, parent=parent, context_ids=ids[SAMPLED:], ids=ids[:SAMPLED], logprobs=logprobs,
        finish="stop", version_runs=((0, version),),
    )  # fmt: skip


def segment(name: str, index: int, turns: list[Turn], version: int) -> Segment:
    ids: IntArray = np.concatenate([part for t in turns for part in (t.context_ids, t.ids)])
    mask = np.tile(np.repeat([False, True], [500, SAMPLED]), len(turns))
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[mask] = np.concatenate([t.logprobs for t in turns if t.logprobs is not None])
    versions = np.where(mask, version, 0).astype(np.int32)
    return Segment(
        rollout_id=name, index=index, kind="sampled", label="final", ids=ids, mask=mask, logprobs=logprobs,
        versions=versions,
    )  # fmt: skip


def rollout(step: int, group: int, slot: int, turns: int) -> Rollout:
    name = f"train/{step:05d}/{group:03d}/{slot:02d}"
    rng = np.random.default_rng([step, group, slot])
    line = [turn(rng, index, index - 1, step - 1) for index in range(turns)]
    rows = [segment(name, 0, line, step - 1)]
    if slot % 2:
        line.append(turn(rng, turns, -1, step - 1))
        rows.append(segment(name, 1, line[-1:], step - 1))
    sampled = SAMPLED * len(line)
    return Rollout(
        id=name, task_id=f"task-{group}", category="", status=Status.OK, reward=float(slot % 3 == 0),
        trajectory=Trajectory(
            segments=tuple(rows), turns=tuple(line), ledger=Ledger(captured=sampled, trained=sampled)
        ),
        verdict=None, changed={}, deleted=(), timings=Timings(agent_s=1.0),
    )  # fmt: skip


def make(path: Path, rollouts: int, turns: int) -> None:
    """Write a run of whole steps with at least this many rollouts."""
    config = load_config(tables={"run": {"dir": str(path)}})
    with RunDir.create(config) as run, run.store() as store:
        for step in range(1, 1 + -(-rollouts // (GROUPS * SLOTS))):
            groups = [_group(store, step, number, turns) for number in range(GROUPS)]
            plan = plan_step(groups, PlanConfig.of(config))
            store.assign(step, list(plan.exclusion_reasons))
            trained = list(plan.exclusion_reasons)
            store.commit_step(step, {"loss": 0.5}, "", plan.digest, plan.ledger, trained=trained)


def _group(store: Store, step: int, number: int, turns: int) -> Group:
    made = tuple(rollout(step, number, slot, turns) for slot in range(SLOTS))
    for slot, one in enumerate(made):
        store.put_rollout("train", step, number, slot, one)
    return Group(id=f"train/{step:05d}/{number:03d}", task_id=made[0].task_id, rollouts=made)


def exported(run: Path, out: Path) -> tuple[dict[str, Any], float, float]:
    """Export in a process; return its counts, CPU seconds and peak GiB."""
    command = [sys.executable, "-m", "insitu", "export", str(run), "--to", "parquet", "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*command, "--out", str(out)], stdout=subprocess.PIPE, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout), cpu_s, used.ru_maxrss / 2**20


def same_after_import(run: Path, folder: Path, back: Path) -> bool:
    """Import an export and compare every rollout and step with the run's."""
    import_folder(folder, back)
    with read_store(run) as one, read_store(back) as other:
        steps = [step.to_dict() for step in one.steps()] == [step.to_dict() for step in other.steps()]
        pairs = (zip(one.rollouts(*place), other.rollouts(*place), strict=True) for place in one.phases())
        return steps and not any(difference(a, b) for pair in pairs for a, b in pair)


def main(arguments: list[str]) -> int:
    parser = Arguments(prog="benchmarks export", description=__doc__)
    parser.add_argument("--rollouts", type=count, default=10_000, help="default: 10,000")
    parser.add_argument("--turns", type=count, default=3, help="calls of the main line (default: 3)")
    parser.add_argument("--json", action="store_true", help="no table, only the JSON line")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        run, out = Path(folder) / "run", Path(folder) / "out"
        make(run, options.rollouts, options.turns)
        report, cpu_s, peak_gib = exported(run, out)
        figures = {
            "bit_equal": same_after_import(run, out, Path(folder) / "back"),
            "bytes_per_token": round(report["bytes_per_token"], 2),
            "tokens_per_s": round(report["tokens"] / cpu_s),
            "peak_gib": round(peak_gib, 3),
            "rollouts": report["rollouts"],
            "tokens": report["tokens"],
        }
    if not options.json:
        for name, value in figures.items():
            print(f"{name:24} {value}")
    print(json.dumps(figures))
    return 0 if figures["bit_equal"] else 1
