"""Everything about a run that can be checked before anything is started or written, all at once.

    prepare(config) -> source, tasks, family, means      or one error that names every problem

What it finds (the task source, the model's rules, sandboxes, the agent) is what the run then uses. Called by
training/loop.py and evaluate/run.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from insitu.chat.load import load_renderer
from insitu.chat.renderer import ChatRenderer
from insitu.config import Config, model_folder
from insitu.engines.external_http import split_address
from insitu.engines.factory import http_options, secret_from_environment
from insitu.engines.http import checked_url
from insitu.errors import ConfigError, InsituError
from insitu.gateway.listeners import check_port
from insitu.grading.grader import runner_for
from insitu.runtime.agents import Means, find_pool, limits_of, make_harness
from insitu.runtime.sandboxes import check_agents, check_tasks
from insitu.runtime.trust_filter import hold_strength
from insitu.runtime.upstream import upstream_options
from insitu.tasks.base import TaskSource
from insitu.tasks.factory import action_of, open_source
from insitu.types import Task

P = ParamSpec("P")
T = TypeVar("T")
Chooser = Callable[[Config, TaskSource], Iterable[Task]]
"""The tasks of a run, or examples of them, for the checks of sandboxes."""
SERVERS = ("vllm", "sglang")


class Checks:
    """Runs checks and keeps their errors, so that a person gets all of them from one start."""

    def __init__(self) -> None:
        self._errors: list[InsituError] = []

    def run(self, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What the check returns; None when it failed."""
        try:
            return check(*args, **kwargs)
        except InsituError as error:
            if str(error) not in map(str, self._errors):
                self._errors.append(error)
            return None

    def close(self) -> None:
        """Raise the error, or one ConfigError that holds all of them."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            listed = "; ".join(f"({number}) {error}" for number, error in enumerate(self._errors, 1))
            raise ConfigError(f"{len(self._errors)} problems: {listed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a run is made of, checked; nothing is running yet."""

    source: TaskSource
    tasks: Sequence[Task]
    """Those that the verb chose."""
    renderer: ChatRenderer | None
    """None with a provider, which has its own rules."""
    means: Means

    @property
    def rules(self) -> ChatRenderer:
        """Raises ConfigError with a provider."""
        if self.renderer is None:
            raise ConfigError("engine.kind upstream: no token rules are known")
        return self.renderer


def prepare(
    config: Config,
    say: Callable[[str], None],
    choose: Chooser,
    further: Sequence[Callable[[Config], object]] = (),
) -> Prepared:
    """Check a configuration. `say` gets lines for the person; `further`: checks of the verb's own. Raises
    InsituError; a missing agent is installed once nothing else is wrong."""
    checks = Checks()
    for check in (check_policy, check_agents, check_engine, action_of, *further):
        checks.run(check, config)
    chosen = checks.run(prepare_tasks, config, say, choose)
    renderer = None if config.engine.kind == "upstream" else checks.run(renderer_of, config)
    pool = find_pool(config, say, checks.run)
    checks.close()
    if chosen is None or pool is None:  # close() has raised
        raise ConfigError("a check failed without an error")
    source, tasks = chosen
    means = Means(pool=pool, harness=make_harness(config, pool))
    return Prepared(source=source, tasks=tasks, renderer=renderer, means=means)


def prepare_tasks(
    config: Config, say: Callable[[str], None], choose: Chooser
) -> tuple[TaskSource, Sequence[Task]]:
    """The source and the chosen tasks, which have their place in the sandboxes of the configuration."""
    source = open_source(config, limits_of(config), runner_for)
    hold_strength(config, source, say)
    tasks = list(choose(config, source))
    check_tasks(config, tasks)
    return source, tasks


def check_policy(config: Config) -> None:
    """Raises ConfigError for [policy] that the engine cannot sample with: sft.run in another verb's file."""
    if config.policy_trouble:
        raise ConfigError(config.policy_trouble)


def renderer_of(config: Config) -> ChatRenderer:
    return load_renderer(model_folder(config), config.model.renderer)


def check_engine(config: Config) -> None:
    """Addresses, keys and folders of [engine]; asks no server. Raises ConfigError, SetupError."""
    table = config.engine
    if table.kind in SERVERS:
        http_options(config)
        if table.publish_dir:
            check_writable(Path(table.publish_dir), "engine.publish_dir")
    elif table.kind == "upstream":
        checked_url(table.url, "engine.url")
        upstream_options(config)
    elif table.kind == "external":
        secret_from_environment(table.key_env)
        host, port = split_address(table.listen, "engine.listen")
        check_port(port, host)


def check_weights(config: Config) -> None:
    """Raises ConfigError where a learner would find no weights in the model's folder."""
    _check_model(model_folder(config), "model.path")


def check_reference(config: Config) -> None:
    """The same for the reference policy."""
    if config.train.reference:
        _check_model(Path(config.train.reference), "train.reference")


def _check_model(folder: Path, key: str) -> None:
    if not (folder / "config.json").exists():
        raise ConfigError(f"{key}: {folder} is not a model folder: it has no config.json")
    if not [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]:
        raise ConfigError(f"{key}: {folder} has no weights: no *.safetensors")


def check_writable(folder: Path, key: str) -> None:
    """Raises ConfigError for a folder that cannot be made or written to. Makes nothing."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}: {folder} cannot be written to")
