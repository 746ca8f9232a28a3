"""Configuration keys that a resumed run may change: for an evaluation, those that cannot affect results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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


TRAINING = ("train.on_bad_step", "train.reference", "tasks.reference")
"""Keys that a resumed training run may change: a teacher may be at another place, but must be the same."""


def resumed_config(path: Path, overrides: Sequence[str], changeable: Sequence[str] = CHANGEABLE) -> Config:
    """Return the stored configuration with `overrides` of keys in `changeable`.

    Raises ConfigError, RecordError.
    """
    for text in overrides:
        if key_of(text) not in changeable:
            raise ConfigError(
                f"a resumed run keeps its configuration; drop {text} (changeable: {', '.join(changeable)})"
            )
    stored = read_config(path)
    if not overrides:
        return stored
    changed = name_run(load_config(path / "config.toml", overrides))
    return changed.model_copy(update={"run": stored.run.model_copy(update={"plain": changed.run.plain})})
