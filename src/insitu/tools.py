"""The public API beside runs: grade, agents, the machine, recover sessions.

The blocking forms also work inside a running event loop, as those of `insitu.api`; nothing is printed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

from insitu.agents.harness import check_start
from insitu.agents.install import install as install_recipe
from insitu.agents.recipe import Recipe, parse_agent
from insitu.api import ConfigSource, Progress, blocking, blocking_form, resolve, viewing
from insitu.doctor import MachineCheck, examine
from insitu.errors import ConfigError, SetupError
from insitu.evaluate.regrade import Regraded, regrade_run
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
