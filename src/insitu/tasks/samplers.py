"""Order of training tasks: a sampler maps numbers of draws to indices of the training split."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from insitu.errors import TaskError, user_code
from insitu.registry import find
from insitu.tasks.mix import TaskMix, TaskSet, schedule
from insitu.types import Task

Indices = npt.NDArray[np.int64]
Sampler = Callable[[Indices, int | None, int], Indices]
"""(draws int64 [n], size of the split or None if endless, seed) -> indices int64 [n], at least 0.

It must be a pure function: a resumed run draws again. Indices past the size begin another epoch.
"""


def epochs(draws: Indices, size: int | None, seed: int) -> Indices:
    """Return the draws themselves: each task once per epoch, which the source shuffles."""
    return draws


def task_sampler(mix: TaskMix) -> Callable[[int], Task]:
    """Return a function from the number of a draw to its task; raise ConfigError."""
    place = schedule([one.config.task_set.weight for one in mix.sets])
    draws = [_set_sampler(one) for one in mix.sets]

    def task(draw: int) -> Task:
        number, within = place(draw)
        return draws[number](within)

    return task


def _set_sampler(one: TaskSet) -> Callable[[int], Task]:
    table = one.config.task_set
    seed = one.config.run.seed
    sampler: Sampler = find("samplers", table.sampler)

    def task(draw: int) -> Task:
        with user_code(TaskError, f"tasks.sampler {table.sampler}"):
            chosen = np.asarray(sampler(np.array([draw]), one.source.size("train"), seed))
        if chosen.shape != (1,) or chosen.dtype.kind not in "iu" or chosen[0] < 0:
            raise TaskError(
                f"tasks.sampler {table.sampler} returned {chosen!r} for one draw, expected an index"
            )
        with user_code(TaskError, f"tasks.source {table.source}"):
            return one.tasks("train", int(chosen[0]), 1)[0]

    return task
