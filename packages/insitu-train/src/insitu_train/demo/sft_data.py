"""Data of the warm start: its job, recorded demonstrations, and the batches made of them. No torch."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from insitu.chat.renderer import ChatRenderer
from insitu.tasks.toy import FAMILIES, ToyProblem, ToySource
from insitu.types import BoolArray, IntArray, Limits, Message
from insitu_train.demo.demonstrator import Habits, edit
from insitu_train.demo.rendered_demonstrations import Demonstration, SimulatedPiTools, render


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationBatch:
    """Right-padded rows [B, T] behind a shared prefix [P]; mask True = this token is a target."""

    prefix: IntArray
    rows: IntArray
    mask: BoolArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of supervised training under one set of habits."""

    steps: int
    look: float
    wrong: float

    @property
    def habits(self) -> Habits:
        return Habits(look=self.look, wrong=self.wrong)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Demonstrations recorded through the agents."""

    prefixes: tuple[IntArray, ...] = field(repr=False)
    """Constant prompt of each agent; batches take them in turn, the first twice as often."""
    rows: Mapping[int, Sequence[Demonstration]] = field(repr=False)
    """Phase index -> demonstrations recorded with that phase's habits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftJob:
    """Everything that determines the weights, besides the tokenizer and the recorded demonstrations."""

    seed: int = 0
    phases: tuple[Phase, ...] = (
        Phase(steps=750, look=0.9, wrong=0.0),
        Phase(steps=250, look=0.12, wrong=0.1),
    )
    rows: int = 32
    recorded_rows: int = 4
    """Rows per batch that were recorded through the agent; the others are rendered."""
    kinds: tuple[str, ...] = (*sorted(FAMILIES), "comparison", "extreme")
    """Task categories of rendered rows; the two with otherwise unused operators occur twice as often."""
    lr: float = 4e-3
    muon_lr: float = 0.025
    threads: int = 1

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)


def read_job(path: Path) -> SftJob:
    raw = json.loads(path.read_text())
    raw["phases"] = tuple(Phase(**p) for p in raw["phases"])
    raw["kinds"] = tuple(raw["kinds"])
    return SftJob(**raw)


def write_job(job: SftJob, path: Path) -> None:
    path.write_text(json.dumps(asdict(job), indent=1) + "\n")


def padded(rows: Sequence[Demonstration]) -> tuple[IntArray, BoolArray]:
    """Right-padded ids and mask, both [B, T]."""
    width = max(len(d.ids) for d in rows)
    ids, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), np.bool_)
    for i, d in enumerate(rows):
        ids[i, : len(d.ids)], mask[i, : len(d.ids)] = d.ids, d.mask
    return ids, mask


def write_recorded(path: Path, recorded: Recorded) -> None:
    rows = [(phase, d) for phase, recorded_rows in recorded.rows.items() for d in recorded_rows]
    np.savez_compressed(
        path,
        prefixes=np.concatenate(recorded.prefixes),
        prefix_lengths=np.array([len(p) for p in recorded.prefixes], np.int32),
        ids=np.concatenate([d.ids for _, d in rows]),
        mask=np.concatenate([d.mask for _, d in rows]),
        lengths=np.array([len(d.ids) for _, d in rows], np.int32),
        phases=np.array([phase for phase, _ in rows], np.int32),
        tasks=np.array([d.task_id for _, d in rows]),
    )


def read_recorded(path: Path) -> Recorded:
    with np.load(path) as data:
        cuts = np.cumsum(data["lengths"])[:-1]
        ids, mask = np.split(data["ids"], cuts), np.split(data["mask"], cuts)
        prefixes = tuple(np.split(data["prefixes"], np.cumsum(data["prefix_lengths"])[:-1]))
        phases, tasks = data["phases"].tolist(), data["tasks"].tolist()
    rows: dict[int, list[Demonstration]] = {}
    for phase, task, i, m in zip(phases, tasks, ids, mask, strict=True):
        rows.setdefault(phase, []).append(Demonstration(task_id=task, ids=i, mask=m))
    return Recorded(prefixes=prefixes, rows=rows)


def batches(job: SftJob, renderer: ChatRenderer, recorded: Recorded) -> Iterator[DemonstrationBatch]:
    """Every batch of the job, a pure function of it."""
    source = ToySource(Limits(), seed=1000 + job.seed, kinds=job.kinds)
    rng, at = random.Random(job.seed), 0
    turns = [0, *range(len(recorded.prefixes))] if len(recorded.prefixes) > 1 else [0]
    for index, phase in enumerate(job.phases):
        rows = list(recorded.rows.get(index, ()))
        for step in range(phase.steps):
            kept = rng.sample(rows, min(job.recorded_rows, len(rows)))
            count = job.rows - len(kept)
            problems = [source.problem(t) for t in source.tasks("train", at, count)]
            at += count
            rows = [*kept, *(render(renderer, p, phase.habits, job.seed) for p in problems)]
            ids, mask = padded(rows)
            yield DemonstrationBatch(prefix=recorded.prefixes[turns[step % len(turns)]], rows=ids, mask=mask)


def edit_turn(renderer: ChatRenderer, problem: ToyProblem, look: Message) -> Demonstration:
    """Return a demonstration up to the right edit after one look; the mask covers only the edit."""
    result = Message(
        role="tool", text=SimulatedPiTools(problem).answer(look.tool_calls[0])[0], tool_call_id="gate"
    )
    looked = renderer.render_reply(look)
    before = [
        renderer.append([Message(role="user", text=problem.prompt)]),
        renderer.generation_prompt(),
        looked,
        renderer.close(looked, "stop"),
        renderer.append([result]),
        renderer.generation_prompt(),
    ]
    right = renderer.render_reply(edit(problem, problem.fault.old, problem.fault.new))
    ids = np.concatenate([*before, right])
    mask = np.zeros(len(ids), np.bool_)
    mask[-len(right) :] = True
    return Demonstration(task_id=f"toy-{problem.seed}", ids=ids, mask=mask)
