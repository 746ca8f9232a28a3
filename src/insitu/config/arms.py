"""The arms of a run: its configuration for each task set, evaluation and agent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from insitu.config.tasks import LAYERS, EvalTable, TaskSetTable, laid_over
from insitu.types.arms import ArmName

if TYPE_CHECKING:
    from insitu.config.tables import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm(ArmName):
    """An arm with its configuration."""

    config: Config
    """The run's with this set and agent alone, under their own tables and the evaluation's; of several agents
    it has the first."""

    @property
    def where(self) -> str:
        """The table that made it what it is, for errors; empty for that of a set without a name."""
        found = ("eval", self.evaluation) if self.evaluation else ("tasks", self.task_set)
        return ".".join(found) if found[1] else ""


def arms_of_set(
    config: Config, table: TaskSetTable, evaluation: str = "", context: object = None
) -> Iterator[Arm]:
    """Yield the arm of a task set, then those of its agents if it has several; raise ValidationError."""
    harnesses = table.harnesses
    arms = [
        Arm(task_set=table.name, evaluation=evaluation, config=_alone(config, table, harness, context))
        for harness in harnesses
    ]
    yield arms[0]
    for arm in arms if table.agents else ():
        agent = re.sub(r"[^A-Za-z0-9_-]", "-", arm.config.harness.label)
        yield Arm(task_set=table.name, evaluation=evaluation, agent=agent, config=arm.config)


def arms_of_eval(config: Config, evaluation: EvalTable, context: object = None) -> Iterator[Arm]:
    """Yield the arms of an evaluation with tables of its own."""
    for table in config.tasks:
        if evaluation.layered and evaluation.covers(table):
            yield from arms_of_set(config, evaluation.over(table), evaluation.name, context)


def all_arms(config: Config) -> Mapping[str, Arm]:
    """Return all arms by `ArmName.part`: those of the task sets, then those of the evaluations."""
    found = [arm for table in config.tasks for arm in arms_of_set(config, table)]
    found += [arm for one in config.eval if one.count for arm in arms_of_eval(config, one)]
    return {arm.part: arm for arm in found}


def _alone(config: Config, table: TaskSetTable, harness: Mapping[str, Any], context: object) -> Config:
    tables = dict(config.__dict__)
    for name in LAYERS:
        if own := harness if name == "harness" else getattr(table, name):
            tables[name] = laid_over(tables[name].__dict__, own)
    bare: dict[str, Any] = {key: {} for key in LAYERS}
    tables["tasks"] = (table.model_copy(update={**bare, "agents": ()}),)
    # evaluations may name the other sets
    tables["eval"] = tuple(one.model_copy(update={**bare, "tasks": ()}) for one in config.eval)
    return type(config).model_validate(tables, context=context)
