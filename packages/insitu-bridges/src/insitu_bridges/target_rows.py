"""Rows read back from the form of another trainer, and their comparison with the rows that were converted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from insitu.errors import RecordError
from insitu.types import BoolArray, ExpertArray, FloatArray, IntArray, Segment
from insitu_bridges.rows import GroupRows, RolloutRows


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """One row as a trainer gets it. None = its form has no place for it, or the value is None."""

    ids: IntArray = field(repr=False)
    mask: BoolArray = field(repr=False)
    logprobs: FloatArray = field(repr=False)
    """Those of trained tokens; others are 0."""
    versions: IntArray | None = field(default=None, repr=False)
    """Those of trained tokens; others are any."""
    advantage: float | None = None
    """With the weight in it where the form has one number for both."""
    weight: float | None = None
    reward: float | None = None


def target_row(ids: Any, mask: Any, logprobs: Any, versions: Any = None, **more: Any) -> TargetRow:
    """Return a row of lists. Raises RecordError when they differ in length."""
    lists = {"ids": ids, "mask": mask, "log-probabilities": logprobs}
    lists |= {} if versions is None else {"versions": versions}
    if len({len(each) for each in lists.values()}) != 1:
        lengths = ", ".join(f"{name} {len(each)}" for name, each in lists.items())
        raise RecordError(f"lists of a row differ in length: {lengths}")
    return TargetRow(
        ids=np.array(ids, np.int32),
        mask=np.array(mask, np.bool_),
        logprobs=np.array(logprobs, np.float32),
        versions=None if versions is None else np.array(versions, np.int32),
        **more,
    )


def prompt_length(segment: Segment) -> int:
    """Return the tokens before the first trained one; 1 of a row without any."""
    return int(segment.mask.argmax()) or 1


def responses(prompt: Any, response: Any, mask: Any, logprobs: Any, reward: Any) -> TargetRow:
    """Return the row of a prompt and a response with a mask."""
    before = [0] * len(prompt)
    return target_row([*prompt, *response], [*before, *mask], [*before, *logprobs], reward=reward)


def calls_row(calls: Sequence[tuple[Any, Any, Any]], **more: Any) -> TargetRow:
    """Return the row of calls: prompt ids, sampled ids, log-probabilities.

    Raises RecordError when they are not one conversation.
    """
    ids = [*calls[-1][0], *calls[-1][1]]
    mask, logprobs = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.float32)
    for prompt, sampled, values in calls:
        start, stop = len(prompt), len(prompt) + len(sampled)
        if [*prompt, *sampled] != ids[:stop]:
            raise RecordError("the calls of a row are not one conversation")
        if len(values) != len(sampled):
            raise RecordError(f"lists of a row differ in length: ids {len(sampled)}, {len(values)}")
        mask[start:stop], logprobs[start:stop] = True, values
    return target_row(ids, mask, logprobs, **more)


def replayed_experts(experts: ExpertArray | None, count: int) -> ExpertArray | None:
    """Return the chosen experts [count - 1, layers, k] of a row's first tokens, for a router's replay.

    No call knows those of the last token, and no loss needs them. None where another's are not known.
    """
    if experts is None or (experts[: count - 1] < 0).any():
        return None
    return experts[: count - 1]


def unscaled(rows: Sequence[TargetRow]) -> list[TargetRow]:
    """Return rows whose weights were multiplied by the step's trained tokens, with insitu's weights."""
    tokens = sum(int(row.mask.sum()) for row in rows if row.weight) or 1
    return [row if row.weight is None else replace(row, weight=row.weight / tokens) for row in rows]


def first_trained(values: Any, mask: Any) -> float | None:
    """Return the value of a row's first trained token."""
    return next((float(value) for value, trained in zip(values, mask, strict=True) if trained), None)


def check_rows(given: Iterable[tuple[RolloutRows, Segment]], read: Sequence[TargetRow]) -> None:
    """Compare rows that were read with those that were given. Raises RecordError with the first difference.

    Tokens after the last trained one may be missing.
    """
    expected = list(given)
    if len(expected) != len(read):
        raise RecordError(f"{len(expected)} rows were converted, {len(read)} are there")
    for (item, segment), row in zip(expected, read, strict=True):
        if found := next(_differences(item, segment, row), ""):
            raise RecordError(f"rollout {item.rollout.id} row {segment.index}: {found} differ")


def _differences(item: RolloutRows, segment: Segment, row: TargetRow) -> Iterator[str]:
    end, mask = len(row.ids), row.mask
    if not np.array_equal(row.ids, segment.ids[:end]):
        yield "ids"
    elif not np.array_equal(mask, segment.mask[:end]) or segment.mask[end:].any():
        yield "masks"
    elif row.logprobs[mask].tobytes() != segment.logprobs[:end][mask].tobytes():
        yield "log-probabilities"
    elif row.versions is not None and not np.array_equal(row.versions[mask], segment.versions[:end][mask]):
        yield "versions"
    if row.advantage is not None and item.advantage is not None:
        weight = item.weight if item.rows else 0.0
        if row.weight is None:  # alone or with the weight in it, as float32
            known = np.array((item.advantage, item.advantage * weight), np.float32)
            same = bool((np.float32(row.advantage) == known).any())
        else:
            # A factor that is multiplied in and divided out again may change the last bit.
            same = row.advantage == item.advantage and math.isclose(row.weight, weight, rel_tol=1e-12)
        if not same:
            yield "advantages"
    reward = item.rollout.reward
    if row.reward is not None and (reward is None or np.float32(row.reward) != np.float32(reward)):
        yield "rewards"


def scored_rows(groups: Iterable[GroupRows]) -> Iterator[tuple[RolloutRows, Segment]]:
    """Yield the rows for a trainer that computes advantages."""
    for item in (item for group in groups for item in group.scored):
        yield from ((item, segment) for segment in item.given)


def graded_rows(groups: Iterable[GroupRows]) -> Iterator[tuple[RolloutRows, Segment]]:
    """Yield the same, of rollouts that have rows."""
    return ((item, segment) for item, segment in scored_rows(groups) if not item.reward_only)


def trained_rows(groups: Iterable[GroupRows]) -> Iterator[tuple[RolloutRows, Segment]]:
    """Yield the rows that insitu's planner trains."""
    for item in (item for group in groups for item in group.rollouts if item.rows):
        yield from ((item, segment) for segment in item.segments)


def all_rows(groups: Iterable[GroupRows]) -> Iterator[tuple[RolloutRows, Segment]]:
    """Yield the rows of all rollouts."""
    for item in (item for group in groups for item in group.rollouts):
        yield from ((item, segment) for segment in item.segments)
