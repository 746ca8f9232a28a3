"""The groups of a training run from the sessions of `insitu serve` (`collect.run`).

No agent and no engine runs: each group is trained once, with its stored tokens, log-probabilities and
versions, in the order of its first session.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from insitu.chat.load import load_renderer
from insitu.chat.renderer import ChatRenderer
from insitu.collect.options import RolloutObserver, Slot
from insitu.collect.store_sink import StoreSink
from insitu.config import Config, model_folder
from insitu.engines.base import Receipt
from insitu.errors import ConfigError, TrainError
from insitu.storage.lifecycle import SERVE
from insitu.storage.run_dir import read_config, read_store
from insitu.storage.store import Store
from insitu.types import Group
from insitu_train.plan.step import PlanConfig, use_of


def check_tokens(config: Config, run: Path, renderer: ChatRenderer) -> None:
    """Raise ConfigError when the stored tokens of `run` are of another tokenizer or chat template."""
    source = read_config(run)
    theirs = load_renderer(model_folder(source), source.model.renderer)
    if theirs.fingerprint != renderer.fingerprint:
        raise ConfigError(
            f"{run} holds tokens of {model_folder(source)}, whose tokenizer or chat template"
            f" differs from that of {model_folder(config)}"
        )


def _served_groups(config: Config) -> Sequence[Group]:
    """Return the groups of `collect.run` that can be trained; raise TrainError when there are none."""
    run, plan = Path(config.collect.run), PlanConfig.of(config)
    check_tokens(config, run, load_renderer(model_folder(config), config.model.renderer))
    with read_store(run) as store:
        rollouts = store.rollouts(SERVE, 0)
    groups = [
        Group(id=task, task_id=task, rollouts=tuple(members))
        for task, members in groupby(rollouts, key=lambda rollout: rollout.task_id)
    ]
    reasons = Counter(use_of(group, plan) for group in groups)
    if not reasons[""]:
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        raise TrainError(
            f"{run} holds no group to train ({why or 'no session'}): a group is two or more sessions of one"
            " task with different rewards"
        )
    return [group for group in groups if not use_of(group, plan)]


def fit_to_sessions(config: Config) -> Config:
    """Return the configuration with no more steps than `collect.run` has groups for.

    Each step is one version further from the served one, which is what `collect.max_staleness` then allows.
    """
    steps = min(-(-len(_served_groups(config)) // config.collect.groups_per_step), config.run.steps)
    run = config.run.model_copy(update={"steps": steps})
    collect = config.collect.model_copy(update={"max_staleness": steps - 1})
    return config.model_copy(update={"run": run, "collect": collect})


class ServedBatches:
    """Implements batch_source.Batches over stored sessions, which it copies into the run's store."""

    rollouts = 0

    def __init__(self, config: Config, store: Store, sink: StoreSink, observer: RolloutObserver) -> None:
        self._groups, self._per_step = _served_groups(config), config.collect.groups_per_step
        self._store, self._sink, self._observer = store, sink, observer

    async def next(self) -> tuple[Sequence[Group], Mapping[str, Any]]:
        """Return the groups of the next step, stored under the ids of this run."""
        last = self._store.last_step()
        step = 1 if last is None else last.step + 1
        stored = self._store.places("train", step)
        chosen = self._groups[(step - 1) * self._per_step : step * self._per_step]
        return [self._copy(step, number, group, stored) for number, group in enumerate(chosen)], {}

    def _copy(self, step: int, number: int, group: Group, stored: Mapping[tuple[int, int], str]) -> Group:
        rollouts = []
        for index, rollout in enumerate(group.rollouts):
            slot = Slot(phase="train", step=step, group=number, slot=index)
            copy = replace(rollout, id=slot.rollout_id)
            if (number, index) not in stored:
                self._sink.put(slot, copy)
            sampled = rollout.trajectory.ledger.captured
            self._observer.rollout_finished(copy.id, reward=copy.reward, tokens=sampled)
            rollouts.append(copy)
        return replace(group, id=rollouts[0].id.rpartition("/")[0], rollouts=tuple(rollouts))

    def draw(self) -> None:
        """Do nothing: no rollout waits for a worker."""

    def pending(self, version: int) -> None:
        """Do nothing: the sessions are stored."""

    def published(self, version: int) -> None:
        """Do nothing: no engine samples."""


class NoEngine:
    """Implements weights.files.Publisher where no engine samples."""

    async def publish(self, version: int) -> Receipt:
        return Receipt(version=version, checksum="")

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Return a no-op context."""
        yield
