"""The bridge's functions for slime's own contract tests, with finished rollouts instead of a source."""

from __future__ import annotations

from row_lab import rollout
from slime_lab import Source

from insitu.bridges import slime
from insitu.config import load_config
from insitu.types import Group

config = load_config(None, ["eval.count=2"])
groups = [
    Group(id=name, task_id="t", rollouts=(rollout(f"{name}0", 1.0, 2), rollout(f"{name}1", 0.0)))
    for name in "ab"
]
slime._source = lambda: (Source(rollout("a", 1.0), groups), config)  # type: ignore[assignment]
generate_final, rewards = slime.generate_final, slime.rewards
generate_rollout_final = slime.generate_rollout_final
