"""The configured task source."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from insitu.config import Config
from insitu.config.base import HUB
from insitu.errors import ConfigError, TaskError, boundary, user_code
from insitu.registry import find
from insitu.tasks.allowlist import read_allowlist
from insitu.tasks.base import REWARD_ONLY, TaskSource
from insitu.tasks.dataset import Format, LoadOptions, RowCheck, RowSource
from insitu.tasks.objects import ObjectFormat, StreamSource
from insitu.tasks.row_files import split_selection
from insitu.tasks.toy import ToySource
from insitu.tasks.user_functions import UserFunction, load_function
from insitu.types import Limits, Oracle, Task

log = logging.getLogger(__name__)


def open_source(config: Config, limits: Limits, check: RowCheck) -> TaskSource:
    """Open the configured source; raise TaskError or ConfigError.

    A data set or list is read whole. `check` (grading.grader.runner_for) rejects tasks that their runner
    cannot grade.
    """
    table = config.task_set
    found = find("tasks", table.source)
    if found is ToySource:
        return ToySource(limits, seed=config.run.seed, kinds=table.kinds)
    found = _called(found)

    def check_tested(task: Task, oracle: Oracle) -> object:
        return None if task.grading.runner in REWARD_ONLY else check(task, oracle)

    if isinstance(found, Format):
        if not table.path:
            raise ConfigError(f"tasks.source {table.source} needs tasks.path, the data set")
        return _rows(config, found, table.path, limits, check_tested)
    if isinstance(found, TaskSource):
        return found
    if isinstance(found, Iterator):
        return StreamSource(found, _options(config, limits), check_tested, eval_share=table.eval_share)
    if isinstance(found, Iterable) and not isinstance(found, str | bytes | dict):
        return _rows(config, ObjectFormat(list(found)), "tasks.source", limits, check_tested)
    raise ConfigError(
        f"tasks.source: {table.source} is a {type(found).__name__}, not a TaskSource, a Format or an"
        " iterable of tasks"
    )


def open_rows(config: Config, limits: Limits, check: RowCheck) -> RowSource:
    """Open the configured data set or list; raise ConfigError for another kind of source."""
    source = open_source(config, limits, check)
    if not isinstance(source, RowSource):
        raise ConfigError(f"tasks.source {config.task_set.source} is not a data set")
    return source


def format_of(name: str) -> Format:
    """Return a built-in format."""
    found: Format = _called(find("tasks", name))
    return found


def action_of(config: Config) -> UserFunction | None:
    """Return the user's function from a reply to files, if one is configured; raise ConfigError."""
    path = config.task_set.parse_answer
    if not path:
        return None
    return UserFunction(
        f"tasks.parse_answer {path}", load_function(path), max_concurrent=config.harness.workers
    )


def _called(found: Any) -> Any:
    """Return the result of a function or class without arguments, else the object itself."""
    instance = isinstance(found, Format | TaskSource) and not isinstance(found, type)
    if instance or not callable(found):
        return found
    with user_code(TaskError, f"tasks.source: {found!r}"):
        return found()


def _options(config: Config, limits: Limits) -> LoadOptions:
    table, sandbox = config.task_set, config.sandbox
    limited = set(sandbox.kinds) <= {"local", "docker"}
    return LoadOptions(
        limits=limits,
        assets=Path(table.assets) if table.assets else None,
        images=_images(Path(table.images)) if table.images else {},
        checker=table.checker,
        memory_mb=sandbox.memory_mb if limited else 0,
        disk_mb=sandbox.disk_mb if limited else 0,
        untested=bool(config.reward.function),
    )


def _rows(config: Config, form: Format, path: str, limits: Limits, check: RowCheck) -> RowSource:
    table = config.task_set
    path, rows = split_selection(path)
    if path.startswith(HUB):
        path = find("parts", "hub_rows")(path, log.info)
    source = RowSource(
        table.source,
        form,
        Path(path),
        _options(config, limits),
        eval_share=table.eval_share,
        seed=config.run.seed,
        on_invalid_row=table.on_invalid_row,
        check=check,
        transform=load_function(table.transform) if table.transform else None,
        rows=rows,
    )
    if table.allowlist:
        source.keep(read_allowlist(Path(table.allowlist)).passed())
    return source


def _images(path: Path) -> dict[str, str]:
    """Return the content of tasks.images; raise ConfigError."""
    with boundary(ConfigError, f"tasks.images: cannot read {path}"):
        value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ConfigError(f"tasks.images: {path} is not a JSON object of image references")
    return value
