"""The public API beside runs: replay, grade, track, attack, agents, tasks, the machine, recover sessions.

The blocking forms also work inside a running event loop, as those of `insitu.api`; nothing is printed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from insitu.agents.harness import check_start
from insitu.agents.install import install as install_recipe
from insitu.agents.recipe import Recipe, parse_agent
from insitu.api import ConfigSource, Overrides, Progress, Run, blocking, resolve, viewing
from insitu.bridges.export import RolloutExport as RolloutExport
from insitu.bridges.export import steps_of as steps_of
from insitu.bridges.export import write_export
from insitu.bridges.imports import import_folder
from insitu.bridges.model_export import ModelExport
from insitu.bridges.model_export import export_model as write_model_export
from insitu.bridges.push import PushOptions
from insitu.bridges.push import push as push_folder
from insitu.deploy.folder import Deployment as Deployment
from insitu.deploy.folder import DeployOptions as DeployOptions
from insitu.deploy.folder import deploy as deploy
from insitu.doctor import MachineCheck, examine
from insitu.doctor import report as machine_report
from insitu.errors import ConfigError, SetupError
from insitu.evaluate.regrade import Regraded, regrade_run, report
from insitu.progress.base import View
from insitu.runtime.fleet.check import check_fleet
from insitu.sandbox.local import LocalBackend
from insitu.serving.served import recover_run
from insitu.suites.attacks.choose import AttackOptions as AttackOptions
from insitu.suites.attacks.choose import attack_tasks
from insitu.suites.attacks.run import AttackReport
from insitu.suites.conformance.checks import ConformanceResult
from insitu.suites.conformance.run import conform_all
from insitu.suites.gpu.run import GpuCheckOptions, check_gpu
from insitu.suites.gpu.slices import SLICES
from insitu.suites.tasks.export import export_rows
from insitu.suites.tasks.validate import ValidateOptions as ValidateOptions
from insitu.suites.tasks.validate import chosen_of, items_of, validate_tasks
from insitu.suites.tasks.validate import list_tasks as tasks_of
from insitu.suites.tasks.validate import show_task as task_of
from insitu.tracking.start import track_run
from insitu.training.replay import replay_run

recover = recover_run
doctor_report = machine_report
export_with = write_export
grade_report = report
grade_with = regrade_run
replay_with = replay_run
conformance_with = conform_all
attack_with = attack_tasks
validate_with = validate_tasks


async def replay_async(run: Path | str, *, progress: Progress = None) -> Mapping[str, Any]:
    """Repeat a stored run's training; the coroutine form of `replay`."""
    with viewing(progress) as view:
        return await replay_run(Path(run), view)


def replay(run: Path | str, *, progress: Progress = None) -> Mapping[str, Any]:
    """Repeat a stored run's training from its tokens and compare every step's weights bit for bit.

    Returns `identical`, `steps`, `differing_steps` and `weights`. Raises InsituError.
    """
    return blocking(lambda: replay_async(run, progress=progress))


async def grade_async(run: Path | str, *, write: bool = False, progress: Progress = None) -> Regraded:
    """Grade a run's stored rollouts again; the coroutine form of `grade`."""
    with viewing(progress) as view:
        return await regrade_run(Path(run), view, write=write)


def grade(run: Path | str, *, write: bool = False) -> Regraded:
    """Grade a run's stored rollouts again from their files and return what differs.

    `write` stores new verdicts of rollouts that were not trained on. Raises InsituError.
    """
    return blocking(lambda: grade_async(run, write=write))


def track(run: Path | str, *, to: Sequence[str] = ()) -> Mapping[str, int]:
    """Send a run's metrics to trackers, and return the number of lines sent to each.

    `to`: names or paths of trackers (default: the run's `track.to`). What was sent earlier is not sent again;
    a run under way is followed to its end. Raises InsituError.
    """
    return track_run(Path(run), to)


async def conformance_async(
    agents: Mapping[str, Recipe],
    *,
    record: Path | None = None,
    progress: Progress = None,
) -> Mapping[str, ConformanceResult]:
    """Check agents token by token; the coroutine form of `conformance`."""
    with viewing(progress) as view:
        return await conform_all(agents, record, view)


def conformance(
    agents: Mapping[str, Recipe], *, record: Path | None = None
) -> Mapping[str, ConformanceResult]:
    """Run agents against a scripted policy and check every captured token.

    `agents`: recipes by their name in the result; `record`: folder for the wire traffic. Raises SetupError.
    """
    return blocking(lambda: conformance_async(agents, record=record))


async def attack_async(
    config: ConfigSource = None,
    *,
    overrides: Overrides = (),
    only: str = "",
    runner: str = "",
    tasks: int = 3,
    progress: Progress = None,
    **tables: Any,
) -> AttackReport:
    """Attack the grader; the coroutine form of `attack`."""
    resolved = resolve(config, overrides, None, tables)
    own = config is not None or "tasks" in tables or any(name.startswith("tasks.") for name in overrides)
    options = AttackOptions(only=only, runner=runner, tasks=tasks, own=own)
    with viewing(progress) as view:
        return await attack_tasks(resolved, options, view)


def attack(
    config: ConfigSource = None,
    *,
    overrides: Overrides = (),
    only: str = "",
    runner: str = "",
    tasks: int = 3,
    **tables: Any,
) -> AttackReport:
    """Run attacks on the grader, each with an honest twin: on `tasks` tasks of yours where one is configured.

    `only`: numbers of attacks, as in `1,4,10-12`; `runner`: grading runners. Raises InsituError.
    """
    return blocking(
        lambda: attack_async(config, overrides=overrides, only=only, runner=runner, tasks=tasks, **tables)
    )


async def validate_async(
    config: ConfigSource = None,
    *,
    overrides: Overrides = (),
    options: ValidateOptions | None = None,
    progress: Progress = None,
    **tables: Any,
) -> Mapping[str, Any]:
    """Validate tasks; the coroutine form of `validate`."""
    with viewing(progress) as view:
        return await validate_tasks(
            resolve(config, overrides, None, tables), options or ValidateOptions(), view
        )


def validate(
    config: ConfigSource = None,
    *,
    overrides: Overrides = (),
    repeats: int = 3,
    limit: int = 0,
    ids: Sequence[str] = (),
    allowlist: Path | None = None,
    **tables: Any,
) -> Mapping[str, Any]:
    """Check that each task's base fails and its solution passes, `repeats` times; return counts and failures.

    Findings are kept in `allowlist`, else in `tasks.allowlist` if that is set. Raises InsituError.
    """
    options = ValidateOptions(repeats=repeats, limit=limit, ids=ids, allowlist=allowlist)
    return blocking(lambda: validate_async(config, overrides=overrides, options=options, **tables))


async def install_with(agents: Iterable[str | Recipe], view: View) -> Mapping[str, Path | None]:
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


async def install_async(
    agents: Iterable[str | Recipe], *, progress: Progress = None
) -> Mapping[str, Path | None]:
    """Install agents; the coroutine form of `install`."""
    with viewing(progress) as view:
        return await install_with(agents, view)


def install(agents: Iterable[str | Recipe], *, progress: Progress = None) -> Mapping[str, Path | None]:
    """Install agents into the cache and start each once; return the folders by `name version`.

    `agents`: recipes, or NAME, NAME@VERSION, module:attribute or a TOML file with [harness]. An agent without
    packages has no folder. Raises ConfigError and SetupError, for instance for a program that does not start.
    """
    return blocking(lambda: install_async(agents, progress=progress))


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
    found = blocking(lambda: check_fleet(resolved))
    return tuple(MachineCheck(name=name, found=works, text=text) for name, text, works in found)


def gpu_slices() -> Mapping[str, str]:
    """Return name -> description of the slices of `gpu_check`."""
    return {one.name: one.text for one in SLICES}


def gpu_check(
    slices: Sequence[str] = (),
    *,
    out: Path | str = "gpu-check",
    deadline_s: float = 540.0,
    rehearse: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Mapping[str, Any]:
    """Run the checks of a machine with a GPU and write a report per slice into `out`.

    Returns `{"slices": {name: {"ok", "seconds", "skipped"}}}`; `ok` is None where nothing ran. `rehearse`
    runs toy sizes on the CPU. Raises ConfigError for an unknown slice.
    """
    options = GpuCheckOptions(out=Path(out), slices=slices, deadline_s=deadline_s, rehearse=rehearse)
    return check_gpu(options, progress or (lambda line: None))


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


def export_run(
    run: Path | str,
    out: Path | str,
    *,
    to: str = "parquet",
    phase: str = "",
    steps: tuple[int, int | None] = (0, None),
    check: bool = False,
    send: str = "",
) -> Mapping[str, Any]:
    """Write a run's rollouts to the new folder `out` in the form `to`, and return counts and account.

    `steps`: the first step, and the one after the last (None = all that follow). `check` reads the export
    back and compares every value; `send` is the URL of a receiver for `otlp`. Raises InsituError, and OSError
    when the folder cannot be written.
    """
    return write_export(
        RolloutExport(run=Path(run), to=to, out=Path(out), phase=phase, steps=steps, check=check, send=send)
    )


def export_model(
    run: Path | str, out: Path | str, *, checkpoint: str | int = "last", to: str = "hf", dtype: str = "auto"
) -> Mapping[str, Any]:
    """Write a checkpoint of a run to the new folder `out`, with a card of the run's facts.

    `checkpoint`: `best` by held-out results, `last`, or the number of a step. `to`: `hf` = whole weights that
    transformers and vLLM load, adapters merged; `peft` = adapters. `dtype`: `float32`, `bfloat16`, or `auto`
    = that of the start model. Raises InsituError.
    """
    return write_model_export(
        ModelExport(run=Path(run), out=Path(out), checkpoint=str(checkpoint), to=to, dtype=dtype)
    )


def push(what: Path | str, to: str, *, public: bool = False, dry_run: bool = False) -> Mapping[str, Any]:
    """Upload a checkpoint as a model, or the rollouts of a run as a data set, to `hub:ORG/NAME`.

    Returns `repo`, `kind`, `private`, `files`, `left_out` (rollouts that hold what looks like a secret) and
    `url`. Private unless `public`; `dry_run` only returns what would be uploaded. Raises InsituError.
    """
    options = PushOptions(what=Path(what), to=to, public=public, dry_run=dry_run)
    return blocking(lambda: push_folder(options))


def import_run(folder: Path | str, out: Path | str | None = None, overrides: Sequence[str] = ()) -> Run:
    """Make a run directory (default: a new one in runs/) from an export or a downloaded push; return it.

    An export names models and files without their folders: `overrides` give them, as "model.path=FOLDER".
    Raises InsituError.
    """
    return Run(import_folder(Path(folder), None if out is None else Path(out), overrides))


__all__ = [
    "attack",
    "attack_async",
    "check_machine",
    "conformance",
    "conformance_async",
    "export_model",
    "export_run",
    "export_tasks",
    "gpu_check",
    "gpu_slices",
    "grade",
    "grade_async",
    "import_run",
    "install",
    "install_async",
    "list_tasks",
    "push",
    "recover",
    "replay",
    "replay_async",
    "show_task",
    "track",
    "validate",
    "validate_async",
]
