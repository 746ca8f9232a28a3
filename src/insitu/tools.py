"""The public API beside runs: grade, agents, tasks, the machine, recover sessions.

The blocking forms also work inside a running event loop, as those of `insitu.api`; nothing is printed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from insitu.agents.harness import check_start
from insitu.agents.install import install as install_recipe
from insitu.agents.recipe import Recipe, parse_agent
from insitu.api import ConfigSource, Overrides, Progress, blocking, blocking_form, resolve, viewing
from insitu.doctor import MachineCheck, examine
from insitu.errors import ConfigError, SetupError
from insitu.evaluate.export_tasks import export_rows
from insitu.evaluate.regrade import Regraded, regrade_run
from insitu.evaluate.validate import ValidateOptions, chosen_of, items_of, validate_tasks
from insitu.evaluate.validate import list_tasks as tasks_of
from insitu.evaluate.validate import show_task as task_of
from insitu.progress.base import View
from insitu.registry import find
from insitu.sandbox.local import LocalBackend
from insitu.serving.served import recover_run

recover = recover_run


async def grade_async(run: Path | str, *, write: bool = False, progress: Progress = None) -> Regraded:
    """Grade a run's stored rollouts again from their files and return what differs.

    `write` stores new verdicts of rollouts that were not trained on. Raises InsituError.
    """
    with viewing(progress) as view:
        return await regrade_run(Path(run), view, write=write)


async def validate_async(
    config: ConfigSource = None,
    *,
    overrides: Overrides = (),
    repeats: int = 3,
    limit: int = 0,
    ids: Sequence[str] = (),
    allowlist: Path | None = None,
    progress: Progress = None,
    **tables: Any,
) -> Mapping[str, Any]:
    """Check that each task's base fails and its solution passes, `repeats` times; return counts and failures.

    Findings are kept in `allowlist`, else in `tasks.allowlist` if that is set. Raises InsituError.
    """
    options = ValidateOptions(repeats=repeats, limit=limit, ids=ids, allowlist=allowlist)
    with viewing(progress) as view:
        return await validate_tasks(resolve(config, overrides, None, tables), options, view)


async def install_async(
    agents: Iterable[str | Recipe], *, progress: Progress = None
) -> Mapping[str, Path | None]:
    """Install agents into the cache and start each once; return the folders by `name version`.

    `agents`: recipes, or NAME, NAME@VERSION, module:attribute or a TOML file with [harness]. An agent without
    packages has no folder. Raises ConfigError and SetupError, for instance for a program that does not start.
    """
    with viewing(progress) as view:
        return await _install(agents, view)


async def _install(agents: Iterable[str | Recipe], view: View) -> Mapping[str, Path | None]:
    recipes = [parse_agent(agent) if isinstance(agent, str) else agent for agent in agents]
    folders: dict[str, Path | None] = {}
    backend = None
    try:
        backend = LocalBackend()
    except SetupError as error:
        view.note(f"the agents are not started: {error}")
    view.stage("installing agents", len(recipes))
    for done, recipe in enumerate(recipes, 1):
        installed = await asyncio.to_thread(install_recipe, recipe, view.note)
        if installed.folder is not None and backend is not None:
            await check_start(recipe, installed, backend)
        folders[f"{recipe.name} {recipe.version}"] = installed.folder
        view.advance(done)
    return folders


grade = blocking_form(grade_async)
validate = blocking_form(validate_async)
install = blocking_form(install_async)


def check_machine() -> tuple[MachineCheck, ...]:
    """Check this machine for insitu's requirements, in the order in which to fix problems."""
    return tuple(examine())


def check_nodes(config: ConfigSource) -> tuple[MachineCheck, ...]:
    """Start the nodes of [fleet], each with an agent in a sandbox, and end them again.

    Raises ConfigError without a fleet, and SetupError when its machines cannot be found.
    """
    resolved = resolve(config, (), None, {})
    if resolved.fleet.kind == "none":
        raise ConfigError("fleet.kind is none: there is nothing to check beyond this machine")
    found = blocking(lambda: find("fleets", resolved.fleet.kind).check(resolved))
    return tuple(MachineCheck(name=name, found=works, text=text) for name, text, works in found)


def list_tasks(
    config: ConfigSource = None, *, overrides: Overrides = (), limit: int = 0, **tables: Any
) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]:
    """Return one row per task and the totals; `limit` 0 = all. Raises TaskError and ConfigError."""
    return tasks_of(resolve(config, overrides, None, tables), limit)


def show_task(
    task: str, config: ConfigSource = None, *, overrides: Overrides = (), tests: bool = False, **tables: Any
) -> Mapping[str, Any]:
    """Return what an agent gets for a task, with `tests` also the requirements. Raises TaskError."""
    return task_of(resolve(config, overrides, None, tables), task, tests=tests)


def export_tasks(
    config: ConfigSource = None,
    *,
    overrides: Overrides = (),
    limit: int = 0,
    ids: Sequence[str] = (),
    **tables: Any,
) -> Iterator[bytes]:
    """Yield tasks as lines of the format `jsonl`. Raises TaskError for one that it cannot express."""
    items, _ = items_of(resolve(config, overrides, None, tables), 0 if ids else limit)
    return export_rows(chosen_of(items, ids))
