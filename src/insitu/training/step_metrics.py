"""Metrics of steps and evaluations for metrics.jsonl, the view and summary.json.

A number that was not measured is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from insitu.storage.score import Score
from insitu.training.options import StepResult
from insitu.types import Group, Ledger

SHOWN = (
    "reward_mean",
    "effective_groups",
    "calls_mean",
    "entropy",
    "max_logprob_gap",
    "tokens_trained",
    "step_s",
    "staleness_max",
    "waited_s",
    "wasted",
)
"""Metrics of a step for the view, where present; metrics.jsonl has all."""

COUNTS = frozenset(
    {
        "optimizer_steps",
        "version",
        "skipped",
        "alarm",
        "mismatched",
        "tokens",
        "rows",
        "micro_batches",
        "seconds",
    }
)
"""Fields of StepResult that are valid without an update; the others are None then."""


def measured(result: StepResult) -> dict[str, Any]:
    """Return a step's result as metrics, None for what a skipped step did not measure."""
    values = asdict(result)
    return {name: v if name in COUNTS or not result.skipped else None for name, v in values.items()}


def ahead_summary(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return summary numbers of asynchronous collection; empty for synchronous runs."""
    asynchronous = [metrics for metrics in steps if "staleness_max" in metrics]
    if not asynchronous:
        return {}
    total = {name: sum(m[name] for m in asynchronous) for name in ("wasted_s", "rollout_s", "waited_s")}
    whole_s = sum(m["cycle_s"] for m in asynchronous)
    return {
        "staleness_max": max(m["staleness_max"] for m in asynchronous),
        "wasted": round(total["wasted_s"] / (total["rollout_s"] or 1.0), 4),
        "trainer_idle": round(total["waited_s"] / (whole_s or 1.0), 4),
    }


def mismatch_text(tokens: int) -> str:
    """Return the notice about tokens excluded for `mismatch`, or ""."""
    if not tokens:
        return ""
    noun = "token" if tokens == 1 else "tokens"
    return f"{tokens} {noun} excluded: sampler/trainer logprob gap exceeds train.max_logprob_gap"


def score_of(groups: Sequence[Group]) -> Score:
    return Score.of([r for g in groups for r in g.rewards])


def heldout_summary(when: str, groups: Sequence[Group]) -> dict[str, float | None]:
    """Return solve rate and mean reward of an evaluation; None where nothing was graded."""
    score = score_of(groups)
    rate, mean = (round(score.rate, 4), round(score.reward_mean, 4)) if score.total else (None, None)
    return {f"heldout_{when}": rate, f"heldout_reward_{when}": mean}


def step_metrics(groups: Sequence[Group], ledger: Ledger, result: StepResult) -> dict[str, Any]:
    score, rollouts = score_of(groups), [r for g in groups for r in g.rollouts]
    return {
        **measured(result),
        "solve_rate": score.rate if score.total else None,
        "reward_mean": score.reward_mean if score.total else None,
        "effective_groups": sum(not g.degenerate for g in groups),
        "groups": len(groups),
        "rollouts": len(rollouts),
        "unscorable": sum(r.reward is None for r in rollouts),
        "calls_mean": sum(len(r.trajectory.turns) for r in rollouts) / len(rollouts),
        "tokens_sampled": ledger.captured,
        "tokens_trained": ledger.trained,
    }
