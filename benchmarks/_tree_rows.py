"""Rows of agent rollouts that share prefixes, as training meets them. Callers: tree, planner.

Groups share a system prompt and a task. A rollout is turns of a sampled reply and an observation. A turn may
fork: a sub-agent works some turns on from there while the main line goes on from the same place, or the
conversation is compacted and a new row starts from system prompt, task and a summary. A sampled token is
trained in the row where it is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from insitu_train.plan.prefix_tree import Tree
from insitu_train.plan.step import PlanRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How much, and how it branches. The defaults are what an agent does in practice."""

    tokens: int = 1_000_000
    """Of all rows, repeated prefixes counted each time; the last rollout may exceed it."""
    group_size: int = 8
    system: int = 6000
    task: int = 500
    turns: tuple[int, int] = (10, 40)
    observation: int = 1000
    """Mean; uniform between half and one and a half of it."""
    reply: int = 250
    forks: float = 0.25
    """Share of turns that fork; below 0, minus the share of rollouts that fork once."""
    vocab: int = 1024

    def scaled(self, by: float) -> Work:
        """The same with all lengths times `by`."""
        return Work(
            tokens=self.tokens,
            group_size=self.group_size,
            system=max(1, round(self.system * by)),
            task=max(1, round(self.task * by)),
            turns=self.turns,
            observation=max(2, round(self.observation * by)),
            reply=max(2, round(self.reply * by)),
            forks=self.forks,
            vocab=self.vocab,
        )


class _Writer:
    """One rollout on its way."""

    def __init__(self, work: Work, rng: np.random.Generator, start: list[int], advantage: float) -> None:
        self.work, self.rng, self.start, self.advantage = work, rng, start, advantage
        self.ids, self.new = list(start), [False] * len(start)
        self.rows: list[PlanRow] = []

    def _add(self, mean: int, sampled: bool) -> None:
        count = int(self.rng.integers(max(1, mean // 2), mean + mean // 2 + 1))
        self.ids += self.rng.integers(0, self.work.vocab, count).tolist()
        self.new += [sampled] * count

    def turn(self) -> None:
        self._add(self.work.reply, True)
        self._add(self.work.observation, False)

    def emit(self) -> None:
        """What there is becomes a row; nothing of it is new any more."""
        end = len(self.new) - self.new[::-1].index(True) if True in self.new else 0
        if end:
            mask = np.array(self.new[:end], np.bool_)
            mu = np.where(mask, -self.rng.exponential(1.0, end) - 1.0, 0.0).astype(np.float32)
            ids = np.array(self.ids[:end], np.int32)
            self.rows.append(
                PlanRow(
                    group_id="",
                    rollout_id="",
                    segment=0,
                    advantage=self.advantage,
                    weight=1.0,
                    ids=ids,
                    mask=mask,
                    logprobs=mu,
                    versions=np.zeros(end, np.int32),
                )
            )
        self.new = [False] * len(self.ids)

    def delegate(self) -> None:
        """A sub-agent goes on from here for some turns; the main line does not see them."""
        held, new = list(self.ids), list(self.new)
        self.new = [False] * len(held)
        for _ in range(int(self.rng.integers(1, 5))):
            self.turn()
        self.emit()
        self.ids, self.new = held, new

    def compact(self) -> None:
        self.emit()
        self.ids, self.new = list(self.start), [False] * len(self.start)
        self._add(2 * self.work.reply, True)


def rows_of(work: Work, seed: int = 0) -> list[PlanRow]:
    """Whole rollouts until there are enough tokens, group by group."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, work.vocab, work.system).tolist()
    rows: list[PlanRow] = []
    while sum(len(r.ids) for r in rows) < work.tokens:
        start = system + rng.integers(0, work.vocab, work.task).tolist()
        for _ in range(work.group_size):
            rows += _rollout(_Writer(work, rng, start, float(rng.normal())))
            if sum(len(r.ids) for r in rows) >= work.tokens:
                break
    return rows


def _rollout(writer: _Writer) -> list[PlanRow]:
    work, rng = writer.work, writer.rng
    turns = int(rng.integers(work.turns[0], work.turns[1] + 1))
    once = int(rng.integers(turns)) if work.forks < 0 and rng.random() < -work.forks else -1
    for turn in range(turns):
        writer.turn()
        if turn == once or rng.random() < work.forks:
            (writer.delegate if rng.random() < 0.5 else writer.compact)()
    writer.emit()
    return writer.rows


def tree_work(tree: Tree, linear: Sequence[int]) -> tuple[float, float]:
    """Return (tokens, attention pairs) of the rows over those of the tree, both >= 1.

    linear: tokens of each row. The ratios are the speed-up limits in the matrices and in attention.
    """
    lengths = np.array(linear, np.int64)
    pairs = int((lengths * (lengths + 1) // 2).sum())
    own = int(tree.positions.sum(dtype=np.int64)) + tree.tokens
    return int(lengths.sum()) / max(1, tree.tokens), pairs / max(1, own)
