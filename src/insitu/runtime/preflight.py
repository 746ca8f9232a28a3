"""Check everything about a run before anything is started or written, and report all problems at once.

    prepare(config) -> source, tasks, renderer, agent setup      or one error that lists every problem

The run then uses the objects found here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from insitu.chat.load import load_renderer
from insitu.chat.renderer import ChatRenderer, check_tools
from insitu.config import Arm, Config, model_folder
from insitu.config.base import split_address
from insitu.engines.factory import http_options, local_engine, secret_from_environment
from insitu.engines.http import checked_url
from insitu.engines.safetensors_file import check_complete
from insitu.engines.server_command import SERVERS, interpreter, place, present_gpus
from insitu.errors import ConfigError, EngineError, InsituError, TaskError
from insitu.gateway.listeners import check_port
from insitu.grading.reward import RewardFunction, reward_function
from insitu.grading.runners.find import runner_for
from insitu.grading.trust import below, trust_of
from insitu.registry import Kind, find
from insitu.runtime.agents import AgentSetup, check_listener, find_pools, limits_of, make_setups
from insitu.runtime.gateway import gateway_config
from insitu.runtime.prompt_sizes import FIRST_CALLS, OWN_FIRST_CALLS, PromptFit, foreign_words
from insitu.runtime.sandboxes import check_agents, check_programs, check_tasks
from insitu.runtime.trackers import check_trackers
from insitu.runtime.transcripts import transcript_reader
from insitu.storage.metrics import GROUPS
from insitu.tasks.base import TaskSource
from insitu.tasks.dataset import RowSource
from insitu.tasks.factory import action_of, open_source
from insitu.tasks.mix import TaskMix, TaskSet
from insitu.types import Oracle, Task

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
Chooser = Callable[[Config, TaskMix], Iterable[Task]]
"""Returns the tasks of a run, or examples of them, for the sandbox checks."""


class Checks:
    """Runs checks and collects their errors, so that the user gets all of them at once."""

    def __init__(self) -> None:
        self._errors: list[InsituError] = []

    def run(self, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return the result of the check; None if it failed."""
        try:
            return check(*args, **kwargs)
        except InsituError as error:
            if str(error) not in map(str, self._errors):
                self._errors.append(error)
            return None

    def close(self) -> None:
        """Raise the error, or one ConfigError that lists all of them."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            listed = "; ".join(f"({number}) {error}" for number, error in enumerate(self._errors, 1))
            raise ConfigError(f"{len(self._errors)} problems: {listed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Checked parts of a run; nothing is running yet."""

    source: TaskMix
    tasks: Sequence[Task]
    """Tasks chosen by the command."""
    renderer: ChatRenderer | None
    """None with engine.kind upstream: the provider renders."""
    setups: Mapping[str, AgentSetup]
    """Sandboxes and agent by arm."""

    @property
    def rules(self) -> ChatRenderer:
        """The renderer; raises ConfigError with engine.kind upstream."""
        if self.renderer is None:
            raise ConfigError("engine.kind upstream has no renderer: the provider renders prompts")
        return self.renderer


def prepare(
    config: Config,
    say: Callable[[str], None],
    choose: Chooser,
    further: Sequence[Callable[[Config], object]] = (),
) -> Prepared:
    """Check a configuration; raise InsituError that lists all problems.

    `say` gets lines for the user; `further`: additional checks of the command. A missing agent is installed
    once everything else has passed.
    """
    checks = Checks()
    if config.engine.kind != "upstream":
        checks.run(model_folder, config, say)
    for check in (_check_policy, _check_engine, check_trackers, check_listener, *further):
        checks.run(check, config)
    checks.run(gateway_config, config)
    for arm in config.arms.values():
        for check in (check_agents, action_of, _check_reward, _check_context):
            checks.run(_in_arm, check, arm)
    chosen = checks.run(prepare_tasks, config, say, choose)
    if chosen is not None:
        checks.run(_check_needs, *chosen)
    renderer = checks.run(check_rendering, config)
    pools = find_pools(config.arms, say, checks.run)
    checks.close()
    if chosen is None:  # close() has raised
        raise ConfigError("a check failed without an error")
    source, tasks = chosen
    if renderer is not None and (note := foreign_words(model_folder(config), tasks)):
        say(note)
    setups = make_setups(config.arms, pools, say)
    return Prepared(source=source, tasks=tasks, renderer=renderer, setups=setups)


def check_at_hand(config: Config, *, trains: bool, samples: bool = True) -> None:
    """Run the checks of a start that need no server, no download and only files that are here.

    A model folder or data set that is not here yet is passed over. `trains`: the command trains; `samples`:
    it runs agents. Raises InsituError that lists all problems.
    """
    checks = Checks()
    folder = Path(config.model.path)
    # A config.json alone is enough for the prediction of memory; the rest of the model comes later.
    shape_only = (folder / "config.json").exists() and not (folder / "tokenizer.json").exists()
    model = not config.model.path or (folder.exists() and not shape_only)
    if config.collect.run or not samples:
        if model:
            check_rendering(config)
        return
    checks.run(_check_policy, config)
    checks.run(gateway_config, config)
    if trains:
        checks.run(check_names, config)
    for kind, name in _own_code(config, trains=trains):
        checks.run(find, kind, name)
    for arm in config.arms.values():
        for each in (check_agents, action_of, _check_reward, *([_check_context] if model else [])):
            checks.run(_in_arm, each, arm)
    if model:
        checks.run(check_rendering, config)
    if all(
        one.source == "toy" or ":" in one.source or (one.path and Path(one.path).exists())
        for one in config.tasks
    ):
        chosen = checks.run(prepare_tasks, config, log.info, lambda _, mix: mix.examples())
        if chosen is not None:
            checks.run(_check_needs, *chosen)
    checks.close()


def _own_code(config: Config, *, trains: bool) -> list[tuple[Kind, str]]:
    """Return the engine, agents and losses that are named by the place of their code."""
    named: list[tuple[Kind, str]] = [("engines", config.engine.kind)]
    named += [("agents", arm.config.harness.agent) for arm in config.arms.values()]
    if trains:
        named += [("losses", config.train.loss), ("advantages", config.train.advantage)]
    return [(kind, name) for kind, name in named if ":" in name]


def _in_arm(check: Callable[[Config], object], arm: Arm) -> None:
    """Run the check of one arm; its errors name the task set or evaluation."""
    with _naming(arm):
        check(arm.config)


@contextmanager
def _naming(arm: Arm) -> Iterator[None]:
    """Prefix errors about a task set, or an evaluation with tables of its own, with its name."""
    try:
        yield
    except InsituError as error:
        if not arm.where:
            raise
        raise type(error)(f"{arm.where}: {error}") from error


def open_mix(config: Config, say: Callable[[str], None] = log.info) -> TaskMix:
    """Open every task set; sets with less trusted verdicts are rejected or skipped by `grade.min_trust`."""

    def opened(arm: Arm) -> TaskSet:
        own = arm.config
        with _naming(arm):
            source = open_source(own, limits_of(own), runner_for)
            filter_by_trust(own, source, say)
            if isinstance(source, RowSource) and source.live:
                say(f"{source.live} tasks of {source.name} are graded in their agent's sandbox: weak")
        agents = (part for part, one in config.arms.items() if one.agent and arm.holds(one))
        return TaskSet(arm=arm, source=source, agents=tuple(agents))

    evaluated = (arm for arm in config.arms.values() if arm.evaluation and not arm.agent)
    return TaskMix(list(map(opened, config.set_arms)), list(map(opened, evaluated)))


def prepare_tasks(
    config: Config, say: Callable[[str], None], choose: Chooser
) -> tuple[TaskMix, Sequence[Task]]:
    """Return the task sets and the chosen tasks, checked against the configured sandboxes."""
    mix = open_mix(config, say)
    tasks = list(choose(config, mix))
    for task in tasks:
        arm = mix.of(task).arm
        with _naming(arm):
            check_tasks(arm.config, [task])
    return mix, tasks


def _check_needs(mix: TaskMix, tasks: Sequence[Task]) -> None:
    """Raise ConfigError for a task whose checks call a program that its sandboxes lack.

    So too where its agent cannot act on its environment.
    """
    rewards: dict[str, RewardFunction | None] = {}
    for task in tasks:
        arm = mix.of(task).arm
        with _naming(arm):
            check_programs(arm.config, task, mix.oracle(task))
            name = arm.config.reward.function
            reward = rewards.setdefault(name, reward_function(arm.config, lambda rollout: ""))
            why = arm.config.offers_no_tools
            if why and reward and reward.opener and reward.opener(mix.row(task)) is not None:
                raise ConfigError(f"task {task.id} is an environment that agents act on by tools: {why}")


def _check_reward(config: Config) -> None:
    """Raise ConfigError if the reward function cannot be loaded."""
    reward_function(config, transcript_reader(config))


def _check_context(config: Config) -> None:
    """Raise ConfigError if a shipped agent's first prompt exceeds the model's context."""
    agent, context = config.harness.agent, config.model.max_context_tokens
    measured = agent in FIRST_CALLS or agent in OWN_FIRST_CALLS
    if config.engine.kind == "upstream" or config.harness.is_command or not measured:
        return
    size = PromptFit(model_folder(config), context).tokens(agent)
    if size >= context:
        raise ConfigError(
            f"harness.agent {agent}: its first prompt has about {size:,} tokens, and"
            f" model.max_context_tokens is {context:,}"
        )


def _check_policy(config: Config) -> None:
    """Raise ConfigError if the engine cannot sample with [policy], e.g. sft.run in another command's file."""
    if config.policy_trouble:
        raise ConfigError(config.policy_trouble)


def renderer_of(config: Config) -> ChatRenderer:
    return load_renderer(model_folder(config), config.model.renderer)


def check_rendering(config: Config) -> ChatRenderer | None:
    """Return the renderer, None with engine.kind upstream.

    Raises RenderError if the folder has none, ConfigError if an agent offers tools and the model takes none.
    """
    if config.engine.kind == "upstream":
        return None
    renderer = renderer_of(config)
    for arm in () if config.sft.run else config.arms.values():
        harness = arm.config.harness
        call = FIRST_CALLS.get(harness.agent) or OWN_FIRST_CALLS.get(harness.agent)
        if call is not None and call.tools and not harness.is_command:
            with _naming(arm):
                check_tools(renderer.caps, f"harness.agent {harness.agent} offers tools: ", ConfigError)
    return renderer


def _check_engine(config: Config) -> None:
    """Check addresses, keys and folders of [engine]; contacts no server. Raise ConfigError or SetupError."""
    table = config.engine
    if table.kind in SERVERS:
        http_options(config)
        if table.launch:
            interpreter(config)
            place(config, present_gpus())
        if table.publish_dir:
            _check_writable(Path(table.publish_dir), "engine.publish_dir")
    elif table.kind == "upstream":
        checked_url(table.url, "engine.urls")
        secret_from_environment(table.key_env)
    elif table.kind == "tinker":
        secret_from_environment(table.key_env)
        if table.url:
            checked_url(table.url, "engine.urls")
    elif table.kind == "external":
        secret_from_environment(table.key_env)
        check_port("engine.listen", *split_address(table.listen))


def check_names(config: Config) -> None:
    """Raise ConfigError for a task set or agent whose metrics would have the names of others."""
    for table in config.tasks:
        if table.name in GROUPS:
            raise ConfigError(f"tasks.{table.name}.name: metrics of a run have this name; choose another")
    if taken := {arm.label for arm in config.agent_arms} & {*GROUPS}:
        raise ConfigError(f"tasks.agents: metrics of a run have the name {min(taken)}; name the task set")


def check_local_engine(config: Config) -> None:
    """Raise ConfigError if the engine that the run starts lacks packages or weights."""
    if config.engine.in_learner:
        local_engine(config).check(config)
        check_weights(config)


def check_weights(config: Config) -> None:
    """Raise ConfigError if the model has no weights here; those of a service are its own."""
    if "tinker" not in (config.policy.kind, config.engine.kind):
        check_model(model_folder(config), "model.path")


def check_model(folder: Path, key: str) -> None:
    """Raise ConfigError if a folder holds no complete model; `key` names it in errors."""
    if not (folder / "config.json").exists():
        raise ConfigError(f"{key}: {folder} is not a model folder: it has no config.json")
    if not [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]:
        raise ConfigError(f"{key}: {folder} has no weights: no *.safetensors")
    try:
        check_complete(folder)
    except EngineError as error:
        raise ConfigError(f"{key}: {error}") from error


def _check_writable(folder: Path, key: str) -> None:
    """Raise ConfigError if a folder cannot be created or written to; creates nothing."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}: {folder} is not writable")


def filter_by_trust(config: Config, source: TaskSource, say: Callable[[str], None]) -> None:
    """Skip tasks below `grade.min_trust`, and pass a line to `say` if there are any.

    Raises TaskError if they must not be skipped, or if no task remains.
    """
    least = config.grade.min_trust
    if least == "weak":
        return
    if not isinstance(source, RowSource):
        for task in source.tasks("train", 0, 1):  # generated tasks are all of one kind
            if why := _distrust_reason(config, task, source.oracle(task)):
                raise TaskError(f"grade.min_trust = {least}: {why}")
        return
    kept: set[str] = set()
    reasons: list[str] = []
    for item in source.used():
        if why := _distrust_reason(config, item.task, item.oracle):
            reasons.append(why)
        else:
            kept.add(item.task.content_hash)
    if not reasons:
        return
    line = f"grade.min_trust = {least}: {len(reasons)} of {len(reasons) + len(kept)} tasks are less trusted"
    if config.task_set.on_invalid_row == "refuse" or not kept:
        more = "; set tasks.on_invalid_row=skip to skip them" if kept else ""
        raise TaskError(f"{line}, the first: {reasons[0]}{more}")
    source.keep(frozenset(kept))
    say(f"{line} and are skipped, the first: {reasons[0]}")


def _distrust_reason(config: Config, task: Task, oracle: Oracle) -> str:
    trust, why = trust_of(task, oracle)
    return f"task {task.id}, {trust}: {why}" if below(trust, config.grade.min_trust) else ""
