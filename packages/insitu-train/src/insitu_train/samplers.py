"""Order of training tasks: a sampler maps numbers of draws to indices of the training split."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from insitu.errors import ConfigError, TaskError, user_code
from insitu.registry import find
from insitu.tasks.base import same_task
from insitu.tasks.mix import TaskMix, TaskSet, schedule
from insitu.types import Task

Indices = npt.NDArray[np.int64]
History = npt.NDArray[np.float64]
"""float64 [m, 5], a row per settled group, oldest first: index of its task, graded rollouts, sum of their
rewards, sum of the squares of these, and how many reached a limit (truncated)."""
Sampler = Callable[[Indices, int | None, int], Indices]
"""(draws int64 [n], size of the split or None if endless, seed) -> indices int64 [n], at least 0; one with a
parameter `history` gets a History too.

It must be a pure function: a resumed run draws again. Indices past the size begin another epoch.
"""
ADMITTED = 256
"""signal: tasks of the split, in order, that are drawn from at first; each retired one admits another."""
FLOOR = 0.1
"""signal: share of the draws that goes to all admitted tasks alike, so that no retired one is forgotten."""
WINDOW = 2
"""signal: newest groups of a task that count."""
UNSEEN = 0.25
"""signal: that of a task without a graded group, the largest of rewards 0 and 1."""
REACHED = 3
"""within_limits: rollouts of a task that reached a limit after which it is left out."""
_STRIDE = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """Rewards of a settled group of training."""

    task_set: str
    task_id: str
    graded: int
    reward_sum: float
    square_sum: float
    truncated: int = 0


def epochs(draws: Indices, size: int | None, seed: int) -> Indices:
    """Return the draws themselves: each task once per epoch, which the source shuffles."""
    return draws


def within_limits(draws: Indices, size: int | None, seed: int, history: History) -> Indices:
    """Return each task once per epoch, and others in place of those of which REACHED rollouts were truncated.

    Raises TaskError where no task is left.
    """
    if size is None:
        raise TaskError("the sampler within_limits needs a set with an end")
    reached = np.bincount(history[:, 0].astype(np.int64), history[:, 4], minlength=size)
    kept = np.flatnonzero(reached < REACHED)
    if not len(kept):
        raise TaskError(f"{REACHED} rollouts of each task reached a limit: raise [limits] or the context")

    def one(draw: int) -> int:
        # below `size`, since the source shuffles later epochs by itself: an index would be another task
        index = int(np.random.default_rng([seed, draw // size]).permutation(size)[draw % size])
        other = int(kept[np.random.default_rng([seed, draw]).integers(len(kept))])
        return index if reached[index] < REACHED else other

    return np.array([one(draw) for draw in draws.tolist()], np.int64)


def learning_signal(size: int, history: History) -> npt.NDArray[np.float64]:
    """Return the variance of each task's newest rewards, p (1 - p) for rewards 0 and 1, or UNSEEN."""
    rows, sums = history[history[:, 1] > 0, :4], np.zeros((size, 3))
    for _ in range(WINDOW):
        newest = np.full(size, -1)
        newest[rows[:, 0].astype(np.int64)] = np.arange(len(rows))  # of a repeated index the last one stays
        places = newest[newest >= 0]
        sums[newest >= 0] += rows[places, 1:]
        rows = np.delete(rows, places, axis=0)
    graded, total, squares = sums.T
    seen = graded > 0
    found = np.full(size, UNSEEN)
    found[seen] = np.maximum(0.0, squares[seen] / graded[seen] - (total[seen] / graded[seen]) ** 2)
    return found


def signal(draws: Indices, size: int | None, seed: int, history: History) -> Indices:
    """Return tasks in proportion to their learning signal.

    A task whose newest rewards are all equal is retired: it is drawn by FLOOR alone until its rewards differ.
    The draws go over the shares in equal strides: n of them give each task its share, and a step has the same
    task twice only where its share is large.
    """
    if size is None:
        raise TaskError("the sampler signal needs a set with an end")
    weights = learning_signal(size, history)
    retired = weights < 1e-9
    weights[ADMITTED + int(retired.sum()) :] = 0.0
    alike = np.where(np.arange(size) < ADMITTED + int(retired.sum()), 1.0, 0.0)
    total = weights.sum()
    shares = alike / alike.sum() if not total else FLOOR * alike / alike.sum() + (1 - FLOOR) * weights / total
    places = (np.random.default_rng(seed).random() + draws * _STRIDE) % 1.0
    ends = np.cumsum(shares)
    return np.searchsorted(ends / ends[-1], places, side="right").astype(np.int64)


class TaskDraws:
    """The tasks of a run's draws, by their numbers."""

    def __init__(self, mix: TaskMix, outcomes: Callable[[], Sequence[GroupOutcome]] = tuple) -> None:
        """Set up; raise ConfigError.

        outcomes: settled groups so far, for samplers with `history`; the same object until there are others.
        """
        self._place = schedule([one.config.task_set.weight for one in mix.sets])
        self._sets = [_SetDraws(one, outcomes) for one in mix.sets]

    def __call__(self, draw: int) -> Task:
        """Return the task of a new draw."""
        number, within = self._place(draw)
        return self._sets[number].task(within)

    def again(self, draw: int, task_id: str) -> Task:
        """Return the task of a draw that an earlier process made."""
        number, within = self._place(draw)
        return self._sets[number].again(within, task_id)


class _SetDraws:
    """Draws of one task set."""

    def __init__(self, one: TaskSet, outcomes: Callable[[], Sequence[GroupOutcome]]) -> None:
        self._set, self._outcomes = one, outcomes
        self._table, self._seed = one.config.task_set, one.config.run.seed
        self._sampler: Callable[..., Any] = find("samplers", self._table.sampler)
        self._by_history = _takes_history(self._sampler)
        self._known: tuple[Sequence[GroupOutcome], History] | None = None
        """Settled groups and the history made of them."""

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self._set.train_ids())}

    def task(self, draw: int) -> Task:
        more = {"history": self._history()} if self._by_history else {}
        with user_code(TaskError, f"tasks.sampler {self._table.sampler}"):
            chosen = np.asarray(self._sampler(np.array([draw]), self._set.size("train"), self._seed, **more))
        if chosen.shape != (1,) or chosen.dtype.kind not in "iu" or chosen[0] < 0:
            raise TaskError(
                f"tasks.sampler {self._table.sampler} returned {chosen!r} for one draw, expected an index"
            )
        return self._at(int(chosen[0]))

    def again(self, draw: int, task_id: str) -> Task:
        found: Task | None
        if self._by_history:  # its history is past: the stored name tells which task it was
            found = self._at(self._indices[task_id]) if task_id in self._indices else None
        else:
            found = self.task(draw)
        of = f" of tasks.{self._set.name}" if self._set.name else ""
        return same_task(f"draw {draw}{of}", found, task_id)

    def _at(self, index: int) -> Task:
        with user_code(TaskError, f"tasks.source {self._table.source}"):
            return self._set.tasks("train", index, 1)[0]

    def _history(self) -> History:
        settled = self._outcomes()
        if self._known is None or self._known[0] is not settled:
            own = [one for one in settled if one.task_set == self._set.name and one.task_id in self._indices]
            rows = [
                (self._indices[one.task_id], one.graded, one.reward_sum, one.square_sum, one.truncated)
                for one in own
            ]
            self._known = settled, np.array(rows, np.float64).reshape(-1, 5)
        return self._known[1]


def _takes_history(sampler: Callable[..., Any]) -> bool:
    """Return whether a sampler draws by the rewards so far."""
    return "history" in inspect.signature(sampler).parameters


def check_draws(mix: TaskMix) -> None:
    """Raise ConfigError for a set to train on without tasks, or without an end and drawn by rewards."""
    for one in mix.sets:
        name, size = one.config.task_set.sampler, one.size("train")
        where = f"tasks.{one.name}" if one.name else "tasks"
        if size == 0 and one.config.task_set.weight:
            raise ConfigError(
                f"{where}: the train split of {one.source.name} has 0 tasks (eval_share, weight)"
            )
        if size is None and _takes_history(find("samplers", name)):
            raise ConfigError(
                f"{where}.sampler = {name}: {one.source.name} has tasks without end, none comes again"
            )
