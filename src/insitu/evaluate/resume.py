"""Configuration keys that a resumed run may change: for an evaluation, those that cannot affect results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from insitu.config import Config, key_of, load_config
from insitu.errors import ConfigError
from insitu.storage.run_dir import name_run, read_config

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
    path: Path, overrides: Mapping[str, Any] | Sequence[str], changeable: Sequence[str] = CHANGEABLE
) -> Config:
    """Return the stored configuration with `overrides` of keys in `changeable`.

    Raises ConfigError, RecordError.
    """
    for text in overrides:
        if key_of(text) not in changeable:
            listed = f" (changeable: {', '.join(changeable)})" if changeable else ""
            raise ConfigError(f"a resumed run keeps its configuration; drop {text}{listed}")
    stored = read_config(path)
    if not overrides:
        return stored
    changed = name_run(load_config(path / "config.toml", overrides))
    _check_steps(stored, changed)
    run = {key: getattr(changed.run, key) for key in ("plain", "steps", "stop_after_evals")}
    return changed.model_copy(update={"run": stored.run.model_copy(update=run)})


def _check_steps(stored: Config, changed: Config) -> None:
    """Raise ConfigError for a number of steps that the run cannot go on to."""
    before, now = stored.run.steps, changed.run.steps
    if now == before:
        return
    if now < before:
        raise ConfigError(
            f"run.steps = {now}: the run is one of {before} steps, and a resume can only add some"
        )
    if stored.train.decay != "constant":
        raise ConfigError(f"run.steps = {now}: train.decay {stored.train.decay} ends at step {before}")
    if stored.collect.run:
        raise ConfigError(f"run.steps = {now}: the stored sessions of the run allow {before}")
