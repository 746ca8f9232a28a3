"""The numbers of steps and evaluations for metrics.jsonl, the view and summary.json. Pure; called by loop.py.

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
"""Metrics of a step that the view gets, where it has them; all of them are in metrics.jsonl."""

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
"""Fields of StepResult that are true of a step without an update too; the others were not measured then."""


def measured(result: StepResult) -> dict[str, Any]:
    """A step's result as metrics: None for what a step without an update did not measure."""
    values = asdict(result)
    return {name: v if name in COUNTS or not result.skipped else None for name, v in values.items()}


def ahead_summary(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a run whose rollouts ran ahead says of that; nothing for another."""
    told = [metrics for metrics in steps if "staleness_max" in metrics]
    if not told:
        return {}
    total = {name: sum(m[name] for m in told) for name in ("wasted_s", "rollout_s", "waited_s")}
    whole_s = sum(m.get("cycle_s", m["step_s"]) for m in told)
    return {
        "staleness_max": max(m["staleness_max"] for m in told),
        "wasted": round(total["wasted_s"] / (total["rollout_s"] or 1.0), 4),
        "trainer_idle": round(total["waited_s"] / (whole_s or 1.0), 4),
    }


def apart_text(tokens: int) -> str:
    """What is said of tokens that are not trained for `mismatch`; "" of none."""
    if not tokens:
        return ""
    are = "token is" if tokens == 1 else "tokens are"
    return f"mismatch: {tokens} {are} not trained, over train.max_logprob_gap between sampler and trainer"


def score_of(groups: Sequence[Group]) -> Score:
    return Score.of([r for g in groups for r in g.rewards])


def heldout_summary(when: str, groups: Sequence[Group]) -> dict[str, float | None]:
    """Solve rate and mean reward of an evaluation for the summary; null where nothing was graded."""
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
