"""The planner: groups in, one complete training step out. Pure numpy; decides everything but the weights.

It settles who is trained and why not (the ledger), gives each rollout its advantage and each segment one
scalar weight for the whole step, so that the loss is a single weighted sum over tokens:

    loss = sum over rows  weight * sum over trained tokens  l(logp, mu, advantage)

Hence nothing depends on packing, micro-batch count or arrival order. Called by train/loop.py.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from whet.capture.ledger import reassign
from whet.config import Config
from whet.errors import ConfigError, TrainError
from whet.train.advantage import AdvantageKind, advantages
from whet.train.pack import MicroBatch, pack
from whet.types import BoolArray, FloatArray, Group, IntArray, Ledger, Rollout, Segment, Status

Reducer = Literal["rollout_mean", "token_mean", "constant", "group_mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """Choices of the planner."""

    advantage: AdvantageKind = "dr_grpo"
    reducer: Reducer = "rollout_mean"
    """What the loss is a mean over: `rollout_mean` rollouts (each a mean over its own tokens, however many
    segments), `token_mean` tokens, `constant` rollouts with tokens / constant_tokens each, `group_mean`
    groups (each a mean over its tokens). Means run over all scorable rollouts of useful groups, so rows
    dropped for a zero advantage do not change the loss."""
    constant_tokens: int = 1024
    """Divisor of `constant`."""
    truncated: Literal["keep", "mask", "penalise"] = "keep"
    """A truncated rollout is trained with its graded reward; or counts in the baseline only; or loses
    `truncated_penalty` of its reward first."""
    truncated_penalty: float = 1.0
    group_min: int = 2
    """Scorable rollouts of a group below which none of it is trained: its baseline would mean nothing."""
    min_groups: int = 1
    """Useful groups below which nothing is trained in this step."""
    token_budget: int = 16384
    """Most tokens in one micro-batch, padding included."""

    def __post_init__(self) -> None:
        if self.advantage == "maxrl" and self.truncated == "penalise":
            raise ConfigError("maxrl needs rewards >= 0 and cannot be combined with truncated=penalise")
        if min(self.constant_tokens, self.token_budget) < 1:
            raise ConfigError("constant_tokens and token_budget must be positive")

    @classmethod
    def of(cls, config: Config) -> PlanConfig:
        """The planner's part of a run's configuration."""
        t = config.train
        return cls(
            advantage=t.advantage,
            truncated=t.truncated,
            group_min=config.collect.group_min,
            min_groups=t.min_groups,
            token_budget=t.token_budget,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One segment to be trained, cut after its last trained token. Arrays share one length."""

    group_id: str
    rollout_id: str
    segment: int
    advantage: float
    weight: float
    """Factor on the sum of the row's token losses."""
    ids: IntArray = field(repr=False)
    mask: BoolArray = field(repr=False)
    logprobs: FloatArray = field(repr=False)
    """The sampler's, where mask is True."""
    versions: IntArray = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything a trainer needs for one step, and the final account of all rollouts given."""

    rows: tuple[Row, ...] = field(repr=False)
    """In order of group, slot and segment."""
    batches: tuple[MicroBatch, ...] = field(repr=False)
    ledger: Ledger
    """captured = trained + excluded by reason, over all rollouts given; trained = tokens of `rows`."""
    groups: int
    """Useful groups: not degenerate, with something to train."""
    skipped: str = ""
    """Why nothing is trained, or empty."""
    digest: str = ""
    """Hex SHA-256 over all of the above."""

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        return self.ledger.trained


@dataclass(slots=True)
class _Slot:
    """A rollout and what becomes of it."""

    group_id: str
    rollout: Rollout
    advantage: float
    reason: str
    """Why it is not trained, or empty."""
    counted: int
    """Tokens that count in the means: those of scorable rollouts in groups that are not degenerate."""
    in_mean: bool


def plan_step(groups: Sequence[Group], config: PlanConfig) -> StepPlan:
    """Plan one optimiser step from collected groups. The order of groups and rollouts does not matter.

    Raises TrainError for what cannot be trained: a rollout given twice, an account of capture that does not
    match its segments, a trained token without a predecessor or without a usable log-probability.
    """
    _check_unique(groups)
    slots: list[_Slot] = []
    for group in sorted(groups, key=lambda g: _natural(g.id)):
        slots += _judge(group, config)
    useful = {s.group_id for s in slots if not s.reason and s.counted}
    skipped = ""
    if len(useful) < config.min_groups or not useful:
        skipped = f"{len(useful)} useful groups of {len(groups)}; {max(1, config.min_groups)} are needed"
        for slot in slots:
            slot.reason = slot.reason or "unused"
    rows = _rows(slots, config)
    first = [int(row.mask.argmax()) for row in rows]
    plan = StepPlan(
        rows=rows,
        batches=pack([row.ids for row in rows], first, config.token_budget),
        ledger=_account(slots, rows),
        groups=len(useful),
        skipped=skipped,
    )
    return StepPlan(
        rows=plan.rows,
        batches=plan.batches,
        ledger=plan.ledger,
        groups=plan.groups,
        skipped=plan.skipped,
        digest=plan_digest(plan),
    )


def plan_digest(plan: StepPlan) -> str:
    """Hex SHA-256 over the whole content of a plan, its own digest excepted."""
    h = hashlib.sha256()
    ledger = [plan.ledger.captured, plan.ledger.trained, sorted(plan.ledger.excluded.items())]
    batches = [[b.prefix, b.tokens, *b.rows] for b in plan.batches]
    names = [[r.group_id, r.rollout_id, r.segment, len(r.ids)] for r in plan.rows]
    h.update(json.dumps([ledger, plan.groups, plan.skipped, batches, names]).encode())
    for row in plan.rows:
        h.update(struct.pack("<dd", row.advantage, row.weight))
        h.update(np.ascontiguousarray(row.ids, "<i4").tobytes())
        h.update(np.ascontiguousarray(row.mask, "|b1").tobytes())
        h.update(np.ascontiguousarray(row.logprobs, "<f4").tobytes())
        h.update(np.ascontiguousarray(row.versions, "<i4").tobytes())
    return h.hexdigest()


# --------------------------------------------------------------------------- who is trained


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which `step/10` follows `step/9`."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(p), p) if p.isdigit() else (1, 0, p) for p in parts)


def _check_unique(groups: Sequence[Group]) -> None:
    for what, ids in (
        ("group", [g.id for g in groups]),
        ("rollout", [r.id for g in groups for r in g.rollouts]),
    ):
        twice = sorted({name for name in ids if ids.count(name) > 1}) if len(set(ids)) < len(ids) else []
        if twice:
            raise TrainError(f"{what} {twice[0]} was given twice: nothing may be trained twice")


def _trained(rollout: Rollout) -> list[Segment]:
    """Segments that reinforcement learning may train, checked against capture's own account."""
    segments = [s for s in rollout.trajectory.segments if s.kind == "sampled" and s.mask.any()]
    tokens = sum(int(s.mask.sum()) for s in segments)
    ledger = rollout.trajectory.ledger
    if tokens != ledger.trained or not ledger.balanced:
        raise TrainError(
            f"rollout {rollout.id}: segments hold {tokens} trained tokens, the account is {ledger}"
        )
    return segments


def _reward(rollout: Rollout, config: PlanConfig) -> float | None:
    """Reward as the advantage sees it; None = unscorable."""
    if rollout.status is Status.INFRA_FAILED or rollout.reward is None:
        return None
    penalised = rollout.status is Status.TRUNCATED and config.truncated == "penalise"
    return rollout.reward - (config.truncated_penalty if penalised else 0.0)


def _judge(group: Group, config: PlanConfig) -> list[_Slot]:
    """Advantage and fate of every rollout of a group, in slot order."""
    rollouts = sorted(group.rollouts, key=lambda r: _natural(r.id))
    rewards = [_reward(r, config) for r in rollouts]
    scorable = [r for r in rewards if r is not None]
    thin, degenerate = len(scorable) < config.group_min, len(set(scorable)) < 2
    credit = advantages(rewards, config.advantage)
    slots = []
    for rollout, value in zip(rollouts, credit, strict=True):
        masked = rollout.status is Status.TRUNCATED and config.truncated == "mask"
        reason = _reason(rollout, None if thin else value, degenerate=degenerate, masked=masked)
        tokens = sum(int(s.mask.sum()) for s in _trained(rollout))
        in_mean = reason in ("", "zero_advantage", "truncated")
        counted = tokens if in_mean and not masked else 0
        slots.append(_Slot(group.id, rollout, value or 0.0, reason, counted, in_mean))
    return slots


def _reason(rollout: Rollout, value: float | None, *, degenerate: bool, masked: bool) -> str:
    """Why a rollout is not trained, or empty. The first that applies names it. `value` None: the
    infrastructure took its score, or so many of its group's that none of them is usable."""
    if rollout.id.startswith("eval"):
        return "evaluation"
    if value is None:
        return "infra"
    if degenerate:
        return "degenerate"
    if masked:
        return "truncated"
    return "" if value else "zero_advantage"


# --------------------------------------------------------------------------- with which weight


def _rows(slots: Sequence[_Slot], config: PlanConfig) -> tuple[Row, ...]:
    rows: list[Row] = []
    weights = _weights(slots, config)
    for slot, weight in zip(slots, weights, strict=True):
        if slot.reason:
            continue
        for segment in sorted(_trained(slot.rollout), key=lambda s: s.index):
            rows.append(_row(slot, segment, weight))
    return tuple(rows)


def _weights(slots: Sequence[_Slot], config: PlanConfig) -> list[float]:
    """The weight of each rollout's segments; every denominator is known before the first backward pass."""
    rollouts = sum(s.in_mean for s in slots) or 1
    tokens = sum(s.counted for s in slots) or 1
    of_group: dict[str, int] = {}
    for slot in slots:
        if slot.counted:
            of_group[slot.group_id] = of_group.get(slot.group_id, 0) + slot.counted
    if config.reducer == "token_mean":
        return [1.0 / tokens for _ in slots]
    if config.reducer == "constant":
        return [1.0 / (rollouts * config.constant_tokens) for _ in slots]
    if config.reducer == "group_mean":
        return [1.0 / (len(of_group) * of_group.get(s.group_id, 1)) if of_group else 0.0 for s in slots]
    return [1.0 / (rollouts * s.counted) if s.counted else 0.0 for s in slots]


def _row(slot: _Slot, segment: Segment, weight: float) -> Row:
    """Cut the dead tail and check what the trainer relies on."""
    where = f"rollout {slot.rollout.id} segment {segment.index}"
    end = len(segment.mask) - int(segment.mask[::-1].argmax())
    ids, mask = segment.ids[:end], segment.mask[:end]
    if mask[0]:
        raise TrainError(f"{where} token 0: the first token has no predecessor and cannot be trained")
    bad = mask & ~(np.isfinite(segment.logprobs[:end]) & (segment.logprobs[:end] <= 0))
    if bad.any():
        token = int(bad.argmax())
        raise TrainError(f"{where} token {token}: log-probability {segment.logprobs[token]} is not usable")
    return Row(
        group_id=slot.group_id,
        rollout_id=slot.rollout.id,
        segment=segment.index,
        advantage=slot.advantage,
        weight=weight,
        ids=ids,
        mask=mask,
        logprobs=segment.logprobs[:end],
        versions=segment.versions[:end],
    )


def _account(slots: Sequence[_Slot], rows: Sequence[Row]) -> Ledger:
    """The final ledger of the step. Raises TrainError when it does not balance."""
    captured = trained = 0
    excluded: dict[str, int] = {}
    for slot in slots:
        ledger = slot.rollout.trajectory.ledger
        if slot.reason:
            ledger = reassign(ledger, slot.reason)
        captured += ledger.captured
        trained += ledger.trained
        for reason, tokens in ledger.excluded.items():
            excluded[reason] = excluded.get(reason, 0) + tokens
    total = Ledger(captured=captured, trained=trained, excluded=dict(sorted(excluded.items())))
    in_rows = sum(int(row.mask.sum()) for row in rows)
    if not total.balanced or in_rows != trained:
        raise TrainError(f"the ledger of the step does not balance: {total}, {in_rows} tokens in rows")
    return total
