"""Rows as NeMo-RL's `DatumSpec`s: a message log of contiguous ids each, with the reward of the rollout.

NeMo-RL compares data, not rollouts: one with several rows counts once per row in its group's baseline.
`several="last"` keeps the last row instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from insitu.bridges.rows import Conversion, GroupRows, Refusal, RolloutRows, RowKey, convert, unscored
from insitu.bridges.target_rows import TargetRow, target_row
from insitu.types import Segment


def to_nemo(
    groups: Sequence[GroupRows], *, several: Literal["all", "last"] = "all"
) -> Conversion[list[dict[str, Any]]]:
    """Return a datum per row, with `reward`, `group_id` and `weight_version` for its `PromptGroupRecord`."""
    refused: dict[RowKey, Refusal] = unscored(groups)
    payload: list[dict[str, Any]] = []
    taken: list[RowKey] = []
    for item in (item for group in groups for item in group.scored):
        for segment in item.segments:
            key = (item.rollout.id, segment.index)
            if several == "last" and segment is not item.segments[-1]:
                refused[key] = "target_contiguous"
                continue
            payload.append(_datum(item, segment, len(payload)))
            taken.append(key)
    return convert(
        payload, groups, taken, refused, lost=("weights", "rows of one rollout", "versions per token")
    )


def _datum(item: RolloutRows, segment: Segment, number: int) -> dict[str, Any]:
    return {
        "message_log": _messages(segment),
        "length": len(segment.ids),
        "extra_env_info": {},
        "loss_multiplier": 1.0,
        "idx": number,
        "task_name": item.rollout.task_id,
        "reward": item.rollout.reward,
        "group_id": item.group_id,
        "weight_version": item.oldest,
    }


def _messages(segment: Segment) -> list[dict[str, Any]]:
    """Return the row cut where the mask changes: masked ids are the assistant's."""
    edges = np.flatnonzero(np.diff(segment.mask)) + 1
    found = []
    for start, stop in zip([0, *edges], [*edges, len(segment.ids)], strict=True):
        sampled = bool(segment.mask[start])
        message: dict[str, Any] = {
            "role": "assistant" if sampled else "user",
            "content": "",
            "token_ids": segment.ids[start:stop],
        }
        if sampled:
            message["generation_logprobs"] = segment.logprobs[start:stop]
        found.append(message)
    return found


def read_nemo(payload: Sequence[Any]) -> list[TargetRow]:
    """Return the rows of data, as made here or as JSON. Raises RecordError."""
    rows = []
    for datum in payload:
        ids: list[Any] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        for message in datum["message_log"]:
            count = len(message["token_ids"])
            ids += [*message["token_ids"]]
            mask += [message["role"] == "assistant"] * count
            logprobs += [*message.get("generation_logprobs", [0.0] * count)]
        rows.append(target_row(ids, mask, logprobs, reward=datum["reward"]))
    return rows
