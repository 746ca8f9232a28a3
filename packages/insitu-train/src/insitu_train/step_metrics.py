"""Metrics of steps and evaluations for metrics.jsonl, the view and summary.json.

A number that was not measured is None, never 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from insitu.config import Config
from insitu.evaluate.result import by_set
from insitu.storage.score import Score
from insitu.storage.store import Store
from insitu.types import PARTS_LEFT_OUT, Group, Ledger, Rollout
from insitu_train.options import StepResult
from insitu_train.unparsed import unparsed_counts

COUNTS = frozenset(
    {
        "optimizer_steps",
        "version",
        "skipped",
        "bad",
        "alarm",
        "mismatched",
        "tokens",
        "rows",
        "micro_batches",
        "seconds",
    }
)
"""Fields of StepResult that are valid without an update; the others are None then."""


def _measured(result: StepResult) -> dict[str, Any]:
    """Return a step's result as metrics, None for what a skipped step did not measure."""
    values = asdict(result)
    of_sets = {f"{name}/ref_kl": value for name, value in values.pop("ref_kl_of_sets").items()}
    return of_sets | {name: v if name in COUNTS or not result.skipped else None for name, v in values.items()}


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


def evaluation_waits(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds that steps waited for evaluations beside them; empty without any."""
    waits = [metrics["evaluate_s"] for metrics in steps if "evaluate_s" in metrics]
    return {"evaluate_s": round(sum(waits), 1)} if waits else {}


def service_usage(config: Config, store: Store) -> dict[str, Any]:
    """Return what a training service computed for the decided rollouts and committed steps of a run.

    `cost` is in the unit of the prices of [engine], None without any. Other engines have no entry.
    """
    prices = config.engine.prices
    if config.engine.kind != "tinker":
        return {}
    rollouts = [one for place in store.phases() for one in store.outcomes(*place)]
    passed = sum(step.metrics.get("row_tokens", 0) for step in store.steps()) * config.train.epochs
    priced = {
        "prompt_tokens": (sum(one.prompt_tokens for one in rollouts), prices.get("input", 0.0)),
        "sampled_tokens": (sum(one.sampled_tokens for one in rollouts), prices.get("output", 0.0)),
        "trained_row_tokens": (passed, prices.get("train", 0.0)),
    }
    cost = sum(tokens * price for tokens, price in priced.values()) / 1e6
    known = any(price for _, price in priced.values())
    counts = {name: tokens for name, (tokens, _) in priced.items()}
    return {"service": {**counts, "cost": round(cost, 4) if known else None}}


def mismatch_text(tokens: int) -> str:
    """Return the notice about tokens excluded for `mismatch`, or ""."""
    if not tokens:
        return ""
    noun = "token" if tokens == 1 else "tokens"
    return f"{tokens} {noun} excluded: sampler/trainer logprob gap exceeds train.max_logprob_gap"


def step_metrics(
    groups: Sequence[Group], ledger: Ledger, result: StepResult, trained: Collection[str] = ()
) -> dict[str, Any]:
    """Return the metrics of a step; `trained`: ids of the rollouts that were trained on."""
    rollouts = [r for g in groups for r in g.rollouts]
    effective = _means([r for r in rollouts if r.id in trained])
    return {
        **_measured(result),
        **_means(rollouts),
        "effective_groups": sum(not g.degenerate for g in groups),
        "groups": len(groups),
        "unscorable": sum(r.reward is None for r in rollouts),
        **{f"effective_{name}": value for name, value in effective.items()},
        "tokens_sampled": ledger.captured,
        "tokens_trained": ledger.trained,
        **_of_sets(groups),
    }


def _of_sets(groups: Sequence[Group]) -> dict[str, Any]:
    """Return what is measured of each named task set and each of several agents, as `name/metric`."""
    found: dict[str, Any] = {}
    for name, chosen in by_set({n: group.rollouts for n, group in enumerate(groups)}).items():
        own = [replace(groups[n], rollouts=tuple(rollouts)) for n, rollouts in chosen.items()]
        rollouts = [r for g in own for r in g.rollouts]
        values = {
            **_means(rollouts),
            "groups": len(own),
            "effective_groups": sum(not g.degenerate for g in own),
            "unscorable": sum(r.reward is None for r in rollouts),
        }
        found |= {f"{name}/{metric}": value for metric, value in values.items()}
    return found


def _means(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return what is measured of all rollouts, and again of those that were trained on."""
    score, n = Score.of([r.reward for r in rollouts if r.reward is not None]), len(rollouts)
    return {
        "solve_rate": score.rate if score.total else None,
        "reward_mean": score.reward_mean if score.total else None,
        "rollouts": n,
        "calls_mean": sum(len(r.trajectory.turns) for r in rollouts) / n if n else None,
        "tokens_mean": sum(r.trajectory.ledger.captured for r in rollouts) / n if n else None,
        "parts_left_out": sum(PARTS_LEFT_OUT in t.labels for r in rollouts for t in r.trajectory.turns),
        **unparsed_counts(rollouts),
    }
