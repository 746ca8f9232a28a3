"""`insitu export RUN --checkpoint best|last|N --to hf|peft|gguf`: a checkpoint for other programs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelExport:
    """Options of one export of a model."""

    run: Path
    out: Path
    """New folder."""
    checkpoint: str = "last"
    """best (by held-out results), last, or the number of a step."""
    to: str = "hf"
    dtype: str = "auto"
    """One of `MODEL_FORMS`; auto = that of the start model, of adapters float32."""


def export_model(options: ModelExport) -> Mapping[str, Any]:
    """Write the folder and return `out`, `step`, `to`, `dtype` and `bytes`. Raises InsituError."""
    if options.to not in MODEL_FORMS:
        raise ConfigError(f"--checkpoint needs --to {' or '.join(MODEL_FORMS)}, got {options.to}")
    if options.dtype not in (known := MODEL_FORMS[options.to]):
        raise ConfigError(f"--dtype of --to {options.to} takes {', '.join(known)}, got {options.dtype}")
    if options.out.exists():
        raise ConfigError(f"{options.out} exists: give a new folder with --out")
    config = read_config(options.run)
    if config.policy.kind == "tinker":
        raise RecordError(f"{options.run}: its weights are at the training service, not in the run directory")
    step = _step_of(options)
    checkpoint = options.run / "checkpoints" / f"step-{step:05d}"
    fresh = options.out.with_name(f".{options.out.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    base = base_name(config)
    dtype = _write(options, checkpoint, fresh, base)
    card = model_card(checkpoint.resolve(), adapters_of=base if options.to == "peft" else "")
    write_text(fresh / "README.md", Redaction().text(card))
    fresh.rename(options.out)
    size = sum(path.stat().st_size for path in options.out.iterdir())
    return {"out": str(options.out), "step": step, "to": options.to, "dtype": dtype, "bytes": size}


def _write(options: ModelExport, checkpoint: Path, folder: Path, base: str) -> str:
    """Write the weights in a child process, since this one does not load torch; return their type."""
    arguments = [
        *("--run", options.run, "--checkpoint", checkpoint, "--folder", folder),
        *("--to", options.to, "--dtype", options.dtype, "--base", base),
    ]
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


def _step_of(options: ModelExport) -> int:
    """Return the step of the wanted checkpoint. Raises RecordError, ConfigError."""
    written = written_steps(options.run / "checkpoints")
    if not written:
        raise RecordError(f"{options.run} has no checkpoint yet")
    there = f"there are {', '.join(map(str, written))}"
    if options.checkpoint == "last":
        return written[-1]
    if options.checkpoint == "best":
        with read_store(options.run) as store:
            best = best_step(store, written)
        if best is None:
            raise RecordError(
                f"{options.run} has no held-out result of a checkpoint that is kept ({there}):"
                " set eval.count and eval.every_steps, or export last"
            )
        return best
    if not options.checkpoint.isdecimal():
        raise ConfigError(f"--checkpoint takes best, last or the number of a step, got {options.checkpoint}")
    if int(options.checkpoint) not in written:
        raise RecordError(f"{options.run} keeps no checkpoint of step {options.checkpoint}: {there}")
    return int(options.checkpoint)


def base_name(config: Config) -> str:
    """Return the name of the start model without a path of this machine."""
    if not config.model.path:
        return "demo model"
    if model_kind(config.model.path) == "hub":
        return config.model.path.removeprefix(HUB)
    cached = _CACHED.search(config.model.path)
    return f"{cached[1]}/{cached[2]}" if cached else Path(config.model.path).name
