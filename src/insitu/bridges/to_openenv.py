"""Rollouts as OpenEnv `TrainingTrace`s: one turn per call.

Turns are ordered by row: in the order of time TRL's harness worker would fork at each sub-agent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from insitu.bridges.calls import row_calls
from insitu.bridges.rows import Conversion, GroupRows, RolloutRows, convert, unscored


def to_openenv(groups: Sequence[GroupRows]) -> Conversion[list[dict[str, Any]]]:
    """Return group, rollout, reward and `trace` of each rollout that can be compared with others."""
    items = [item for group in groups for item in group.scored]
    taken = [(item.rollout.id, segment.index) for item in items for segment in item.segments]
    payload = [
        {
            "group_id": item.group_id,
            "rollout_id": item.rollout.id,
            "env_reward": item.rollout.reward,
            "trace": training_trace(item),
        }
        for item in items
    ]
    return convert(payload, groups, taken, unscored(groups), lost=("weights", "versions"))


def training_trace(item: RolloutRows) -> dict[str, Any]:
    """Return a `TrainingTrace` as a dictionary."""
    return {"schema_version": 1, "turns": list(_turns(item))}


def _turns(item: RolloutRows) -> Iterator[dict[str, Any]]:
    for segment, calls in row_calls(item):
        for call in (call for call in calls if call.trained):
            mask = segment.mask[: call.stop].copy()
            mask[: call.middle] = False
            yield {
                "node_id": f"{item.rollout.id}/{call.turn.index}",
                "prompt_token_ids": segment.ids[: call.middle].tolist(),
                "completion_token_ids": call.turn.ids.tolist(),
                "per_token_logps": segment.logprobs[call.middle : call.stop].astype(np.float64).tolist(),
                "loss_mask": mask.astype(np.int32).tolist(),
                "metadata": {"versions": [list(run) for run in call.turn.version_runs]},
            }
