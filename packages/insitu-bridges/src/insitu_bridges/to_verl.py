"""Rollouts as verl's `AgentLoopOutput`s (0.9): a list per rollout, which V1 takes; V0 takes one each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from insitu.types import Segment
from insitu_bridges.rows import Conversion, GroupRows, Refusal, RolloutRows, RowKey, convert, unscored
from insitu_bridges.target_rows import TargetRow, prompt_length, replayed_experts, responses


def to_verl(
    groups: Sequence[GroupRows],
    *,
    several: Literal["all", "last"] = "all",
    max_prompt: int = 0,
    max_response: int = 0,
) -> Conversion[list[list[dict[str, Any]]]]:
    """Return the outputs of each rollout that can be compared with others; verl computes the advantages.

    several: `last` keeps one row per rollout, for V0. max_prompt, max_response: verl cuts what is longer, so
    such rows are refused; 0 = no limit.
    """
    refused: dict[RowKey, Refusal] = unscored(groups)
    payload: list[list[dict[str, Any]]] = []
    taken: list[RowKey] = []
    for item in (item for group in groups for item in group.scored):
        outputs = []
        segments = item.given
        for segment in segments:
            key = (item.rollout.id, segment.index)
            output = output_of(item, segment)
            if item.reward_only:
                outputs.append(output)
            elif several == "last" and segment is not segments[-1]:
                refused[key] = "target_one_row"
            elif _longer(output["prompt_ids"], max_prompt) or _longer(output["response_ids"], max_response):
                refused[key] = "target_length"
            else:
                outputs.append(output)
                taken.append(key)
        payload.append(outputs)
    return convert(payload, groups, taken, refused, lost=("weights", "versions per token"))


def _longer(ids: Sequence[int], limit: int) -> bool:
    return bool(limit) and len(ids) > limit


def output_of(item: RolloutRows, segment: Segment) -> dict[str, Any]:
    """Return the fields of the `AgentLoopOutput` of one row."""
    first = prompt_length(segment)
    versions = segment.versions[segment.mask] if segment.mask.any() else segment.versions
    return {
        "prompt_ids": segment.ids[:first].tolist(),
        "response_ids": segment.ids[first:].tolist(),
        "response_mask": segment.mask[first:].astype(np.int32).tolist(),
        "response_logprobs": segment.logprobs[first:].astype(np.float64).tolist(),
        # verl pads what is missing at the end, and takes an array only
        "routed_experts": replayed_experts(segment.experts, len(segment.ids)),
        "reward_score": item.rollout.reward,
        "num_turns": len(item.rollout.turns),
        "metrics": _metrics(item),
        "extra_fields": {
            "min_global_steps": int(versions.min()),
            "max_global_steps": int(versions.max()),
            "reward_extra_info": dict(item.rollout.reward_components),
        },
    }


def _metrics(item: RolloutRows) -> dict[str, float]:
    """Return the seconds that verl asks for; the agent's own time counts as tools."""
    timings = item.rollout.timings
    return {
        "generate_sequences": timings.engine_s,
        "tool_calls": max(0.0, timings.agent_s - timings.engine_s),
        "compute_score": timings.grade_s,
    }


def read_verl(payload: Sequence[Any]) -> list[TargetRow]:
    """Return the rows of outputs. Raises RecordError."""
    names = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "reward_score")
    return [responses(*(output[name] for name in names)) for outputs in payload for output in outputs]
