"""Rows as SkyRL's `GeneratorOutput` (0.3) with `step_wise_trajectories`: a rollout's rows in sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from insitu_bridges.rows import Conversion, GroupRows, RowKey, convert, unscored
from insitu_bridges.target_rows import TargetRow, prompt_length, responses

_FIELDS = (
    "prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs",
    "trajectory_ids", "is_last_step",
)  # fmt: skip


def to_skyrl(groups: Sequence[GroupRows]) -> Conversion[dict[str, Any]]:
    """Return lists of one length, an entry per row; the reward stands at each row of its rollout."""
    out: dict[str, Any] = {name: [] for name in _FIELDS}
    taken: list[RowKey] = []
    for number, item in (pair for group in groups for pair in enumerate(group.scored)):
        segments = item.given
        for segment in segments:
            first = prompt_length(segment)
            values = (
                segment.ids[:first].tolist(),
                segment.ids[first:].tolist(),
                item.rollout.reward,
                segment.mask[first:].astype(np.int32).tolist(),
                "length" if item.rollout.status == "truncated" else "stop",
                segment.logprobs[first:].astype(np.float64).tolist(),
                {"instance_id": item.group_id, "repetition_id": number},
                segment is segments[-1],
            )
            for name, value in zip(_FIELDS, values, strict=True):
                out[name].append(value)
        taken += [] if item.reward_only else [(item.rollout.id, segment.index) for segment in segments]
    out["rollout_metrics"] = None
    return convert(out, groups, taken, unscored(groups), lost=("weights", "versions"))


def read_skyrl(payload: Sequence[Any]) -> list[TargetRow]:
    """Return the rows of outputs. Raises RecordError."""
    names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "rewards")
    return [
        responses(*values) for out in payload for values in zip(*(out[name] for name in names), strict=True)
    ]
