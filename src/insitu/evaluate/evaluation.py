"""An evaluation: rollouts of a list of tasks at one policy version, whose tokens are never trained.

`insitu rollout` is a run of no steps with one, training has those of [[eval]]. All are collected, stored and
continued alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from insitu.collect.breaker import Breaker
from insitu.collect.collector import Collector
from insitu.collect.groups import open_groups
from insitu.collect.options import AttemptRunner, Check, CollectOptions, Phase, RolloutObserver
from insitu.collect.starvation import Activity
from insitu.collect.store_sink import AttemptObserver, StoreSink
from insitu.config import Config
from insitu.errors import RecordError
from insitu.storage.store import Store
from insitu.tasks.base import same_task
from insitu.types import Status, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What is evaluated, and under which phase and step it is stored."""

    phase: Phase
    step: int = 0
    tasks: Sequence[Task]
    samples: int
    """Rollouts of each task."""
    temperature: float = 0.0
    """0 = that of the engine."""

    def missing(self, store: Store) -> int:
        """Return how many rollouts are undecided.

        Raises RecordError or TaskError when the tasks differ from those of the stored rollouts.
        """
        decided = 0
        for stored in store.outcomes(self.phase, self.step):
            if stored.group >= len(self.tasks) or stored.slot >= self.samples:
                raise RecordError(f"{stored.rollout_id} is stored but is not a rollout of these tasks")
            same_task(stored.rollout_id, self.tasks[stored.group], stored.task_id, stored.task_hash)
            decided += stored.status is not Status.INFRA_FAILED
        return len(self.tasks) * self.samples - decided

    def open(
        self,
        config: Config,
        store: Store,
        observer: AttemptObserver,
        attempts: AttemptRunner,
        view: RolloutObserver,
        breaker: Breaker,
        *,
        check: Check,
        version: int = 0,
        activity: Activity | None = None,
    ) -> AbstractAsyncContextManager[Collector]:
        """Run the undecided rollouts inside the context; the only batch has a group per task."""
        self.missing(store)
        options = CollectOptions.of(
            config,
            phase=self.phase,
            first_step=self.step,
            group_size=self.samples,
            temperature=self.temperature or config.engine.temperature,
            whole=False,
        )
        sink = StoreSink(store, observer)
        return open_groups(
            attempts, sink, view, breaker, options, self.tasks,
            check=check, version=version, activity=activity,
        )  # fmt: skip
