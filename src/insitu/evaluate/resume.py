"""Configuration keys that a resumed run may change: for an evaluation, those that cannot affect results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from insitu.config import Config, key_of, load_config
from insitu.errors import ConfigError
from insitu.storage.run_dir import name_run, read_config, read_store, read_tables

CHANGEABLE = (
    "collect.attempts",
    "engine.key_env",
    "engine.max_concurrent",
    "engine.max_cost",
    "engine.max_wait_s",
    "engine.requests_per_minute",
    "engine.url",
    "engine.urls",
    "grade.workers",
    "harness.workers",
    "run.plain",
)
"""Concurrency, rate limits, cost limits and the address of the same engine."""


TRAINING = ("run.steps", "run.stop_after_evals", "train.on_bad_step", "train.reference", "tasks.reference")
"""Keys that a resumed training run may change: more steps, and another place of the same teacher."""


def resumed_config(
    path: Path,
    overrides: Mapping[str, Any] | Sequence[str],
    changeable: Sequence[str] = CHANGEABLE,
    *,
    ignore_others: bool = False,
) -> Config:
    """Return the stored configuration with `overrides` of keys in `changeable`; refuse or ignore others.

    Raises ConfigError, RecordError.
    """
    others = [text for text in overrides if key_of(text) not in changeable]
    if others and not ignore_others:
        listed = f" (changeable: {', '.join(changeable)})" if changeable else ""
        raise ConfigError(f"a resumed run keeps its configuration; drop {others[0]}{listed}")
    if isinstance(overrides, Mapping):
        overrides = {name: value for name, value in overrides.items() if name not in others}
    else:
        overrides = [text for text in overrides if text not in others]
    stored = read_config(path)
    if not overrides:
        return stored
    changed = name_run(load_config(None, overrides, read_tables(path)))
    if changed.run.steps != stored.run.steps:
        _check_steps(path, stored, changed.run.steps)
    run = {key: getattr(changed.run, key) for key in ("plain", "steps", "stop_after_evals")}
    return changed.model_copy(update={"run": stored.run.model_copy(update=run)})


def _check_steps(path: Path, stored: Config, steps: int) -> None:
    """Raise ConfigError for a number of steps that the run cannot have."""
    with read_store(path) as store:
        last = store.last_step()
    if last is not None and steps < last.step:
        raise ConfigError(f"run.steps = {steps}: the run has {last.step} steps already")
    if stored.train.decay != "constant":
        raise ConfigError(
            f"run.steps = {steps}: train.decay {stored.train.decay} ends at step {stored.run.steps}"
        )
    if stored.collect.run:
        raise ConfigError(f"run.steps = {steps}: the stored sessions of the run allow {stored.run.steps}")
