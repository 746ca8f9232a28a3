"""A rollout source for tests of the bridge to slime."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from insitu.types import Group, Rollout
from insitu_bridges import RolloutBatch


class Source:
    """A source whose rollouts and groups are given."""

    def __init__(self, one: Rollout, groups: Sequence[Group] = ()) -> None:
        self.one, self.groups, self.asked = one, tuple(groups), list[Any]()

    def call(self, make: Any) -> RolloutBatch:
        make(SimpleNamespace(next=lambda: self.asked.append("next")))
        return RolloutBatch(step=1, version=0, groups=self.groups)

    def submit(self, make: Any) -> Future[Rollout]:
        def run(task: str, key: int, *, evaluation: bool) -> None:
            self.asked.append((task, key, evaluation))

        make(SimpleNamespace(run=run))
        done: Future[Rollout] = Future()
        done.set_result(self.one)
        return done
