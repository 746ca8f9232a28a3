"""Rows as pairs for DPO: two rollouts of one group, the better one chosen, the worse one rejected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from insitu.types import Segment
from insitu_bridges.rows import Conversion, GroupRows, Refusal, RolloutRows, RowKey, convert, unscored
from insitu_bridges.target_rows import TargetRow, prompt_length, responses

_Side = tuple[RolloutRows, Segment]


def to_dpo(groups: Sequence[GroupRows]) -> Conversion[list[dict[str, Any]]]:
    """Return a dictionary per pair: ids of the prompt, and ids, masks and log-probabilities after it.

    A rollout stands in one pair at most, with its final row; other rows are refused (`target_one_row`), as
    are those of rollouts without a partner (`target_pair`), one with another reward after the same prompt.
    The reward of several steps says nothing of one row: such rollouts are refused too (`target_steps`).
    """
    pairs = [(group, pair) for group in groups for pair in _pairs(group)]
    taken = [(item.rollout.id, segment.index) for _, pair in pairs for item, segment in pair]
    refused: dict[RowKey, Refusal] = unscored(groups)
    in_payload = set(taken)
    paired = {rollout_id for rollout_id, _ in taken}
    for item in (item for group in groups for item in group.scored if not item.reward_only):
        one, name = item.rollout.id in paired, item.rollout.id
        if one or not item.reason:
            left = {(name, segment.index) for segment in item.segments} - in_payload
            why: Refusal = "target_one_row" if one else "target_steps" if item.stepped else "target_pair"
            refused.update(dict.fromkeys(left, why))
    payload = [_pair(group, *pair) for group, pair in pairs]
    return convert(payload, groups, taken, refused, lost=("weights", "versions"))


def _pairs(group: GroupRows) -> Iterator[tuple[_Side, _Side]]:
    """Yield the best with the worst, the second best with the second worst, while rewards differ.

    Only rollouts whose final rows have the same ids before the first sampled token are compared.
    """
    by_prompt: dict[bytes, list[_Side]] = {}
    for item in (item for item in group.scored if not (item.reward_only or item.stepped)):
        finals = [segment for segment in item.segments if segment.label == "final" and segment.mask.any()]
        for segment in finals[-1:]:
            prompt = segment.ids[: prompt_length(segment)].tobytes()
            by_prompt.setdefault(prompt, []).append((item, segment))
    for sides in by_prompt.values():
        ranked = sorted(sides, key=_reward, reverse=True)
        for chosen, rejected in zip(ranked, reversed(ranked), strict=True):
            if _reward(chosen) <= _reward(rejected):  # so it is from the middle on
                break
            yield chosen, rejected


def _reward(side: _Side) -> float:
    return side[0].rollout.reward or 0.0  # scored rollouts have one


def _pair(group: GroupRows, chosen: _Side, rejected: _Side) -> dict[str, Any]:
    first = prompt_length(chosen[1])
    out: dict[str, Any] = {"prompt_ids": chosen[1].ids[:first].tolist()}
    for name, (item, segment) in (("chosen", chosen), ("rejected", rejected)):
        out[f"{name}_ids"] = segment.ids[first:].tolist()
        out[f"{name}_mask"] = segment.mask[first:].astype(np.int32).tolist()
        out[f"{name}_logprobs"] = segment.logprobs[first:].astype(np.float64).tolist()
        out[f"{name}_reward"] = item.rollout.reward
        out[f"{name}_rollout"] = item.rollout.id
    return {**out, "group_id": group.id, "task_id": group.task_id}


def pair_rows(groups: Iterable[GroupRows]) -> Iterator[_Side]:
    """Yield the rows in pairs: chosen, rejected, chosen, ..."""
    return (side for group in groups for pair in _pairs(group) for side in pair)


def read_dpo(payload: Sequence[Any]) -> list[TargetRow]:
    """Return the rows of pairs: chosen, rejected, chosen, ... Raises RecordError."""
    return [
        responses(pair["prompt_ids"], *(pair[f"{side}_{name}"] for name in _NAMES))
        for pair in payload
        for side in ("chosen", "rejected")
    ]


_NAMES = ("ids", "mask", "logprobs", "reward")
