"""The public Python API of exports: `export_run`, `export_model`, `import_run` and `push`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from insitu.api import Run, blocking
from insitu_bridges.export import RolloutExport, write_export
from insitu_bridges.imports import import_folder
from insitu_bridges.model_export import ModelExport
from insitu_bridges.model_export import export_model as write_model_export
from insitu_bridges.push import PushOptions
from insitu_bridges.push import push as push_folder


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
    transformers and vLLM load, adapters merged; `peft` = adapters; `gguf` = whole weights in one file for
    llama.cpp. `dtype`: `float32`, `bfloat16`, for `gguf` also `q8_0`, or `auto` = that of the start model.
    Raises InsituError.
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
