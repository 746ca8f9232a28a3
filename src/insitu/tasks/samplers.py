"""Order of training tasks: a sampler maps numbers of draws to indices of the training split."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from insitu.config import Config
from insitu.errors import TaskError, user_code
from insitu.registry import find
from insitu.tasks.base import TaskSource
from insitu.types import Task

Indices = npt.NDArray[np.int64]
Sampler = Callable[[Indices, int | None, int], Indices]
"""(draws int64 [n], size of the split or None if endless, seed) -> indices int64 [n], at least 0.

It must be a pure function: a resumed run draws again. Indices past the size begin another epoch.
"""


def epochs(draws: Indices, size: int | None, seed: int) -> Indices:
    """Return the draws themselves: each task once per epoch, which the source shuffles."""
    return draws


def task_sampler(config: Config, source: TaskSource) -> Callable[[int], Task]:
    """Return a function from the number of a draw to its task; raise ConfigError."""
    name = config.tasks.sampler
    sampler: Sampler = find("samplers", name)

    def task(draw: int) -> Task:
        with user_code(TaskError, f"tasks.sampler {name}"):
            chosen = np.asarray(sampler(np.array([draw]), source.size("train"), config.run.seed))
        if chosen.shape != (1,) or chosen.dtype.kind not in "iu" or chosen[0] < 0:
            raise TaskError(f"tasks.sampler {name} returned {chosen!r} for one draw, expected an index")
        with user_code(TaskError, f"tasks.source {config.tasks.source}"):
            return source.tasks("train", int(chosen[0]), 1)[0]

    return task
