"""Does a run learn faster when it draws its tasks by their learning signal?

Run `python -m benchmarks curriculum` (--json: one object on the last line). The shipped model is trained on a
small set of toy tasks inside the scripted agent, with `tasks.sampler` = epochs and = signal, from the same
seeds. In a part of the set no program can pass (an expected value is wrong), as in unvalidated data
sets. Held-out tasks are drawn from the endless toy source and can all be solved. A run that exists is
not run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks._arguments import Arguments, count, count_or_zero
from insitu.errors import SetupError, boundary
from insitu.storage.metrics import read_metrics

SAMPLERS = ("epochs", "signal")
_CONFIG = """\
[run]
steps = {steps}
seed = {seed}
dir = "{run}"
[[tasks]]
name = "train"
source = "jsonl"
path = "{tasks}"
eval_share = 0.0
sampler = "{sampler}"
[[tasks]]
name = "new"
source = "toy"
weight = 0
[eval]
tasks = ["new"]
count = {heldout}
every_steps = {every}
[harness]
agent = "script"
mode = "warm"
workers = 8
[collect]
groups_per_step = 12
group_size = 8
[train]
lr = 1e-3
"""


def write_tasks(path: Path, tasks: int, unsolvable: int) -> None:
    """Write toy tasks as rows, of which the given number, evenly spread, cannot be solved."""
    export = ["tasks", "export", "tasks.source=toy", "--limit", str(tasks), "--out", str(path)]
    _insitu("export of tasks", *export)
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    for number, row in enumerate(rows):
        if (number + 1) * unsolvable // tasks > number * unsolvable // tasks:
            row["cases"][0]["expected"] = "no program returns this"
            del row["gold"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(folder: Path, tasks: Path, sampler: str, seed: int, steps: int, heldout: int) -> dict[str, Any]:
    """Train unless it is done; return the held-out curve and the share of groups with different rewards."""
    run, file = folder / f"{sampler}-{seed}", folder / f"{sampler}-{seed}.toml"
    every = max(1, steps // 6)
    values = {"steps": steps, "seed": seed, "run": run, "tasks": tasks, "sampler": sampler}
    file.write_text(_CONFIG.format(**values, heldout=heldout, every=every))
    if not (run / "summary.json").is_file():
        chosen = ["--resume", str(run)] if run.exists() else [str(file)]
        _insitu(run.name, "train", "--plain", *chosen)
    lines = list(read_metrics(run / "metrics.jsonl"))
    trained = {line["step"]: line for line in lines if line["event"] == "step"}
    curve = {line["step"]: line["solve_rate"] for line in lines if line["event"].startswith("eval_")}
    return {
        "heldout": {str(step): curve[step] for step in sorted(curve)},
        "effective": sum(line["effective_groups"] for line in trained.values())
        / sum(line["groups"] for line in trained.values()),
    }


def _insitu(name: str, *arguments: str) -> None:
    """Run a command; raise SetupError with its last line if it fails."""
    command = [sys.executable, "-m", "insitu", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SetupError(f"{name}: {(done.stdout.strip().splitlines() or ['no output'])[-1]}")


def compared(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over seeds: held-out rate after each step, and share of effective groups."""
    curve = {key: mean(run["heldout"][key] for run in runs) for key in runs[0]["heldout"]}
    return {
        "heldout": {key: round(value, 3) for key, value in curve.items()},
        "after_by_seed": [round([*run["heldout"].values()][-1], 3) for run in runs],
        "effective": round(mean(run["effective"] for run in runs), 3),
    }


def main(arguments: list[str]) -> int:
    parser = Arguments(prog="benchmarks curriculum", description=__doc__)
    parser.add_argument("--tasks", type=count, default=64, help="size of the set (default: 64)")
    parser.add_argument("--unsolvable", type=count_or_zero, nargs="+", default=[0, 32], help="default: 0 32")
    parser.add_argument("--steps", type=count, default=24, help="default: 24")
    parser.add_argument("--heldout", type=count, default=64, help="held-out tasks (default: 64)")
    parser.add_argument("--seeds", type=count, default=3, help="default: 3")
    parser.add_argument("--out", type=Path, help="keep the runs here, and go on where they stood")
    parser.add_argument("--json", action="store_true", help="no table, only the JSON line")
    options = parser.parse_args(arguments)
    if max(options.unsolvable) > options.tasks:
        parser.error(f"--unsolvable {max(options.unsolvable)} of --tasks {options.tasks}")
    with tempfile.TemporaryDirectory() as scratch:
        out = (options.out or Path(scratch)).absolute()
        found: dict[str, dict[str, Any]] = {}
        try:
            for unsolvable in options.unsolvable:
                sizes = f"{options.tasks}-tasks-{options.steps}-steps-{options.heldout}-heldout"
                folder = out / f"{unsolvable}-unsolvable-of-{sizes}"
                with boundary(SetupError, f"create {folder}"):
                    folder.mkdir(parents=True, exist_ok=True)
                write_tasks(folder / "tasks.jsonl", options.tasks, unsolvable)
                runs: dict[str, list[dict[str, Any]]] = {name: [] for name in SAMPLERS}
                for seed in range(options.seeds):
                    for sampler in SAMPLERS:
                        run = (folder, folder / "tasks.jsonl", sampler, seed, options.steps, options.heldout)
                        runs[sampler].append(train(*run))
                found[str(unsolvable)] = {name: compared(runs[name]) for name in SAMPLERS}
        except SetupError as error:
            print(f"insitu: {error}", file=sys.stderr)
            return 2
    if not options.json:
        for unsolvable, sides in found.items():
            for name, side in sides.items():
                rates = " ".join(f"{rate:.3f}" for rate in side["heldout"].values())
                print(f"{unsolvable:>3} of {options.tasks} unsolvable, {name:7} held-out {rates}")
    print(
        json.dumps(
            {"tasks": options.tasks, "steps": options.steps, "seeds": options.seeds, "unsolvable": found}
        )
    )
    return 0
