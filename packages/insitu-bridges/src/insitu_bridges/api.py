"""The public Python API of exports: `export_run`, `export_model`, `import_run` and `push`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from insitu.api import Run
from insitu_bridges.export import RolloutExport, write_export
from insitu_bridges.imports import import_folder
from insitu_bridges.model_export import export_model as export_model
from insitu_bridges.push import push as push


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


def import_run(folder: Path | str, out: Path | str | None = None, overrides: Sequence[str] = ()) -> Run:
    """Make a run directory (default: a new one in runs/) from an export or a downloaded push; return it.

    An export names models and files without their folders: `overrides` give them, as "model.path=FOLDER".
    Raises InsituError.
    """
    return Run(import_folder(Path(folder), None if out is None else Path(out), overrides))
