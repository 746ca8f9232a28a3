"""The planner: groups in, one complete training step out.

It decides who is trained and why not (the ledger), each rollout's advantage, and one scalar weight per row
for the whole step, so that the loss is one weighted sum:

    loss = sum over rows  weight * sum over trained tokens  l(logp, mu, advantage)

It depends neither on packing, micro-batch count nor arrival order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from insitu.capture.ledger import reassign
from insitu.config import Config, model_folder
from insitu.config.training import PlanKeys, split_ranks
from insitu.errors import TrainError
from insitu.types import (
    BoolArray,
    ExpertArray,
    FloatArray,
    Group,
    IntArray,
    Ledger,
    Rollout,
    Segment,
    Status,
    equal_rewards,
)
from insitu_train.plan.advantage import advantages, overlong_penalty
from insitu_train.plan.digest import map_threaded, plan_digest
from insitu_train.plan.packing import PAIR_COST, MicroBatch, pack, pair_cost
from insitu_train.plan.prefix import Sorted, sort_rows
from insitu_train.plan.row_selection import Chosen, choose_rows

__all__ = ["PlanConfig", "PlanRow", "PlannedRollout", "StepPlan", "plan_digest", "plan_rollouts", "plan_step"]


class PlanConfig(PlanKeys):
    """Options of the planner.

    Means over rollouts, tokens or groups (`reducer`) run over all scorable rollouts of groups whose rewards
    differ, those with advantage zero among them. What a setting leaves out (masked, over the caps) is in
    neither sum nor number.
    """

    pull: bool = False
    """The loss has a term without the advantage (`LossConfig.has_kl_term`), so rollouts with advantage zero
    are trained too.
    """
    constant_tokens: int = 1024
    """What the reducer `constant` divides the token losses of a rollout by."""
    group_min: int = 2
    """Scorable rollouts below which no rollout of the group is trained."""
    pair_cost: float = PAIR_COST
    """Cost of a query-key pair, in units of one token through the matrices."""

    @classmethod
    def of(cls, config: Config) -> PlanConfig:
        """Return the planner's part of a run's configuration."""
        t = config.train
        # The constant is close enough for a small model's pass on a CPU.
        cost = pair_cost(model_folder(config)) if t.layout == "tree" or t.ranks != 1 else PAIR_COST
        return cls.rules_of(config).changed(pair_cost=cost)

    @classmethod
    def rules_of(cls, config: Config) -> PlanConfig:
        """Return the part that decides about rollouts; reads no model, so its rows are not to be packed."""
        t, tokens = config.train, config.limits.max_session_tokens
        return t.pick(cls, pull=t.has_kl_term, group_min=config.collect.group_min, constant_tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One segment to be trained, cut after its last trained token; arrays have one length."""

    group_id: str
    rollout_id: str
    part: str = ""
    """Name of its task set: which reference policy scores it."""
    segment: int
    advantage: float
    weight: float
    """Factor of the sum of the row's token losses."""
    ids: IntArray = field(repr=False)
    mask: BoolArray = field(repr=False)
    logprobs: FloatArray = field(repr=False)
    """The sampler's, where mask is True."""
    versions: IntArray = field(repr=False)
    experts: ExpertArray | None = field(default=None, repr=False)
    """Of every token, by the sampler; None = the trainer's router chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The input of one training step and the final ledger of all its rollouts."""

    rows: tuple[PlanRow, ...] = field(repr=False)
    """Ordered by group, slot and segment."""
    batches: tuple[MicroBatch, ...] = field(repr=False)
    ledger: Ledger
    """Over all rollouts given; trained = tokens of `rows`."""
    groups: int
    """Useful groups: not degenerate, with something to train."""
    skipped: str = ""
    """Why nothing is trained, or empty."""
    digest: str = ""
    """Hex SHA-256 over all of the above."""
    exclusion_reasons: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Rollout id -> why it is not trained, or empty. Not sent to the learner."""

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        return self.ledger.trained


@dataclass(slots=True)
class PlannedRollout:
    """A rollout and the decision about it."""

    group_id: str
    rollout: Rollout
    advantage: float | None
    """None when it, or too few of its group, have a score."""
    reason: str
    """Why it is not trained, or empty."""
    chosen: Chosen
    counted: int
    """Tokens that count in the means: those of scorable rollouts in groups that are not degenerate.

    0 of one that is masked or over the caps: it is in no mean.
    """
    weight: float = 0.0
    """Weight of its rows."""

    @property
    def exclusion(self) -> str:
        """`reason`, or why no row is left."""
        if self.reason or self.chosen.rows:
            return self.reason
        return "overlong" if self.chosen.excluded else "no_tokens"


def plan_step(groups: Sequence[Group], config: PlanConfig) -> StepPlan:
    """Plan one optimizer step from collected groups; their order does not matter.

    Raises TrainError for a rollout given twice, a ledger that contradicts the segments, and a trained token
    without a predecessor or a usable log-probability.
    """
    slots, useful, skipped = plan_rollouts(groups, config)
    rows, logprobs = _rows(slots)
    found = sort_rows([row.ids for row in rows], [row.experts for row in rows])
    plan = StepPlan(
        rows=rows,
        batches=pack_rows(rows, config, found),
        ledger=_account(slots, sum(map(len, logprobs))),
        groups=useful,
        skipped=skipped,
        exclusion_reasons={slot.rollout.id: slot.exclusion for slot in slots},
    )
    return replace(plan, digest=plan_digest(plan, found, logprobs))


def plan_rollouts(groups: Sequence[Group], config: PlanConfig) -> tuple[list[PlannedRollout], int, str]:
    """Return the decisions by group and slot, the number of useful groups, and why nothing is trained.

    Raises TrainError as `plan_step` does.
    """
    _check_unique(groups)
    slots: list[PlannedRollout] = []
    for group in sorted(groups, key=lambda g: _natural(g.id)):
        slots += _judge(group, config)
    useful = len({s.group_id for s in slots if not s.exclusion})
    skipped = ""
    if useful < max(1, config.min_groups):
        skipped = f"{useful} useful groups of {len(groups)}; {max(1, config.min_groups)} are needed"
        for slot in (slot for slot in slots if not slot.exclusion):
            slot.reason = "few_groups"
    for slot, weight in zip(slots, _weights(slots, config), strict=True):
        slot.weight = weight
    return slots, useful, skipped


def pack_rows(
    rows: Sequence[PlanRow], config: PlanConfig, known: Sorted | None = None
) -> tuple[MicroBatch, ...]:
    """Pack rows into micro-batches. known: result of `sort_rows`, computed when missing."""
    return pack(
        [row.ids for row in rows],
        [int(row.mask.argmax()) for row in rows],
        config.token_budget,
        layout=config.layout,
        ranks=split_ranks(config.ranks)[1],
        pair_cost=config.pair_cost,
        known=known or sort_rows([row.ids for row in rows], [row.experts for row in rows]),
    )


# --------------------------------------------------------------------------- who is trained


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key under which `step/10` follows `step/9`."""
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


def _reward(rollout: Rollout, config: PlanConfig) -> float | None:
    """Return the reward that the advantage is computed from; None = unscorable."""
    if rollout.status is Status.INFRA_FAILED or rollout.reward is None:
        return None
    penalised = rollout.status is Status.TRUNCATED and config.truncated == "penalise"
    tokens = rollout.trajectory.ledger.captured
    penalty = overlong_penalty(tokens, config.overlong_tokens)
    return rollout.reward - (1.0 if penalised else 0.0) - penalty


def _judge(group: Group, config: PlanConfig) -> list[PlannedRollout]:
    """Return advantage and decision of every rollout of a group, in slot order."""
    rollouts = sorted(group.rollouts, key=lambda r: _natural(r.id))
    rewards = [_reward(r, config) for r in rollouts]
    scorable = [r for r in rewards if r is not None]
    thin = len(scorable) < config.group_min
    degenerate = _teaches_nothing(scorable, config.degenerate)
    cut = any(r.status is Status.TRUNCATED for r in rollouts) and config.truncated == "drop_group"
    credit = advantages(rewards, config.advantage)
    failed = any(r.status is Status.INFRA_FAILED for r in rollouts)
    # In a small group without failures the missing rollouts timed out.
    lost = "infra" if failed else "ungraded" if len(scorable) < len(rewards) else "deadline"
    slots = []
    for rollout, value in zip(rollouts, credit, strict=True):
        masked = cut or (rollout.status is Status.TRUNCATED and config.truncated == "mask")
        reason = _reason(rollout, None if thin else value, degenerate=degenerate, masked=masked, lost=lost)
        if reason == "zero_advantage" and config.pull:
            reason = ""
        chosen = choose_rows(rollout, config)
        counted = chosen.counted if reason in ("", "zero_advantage") else 0
        slots.append(PlannedRollout(group.id, rollout, value, reason, chosen, counted))
    return slots


def _teaches_nothing(rewards: Sequence[float], rule: str | float) -> bool:
    """Return whether the rewards of a group are equal, or vary less than `train.degenerate` asks for."""
    if rule == "keep":
        return False
    varies_less = isinstance(rule, float) and len(rewards) > 1 and float(np.var(rewards)) < rule
    return equal_rewards(rewards) or varies_less


def use_of(group: Group, config: PlanConfig) -> str:
    """Return why nothing of a group would be trained (infra, deadline, degenerate, ...), or empty.

    The most frequent reason of its rollouts; infra only when there is no other.
    """
    slots = _judge(group, config)
    reasons = [s.exclusion for s in slots]
    if not all(reasons):
        return ""
    others = [reason for reason in reasons if reason != "infra"]
    return max(others, key=others.count) if others else "infra"


def _reason(rollout: Rollout, value: float | None, *, degenerate: bool, masked: bool, lost: str) -> str:
    """Return why a rollout is not trained, or empty; the first reason that applies.

    value: its advantage; None when it, or too few of its group, have a score, for the reason `lost`.
    """
    if rollout.id.startswith("eval"):
        return "evaluation"
    if value is None:
        ungraded = rollout.reward is None and rollout.status is not Status.INFRA_FAILED
        return "ungraded" if ungraded else lost
    if degenerate:
        return "degenerate"
    if masked:
        return "truncated"
    return "" if value else "zero_advantage"


# --------------------------------------------------------------------------- with which weight


def _rows(slots: Sequence[PlannedRollout]) -> tuple[tuple[PlanRow, ...], list[FloatArray]]:
    """Return all rows, and the log-probabilities of each row's trained tokens."""
    todo = [(slot, segment) for slot in slots if not slot.reason for segment in slot.chosen.rows]
    made = map_threaded(lambda one: row_of(*one), todo, sum(len(segment.ids) for _, segment in todo))
    return tuple(row for row, _ in made), [logprobs for _, logprobs in made]


def _weights(slots: Sequence[PlannedRollout], config: PlanConfig) -> list[float]:
    """Return the weight of each rollout's rows."""
    rollouts = sum(s.counted > 0 for s in slots) or 1
    tokens = sum(s.counted for s in slots) or 1
    of_group: dict[str, int] = {}
    for slot in slots:
        if slot.counted:
            of_group[slot.group_id] = of_group.get(slot.group_id, 0) + slot.counted
    if config.reducer == "token":
        return [1.0 / tokens for _ in slots]
    if config.reducer == "constant":
        return [1.0 / (rollouts * config.constant_tokens) for _ in slots]
    if config.reducer == "group":
        return [1.0 / (len(of_group) * of_group.get(s.group_id, 1)) if of_group else 0.0 for s in slots]
    return [1.0 / (rollouts * s.counted) if s.counted else 0.0 for s in slots]


def row_of(slot: PlannedRollout, segment: Segment) -> tuple[PlanRow, FloatArray]:
    """Return the row of a segment and its trained tokens' log-probabilities, which must be usable."""
    row = cut_row(slot.group_id, slot.rollout.id, segment, slot.advantage or 0.0, slot.weight)
    row = replace(row, part=slot.rollout.task_set)
    mu = row.logprobs[row.mask]
    # nan fails every comparison
    if not (float(mu.min()) > -np.inf and float(mu.max()) <= 0):
        token = int(np.flatnonzero(row.mask)[int((np.isfinite(mu) & (mu <= 0)).argmin())])
        raise TrainError(
            f"rollout {slot.rollout.id} segment {segment.index} token {token}: log-probability"
            f" {segment.logprobs[token]} is not usable"
        )
    return row, mu


def cut_row(group_id: str, rollout_id: str, segment: Segment, advantage: float, weight: float) -> PlanRow:
    """Return a segment as a row, cut after its last trained token. Raises TrainError."""
    if segment.mask[0]:
        raise TrainError(
            f"rollout {rollout_id} segment {segment.index} token 0: the first token has no predecessor and"
            " cannot be trained"
        )
    end = len(segment.mask) - int(segment.mask[::-1].argmax())
    return PlanRow(
        group_id=group_id,
        rollout_id=rollout_id,
        segment=segment.index,
        advantage=advantage,
        weight=weight,
        ids=segment.ids[:end],
        mask=segment.mask[:end],
        logprobs=segment.logprobs[:end],
        versions=segment.versions[:end],
        experts=None if segment.experts is None else segment.experts[:end],
    )


def _account(slots: Sequence[PlannedRollout], in_rows: int) -> Ledger:
    """Return the ledger of the step. Raises TrainError when it does not balance."""
    captured = trained = 0
    excluded: dict[str, int] = {}
    for slot in slots:
        ledger = slot.rollout.trajectory.ledger
        if slot.reason:
            ledger = reassign(ledger, slot.reason)
        else:
            for reason, tokens in slot.chosen.excluded.items():
                ledger = reassign(ledger, reason, tokens)
        captured += ledger.captured
        trained += ledger.trained
        for reason, tokens in ledger.excluded.items():
            excluded[reason] = excluded.get(reason, 0) + tokens
    total = Ledger(captured=captured, trained=trained, excluded=dict(sorted(excluded.items())))
    if not total.balanced or in_rows != trained:
        raise TrainError(f"the ledger of the step does not balance: {total}, {in_rows} tokens in rows")
    return total


def check_versions(plan: StepPlan, version: int, max_staleness: int) -> None:
    """Raise TrainError for a version that cannot occur at `version`: a wrong checkpoint, a missed refresh."""
    oldest = version - max_staleness
    for row in plan.rows:
        wrong = row.mask & ((row.versions < oldest) | (row.versions > version))
        if wrong.any():
            token = int(wrong.argmax())
            raise TrainError(
                f"rollout {row.rollout_id} segment {row.segment} token {token} was sampled by version"
                f" {row.versions[token]}, the trainer is at {version} and accepts none older than"
                f" {oldest}: no update"
            )
