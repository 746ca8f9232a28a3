"""What makes the rollouts of a run while it runs: in this process (`runtime.run.Runtime`) or on nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from insitu.collect.options import AttemptRunner
from insitu.storage.run_dir import RunDir


class OpenStats(Protocol):
    """Counters of a session that a view shows."""

    @property
    def sampled_tokens(self) -> int: ...

    @property
    def doing(self) -> str: ...


class OpenSession(Protocol):
    """A session of an agent at work."""

    @property
    def public_id(self) -> str: ...

    @property
    def rollout_id(self) -> str: ...

    @property
    def stats(self) -> OpenStats: ...


class RunningAgents(Protocol):
    """Gateway, sandboxes, agents and graders that are up; extensions of kind `fleets` give one."""

    @property
    def agents(self) -> tuple[str, str]:
        """Names and versions of the agents."""

    def attempts(self, run: RunDir) -> AttemptRunner:
        """Return the runner of attempts, which keeps logs, artifacts and host calls in the run."""

    def open_sessions(self) -> Sequence[OpenSession]:
        """Return the sessions of the agents at work."""

    def gauges(self) -> Mapping[str, int]:
        """Return further figures for the timeline."""
