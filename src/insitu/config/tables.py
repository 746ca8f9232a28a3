"""The tables of the file and their keys.

Units are part of the names (`_s`, `_tokens`). TOML has no null, so "not set" is 0 or "", as each field
describes. No field holds a secret: secrets are read from environment variables only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, ValidationError, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from insitu.config.arms import Arm, all_arms, arms_of_set
from insitu.config.base import (
    Count,
    CountOrZero,
    OwnPath,
    RewardName,
    Seconds,
    Table,
    TrackerName,
    unless,
)
from insitu.config.engines import EngineTable
from insitu.config.fleet import FleetTable
from insitu.config.gateway import GatewayTable
from insitu.config.harness import HarnessTable
from insitu.config.model import PolicyTable
from insitu.config.sandbox import SandboxTable
from insitu.config.tasks import LAYERS, EvalTable, TaskSetTable
from insitu.config.training import CollectTable, SftTable, TrainTable
from insitu.errors import ConfigError, describe_invalid
from insitu.types.limits import LimitKeys

_TABLES = Field(strict=False, min_length=1)
_FUNCTION = unless("function", "")


ALARMS: Mapping[str, float] = {
    "infra_failure": 0.1, "tamper": 0.1, "reward": 0.4, "excluded_tokens": 0.2,
    "unparsed": 0.1, "collapse": 0.5, "kl": 0.1, "reference_kl": 0.0,
}  # fmt: skip


def _with_usual(given: Mapping[str, float]) -> Mapping[str, float]:
    if unknown := given.keys() - ALARMS:
        raise ValueError(f"no alarm is named {min(unknown)}; there are: {', '.join(ALARMS)}")
    return {**ALARMS, **given}


_Alarms = Annotated[Mapping[str, Annotated[float, Field(ge=0)]], AfterValidator(_with_usual)]


class _RunTable(Table):
    """The run as a whole."""

    profile: Literal["", "laptop", "one-gpu", "cluster"] = ""
    """Kind of machine whose values replace the defaults of other keys (docs/recipes.md); empty = none."""
    dir: OwnPath = ""
    """Run directory; empty = runs/<ULID> under the current folder."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of all random streams of the run."""
    steps: CountOrZero = 30
    """Optimizer steps of reinforcement learning."""
    checkpoint_every_steps: Count = 5
    """Steps between checkpoints, written in the background; the last step and those before an evaluation
    have one too. A run that is killed trains the steps after the newest one again, from their rollouts."""
    keep_checkpoints: Count = 3
    """Newest checkpoints kept on disk, beside the one with the best held-out result."""
    stop_after_evals: CountOrZero = 0
    """Evaluations during training without a better held-out result after which the run ends; 0 = never."""
    alarms: _Alarms = ALARMS
    """Levels above which a step warns, e.g. { reward = 0.6 }; 0 = never; see docs/troubleshooting.md."""
    hub: Annotated[str, Field(pattern=r"^([\w.-]+/[\w.-]+)?$")] = ""
    """ORG/NAME: private repository of the Hugging Face Hub that gets the newest checkpoint with all that
    `insitu train --resume hub:ORG/NAME` needs, in the background; empty = none."""


class _ModelTable(Table):
    """The model that is trained."""

    path: OwnPath = ""
    """Folder with weights, tokenizer and chat template, a GGUF file of them, or hub:ORG/NAME[@REVISION];
    empty = the warm start of the demo."""
    renderer: str = "auto"
    """Token rules: auto, template (the folder's own), hermes (a template with tools for models that have none
    and write <|im_start|>), or the name of rules in the renderers package; arguments of the chat template
    stand behind a ?: "auto?enable_thinking=false"."""
    max_context_tokens: Count = 4096
    """Prompt plus sampled tokens of one model call."""
    keep_reasoning: Literal["all", "template"] = "all"
    """Reasoning of earlier turns: all = kept as sampled; template = dropped where the model's chat format
    drops it, so each question starts a new branch."""


class _LimitsTable(LimitKeys, Table):
    """Limits of one rollout; a rollout that reaches one is graded."""


class _GradeTable(Table):
    """The grader."""

    workers: Count = 2
    """Concurrent gradings."""
    timeout_s: Seconds = 1800.0
    """CPU seconds per process of a grading, if the task sets no lower limit; wall time is 3 times that."""
    min_trust: Literal["weak", "standard", "strong"] = "weak"
    """Tasks with less trusted verdicts are rejected, or skipped with tasks.on_invalid_row = skip."""


class _RewardTable(Table):
    """The reward of a graded rollout."""

    function: RewardName = ""
    """Function of a FinishedRollout, async or not, that returns a number, named numbers or None (not
    graded): entry point, module:attribute or file.py:attribute; empty = the verdict's reward."""
    timeout_s: Annotated[Seconds, _FUNCTION] = 300.0
    """Timeout of one call; it is an infrastructure failure, as an exception is."""
    max_concurrent: Annotated[Count, _FUNCTION] = 8
    """Concurrent calls."""
    group: Annotated[bool, _FUNCTION] = False
    """Call it when all rollouts of the group are graded; `rollout.group` has all of them then."""


class _RolloutTable(Table):
    """`insitu rollout`: attempts without training."""

    split: Literal["train", "eval"] = "eval"
    """Which tasks of the source."""
    count: CountOrZero = 0
    """Number of tasks; 0 = all."""
    samples: Count = 1
    """Graded rollouts of each task; pass@k is reported for k up to this."""


class _RecordTable(Table):
    """What a run keeps besides its rollouts."""

    scores: Annotated[str, Field(pattern=r"^(off|all|last:[1-9]\d*)$")] = "last:50"
    """Trainer's log-probability, entropy and clipping of every trained token, for the viewer: off, all, or
    last:N = those of the last N steps. About 6 bytes per token and step."""

    @property
    def steps_kept(self) -> int | None:
        """Steps whose scores stay; None = all."""
        return int(self.scores.removeprefix("last:")) if self.scores.startswith("last:") else None


class _TrackTable(Table):
    """Trackers that get the metrics of a run; each runs in a process of its own."""

    to: Annotated[tuple[TrackerName, ...], Field(strict=False)] = ()
    """wandb, trackio, tensorboard, or paths of your own trackers."""
    project: Annotated[str, unless("to", ())] = "insitu"
    """Project of the run at wandb and trackio."""


class Config(Table):
    """The whole file."""

    __slots__ = ("_arms",)
    # outside of the fields: neither copied nor compared
    _arms: Mapping[str, Arm] = PrivateAttr()

    run: _RunTable = _RunTable()
    model: _ModelTable = _ModelTable()
    tasks: Annotated[tuple[TaskSetTable, ...], _TABLES] = (TaskSetTable(),)
    eval: Annotated[tuple[EvalTable, ...], _TABLES] = (EvalTable(),)
    sandbox: SandboxTable = SandboxTable()
    harness: HarnessTable = HarnessTable()
    fleet: FleetTable = FleetTable()
    gateway: GatewayTable = GatewayTable()
    engine: EngineTable = EngineTable()
    limits: _LimitsTable = _LimitsTable()
    grade: _GradeTable = _GradeTable()
    reward: _RewardTable = _RewardTable()
    collect: CollectTable = CollectTable()
    record: _RecordTable = _RecordTable()
    rollout: _RolloutTable = _RolloutTable()
    train: TrainTable = TrainTable()
    sft: SftTable = SftTable()
    policy: PolicyTable = PolicyTable()
    track: _TrackTable = _TrackTable()

    @property
    def task_set(self) -> TaskSetTable:
        """The only one of [[tasks]]; raises ConfigError for a mix."""
        if len(self.tasks) > 1:
            names = ", ".join(table.name for table in self.tasks)
            raise ConfigError(f"this takes one task set, and [[tasks]] has {len(self.tasks)}: {names}")
        return self.tasks[0]

    @property
    def arms(self) -> Mapping[str, Arm]:
        """The arms of the run by `Task.part`; resolved once."""
        if not hasattr(self, "_arms"):
            object.__setattr__(self, "_arms", all_arms(self))
        return self._arms

    @property
    def set_arms(self) -> Sequence[Arm]:
        """The arm of each task set, in order."""
        return [self.arms[table.name] for table in self.tasks]

    @property
    def agent_arms(self) -> Sequence[Arm]:
        """The arms of several agents of a task set."""
        return [arm for arm in self.arms.values() if arm.agent and not arm.evaluation]

    def evaluated_after(self, step: int) -> bool:
        """Return whether there is an evaluation during training after this step."""
        return any(table.due(step) for table in self.eval)

    @property
    def samples_while_training(self) -> bool:
        """Whether rollouts run while the trainer trains."""
        return self.collect.max_staleness > 0 or any(table.beside_training for table in self.eval)

    def saved_after(self, step: int) -> bool:
        """Return whether a checkpoint is written after this step."""
        due = step % self.run.checkpoint_every_steps == 0 or step == self.run.steps
        return due or self.evaluated_after(step)

    @model_validator(mode="after")
    def _is_a_mix(self, info: ValidationInfo) -> Self:
        names = [table.name for table in self.tasks]
        if len(names) > 1 and ("" in names or len({*names}) < len(names)):
            raise ValueError("each of several [[tasks]] needs a name of its own")
        for table in self.tasks:
            if table.reference and self.train.kl == "none":
                raise ValueError("tasks.reference has no effect with train.kl = 'none'")
            self._check_layers(table, [table], info.context)
        return self

    @model_validator(mode="after")
    def _evaluates(self, info: ValidationInfo) -> Self:
        if len({one.name for one in self.eval}) < len(self.eval):
            raise ValueError("each [[eval]] needs a name of its own")
        known = [table.name for table in self.tasks]
        for one in self.eval:
            if unknown := sorted({*one.tasks} - {*known}):
                listed = ", ".join(filter(None, known)) or "none with a name"
                raise ValueError(f"eval.{one.name}.tasks: no task set {unknown[0]!r}; there are: {listed}")
            self._check_layers(one, map(one.over, filter(one.covers, self.tasks)), info.context)
        if self.run.stop_after_evals and not (self.eval[0].count and self.eval[0].every_steps):
            raise ValueError(f"run.stop_after_evals needs eval.{self.eval[0].name}.every_steps and count")
        return self

    def _check_layers(
        self, table: TaskSetTable | EvalTable, sets: Iterable[TaskSetTable], context: object
    ) -> None:
        """Raise ValueError that names the table for a key of its layers that `sets` cannot have under it.

        So too for two agents of one name.
        """
        kind, agents = ("tasks", table.agents) if isinstance(table, TaskSetTable) else ("eval", ())
        if shared := {"workers", "mode"} & {*table.harness}.union(*agents):
            where = ".".join(filter(None, [kind, table.name]))
            raise ValueError(f"{where}: harness.{min(shared)} is that of the run")
        if not (agents or any(getattr(table, layer) for layer in LAYERS)):
            return
        try:
            for one in sets:
                list(arms_of_set(self, one.model_copy(update={"agents": ()}), context=context))
                names = [arm.part for arm in arms_of_set(self, one, context=context)]
                if len({*names}) < len(names):
                    where = ".".join(filter(None, ["tasks", one.name, "agents"]))
                    raise ValueError(
                        f"{where}: two of them have the same name; agents of a group need different ones"
                    )
        except ValidationError as error:
            raise ValueError(describe_invalid(error, kind, *filter(None, [table.name]))) from None

    @property
    def set_names(self) -> Sequence[str]:
        """Names of the task sets of a mix; empty for a run with one task set."""
        return [table.name for table in self.tasks] if len(self.tasks) > 1 else []

    def agent_of(self, part: str) -> str:
        """Return the names of the agents of a part; empty where the run has no such part or no agents."""
        if self.collect.run or part not in self.arms:
            return ""
        own = self.arms[part]
        return _names(arm for arm in self.arms.values() if own.holds(arm))

    @property
    def agent_names(self) -> str:
        """Names of the agents, of each task set in use."""
        return _names(arm for arm in self.arms.values() if not arm.evaluation)

    @property
    def longest_wall_s(self) -> float:
        """The largest limit of a rollout's time."""
        return max(arm.config.limits.wall_s for arm in self.arms.values())

    @property
    def sandboxes_needed(self) -> int:
        """Fewest sandboxes that cannot deadlock."""
        # One per worker (a warm worker keeps it), a running and a prepared one per grading, one to read the
        # base files of a task from.
        return self.harness.workers + 2 * self.grade.workers + 1

    @property
    def policy_trouble(self) -> str:
        """Why the engine cannot sample with the trained policy; empty if it can."""
        if self.policy.kind == "tinker" and self.engine.kind != "tinker":
            return 'policy.kind = "tinker" needs engine.kind = "tinker": the service samples what it trains'
        if self.policy.kind == "tinker" and not self.policy.lora_rank:
            return 'policy.kind = "tinker" needs policy.lora_rank: the service trains adapters'
        return ""

    def mapped(self, change: Callable[[FieldInfo, Any], Any]) -> Self:
        """Return a copy whose values are `change(key, value)`; they are not validated."""
        tables: dict[str, Any] = {}
        for name, value in self:
            several = isinstance(value, tuple)
            found = tuple(self._mapped(table, change) for table in (value if several else (value,)))
            tables[name] = found if several else found[0]
        return self.model_copy(update=tables)

    def _mapped(self, table: Table, change: Callable[[FieldInfo, Any], Any]) -> Table:
        values = {key: change(info, table.__dict__[key]) for key, info in type(table).model_fields.items()}
        for layer in LAYERS if isinstance(table, TaskSetTable | EvalTable) else ():
            keys = type(self.__dict__[layer]).model_fields
            values[layer] = {key: change(keys[key], value) for key, value in table.__dict__[layer].items()}
        return table.model_copy(update=values)

    @model_validator(mode="after")
    def _policy_has_an_engine(self) -> Self:
        # `insitu sft` does not sample, whatever engine produced the rollouts of sft.run
        if self.policy_trouble and not self.sft.run:
            raise ValueError(self.policy_trouble)
        if self.model.keep_reasoning != "all" and self.engine.kind == "upstream" and not self.sft.run:
            raise ValueError(
                "model.keep_reasoning has no effect with engine.kind upstream: the provider renders prompts"
            )
        return self

    @model_validator(mode="after")
    def _gateway_can_add(self) -> Self:
        if self.gateway.adds and (why := self.offers_no_tools):
            raise ValueError(f"{self.gateway.adds} has no effect with {why}")
        return self

    @property
    def offers_no_tools(self) -> str:
        """Why the gateway can add no tools to requests; empty if it can."""
        if self.engine.kind == "upstream":
            return "engine.kind upstream: request bodies are passed on unchanged"
        agent = self.harness.agent
        no_tools = agent in ("single_turn", "terminus", "aider")
        return f"harness.agent {agent}: it offers the model no tools" if no_tools else ""

    @model_validator(mode="after")
    def _fits_a_fleet(self) -> Self:
        if self.fleet.kind == "none":
            return self
        if self.engine.kind == "upstream":
            raise ValueError("fleet.kind needs an engine: with engine.kind upstream it has to be none")
        if self.gateway.listen:
            raise ValueError("gateway.listen has no effect with fleet.kind: each node has its own gateway")
        if self.reward.group:
            raise ValueError(
                "reward.group does not work with fleet.kind: a group's rollouts are on many nodes"
            )
        return self

    @model_validator(mode="after")
    def _sharded(self) -> Self:
        if self.train.shard and (self.policy.kind != "hf" or self.engine.kind == "embedded"):
            raise ValueError("train.shard needs policy.kind = 'hf' and an engine apart")
        if self.train.shard and self.engine.publish in ("ipc", "nccl"):
            raise ValueError(
                f"train.shard: sharded weights reach an engine as files, not by {self.engine.publish}"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if 0 < self.sandbox.max_sandboxes < self.sandboxes_needed:
            raise ValueError(
                f"sandbox.max_sandboxes = {self.sandbox.max_sandboxes} is too few:"
                f" {self.harness.workers} harness.workers and {self.grade.workers} grade.workers"
                f" need {self.sandboxes_needed} sandboxes (0 = enough)"
            )
        if self.harness.compact is True and (self.harness.is_command or self.harness.agent != "pi"):
            raise ValueError(f"harness.compact = true is pi's own, not of {self.harness.label}")
        if self.harness.compact > self.model.max_context_tokens:
            raise ValueError(
                "harness.compact has no effect: no prompt is as long as model.max_context_tokens"
            )
        if self.collect.group_min > self.collect.group_size:
            raise ValueError("collect.group_min is larger than collect.group_size")
        if self.train.min_groups > self.collect.groups_per_step:
            raise ValueError("train.min_groups is larger than collect.groups_per_step: no step could train")
        if self.limits.max_call_tokens >= self.model.max_context_tokens:
            raise ValueError("limits.max_call_tokens leaves no room for a prompt in model.max_context_tokens")
        return self

    @model_validator(mode="after")
    def _decays(self) -> Self:
        steps = self.run.steps * self.train.epochs
        if self.train.decay != "constant" and not self.sft.run and steps <= self.train.warmup_steps:
            raise ValueError(
                f"train.decay {self.train.decay} has no steps left: run.steps x train.epochs = {steps}"
                f" are no more than train.warmup_steps = {self.train.warmup_steps}"
            )
        return self

    @property
    def publishes_adapters(self) -> bool:
        """Whether the engine gets adapters unmerged."""
        by_name = self.engine.kind == "vllm" and self.engine.publish_lora == "adapter"
        return self.policy.lora_rank > 0 and by_name and not self.sft.run

    @model_validator(mode="after")
    def _publishes(self) -> Self:
        publish = self.engine.publish
        if self.engine.publish_lora != "adapter" and not self.policy.lora_rank:
            raise ValueError("engine.publish_lora has no effect without policy.lora_rank")
        if self.policy.lora_rank and publish in ("ipc", "nccl"):
            raise ValueError(
                f"engine.publish {publish} does not support policy.lora_rank: it sends whole weights"
            )
        adapters = self.engine.kind == "vllm" and self.engine.publish_lora == "adapter"
        if self.policy.lora_rank and adapters and publish != "disk":
            raise ValueError(
                "engine.publish must be disk with policy.lora_rank, unless engine.publish_lora is merged"
            )
        if self.policy.lora_rank and adapters and self.engine.publish_mode != "recompute":
            raise ValueError(
                f"engine.publish_mode {self.engine.publish_mode} has no effect with adapters:"
                " running calls keep their adapter"
            )
        return self

    @model_validator(mode="after")
    def _keeps_context(self) -> Self:
        if self.engine.publish_mode == "keep" and self.engine.kind != "vllm":
            raise ValueError(f"engine.publish_mode keep is for vllm, not for {self.engine.kind}")
        if self.engine.publish_mode == "keep" and not self.collect.max_staleness:
            raise ValueError("engine.publish_mode keep has no effect with collect.max_staleness = 0")
        return self


def _names(arms: Iterable[Arm]) -> str:
    """Return the names of their agents, each once."""
    return " + ".join(dict.fromkeys(arm.config.harness.label for arm in arms))
