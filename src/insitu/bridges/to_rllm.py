"""Rollouts as rLLM's `Episode`s: a step per trained call, with the planner's advantage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from insitu.bridges.calls import RowCall, row_calls
from insitu.bridges.rows import Conversion, GroupRows, RolloutRows, convert
from insitu.bridges.target_rows import TargetRow, calls_row


def to_rllm(groups: Sequence[GroupRows]) -> Conversion[list[dict[str, Any]]]:
    """Return an episode per trained rollout, a trajectory per row."""
    items = [item for group in groups for item in group.rollouts if item.rows]
    taken = [(row.rollout_id, row.segment) for item in items for row in item.rows]
    return convert([_episode(item) for item in items], groups, taken, lost=("weights", "versions per token"))


def _episode(item: RolloutRows) -> dict[str, Any]:
    trajectories = []
    for _, calls in row_calls(item):
        steps = [_step(item, call) for call in calls if call.trained]
        steps[-1] |= {"done": True, "reward": item.rollout.reward}
        trajectories.append({"task": item.rollout.task_id, "steps": steps, "reward": item.rollout.reward})
    return {
        "id": item.rollout.id,
        "task": item.rollout.task_id,
        "is_correct": (item.rollout.reward or 0.0) >= 1.0,
        "trajectories": trajectories,
    }


def _step(item: RolloutRows, call: RowCall) -> dict[str, Any]:
    versions = call.segment.versions[call.middle : call.stop]
    return {
        "prompt_ids": call.segment.ids[: call.middle].tolist(),
        "response_ids": call.segment.ids[call.middle : call.stop].tolist(),
        "logprobs": call.segment.logprobs[call.middle : call.stop].astype(np.float64).tolist(),
        "reward": 0.0,
        "done": False,
        "advantage": item.advantage,
        "weight_version": int(versions.min()),
        "start_version": int(versions.min()),
        "end_version": int(versions.max()),
    }


def read_rllm(payload: Sequence[Any]) -> list[TargetRow]:
    """Return the rows of episodes. Raises RecordError."""
    names = ("prompt_ids", "response_ids", "logprobs")
    return [
        calls_row(
            [tuple(step[name] for name in names) for step in one["steps"]],
            advantage=one["steps"][0]["advantage"],
            reward=one["reward"],
        )
        for episode in payload
        for one in episode["trajectories"]
    ]
