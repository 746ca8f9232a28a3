"""The bridge's functions for slime's own contract tests, with finished rollouts instead of a source."""

from __future__ import annotations

from types import SimpleNamespace

from row_lab import rollout
from slime_lab import Source

from insitu.config import load_config
from insitu.types import Group
from insitu_bridges import slime

config = load_config(None, ["eval.count=2", "engine.temperature=0.3"])  # what its suite asks for
groups = [
    Group(id=name, task_id="t", rollouts=(rollout(f"{name}0", 1.0, 2), rollout(f"{name}1", 0.0)))
    for name in "ab"
]
slime._source = lambda args, parameters=None: (Source(rollout("a", 1.0), groups), config)  # type: ignore[assignment]
slime._tokenizer = lambda folder: SimpleNamespace(decode=lambda ids, **_: str(ids))  # type: ignore[assignment]
generate_final, rewards = slime.generate_final, slime.rewards
generate_rollout_final = slime.generate_rollout_final
