"""What a resumed evaluation may do otherwise than the run began: nothing that could change a result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from insitu.config import Config, load_config
from insitu.errors import ConfigError
from insitu.storage.run_dir import read_config

FREE = (
    "collect.attempts",
    "engine.key_env",
    "engine.max_concurrent",
    "engine.max_cost",
    "engine.max_wait_s",
    "engine.requests_per_minute",
    "engine.url",
    "grade.workers",
    "harness.workers",
    "run.plain",
)
"""How fast, how much at once, for how much money, and where the same engine is found."""


def resumed_config(path: Path, overrides: Sequence[str]) -> Config:
    """The stored configuration with `overrides` of keys in FREE. Raises ConfigError, RecordError."""
    held = read_config(path)
    for text in overrides:
        name = text.partition("=")[0].strip()
        if name not in FREE:
            raise ConfigError(
                f"a resumed run keeps its configuration; drop {text} (free are: {', '.join(FREE)})"
            )
    if not overrides:
        return held
    changed = load_config(path / "config.toml", overrides)
    return changed.model_copy(update={"run": held.run.model_copy(update={"plain": changed.run.plain})})
