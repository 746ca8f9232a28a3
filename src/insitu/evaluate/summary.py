"""Numbers of an evaluation from its store: summary.json, results.jsonl and the text report."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import orjson

from insitu.config import Config
from insitu.evaluate.result import EvalResult
from insitu.gateway.text_log import spent_in
from insitu.progress.base import duration
from insitu.storage.attempts import CANCELLED, INTERRUPTED
from insitu.storage.files import write_text
from insitu.storage.pass_at_k import PassAtK, TaskCounts, covered, estimate, reported_ks
from insitu.storage.run_dir import RunDir
from insitu.storage.store import Store
from insitu.storage.summaries import RolloutSummary
from insitu.types import Outcome, Status

RESULTS = "results.jsonl"
PHASE = "rollout"
"""Phase of the only evaluation, at step 0."""


def result_of(config: Config, rollouts: Sequence[RolloutSummary]) -> EvalResult:
    """Return what the stored rollouts found."""
    groups: dict[int, list[RolloutSummary]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return EvalResult.of(groups, config.rollout.samples)


def summarise(run: RunDir, store: Store, records: str) -> Mapping[str, Any]:
    """Return the summary without the agent and the time; `records`: folder of the provider calls."""
    c = run.config
    rollouts = store.outcomes(PHASE, 0)
    result = result_of(c, rollouts)
    score = result.score
    return {
        "kind": "rollout",
        "run_dir": str(run.path),
        "engine": c.engine.kind,
        "model": c.engine.model or c.model.path,
        "source": " + ".join(table.source for table in c.tasks),
        "split": c.rollout.split,
        "seed": c.run.seed,
        "tasks": len(result.tasks),
        "samples": c.rollout.samples,
        "rollouts": len(rollouts),
        "graded": score.total,
        "pass_at": _levels(result.samples, result.tasks.values()),
        "sets": _sets(c, result),
        "reward_mean": score.reward_mean if score.total else None,
        "status": {status.value: sum(o.status is status for o in rollouts) for status in Status},
        "verdict": {kind.value: sum(o.outcome is kind for o in rollouts) for kind in Outcome},
        "trust": dict(Counter(o.trust for o in rollouts if o.trust)),
        "categories": _category_counts(rollouts),
        "egress_attempts": sum(o.egress_attempts or 0 for o in rollouts),
        "tries": sum(store.tried(f"{PHASE}/").values()),
        "masked": _infra_failures(store, rollouts),
        "last_failure": next((o.error for o in reversed(rollouts) if o.status is Status.INFRA_FAILED), ""),
        "ledger": asdict(store.ledger()),
        **_usage(run, rollouts, records),
    }


def _levels(samples: int, tasks: Collection[TaskCounts]) -> Mapping[str, Any]:
    levels = [estimate(list(tasks), k) for k in reported_ks(samples)]
    return {str(level.k): _plain(level) for level in levels}


def _sets(config: Config, result: EvalResult) -> Mapping[str, Any]:
    """Return the numbers of each task set of a mix, and of each of several agents on the tasks it had."""
    found = {}
    for arm in [*(config.set_arms if config.set_names else ()), *config.agent_arms]:
        own = result.sets.get(arm.label)
        counts = [count for count in own.tasks.values() if count.graded or not arm.agent] if own else []
        found[arm.label] = {
            "agent": config.agent_of(arm.part),
            "tasks": len(counts),
            "graded": sum(count.graded for count in counts),
            "resolved": sum(count.resolved for count in counts),
            "pass_at": _levels(result.samples, counts),
        }
    return found


def _infra_failures(store: Store, rollouts: Sequence[RolloutSummary]) -> Mapping[str, int]:
    """Map task ids to their number of infrastructure failures if any, most first."""
    counts = Counter[str]()
    for rollout in rollouts:
        counts[rollout.task_id] += sum(
            status is Status.INFRA_FAILED and not error.startswith((CANCELLED, INTERRUPTED))
            for _, status, error in store.attempts(rollout.rollout_id)
        )
    return {task: count for task, count in counts.most_common() if count}


def _plain(level: PassAtK) -> Mapping[str, Any]:
    return {"value": level.value, "low": level.low, "high": level.high, "tasks": level.tasks}


def _category_counts(rollouts: Sequence[RolloutSummary]) -> Mapping[str, Any]:
    results: dict[str, list[bool]] = {}
    for rollout in rollouts:
        if rollout.category and rollout.reward is not None:
            results.setdefault(rollout.category, []).append(rollout.reward >= 1.0)
    return {name: {"resolved": sum(r), "graded": len(r)} for name, r in sorted(results.items())}


def _usage(run: RunDir, rollouts: Sequence[RolloutSummary], records: str) -> Mapping[str, Any]:
    """Return calls, tokens and cost: for a provider of all attempts, else of decided rollouts."""
    table = run.config.engine
    if table.kind == "upstream":
        spent = spent_in(run.path / records)
        priced = bool(table.prices.get("input") or table.prices.get("output"))
        return {
            "calls": spent.calls,
            "prompt_tokens": spent.prompt_tokens,
            "sampled_tokens": spent.sampled_tokens,
            "estimated_calls": spent.estimated_calls,
            "cost": spent.cost if priced else None,
        }
    return {
        "calls": sum(o.calls for o in rollouts),
        "prompt_tokens": sum(o.prompt_tokens for o in rollouts),
        "sampled_tokens": sum(o.sampled_tokens for o in rollouts),
        "estimated_calls": 0,
        "cost": None,
    }


def write_results(run: RunDir, store: Store) -> None:
    """Write results.jsonl with one line per rollout."""
    agent_of = functools.cache(run.config.agent_of)
    outcomes = store.outcomes(PHASE, 0)
    lines = [orjson.dumps(_line(rollout, agent_of(rollout.part))).decode() for rollout in outcomes]
    write_text(run.path / RESULTS, "".join(f"{line}\n" for line in lines))


def _line(rollout: RolloutSummary, agent: str) -> Mapping[str, Any]:
    return {
        "task_set": rollout.task_set,
        "agent": agent,
        "task_id": rollout.task_id,
        "slot": rollout.slot,
        "rollout_id": rollout.rollout_id,
        "status": rollout.status.value,
        "verdict": None if rollout.outcome is None else rollout.outcome.value,
        "reward": rollout.reward,
        "trust": rollout.trust,
        "tries": rollout.attempt,
        "calls": rollout.calls,
        "prompt_tokens": rollout.prompt_tokens,
        "sampled_tokens": rollout.sampled_tokens,
        "egress_attempts": rollout.egress_attempts,
        "agent_s": rollout.timings.agent_s,
        "grade_s": rollout.timings.grade_s,
        "error": rollout.error,
        "reason": rollout.reason,
    }


def render(summary: Mapping[str, Any]) -> str:
    """Return the text report."""
    return "\n".join(_lines(summary)) + "\n"


def _lines(s: Mapping[str, Any]) -> Iterator[str]:
    yield f"{s['agent']} {s['agent_version']} on {s['engine']} {s['model']}".rstrip()
    yield (
        f"{s['tasks']} tasks of {s['source']} ({s['split']}), {s['samples']} each: "
        f"{s['graded']} of {s['rollouts']} rollouts graded in {duration(s['wall_s'])}"
    )
    for k, level in s["pass_at"].items():
        skipped = s["tasks"] - level["tasks"]
        less = f", {skipped} with fewer than {k} graded excluded" if skipped else ""
        yield (
            f"  pass@{k:<4} {level['value']:.3f}   95 % {level['low']:.3f} to {level['high']:.3f}"
            f"   ({level['tasks']} tasks{less})"
        )
    for name, one in s["sets"].items():
        levels = (
            f", pass@{k} {found['value']:.3f}{covered(found['tasks'], one['tasks'])}"
            for k, found in one["pass_at"].items()
            if found["tasks"]
        )
        yield (
            f"  {name}: {one['agent']}, {one['resolved']} of {one['graded']} rollouts on {one['tasks']} tasks"
            f" resolved{''.join(levels)}"
        )
    if s["reward_mean"] is not None:
        yield f"  reward    {s['reward_mean']:.3f} on average"
    yield f"  status    {_counts(s['status'])}"
    yield f"  verdicts  {_counts(s['verdict'])}; graded {_counts(s['trust'])}"
    for name, category in s["categories"].items():
        yield f"    {name}: {category['resolved']}/{category['graded']}"
    guessed = f", {s['estimated_calls']} calls estimated" if s["estimated_calls"] else ""
    cost = "" if s["cost"] is None else f", cost {s['cost']:.4g}"
    yield (
        f"  used      {s['calls']:,} calls, {s['prompt_tokens']:,} prompt and {s['sampled_tokens']:,} sampled"
        f" tokens{guessed}{cost}"
    )
    missing = s["rollouts"] - s["graded"]
    if missing:
        yield f"  {missing} not graded; the last: {s['last_failure']}"
        yield f"  retry them with: insitu rollout --resume {s['run_dir']}"
    yield f"written to {s['run_dir']}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "none"
