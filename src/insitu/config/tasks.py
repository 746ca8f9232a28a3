"""The tables [[tasks]] and [[eval]]: task sets, their shares of a run, and evaluations on them.

Both may hold tables of the run, e.g. `limits = { wall_s = 60 }`, whose keys replace the run's for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from insitu import registry
from insitu.config.base import (
    Count,
    CountOrZero,
    Fraction,
    OwnPath,
    SamplerName,
    Table,
    TaskSourceName,
    only,
    unless,
)
from insitu.config.harness import AgentCommand
from insitu.types import MIN_TEMPERATURE

ToyKind = Literal["operator", "constant", "swapped", "variable", "comparison", "extreme", "no_return"]
LAYERS = ("harness", "limits", "sandbox", "grade", "reward")
"""Tables of the run that one of [[tasks]] or [[eval]] may hold keys of."""

_DATA_SET = unless("source", "toy")
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]*$")]


def laid_over(below: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a layer and those below it, without those of an agent that the layer replaces."""
    replaced: set[str] = set()
    command = own.get("command")
    if command and (not isinstance(command, list | tuple) or command[0] != "{agent}"):
        replaced = {"agent", "version"}
    elif "agent" in own:
        replaced = {*AgentCommand.model_fields}
        if own["agent"] != below.get("agent"):
            replaced.add("version")
    return {**{key: value for key, value in below.items() if key not in replaced}, **own}


class TaskSetTable(Table):
    """What the agent works on: one task set, or one of a mix."""

    name: _Name = ""
    """Name in metrics and the viewer; needed with several sets."""
    weight: Annotated[float, Field(ge=0, le=1e9)] = 1.0
    """Share of the groups that work on this set, relative to the other sets; 0 = only evaluated."""
    source: TaskSourceName = "toy"
    """toy = generated bug-fix tasks; the format of the data set at `path`; or a list, an iterator or a
    function that returns tasks, as module:attribute, file.py:attribute or entry point."""
    path: Annotated[OwnPath, _DATA_SET] = ""
    """File, files (`data/test-*.parquet`) or folder of the data set, or hub:ORG/NAME[@REVISION][:FILES]; with
    [start:stop:step] or [3, 5] at its end, these rows of it."""
    kinds: Annotated[tuple[ToyKind, ...], Field(strict=False), only("source", "toy")] = ()
    """Kinds of faults to use; empty = all."""
    sampler: SamplerName = "epochs"
    """Order of training tasks: epochs; for sets with an end signal = by the variance of each task's newest
    rewards, or within_limits = epochs without tasks of which three rollouts were truncated by a limit; or a
    function of the number of a draw, as entry point, module:attribute or file.py:attribute."""
    eval_share: Annotated[Fraction, _DATA_SET] = 0.25
    """Share of a data set that is held out, by content hash; 1 = all of it, 0 = none."""
    on_invalid_row: Annotated[Literal["refuse", "skip"], _DATA_SET] = "refuse"
    """A row that cannot be graded: refuse = reject the data set; skip = skip the row."""
    assets: Annotated[OwnPath, _DATA_SET] = ""
    """swe_pro, slime: folder with the set's run scripts."""
    images: Annotated[OwnPath, _DATA_SET] = ""
    """JSON file: image name or task id -> image reference (digest pins, mirrors); empty = unchanged."""
    allowlist: Annotated[OwnPath, _DATA_SET] = ""
    """File written by `insitu tasks validate`: only tasks that passed are used; empty = all."""
    transform: Annotated[str, _DATA_SET] = ""
    """Dotted path of a function row -> row or None, called first; empty = none."""
    checker: Annotated[str, _DATA_SET] = ""
    """Dotted path of a function (stdin, expected, printed) -> bool, for runner stdio; empty = by words."""
    parse_answer: str = ""
    """Dotted path of a function (reply, task) -> files, for single_turn; empty = the last code block."""
    reference: OwnPath = ""
    """Reference policy or teacher for this set: a model folder or the URL of a vLLM server; empty =
    train.reference."""
    harness: Mapping[str, Any] = {}
    """Keys of [harness] for this set, e.g. { agent = "mini_swe" }."""
    agents: Annotated[tuple[Mapping[str, Any], ...], Field(strict=False)] = ()
    """Keys of [harness] for each of several agents that the rollouts of a group use in turn, so advantages
    compare them; empty = one agent."""
    limits: Mapping[str, Any] = {}
    """Keys of [limits] for this set."""
    sandbox: Mapping[str, Any] = {}
    """Keys of [sandbox] for this set, which then has a pool of its own."""
    grade: Mapping[str, Any] = {}
    """Keys of [grade] for this set."""
    reward: Mapping[str, Any] = {}
    """Keys of [reward] for this set."""

    @model_validator(mode="after")
    def _fits_source(self) -> Self:
        if self.source in registry.shipped("tasks") and self.source != "toy" and not self.path:
            raise ValueError(f"source = {self.source!r} needs path: the file or folder of the data set")
        if len(self.agents) == 1:
            raise ValueError("agents names several agents; the keys of one belong into harness")
        return self

    @property
    def harnesses(self) -> Sequence[Mapping[str, Any]]:
        """Keys of [harness] of each agent."""
        return [laid_over(self.harness, one) for one in self.agents] or [self.harness]


class EvalTable(Table):
    """An evaluation, before and after training and in between; the first one is the run's held-out score."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")] = "heldout"
    """Name in metrics and the viewer; another one for each evaluation."""
    tasks: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of the task sets it takes tasks of, equally many of each; empty = all with a weight above 0."""
    split: Literal["eval", "train"] = "eval"
    """eval = held-out tasks; train = tasks of training."""
    count: CountOrZero = 128
    """Tasks of the evaluation; 0 = no evaluation. The default stands for at most all."""
    samples: Count = 1
    """Rollouts of each task; pass@k and pass^k are reported for k up to this."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature; 0 = engine.temperature."""
    every_steps: CountOrZero = 0
    """Steps between evaluations during training; 0 = only before and after."""
    beside_training: Annotated[bool, unless("every_steps", 0)] = False
    """Evaluations during training run beside the next step, whose weights are published when they have ended;
    false = the next step waits for them."""
    harness: Mapping[str, Any] = {}
    """Keys of [harness] for this evaluation, e.g. { agent = "mini_swe" }."""
    limits: Mapping[str, Any] = {}
    """Keys of [limits] for this evaluation."""
    sandbox: Mapping[str, Any] = {}
    """Keys of [sandbox] for this evaluation, which then has a pool of its own."""
    grade: Mapping[str, Any] = {}
    """Keys of [grade] for this evaluation."""
    reward: Mapping[str, Any] = {}
    """Keys of [reward] for this evaluation."""

    @model_validator(mode="after")
    def _temperature_is_sampled(self) -> Self:
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature is 0, for that of the engine, or at least {MIN_TEMPERATURE}")
        return self

    @property
    def layered(self) -> bool:
        """Whether it has tables of its own, e.g. another agent."""
        return any(getattr(self, layer) for layer in LAYERS)

    def due(self, step: int) -> bool:
        """Return whether it takes place during training after this step."""
        return bool(self.count) and self.every_steps > 0 and step > 0 and step % self.every_steps == 0

    def covers(self, table: TaskSetTable) -> bool:
        """Return whether it takes tasks of this set."""
        return table.name in self.tasks if self.tasks else table.weight > 0

    def over(self, table: TaskSetTable) -> TaskSetTable:
        """Return the task set with the evaluation's own tables laid over its own."""
        layers = {layer: laid_over(getattr(table, layer), getattr(self, layer)) for layer in LAYERS}
        named = "agent" in self.harness or "command" in self.harness
        agents = () if named else tuple({**one, **self.harness} for one in table.agents)
        return table.model_copy(update={"agents": agents, **layers})
