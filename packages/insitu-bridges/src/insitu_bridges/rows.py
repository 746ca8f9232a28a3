"""Rows for other trainers, decided by insitu's own planner; pure, numpy only.

`rows_of` keeps every rollout: trained ones with their rows, the others with the reason. A trainer that
computes advantages itself needs both: a rollout at its group's mean reward is part of the baseline.
A `Conversion` accounts for every captured token: it is in the payload or excluded for one named reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Generic, Literal, TypeVar, get_args

import numpy as np

from insitu.errors import ConfigError, TrainError
from insitu.types import EXCLUSIONS, Group, Ledger, Rollout, Segment, Status
from insitu_train.plan.step import PlanConfig, PlannedRollout, PlanRow, plan_rollouts, row_of

T = TypeVar("T")
Refusal = Literal[
    "target_one_row", "target_length", "target_unscored", "target_pair", "target_steps", "target_not_best"
]
"""Why a row is not in a payload, beside the planner's reasons: the target takes one row per rollout; the row
is longer than it takes; it has no place for reward None; it has no partner for a pair; its reward is of
several steps; another is the best of its group."""
REFUSALS: frozenset[str] = frozenset(get_args(Refusal))
SCORED_REASONS = frozenset({"", "zero_advantage", "degenerate", "few_groups"})
"""Reasons of rollouts that have no gradient and yet count in the baseline of another trainer."""
UNTRAINED_REASONS = frozenset({"truncated", "overlong", "row_cap", "no_tokens"})
"""Reasons of graded rollouts that count in the baseline and have no row to train."""
RowKey = tuple[str, int]
"""Rollout id and segment index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRows:
    """One rollout as the planner decided it."""

    group_id: str
    rollout: Rollout
    advantage: float | None
    """None when it, or too few of its group, have a score. Never 0 instead."""
    weight: float
    """Factor of the sum of each row's token losses."""
    reason: str
    """Why it is not trained, or empty."""
    segments: tuple[Segment, ...] = field(repr=False)
    """The rows that `train.rows` and its caps leave, in order of index, trained or not."""
    rows: tuple[PlanRow, ...] = field(repr=False)
    """The same as trained rows, cut after their last trained token; empty when there is a reason."""
    excluded: Mapping[str, int] = field(default_factory=dict)
    """Tokens excluded by `train.rows` and its caps, by reason."""

    @property
    def scored(self) -> bool:
        """Whether a trainer with its own advantages takes it: graded, not an evaluation."""
        return self.reason in SCORED_REASONS | UNTRAINED_REASONS and self.rollout.reward is not None

    @property
    def reward_only(self) -> bool:
        """Whether nothing of it may be trained by any trainer; its reward is still part of the baseline."""
        return self.reason in UNTRAINED_REASONS or not self.segments

    @property
    def stepped(self) -> bool:
        """Whether it is of several steps of a task: no single row stands for its reward."""
        return any(turn.step > 1 for turn in self.rollout.turns)

    @property
    def given(self) -> tuple[Segment, ...]:
        """The rows for a trainer with its own advantages; without one to train, a row of two other tokens."""
        if not self.reward_only:
            return self.segments
        none = np.zeros(2, np.int32)
        return (
            Segment(
                rollout_id=self.rollout.id, index=-1, kind="sampled", label="", ids=none,
                mask=none.astype(np.bool_), logprobs=none.astype(np.float32), versions=none,
            ),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRows:
    """Rollouts of one task that share a baseline, in slot order."""

    id: str
    task_id: str
    rollouts: tuple[RolloutRows, ...]

    @property
    def rows(self) -> tuple[PlanRow, ...]:
        """All trained rows, by slot and segment."""
        return tuple(row for rollout in self.rollouts for row in rollout.rows)

    @property
    def scored(self) -> tuple[RolloutRows, ...]:
        """Rollouts for a trainer with its own advantages; none when fewer than two can be compared."""
        found = tuple(rollout for rollout in self.rollouts if rollout.scored)
        return found if len(found) > 1 else ()


def rows_of(groups: Sequence[Group], plan: PlanConfig) -> tuple[GroupRows, ...]:
    """Return the groups of one step with the planner's decisions, in the planner's order.

    Weights are those of the whole step, so give all groups that one optimizer step takes. Raises TrainError
    as `plan_step` does.
    """
    tasks = {group.id: group.task_id for group in groups}
    decided, _, _ = plan_rollouts(groups, plan)
    return tuple(
        GroupRows(id=name, task_id=tasks[name], rollouts=tuple(_rollout_rows(slot) for slot in slots))
        for name, slots in groupby(decided, key=lambda slot: slot.group_id)
    )


def rows_alone(rollout: Rollout, plan: PlanConfig) -> RolloutRows:
    """Return a rollout as the only one of its group, for a trainer that computes the advantages."""
    if plan.truncated == "drop_group":
        raise ConfigError("train.truncated = 'drop_group' needs whole groups; this trainer takes rollouts")
    # One of a larger group: neither too few nor all equal.
    plan = plan.changed(group_min=1, degenerate="keep")
    [group] = rows_of([Group(id=rollout.id, task_id=rollout.task_id, rollouts=(rollout,))], plan)
    return group.rollouts[0]


def _rollout_rows(slot: PlannedRollout) -> RolloutRows:
    reason = slot.exclusion
    return RolloutRows(
        group_id=slot.group_id,
        rollout=slot.rollout,
        advantage=slot.advantage,
        weight=slot.weight,
        reason=reason,
        segments=slot.chosen.rows,
        rows=() if reason else tuple(row_of(slot, segment)[0] for segment in slot.chosen.rows),
        excluded=slot.chosen.excluded,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion(Generic[T]):
    """Rows in the form of another trainer, and the account of all captured tokens."""

    payload: T = field(repr=False)
    account: Ledger
    """captured = sampled tokens of all rollouts given; trained = those in the payload; the others by reason:
    capture's, the planner's, or a `Refusal`."""
    taken: frozenset[RowKey]
    """Rows in the payload."""
    refused: Mapping[RowKey, Refusal]
    """Rows that the target has no place for."""
    lost: tuple[str, ...] = ()
    """What of the rows in the payload the target has no place for: `weights`, `versions`, ..."""


def convert(
    payload: T,
    groups: Iterable[GroupRows],
    taken: Iterable[RowKey],
    refused: Mapping[RowKey, Refusal] | None = None,
    lost: tuple[str, ...] = (),
) -> Conversion[T]:
    """Return the conversion of `groups` whose payload holds the rows `taken`.

    Raises TrainError for a row taken twice, one that is taken and refused, and one that the planner trains
    and that is neither taken nor refused: nothing is left out silently.
    """
    refused = refused or {}
    in_payload = _unique(taken)
    kept = frozenset(in_payload)
    excluded: dict[str, int] = {}
    captured = trained = 0
    for item in (rollout for group in groups for rollout in group.rollouts):
        ledger = item.rollout.trajectory.ledger
        captured += ledger.captured
        left = ledger.trained
        moved = [*item.excluded.items()]
        for key, tokens in _row_tokens(item):
            if key in in_payload:
                in_payload.remove(key)
                trained += tokens
                left -= tokens
            elif key in refused:
                moved.append((refused[key], tokens))
            elif not item.reason:
                raise TrainError(f"row {key[1]} of rollout {key[0]} is neither in the payload nor refused")
        left -= sum(tokens for _, tokens in moved)
        for reason, tokens in (*ledger.excluded.items(), *moved, (item.reason, left)):
            if tokens:
                excluded[reason] = excluded.get(reason, 0) + tokens
    if in_payload:
        raise TrainError(f"the payload has a row that was not given: {sorted(in_payload)[0]}")
    account = Ledger(captured=captured, trained=trained, excluded=dict(sorted(excluded.items())))
    if not account.balanced or not excluded.keys() <= EXCLUSIONS | REFUSALS:
        raise TrainError(f"the account of the conversion does not balance: {account}")
    return Conversion(payload=payload, account=account, taken=kept, refused=refused, lost=lost)


def _unique(taken: Iterable[RowKey]) -> set[RowKey]:
    found: set[RowKey] = set()
    for key in taken:
        if key in found:
            raise TrainError(f"row {key[1]} of rollout {key[0]} is in the payload twice")
        found.add(key)
    return found


def _row_tokens(item: RolloutRows) -> Iterator[tuple[RowKey, int]]:
    for segment in item.segments:
        yield (item.rollout.id, segment.index), int(segment.mask.sum())


def step_tokens(groups: Iterable[GroupRows]) -> int:
    """Return the trained tokens of a step, for a trainer that divides its loss by their number."""
    return sum(int(row.mask.sum()) for group in groups for row in group.rows if row.weight)


def unscored(groups: Iterable[GroupRows]) -> dict[RowKey, Refusal]:
    """Return the refusals of a target without a place for reward None: rows of graded groups that lack one.

    Covers rollouts without a reward and those alone in their group, which no baseline can be computed for.
    """
    found: dict[RowKey, Refusal] = {}
    for group in groups:
        kept = {id(rollout) for rollout in group.scored}
        for item in group.rollouts:
            ungraded = item.rollout.reward is None and item.rollout.status is not Status.INFRA_FAILED
            if id(item) not in kept and (item.scored or ungraded):
                found.update((key, "target_unscored") for key, _ in _row_tokens(item))
    return found
