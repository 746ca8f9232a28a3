"""The name of an arm: one task set, as one evaluation and one agent have it.

This is the only module that writes and reads what is stored of it (`Task.part`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

_OF_EVAL, _OF_AGENT = "@", "+"
"""No name contains them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmName:
    """Which arm of a run a rollout is of."""

    task_set: str
    """Empty in a run with one set without a name."""
    evaluation: str = ""
    """Evaluation with tables of its own; empty = training, and the other evaluations."""
    agent: str = ""
    """One of several agents; empty = the only one, or all of them."""

    @property
    def part(self) -> str:
        """What is stored: SET, SET@EVAL, SET@+AGENT or SET@EVAL+AGENT."""
        own = f"{_OF_EVAL}{self.evaluation}" if self.evaluation or self.agent else ""
        return f"{self.task_set}{own}{_OF_AGENT if self.agent else ''}{self.agent}"

    @property
    def label(self) -> str:
        """The name in metrics; that of an agent is SET+AGENT, or AGENT in a set without name."""
        return _OF_AGENT.join(filter(None, [self.task_set, self.agent])) if self.agent else self.part

    def holds(self, other: ArmName) -> bool:
        """Return whether it is the same arm, or that of one of its agents."""
        same = (self.task_set, self.evaluation) == (other.task_set, other.evaluation)
        return same and self.agent in ("", other.agent)


@lru_cache(4096)
def arm_of(part: str) -> ArmName:
    """Read `ArmName.part`."""
    place, _, agent = part.partition(_OF_AGENT)
    task_set, _, evaluation = place.partition(_OF_EVAL)
    return ArmName(task_set=task_set, evaluation=evaluation, agent=agent)
