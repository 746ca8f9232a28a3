"""Rollouts as OpenEnv `TrainingTrace`s: one turn per call.

Turns are ordered by row: in the order of time TRL's harness worker would fork at each sub-agent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from insitu_bridges.calls import row_calls
from insitu_bridges.rows import Conversion, GroupRows, RolloutRows, convert, unscored
from insitu_bridges.target_rows import TargetRow, calls_row


def to_openenv(groups: Sequence[GroupRows]) -> Conversion[list[dict[str, Any]]]:
    """Return group, rollout, reward and `trace` of each rollout that can be compared with others.

    A rollout of which only the reward counts has no turns.
    """
    items = [item for group in groups for item in group.scored]
    given = [item for item in items if not item.reward_only]
    taken = [(item.rollout.id, segment.index) for item in given for segment in item.segments]
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
    for segment, calls in () if item.reward_only else row_calls(item):
        for call in (call for call in calls if call.trained):
            mask = segment.mask[: call.stop].copy()
            mask[: call.middle] = False
            yield {
                "node_id": f"{item.rollout.id}/{call.turn.index}",
                "prompt_token_ids": segment.ids[: call.middle].tolist(),
                "completion_token_ids": call.turn.ids.tolist(),
                "per_token_logps": segment.logprobs[call.middle : call.stop].astype(np.float64).tolist(),
                "loss_mask": mask.astype(np.int32).tolist(),
                "metadata": {"row": segment.index, "versions": [list(run) for run in call.turn.version_runs]},
            }


def read_openenv(payload: Sequence[Any]) -> list[TargetRow]:
    """Return the rows of traces. Raises RecordError."""
    names = ("prompt_token_ids", "completion_token_ids", "per_token_logps")
    return [
        calls_row([tuple(turn[name] for name in names) for turn in turns], reward=one["env_reward"])
        for one in payload
        for _, turns in groupby(one["trace"]["turns"], key=lambda turn: turn["metadata"]["row"])
    ]
