"""`insitu export RUN --checkpoint best|last|N --to hf|peft|gguf`: a checkpoint for other programs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from insitu.config import Config, model_kind
from insitu.config.base import HUB
from insitu.errors import ConfigError, RecordError
from insitu.storage.files import write_text
from insitu.storage.run_dir import read_config, read_store
from insitu_bridges.card import model_card
from insitu_train.recovery import best_step, written_steps
from insitu_train.redaction import Redaction

MODEL_FORMS: Mapping[str, Sequence[str]] = {
    "hf": ("auto", "float32", "bfloat16"),
    "peft": ("auto", "float32", "bfloat16"),
    "gguf": ("auto", "float32", "bfloat16", "q8_0"),
}
"""Types of weights by form."""
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
"""Folder of a model in the cache of Hugging Face."""


def export_model(
    run: Path | str, out: Path | str, *, checkpoint: str | int = "last", to: str = "hf", dtype: str = "auto"
) -> Mapping[str, Any]:
    """Write a checkpoint of a run to the new folder `out`, with a card of the run's facts.

    `checkpoint`: `best` by held-out results, `last`, or the number of a step. `to`: `hf` = whole weights that
    transformers and vLLM load, adapters merged; `peft` = adapters; `gguf` = whole weights in one file for
    llama.cpp. `dtype`: `float32`, `bfloat16`, for `gguf` also `q8_0`, or `auto` = that of the start model, of
    adapters float32. Returns `out`, `step`, `to`, `dtype` and `bytes`. Raises InsituError.
    """
    run, out = Path(run), Path(out)
    if to not in MODEL_FORMS:
        raise ConfigError(f"--checkpoint needs --to {' or '.join(MODEL_FORMS)}, got {to}")
    if dtype not in (known := MODEL_FORMS[to]):
        raise ConfigError(f"--dtype of --to {to} takes {', '.join(known)}, got {dtype}")
    if out.exists():
        raise ConfigError(f"{out} exists: give a new folder with --out")
    config = read_config(run)
    if config.policy.kind == "tinker":
        raise RecordError(f"{run}: its weights are at the training service, not in the run directory")
    step = _step_of(run, str(checkpoint))
    source = run / "checkpoints" / f"step-{step:05d}"
    fresh = out.with_name(f".{out.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    base = base_name(config)
    dtype = _write(
        source,
        *("--run", run, "--checkpoint", source, "--folder", fresh),
        *("--to", to, "--dtype", dtype, "--base", base),
    )
    card = model_card(source.resolve(), adapters_of=base if to == "peft" else "")
    write_text(fresh / "README.md", Redaction().text(card))
    fresh.rename(out)
    size = sum(path.stat().st_size for path in out.iterdir())
    return {"out": str(out), "step": step, "to": to, "dtype": dtype, "bytes": size}


def _write(checkpoint: Path, *arguments: object) -> str:
    """Write the weights in a child process, since this one does not load torch; return their type."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "insitu_train.model_export", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RecordError(f"cannot export {checkpoint}: {lines[-1]}")
    return done.stdout.split()[-1]


def _step_of(run: Path, wanted: str) -> int:
    """Return the step of the wanted checkpoint. Raises RecordError, ConfigError."""
    written = written_steps(run / "checkpoints")
    if not written:
        raise RecordError(f"{run} has no checkpoint yet")
    there = f"there are {', '.join(map(str, written))}"
    if wanted == "last":
        return written[-1]
    if wanted == "best":
        with read_store(run) as store:
            best = best_step(store, written)
        if best is None:
            raise RecordError(
                f"{run} has no held-out result of a checkpoint that is kept ({there}):"
                " set eval.count and eval.every_steps, or export last"
            )
        return best
    if not wanted.isdecimal():
        raise ConfigError(f"--checkpoint takes best, last or the number of a step, got {wanted}")
    if int(wanted) not in written:
        raise RecordError(f"{run} keeps no checkpoint of step {wanted}: {there}")
    return int(wanted)


def base_name(config: Config) -> str:
    """Return the name of the start model without a path of this machine."""
    if not config.model.path:
        return "demo model"
    if model_kind(config.model.path) == "hub":
        return config.model.path.removeprefix(HUB)
    cached = _CACHED.search(config.model.path)
    return f"{cached[1]}/{cached[2]}" if cached else Path(config.model.path).name
