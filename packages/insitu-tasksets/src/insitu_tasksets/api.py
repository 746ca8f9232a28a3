"""The public Python API of task sets: `list_tasks`, `show_task`, `export_tasks` and `validate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from insitu.api import ConfigSource, Overrides, Progress, blocking_form, resolve, viewing
from insitu_tasksets.export_tasks import export_rows
from insitu_tasksets.validate import ValidateOptions, chosen_of, items_of, validate_tasks
from insitu_tasksets.validate import list_tasks as _rows_of
from insitu_tasksets.validate import show_task as _shown


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


validate = blocking_form(validate_async)


def list_tasks(
    config: ConfigSource = None, *, overrides: Overrides = (), limit: int = 0, **tables: Any
) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]:
    """Return one row per task and the totals; `limit` 0 = all. Raises TaskError and ConfigError."""
    return _rows_of(resolve(config, overrides, None, tables), limit)


def show_task(
    task: str, config: ConfigSource = None, *, overrides: Overrides = (), tests: bool = False, **tables: Any
) -> Mapping[str, Any]:
    """Return what an agent gets for a task, with `tests` also the requirements. Raises TaskError."""
    return _shown(resolve(config, overrides, None, tables), task, tests=tests)


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
