"""Runs of the transfer benchmark: `insitu train` inside one agent or all, `insitu rollout` inside each.

    warm start -> train -> model -> held-out tasks inside each agent -> one JSON file per cell

The folders `trained`, `cells` and `costs` are what a report and a later call need of what is finished; the
rest may be removed, `warm` is made again. What is finished is not run twice. A command that is stopped at the
deadline goes on where it was.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

from benchmarks._transfer_agents import SPELLINGS
from insitu.errors import SetupError
from insitu.storage.run_dir import read_store
from insitu.tasks.toy import ToySource
from insitu.types import Limits

AGENTS = tuple(SPELLINGS)
ALL, START = "all", "start"
"""Rows besides the agents: trained inside all of them, and the warm start without training."""
DEAR = "mini_swe"
"""A rollout inside it costs some ten times the CPU time of one inside the others."""
ROWS = (START, "script", "pi", "terminus", "codex", ALL, DEAR)
"""In the order of their costs."""
STEPS, GROUPS, GROUP_SIZE = 10, 10, 8
"""Of a training run: steps, groups per step (one task each) and rollouts per group."""
TASKS = 64
"""Held-out tasks of a cell, one rollout each at temperature 1."""
CONTEXT = 16384
"""Codex starts with 37,800 characters, for which insitu expects some 9,450 tokens; here they are fewer."""
STOP_S = 60.0
"""Time for a stopped command to end."""
_TRAINING = """\
[run]
steps = {steps}
seed = {seed}
dir = "{dir}"
[model]
path = "{model}"
max_context_tokens = {context}
{tasks}
[eval]
count = 0
[harness]
mode = "warm"
workers = 8
[collect]
groups_per_step = {groups}
group_size = {group_size}
[train]
lr = 6e-4
min_groups = 2
warmup_steps = 3
"""
_HELDOUT = """\
[run]
seed = {seed}
dir = "{dir}"
[rollout]
split = "eval"
count = {count}
samples = 1
[model]
path = "{model}"
max_context_tokens = {context}
[tasks]
source = "toy"
[harness]
agent = "{agent}"
mode = "warm"
workers = 8
"""


class Late(Exception):
    """The deadline passed before everything was finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A model of one row and seed on held-out tasks inside one agent."""

    row: str
    seed: int
    agent: str

    @property
    def name(self) -> str:
        return f"{self.row}-{self.seed}-{self.agent}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """The output folder and the time until which commands may run."""

    folder: Path
    ends: float = field(default=float("inf"))
    """Time of time.monotonic()."""
    steps: int = STEPS
    tasks: int = TASKS

    def run(self, arguments: Sequence[str]) -> tuple[float, float]:
        """Run one command of insitu; return its wall and CPU seconds. Raises Late, SetupError."""
        began, used = time.monotonic(), _children_s()
        if began >= self.ends:
            raise Late
        command = [sys.executable, "-m", "insitu", *arguments]
        log = self.folder / "log.txt"
        with log.open("ab") as out:
            out.write(f"\n$ insitu {' '.join(arguments)}\n".encode())
            out.flush()
            child = subprocess.Popen(command, stdout=out, stderr=out)
            try:
                code = child.wait(None if self.ends == float("inf") else self.ends - began)
            except subprocess.TimeoutExpired:
                raise Late from None
            finally:
                _stop(child)
        if code:
            last = log.read_text(errors="replace").strip().splitlines()[-1]
            raise SetupError(f"insitu {arguments[0]} failed with exit code {code}: {last}")
        return time.monotonic() - began, _children_s() - used

    def train(self, row: str, seed: int, warm: Path) -> Path:
        """Return the model of a row and seed; train it if it is not there."""
        name = f"{row}-{seed}"
        model, run = self.folder / "models" / name, self.folder / "runs" / name
        if model.exists():
            return model
        if not (run / "summary.json").exists():
            sets = AGENTS if row == ALL else (row,)
            tasks = "\n".join(
                f'[[tasks]]\nname = "{agent}"\nsource = "toy"\nharness = {{ agent = "{agent}" }}'
                for agent in sets
            )
            text = _TRAINING.format(
                steps=self.steps,
                seed=seed,
                dir=run,
                model=warm,
                context=CONTEXT,
                tasks=tasks,
                groups=GROUPS,
                group_size=GROUP_SIZE,
            )
            self._command("train", name, text, run)
        part = model.with_name(f"{name}.part")
        shutil.rmtree(part, ignore_errors=True)
        model.parent.mkdir(parents=True, exist_ok=True)
        self.run(["export", str(run), "--checkpoint", "last", "--to", "hf", "--out", str(part)])
        _write(self.folder / "trained" / f"{name}.json", _facts(self.folder, name))
        part.rename(model)
        return model

    def measure(self, cell: Cell, model: Path) -> None:
        """Write the file of a cell if it is not there."""
        kept, run = self.cell_file(cell), self.folder / "runs" / "heldout" / cell.name
        if kept.exists():
            return
        if not (run / "summary.json").exists():
            text = _HELDOUT.format(
                seed=cell.seed, dir=run, count=self.tasks, model=model, context=CONTEXT, agent=cell.agent
            )
            self._command("rollout", f"heldout-{cell.name}", text, run)
        chosen = ToySource(Limits()).tasks("eval", 0, self.tasks)
        with read_store(run) as store:
            rewards = {rollout.task_id: rollout.reward for rollout in store.rollouts("rollout", 0)}
        outcomes = "".join(_mark(rewards.get(task.id)) for task in chosen)
        summary = json.loads((run / "summary.json").read_text())
        measured = {"row": cell.row, "seed": cell.seed, "agent": cell.agent, "outcomes": outcomes}
        measured |= {"wall_s": summary["wall_s"]}
        _write(kept, measured)

    def _command(self, verb: str, name: str, text: str, run: Path) -> None:
        """Start a run from a configuration, or continue it; keep what it cost."""
        cost = self.folder / "costs" / f"{name}.json"
        used = json.loads(cost.read_text()) if cost.exists() else {"wall_s": 0.0, "cpu_s": 0.0}
        config = self.folder / "configs" / f"{name}.toml"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(text)
        again = (run / "run.sqlite").exists()
        began, before = time.monotonic(), _children_s()
        if run.exists() and not again:
            shutil.rmtree(run)
        try:
            self.run([verb, "--plain", *(["--resume", str(run)] if again else [str(config)])])
        finally:
            used["wall_s"] += time.monotonic() - began
            used["cpu_s"] += _children_s() - before
            _write(cost, used)

    def cell_file(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{cell.name}.json"


def cells(seeds: Sequence[int]) -> Iterator[Cell]:
    """Yield all cells in the order of their making: seed by seed, those inside the dear agent last."""
    for seed in seeds:
        made = [Cell(row=row, seed=seed, agent=agent) for row in ROWS for agent in AGENTS]
        yield from sorted(made, key=lambda cell: DEAR in (cell.row, cell.agent))


def training_facts(folder: Path, row: str, seed: int) -> dict[str, Any]:
    """Return what a finished training run was: its solve rate by step, ledger, and what it cost."""
    found: dict[str, Any] = json.loads((folder / "trained" / f"{row}-{seed}.json").read_text())
    return found


def _facts(folder: Path, name: str) -> dict[str, Any]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_bytes().splitlines()
    steps = [made for made in map(json.loads, lines) if made["event"] == "step"]
    summary = json.loads((folder / "runs" / name / "summary.json").read_text())
    cost = json.loads((folder / "costs" / f"{name}.json").read_text())
    return {
        "solve_rates": [round(step["solve_rate"], 3) for step in steps],
        "rollouts": summary["rollouts"],
        "ledger": summary["ledger"],
        "max_logprob_gap": summary["max_logprob_gap"],
        **{key: round(value, 1) for key, value in cost.items()},
    }


def _mark(reward: float | None) -> str:
    """1 = solved, 0 = not solved, - = not graded."""
    return "-" if reward is None else "1" if reward >= 1.0 else "0"


def _children_s() -> float:
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(value) + "\n")
    part.replace(path)
