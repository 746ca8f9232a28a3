"""Rows as examples for supervised trainers: those of the best rollouts of each group, one example per row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from insitu.errors import RecordError
from insitu.types import Segment, Status
from insitu_bridges.rows import SCORED_REASONS, Conversion, GroupRows, Refusal, RolloutRows, RowKey, convert
from insitu_bridges.target_rows import TargetRow, target_row

CONTEXT = -100
"""Label of a token without loss."""
_TOO_FEW = frozenset({"infra", "ungraded", "deadline"})
"""The planner's reasons for a graded rollout whose group has too few others; an example needs none."""


def to_sft(groups: Sequence[GroupRows]) -> Conversion[list[dict[str, Any]]]:
    """Return a dictionary per row of the best rollouts: ids, labels (-100 = context) and log-probabilities.

    The best have the greatest reward of their group, above 0, from an agent that did not fail. Rows of others
    are refused (`target_not_best`, without a reward `target_unscored`) unless the planner has its own reason.
    """
    best = [(group, item, segment) for group in groups for item, segment in best_rows([group])]
    taken = {(item.rollout.id, segment.index) for _, item, segment in best}
    refused: dict[RowKey, Refusal] = {}
    for item in (item for group in groups for item in group.rollouts if not item.reason):
        why: Refusal = "target_unscored" if item.rollout.reward is None else "target_not_best"
        keys = {(item.rollout.id, segment.index) for segment in item.segments}
        refused.update(dict.fromkeys(keys - taken, why))
    payload = [_example(*one) for one in best]
    return convert(payload, groups, taken, refused, lost=("weights", "versions"))


def best_rows(groups: Iterable[GroupRows]) -> Iterator[tuple[RolloutRows, Segment]]:
    """Yield the rows of the rollouts with the greatest reward of each group, where it is above 0."""
    for group in groups:
        able = [item for item in group.rollouts if _usable(item)]
        most = max((item.rollout.reward or 0.0 for item in able), default=0.0)
        for item in (item for item in able if most > 0 and item.rollout.reward == most):
            yield from ((item, segment) for segment in item.segments)


def _usable(item: RolloutRows) -> bool:
    graded = item.rollout.reward is not None and item.rollout.status in (Status.OK, Status.TRUNCATED)
    return graded and item.reason in SCORED_REASONS | _TOO_FEW


def _example(group: GroupRows, item: RolloutRows, segment: Segment) -> dict[str, Any]:
    return {
        "input_ids": segment.ids.tolist(),
        "labels": np.where(segment.mask, segment.ids, CONTEXT).tolist(),
        "logprobs": segment.logprobs.astype(np.float64).tolist(),
        "reward": item.rollout.reward,
        "rollout": item.rollout.id,
        "row": segment.label,
        "group_id": group.id,
        "task_id": group.task_id,
    }


def read_sft(payload: Sequence[Any]) -> list[TargetRow]:
    """Return the rows of examples. Raises RecordError."""
    names = ("input_ids", "labels", "logprobs", "reward")
    return [_row(*(one[name] for name in names)) for one in payload]


def _row(input_ids: Any, labels: Any, logprobs: Any, reward: Any) -> TargetRow:
    mask = [label != CONTEXT for label in labels]
    row = target_row(input_ids, mask, logprobs, reward=reward)
    if (row.ids != np.where(row.mask, labels, row.ids)).any():
        raise RecordError("a label is another token than the one at its place")
    return row
