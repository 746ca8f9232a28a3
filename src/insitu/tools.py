"""The public API beside runs: replay, grade again, attack, check agents, validate tasks, recover sessions.

The blocking forms also work inside a running event loop, as those of `insitu.api`; nothing is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from insitu.agents.recipe import Recipe
from insitu.api import CallbackView, ConfigSource, Overrides, RunEvent, blocking, resolve
from insitu.evaluate.regrade import Regraded, regrade_run, report
from insitu.serving.served import recover_run
from insitu.suites.attacks.choose import AttackOptions as AttackOptions
from insitu.suites.attacks.choose import attack_tasks
from insitu.suites.attacks.run import AttackReport
from insitu.suites.conformance.checks import ConformanceResult
from insitu.suites.conformance.run import conform_all
from insitu.suites.tasks.validate import ValidateOptions, validate_tasks
from insitu.training.replay import replay_run

recover = recover_run
grade_report = report
grade_with = regrade_run
replay_with = replay_run
conformance_with = conform_all
attack_with = attack_tasks
validate_with = validate_tasks


async def replay_async(
    run: Path | str, *, progress: Callable[[RunEvent], None] | None = None
) -> Mapping[str, Any]:
    """Repeat a stored run's training; the coroutine form of `replay`."""
    return await replay_run(Path(run), CallbackView(progress))


def replay(run: Path | str, *, progress: Callable[[RunEvent], None] | None = None) -> Mapping[str, Any]:
    """Repeat a stored run's training from its tokens and compare every step's weights bit for bit.

    Returns `identical`, `steps`, `differing_steps` and `weights`. Raises InsituError.
    """
    return blocking(lambda: replay_async(run, progress=progress))


async def grade_async(
    run: Path | str, *, write: bool = False, progress: Callable[[RunEvent], None] | None = None
) -> Regraded:
    """Grade a run's stored rollouts again; the coroutine form of `grade`."""
    return await regrade_run(Path(run), CallbackView(progress), write=write)


def grade(run: Path | str, *, write: bool = False) -> Regraded:
    """Grade a run's stored rollouts again from their files and return what differs.

    `write` stores new verdicts of rollouts that were not trained on. Raises InsituError.
    """
    return blocking(lambda: grade_async(run, write=write))


async def conformance_async(
    agents: Mapping[str, Recipe],
    *,
    record: Path | None = None,
    progress: Callable[[RunEvent], None] | None = None,
) -> Mapping[str, ConformanceResult]:
    """Check agents token by token; the coroutine form of `conformance`."""
    return await conform_all(agents, record, CallbackView(progress))


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
    progress: Callable[[RunEvent], None] | None = None,
    **tables: Any,
) -> AttackReport:
    """Attack the grader; the coroutine form of `attack`."""
    resolved = resolve(config, overrides, None, tables)
    own = config is not None or "tasks" in tables or any(name.startswith("tasks.") for name in overrides)
    options = AttackOptions(only=only, runner=runner, tasks=tasks, own=own)
    return await attack_tasks(resolved, options, CallbackView(progress))


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
    progress: Callable[[RunEvent], None] | None = None,
    **tables: Any,
) -> Mapping[str, Any]:
    """Validate tasks; the coroutine form of `validate`."""
    return await validate_tasks(
        resolve(config, overrides, None, tables), options or ValidateOptions(), CallbackView(progress)
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

    Findings are kept in `allowlist`. Raises InsituError.
    """
    options = ValidateOptions(repeats=repeats, limit=limit, ids=ids, allowlist=allowlist)
    return blocking(lambda: validate_async(config, overrides=overrides, options=options, **tables))


__all__ = [
    "attack",
    "attack_async",
    "conformance",
    "conformance_async",
    "grade",
    "grade_async",
    "recover",
    "replay",
    "replay_async",
    "validate",
    "validate_async",
]
