"""The public Python API of checks of insitu itself: `attack`, `conformance` and `gpu_check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from insitu.agents.recipe import Recipe
from insitu.api import ConfigSource, Overrides, Progress, blocking_form, resolve, viewing
from insitu_lab.attacks.choose import attack_tasks
from insitu_lab.attacks.run import AttackReport
from insitu_lab.conformance.checks import ConformanceResult
from insitu_lab.conformance.run import conform_all
from insitu_lab.gpu.run import GpuCheckOptions, check_gpu


async def conformance_async(
    agents: Mapping[str, Recipe],
    *,
    record: Path | None = None,
    progress: Progress = None,
) -> Mapping[str, ConformanceResult]:
    """Run agents against a scripted policy and check every captured token.

    `agents`: recipes by their name in the result; `record`: folder for the wire traffic. Raises SetupError.
    """
    with viewing(progress) as view:
        return await conform_all(agents, record, view)


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
    """Run attacks on the grader, each with an honest twin: on `tasks` tasks of yours where one is configured.

    `only`: numbers of attacks, as in `1,4,10-12`; `runner`: grading runners. Raises InsituError.
    """
    resolved = resolve(config, overrides, None, tables)
    own = config is not None or "tasks" in tables or any(name.startswith("tasks.") for name in overrides)
    with viewing(progress) as view:
        return await attack_tasks(resolved, view, only=only, runner=runner, tasks=tasks, own=own)


attack = blocking_form(attack_async)
conformance = blocking_form(conformance_async)


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
