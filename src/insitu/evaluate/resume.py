"""Configuration keys that a resumed run may change: those that do not decide its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from insitu.config import Config, key_of, load_config
from insitu.errors import ConfigError
from insitu.storage.run_dir import name_run, read_config, read_store, read_tables

_SAME_RESULT = """
run: alarms checkpoint_every_steps keep_checkpoints
engine: urls listen key_env replicas gpus python share_gpu publish publish_dir
engine: call_timeout_s start_timeout_s max_concurrent max_cost max_wait_s prices requests_per_minute
gateway: listen public_url
fleet: address nodes lease_s
sandbox: max_sandboxes
harness: workers
grade: workers
reward: max_concurrent
collect: attempts max_consecutive_failures stall_timeout_s
train: token_budget layout threads restarts step_timeout_s
policy: memory_gib
record: scores
track: to project
"""
"""Where and how fast a run works, what it costs, when it gives up on its host, what it warns of and records.

Not here: what an agent, a grader or the loss meets. `limits` and `grade.timeout_s` are of these.
"""
_KEYS = tuple(
    f"{table}.{key}"
    for table, _, keys in (line.partition(": ") for line in _SAME_RESULT.split("\n") if line)
    for key in keys.split()
)
CHANGEABLE = tuple(key for key in _KEYS if key.partition(".")[0] not in ("train", "policy"))
"""Of an evaluation, which has no trainer."""
TRAINING = (
    "run.steps", "run.stop_after_evals", "train.on_bad_step", "train.ranks", "train.reference",
    "tasks.reference", *_KEYS,
)  # fmt: skip
"""Of a training run: also more steps, and another place of the same teacher."""


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
        table, _, key = key_of(others[0]).partition(".")
        mine = ", ".join(key for key in changeable if key.startswith(f"{table}.")) or f"nothing of {table}"
        listed = f" ({mine} may change)" if changeable and key else ""
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
    names = (key.partition(".")[2] for key in changeable if key.startswith("run."))
    run = {name: getattr(changed.run, name) for name in names}
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
