"""The running parts that the training loop works with."""

from __future__ import annotations

from dataclasses import dataclass

from insitu.agents.base import Harness
from insitu.collect.options import AttemptRunner
from insitu.engines.base import Engine
from insitu.tasks.base import TaskSource
from insitu.training.learner.client import Learner
from insitu.training.learner.supervisor import LearnerSupervisor
from insitu.training.plan.step import PlanConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAgents:
    """What makes rollouts, running."""

    source: TaskSource
    harness: Harness
    attempts: AttemptRunner
    engine: Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """Everything that the loop needs, running."""

    agents: RunAgents | None
    """None = the rollouts are stored sessions (`collect.run`)."""
    learner: Learner
    supervisor: LearnerSupervisor
    plan_config: PlanConfig
