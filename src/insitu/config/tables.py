"""The tables of the file and their keys. Units stand in the names (`_s`, `_tokens`). There is no null in
TOML, so "not set" is 0 or "" and each field says what that means. No field holds a secret: secrets travel in
environment variables only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from insitu.config.base import Count, CountOrZero, Fraction, OwnPath, Seconds, Table
from insitu.config.engines import EngineTable
from insitu.config.gateway import GatewayTable
from insitu.config.model import PolicyTable
from insitu.config.sft import SftTable
from insitu.config.training import CollectTable, TrainTable

WARM_AGENTS = ("pi", "script", "terminus")
"""Agents whose process or sandbox can serve more than one rollout."""

ToyFamily = Literal["operator", "constant", "swapped", "variable", "comparison", "extreme", "no_return"]

Source = Literal[
    "toy",
    "jsonl",
    "folder",
    "humaneval",
    "unit_tests",
    "swe_bench",
    "swe_bench_folders",
    "swe_bench_live",
    "swe_gym",
    "swe_rebench",
    "swe_pro",
    "swe_smith",
    "r2e_gym",
    "slime",
    "terminus",
    "apps",
    "taco",
    "code_contests",
    "live_code_bench",
    "mbpp",
    "evalplus",
    "bigcodebench",
    "polyglot",
    "harbor",
    "terminal_bench",
]
SandboxKind = Literal["local", "docker", "harbor"]
DATA_SET_KEYS = (
    "path",
    "eval_share",
    "on_invalid_row",
    "assets",
    "images",
    "allowlist",
    "transform",
    "reward",
    "checker",
)


class RunTable(Table):
    """The run as a whole."""

    dir: OwnPath = ""
    """Run directory; empty = runs/<ULID> under the current folder."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Names every random stream of the run."""
    steps: CountOrZero = 30
    """Optimizer steps of reinforcement learning."""
    eval_tasks: CountOrZero = 128
    """Held-out tasks per evaluation, one rollout each; 0 = no evaluation."""
    eval_every_steps: CountOrZero = 0
    """Steps between evaluations during training; 0 = only before and after."""
    keep_checkpoints: Count = 3
    """Newest checkpoints kept on disk."""
    plain: bool = False
    """Plain lines without colour instead of the live view."""


class ModelTable(Table):
    """The model that is trained."""

    path: OwnPath = ""
    """Folder with weights, tokenizer and chat template; empty = the warm start of the demo."""
    renderer: str = "auto"
    """Token rules: auto, template (the folder's own), or the name of rules in the renderers package."""
    max_context_tokens: Count = 4096
    """Prompt plus sampled tokens of one model call."""
    keep_reasoning: Literal["all", "template"] = "all"
    """Reasoning of earlier turns: all = it stays as it was sampled; template = it is dropped where the rules
    of the model drop it, which makes a new branch of each question."""


class TasksTable(Table):
    """What the agent works on."""

    source: Source = "toy"
    """Generated bug-fix tasks, or the format of the data set at `path`; see docs/tasks.md."""
    path: OwnPath = ""
    """File or folder of the data set; not for toy."""
    groups_per_step: Count = 12
    """Tasks per optimizer step."""
    kinds: Annotated[tuple[ToyFamily, ...], Field(strict=False)] = ()
    """toy: task families to use; empty = all."""
    eval_share: Fraction = 0.25
    """Share of a data set that is held out, by content hash; 1 = all of it, 0 = none. Not for toy."""
    on_invalid_row: Literal["refuse", "skip"] = "refuse"
    """A row that cannot be graded: refuse the data set, or leave the row out. Not for toy."""
    assets: OwnPath = ""
    """swe_pro, slime: folder with the set's run scripts."""
    images: OwnPath = ""
    """JSON file, image name or task id -> the reference to use: pins by digest, mirrors; empty = as it is."""
    allowlist: OwnPath = ""
    """File that `insitu tasks validate` wrote: only tasks that passed are used; empty = all."""
    transform: str = ""
    """Dotted path of a function row -> row or None, called before anything else; empty = none."""
    checker: str = ""
    """Dotted path of a function (stdin, expected, printed) -> bool, for runner stdio; empty = by words."""
    parse_answer: str = ""
    """Dotted path of a function (reply, task) -> files, for single_turn; empty = the last code block."""
    reward: str = ""
    """Dotted path of a function (row, answer, verdict) -> reward from 0 to 1; empty = the verdict's own."""

    @model_validator(mode="after")
    def _fits_source(self) -> Self:
        if self.source == "toy":
            for key in DATA_SET_KEYS:
                if self.__dict__[key] != type(self).model_fields[key].default:
                    raise ValueError(f"{key} means nothing with source = 'toy'")
        elif not self.path:
            raise ValueError(f"source = {self.source!r} needs path: the file or folder of the data set")
        elif self.kinds:
            raise ValueError(f"families means nothing with source = {self.source!r}, only with toy")
        return self


class SandboxTable(Table):
    """Where agents run and are graded."""

    backend: SandboxKind = "local"
    """local = namespaces of this machine; docker = containers, which tasks with images need; harbor =
    sandboxes of Harbor's environments (clouds), for grading: no agent reaches the gateway from there."""
    fallback: SandboxKind | Literal[""] = ""
    """Backend that takes over while `backend` is down; empty = none: sandboxes wait for it, or fail."""
    environment: str = ""
    """harbor: kind of its environments (e2b, modal, daytona, ...), or dotted path of a function that makes
    one: package.module:function (spec, folder) -> environment."""
    mode: Literal["auto", "bubblewrap", "namespaces"] = "auto"
    """local: how it isolates; auto = bubblewrap, else namespaces."""
    image: str = ""
    """docker, harbor: image of sandboxes whose task names none."""
    program: str = "docker"
    """docker: the command line to use, docker or podman."""
    runtime: str = ""
    """docker: OCI runtime of the sandboxes; empty = the daemon's default."""
    user: Annotated[str, Field(pattern=r"^\d+(:\d+)?$")] = "1000:1000"
    """docker, with insitu running as root: user and group that everything in a sandbox runs as."""
    memory_mb: Annotated[int, Field(ge=512)] = 4096
    """Memory of one sandbox, the files it writes to memory included; local: where control groups can be
    made."""
    disk_mb: CountOrZero = 0
    """docker: what one sandbox of a task's image may write to its disk; 0 = nothing bounds it. Needs storage
    with quotas: overlay2 on xfs mounted with pquota, btrfs (where what the image holds counts) or zfs.
    Sandboxes without such an image write to memory."""
    pull_timeout_s: Seconds = 1800.0
    """docker, harbor: seconds to fetch an image that is not there yet."""
    max_sandboxes: CountOrZero = 0
    """Sandboxes at once: agents', grading and spare ones; 0 = what the run needs, 128 at least."""
    warm: CountOrZero = 1
    """Spare sandboxes kept ready of a plain spec that is asked for again and again, as grading does."""
    boot_attempts: Count = 3
    """Tries to start a sandbox before the attempt fails."""
    boot_timeout_s: Seconds = 120.0
    """Of one try; an image that is not there yet has pull_timeout_s more."""
    breaker_failures: Count = 5
    """Failed starts within the window after which a backend is left alone for a while."""
    breaker_window_s: Seconds = 60.0
    """Length of the window."""
    breaker_cooldown_s: Seconds = 30.0
    """How long it is first left alone; doubled by each trial that fails."""

    @property
    def kinds(self) -> tuple[SandboxKind, ...]:
        """The backends in use, the one that is preferred first."""
        return (self.backend, self.fallback) if self.fallback else (self.backend,)

    @model_validator(mode="after")
    def _fits_backend(self) -> Self:
        for key, owners in SANDBOX_KEYS.items():
            default = type(self).model_fields[key].default
            if not {*owners} & {*self.kinds} and self.__dict__[key] != default:
                used = f"backend = {self.backend!r}" + (
                    f", fallback = {self.fallback!r}" * bool(self.fallback)
                )
                raise ValueError(f"{key} means nothing with {used}, only with {' or '.join(owners)}")
        if self.fallback == self.backend:
            raise ValueError(f"fallback is the backend itself: {self.backend}")
        if "harbor" in self.kinds and not self.environment:
            raise ValueError(
                "harbor needs sandbox.environment: which of Harbor's environments, for instance e2b"
            )
        return self


SANDBOX_KEYS: Mapping[str, tuple[SandboxKind, ...]] = {
    "mode": ("local",),
    "environment": ("harbor",),
    "image": ("docker", "harbor"),
    "program": ("docker",),
    "runtime": ("docker",),
    "user": ("docker",),
    "memory_mb": ("local", "docker"),
    "disk_mb": ("docker",),
    "pull_timeout_s": ("docker", "harbor"),
}
"""Keys of [sandbox] that only some backends read; the rest are read by all."""


class HarnessTable(Table):
    """Which agent, and how its processes are reused."""

    agent: Literal[
        "pi",
        "script",
        "terminus",
        "claude_code",
        "codex",
        "opencode",
        "qwen_code",
        "gemini_cli",
        "mini_swe",
        "single_turn",
    ] = "pi"
    """The agent; single_turn = none: one reply to the task's prompt is checked."""
    mode: Literal["fresh", "warm"] = "fresh"
    """fresh = a new agent process per rollout; warm = workers that are wiped in between."""
    workers: Count = 8
    """Rollouts that run at the same time."""
    max_rollouts_per_process: Count = 64
    """Rollouts after which a warm worker is replaced."""
    compact: bool = False
    """pi only: it may compact its context when that gets full. Other agents decide for themselves."""
    artifacts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Files or folders, in the work folder or home of a sandbox, kept in artifacts/ of the run directory."""
    artifact_files: Count = 64
    """Most files kept of one attempt."""
    artifact_bytes: Count = 4 << 20
    """Most bytes kept of one attempt; a file that does not fit into what is left is left out."""


class LimitsTable(Table):
    """What one rollout may use. Reaching a limit is the agent's own doing and is graded."""

    wall_s: Seconds = 120.0
    """Seconds from the agent's start to its forced stop, without those for which the engine was away."""
    max_calls: Count = 8
    """Model calls per rollout."""
    max_call_tokens: Count = 96
    """Sampled tokens per model call."""
    max_session_tokens: Count = 65536
    """Sampled tokens per rollout."""
    max_prompt_tokens: CountOrZero = 0
    """Prompt tokens per rollout, summed over its calls; 0 = no limit."""
    max_nodes: Count = 1024
    """Nodes of a rollout's forest; a call adds two at most."""


class GradeTable(Table):
    """The judge."""

    workers: Count = 2
    """Gradings that run at the same time."""
    timeout_s: Seconds = 1800.0
    """Most CPU seconds of one process of a grading. A task may name fewer; it may wait 3 times as long."""
    min_trust: Literal["weak", "standard", "strong"] = "weak"
    """Tasks whose verdicts are worth less are refused, or left out with tasks.on_invalid_row = skip."""


class RolloutTable(Table):
    """`insitu rollout`: attempts without training."""

    split: Literal["train", "eval"] = "eval"
    """Which tasks of the source."""
    tasks: CountOrZero = 0
    """How many of them; 0 = all that there are."""
    start: CountOrZero = 0
    """Tasks of the split to skip."""
    per_task: Count = 1
    """Graded rollouts of each task; pass@k is told for k up to this."""


class Config(Table):
    """The whole file."""

    run: RunTable = RunTable()
    model: ModelTable = ModelTable()
    tasks: TasksTable = TasksTable()
    sandbox: SandboxTable = SandboxTable()
    harness: HarnessTable = HarnessTable()
    gateway: GatewayTable = GatewayTable()
    engine: EngineTable = EngineTable()
    limits: LimitsTable = LimitsTable()
    grade: GradeTable = GradeTable()
    collect: CollectTable = CollectTable()
    rollout: RolloutTable = RolloutTable()
    train: TrainTable = TrainTable()
    sft: SftTable = SftTable()
    policy: PolicyTable = PolicyTable()

    @property
    def sandboxes_needed(self) -> int:
        """Sandboxes with which no part of a run waits for another for ever: one for each worker, which a
        warm one keeps; for each grading one, and one made ready; one that a task's base is read from."""
        return self.harness.workers + 2 * self.grade.workers + 1

    @property
    def policy_trouble(self) -> str:
        """Why the engine cannot sample with what [policy] trains; empty when it can."""
        if self.policy.kind == "hf" and self.engine.kind == "embedded":
            return (
                'policy.kind = "hf" needs engine.kind = "vllm" or "sglang": the embedded engine only runs the'
                " built-in model"
            )
        return ""

    @model_validator(mode="after")
    def _policy_has_an_engine(self) -> Self:
        # `insitu sft` samples with nothing, whatever engine made the rollouts of sft.run
        if self.policy_trouble and not self.sft.run:
            raise ValueError(self.policy_trouble)
        if self.model.keep_reasoning != "all" and self.engine.kind == "upstream" and not self.sft.run:
            raise ValueError(
                "model.keep_reasoning means nothing with engine.kind upstream: it has its own rules"
            )
        return self

    @model_validator(mode="after")
    def _gateway_can_add(self) -> Self:
        adds, agent = self.gateway.adds, self.harness.agent
        if adds and self.engine.kind == "upstream":
            raise ValueError(f"{adds} means nothing with engine.kind upstream: bodies go on as they are")
        # not model_fields_set: a stored configuration names every key
        usual = type(self.gateway).model_fields["max_concurrent_calls"].default
        if self.engine.kind == "upstream" and self.gateway.max_concurrent_calls != usual:
            raise ValueError(
                "gateway.max_concurrent_calls: with engine.kind upstream it is engine.max_concurrent"
            )
        if adds and agent in ("single_turn", "terminus"):
            raise ValueError(f"{adds} means nothing with harness.agent {agent}: it offers the model no tools")
        return self

    @model_validator(mode="after")
    def _sharded(self) -> Self:
        if self.train.shard and self.policy.kind != "hf":
            raise ValueError("train.shard needs policy.kind = 'hf': the builtin model is not sharded")
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
                f" {self.harness.workers} harness.workers"
                f" and {self.grade.workers} grade.workers need {self.sandboxes_needed} sandboxes (0 = enough)"
            )
        if self.harness.mode == "warm" and self.harness.agent not in WARM_AGENTS:
            raise ValueError(
                f"harness.mode warm is not for {self.harness.agent}: it starts anew for each task"
            )
        if self.harness.compact and self.harness.agent != "pi":
            raise ValueError(f"harness.compact is for pi; {self.harness.agent} has no such switch")
        if self.collect.group_min > self.collect.group_size:
            raise ValueError("collect.group_min is larger than collect.group_size")
        if self.train.min_groups > self.tasks.groups_per_step:
            raise ValueError("train.min_groups is larger than tasks.groups_per_step: no step could train")
        if self.train.max_rows and self.train.rows != "all":
            raise ValueError(f"train.max_rows is for train.rows all; {self.train.rows} makes one row anyway")
        if self.limits.max_call_tokens >= self.model.max_context_tokens:
            raise ValueError("limits.max_call_tokens leaves no room for a prompt in model.max_context_tokens")
        if self.train.advantage == "maxrl" and self.train.truncated == "penalise":
            raise ValueError(
                "train.advantage maxrl needs rewards >= 0, train.truncated penalise makes others"
            )
        if self.train.advantage == "maxrl" and self.train.overlong_tokens:
            raise ValueError("train.advantage maxrl needs rewards >= 0, train.overlong_tokens makes others")
        return self

    @model_validator(mode="after")
    def _decays(self) -> Self:
        steps = self.run.steps * self.train.epochs
        if self.train.decay != "constant" and not self.sft.run and steps <= self.train.warmup_steps:
            raise ValueError(
                f"train.decay {self.train.decay} has no step to fall in: run.steps x train.epochs = {steps}"
                f" are no more than train.warmup_steps = {self.train.warmup_steps}"
            )
        return self

    @model_validator(mode="after")
    def _publishes(self) -> Self:
        publish = self.engine.publish
        if self.engine.publish_lora != "adapter" and not self.policy.lora_rank:
            raise ValueError("engine.publish_lora means nothing without policy.lora_rank")
        if self.policy.lora_rank and publish in ("ipc", "nccl"):
            raise ValueError(f"engine.publish {publish} is for whole weights, not with policy.lora_rank")
        adapters = self.engine.kind == "vllm" and self.engine.publish_lora == "adapter"
        if self.policy.lora_rank and adapters and publish != "disk":
            raise ValueError(
                "engine.publish must be disk with policy.lora_rank: adapters travel as they are, unless"
                " engine.publish_lora is merged"
            )
        if self.policy.lora_rank and adapters and self.engine.publish_mode != "keep":
            raise ValueError("engine.publish_mode wait means nothing for adapters: no call changes weights")
        return self
