"""The groups of a training step as they were collected, from the store."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from insitu.storage.store import Store
from insitu.types import Group, Rollout


def stored_groups(store: Store, step: int) -> Sequence[Group]:
    """Return the groups of one training step as collected."""
    rollouts = store.step_rollouts(step)

    def group_of(rollout: Rollout) -> str:
        return rollout.id.rsplit("/", 1)[0]

    return [
        Group(id=name, task_id=held[0].task_id, rollouts=tuple(held))
        for name, held in ((name, list(members)) for name, members in groupby(rollouts, key=group_of))
    ]
