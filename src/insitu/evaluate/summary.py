"""The numbers of an evaluation, from its store alone: for summary.json, results.jsonl and a person's eyes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from insitu.evaluate.pass_at_k import Counted, PassAtK, estimate, ladder
from insitu.evaluate.results import PHASE, STEP
from insitu.runtime.upstream import spent_in
from insitu.storage.run_dir import RunDir, write_text
from insitu.storage.store import Store
from insitu.storage.summaries import Outline
from insitu.types import Outcome, Status, Task
from insitu.view.base import duration

RESULTS = "results.jsonl"


def solved(held: Outline) -> bool:
    """By its reward, which is 1 where the verdict is `resolved` unless the user has a function of his own."""
    return held.reward is not None and held.reward >= 1.0


def counted(outlines: Sequence[Outline], tasks: int) -> list[Counted]:
    """Graded rollouts of each task, and those of full reward, in the order of the tasks."""
    graded, resolved = Counter[int](), Counter[int]()
    for held in outlines:
        graded[held.group] += held.reward is not None
        resolved[held.group] += solved(held)
    return [Counted(graded=graded[group], resolved=resolved[group]) for group in range(tasks)]


def summarise(run: RunDir, store: Store, tasks: Sequence[Task], records: str) -> Mapping[str, Any]:
    """Everything but the agent and the time. `records`: folder with the text of a provider's calls."""
    c = run.config
    held = store.outcomes(PHASE, STEP)
    per_task = counted(held, len(tasks))
    rewards = [o.reward for o in held if o.reward is not None]
    levels = [estimate(per_task, k, seed=c.run.seed) for k in ladder(c.rollout.per_task)]
    return {
        "kind": "rollout",
        "run_dir": str(run.path),
        "engine": c.engine.kind,
        "model": c.engine.model or c.model.path,
        "source": c.tasks.source,
        "split": c.rollout.split,
        "seed": c.run.seed,
        "tasks": len(tasks),
        "per_task": c.rollout.per_task,
        "rollouts": len(held),
        "graded": len(rewards),
        "pass_at": {str(level.k): _plain(level) for level in levels},
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "status": {status.value: sum(o.status is status for o in held) for status in Status},
        "verdict": {kind.value: sum(o.outcome is kind for o in held) for kind in Outcome},
        "trust": dict(Counter(o.trust for o in held if o.trust)),
        "categories": _kinds(held),
        "egress_attempts": sum(o.egress_attempts or 0 for o in held),
        "tries": sum(store.tried(f"{PHASE}/").values()),
        "masked": _masked(store, held),
        "last_failure": next((o.error for o in reversed(held) if o.status is Status.INFRA_FAILED), ""),
        "ledger": asdict(store.ledger()),
        **_usage(run, held, records),
    }


def _masked(store: Store, held: Sequence[Outline]) -> Mapping[str, int]:
    """Task id -> tries that failed of the infrastructure, where there are any; most first. They earn nothing
    and cost nothing, so one task with many of them wants a look."""
    found = Counter[str]()
    for one in held:
        failed = [status is Status.INFRA_FAILED for _, status, _ in store.attempts(one.rollout_id)]
        found[one.task_id] += sum(failed)
    return {task: count for task, count in found.most_common() if count}


def _plain(level: PassAtK) -> Mapping[str, Any]:
    return {
        "value": level.value,
        "low": level.low,
        "high": level.high,
        "tasks": level.tasks,
        "method": level.method,
    }


def _kinds(held: Sequence[Outline]) -> Mapping[str, Any]:
    found: dict[str, list[bool]] = {}
    for one in held:
        if one.category and one.reward is not None:
            found.setdefault(one.category, []).append(solved(one))
    return {name: {"resolved": sum(f), "graded": len(f)} for name, f in sorted(found.items())}


def _usage(run: RunDir, held: Sequence[Outline], records: str) -> Mapping[str, Any]:
    """Of a provider: all that was paid for, failed tries included; of our own engines: decided rollouts."""
    table = run.config.engine
    if table.kind == "upstream":
        spent = spent_in(run.path / records)
        priced = bool(table.input_price or table.output_price)
        return {
            "calls": spent.calls,
            "prompt_tokens": spent.prompt_tokens,
            "sampled_tokens": spent.sampled_tokens,
            "estimated_calls": spent.estimated_calls,
            "cost": spent.cost if priced else None,
        }
    return {
        "calls": sum(o.calls for o in held),
        "prompt_tokens": sum(o.prompt_tokens for o in held),
        "sampled_tokens": sum(o.sampled_tokens for o in held),
        "estimated_calls": 0,
        "cost": None,
    }


def write_results(path: Path, store: Store) -> None:
    """One JSON line per rollout."""
    lines = [orjson.dumps(_line(held)).decode() for held in store.outcomes(PHASE, STEP)]
    write_text(path / RESULTS, "".join(f"{line}\n" for line in lines))


def _line(held: Outline) -> Mapping[str, Any]:
    return {
        "task_id": held.task_id,
        "slot": held.slot,
        "rollout_id": held.rollout_id,
        "status": held.status.value,
        "verdict": None if held.outcome is None else held.outcome.value,
        "reward": held.reward,
        "trust": held.trust,
        "tries": held.attempt,
        "calls": held.calls,
        "prompt_tokens": held.prompt_tokens,
        "sampled_tokens": held.sampled_tokens,
        "egress_attempts": held.egress_attempts,
        "agent_s": held.timings.agent_s,
        "grade_s": held.timings.grade_s,
        "error": held.error,
        "reason": held.reason,
    }


def render(summary: Mapping[str, Any]) -> str:
    """For a person."""
    return "\n".join(_lines(summary)) + "\n"


def _lines(s: Mapping[str, Any]) -> Iterator[str]:
    yield f"{s['agent']} {s['agent_version']} on {s['engine']} {s['model']}".rstrip()
    yield (
        f"{s['tasks']} tasks of {s['source']} ({s['split']}), {s['per_task']} each: "
        f"{s['graded']} of {s['rollouts']} rollouts graded in {duration(s['wall_s'])}"
    )
    for k, level in s["pass_at"].items():
        skipped = s["tasks"] - level["tasks"]
        less = f", {skipped} with fewer than {k} graded left out" if skipped else ""
        yield (
            f"  pass@{k:<4} {level['value']:.3f}   95 % {level['low']:.3f} to {level['high']:.3f}"
            f"   ({level['method']}, {level['tasks']} tasks{less})"
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
        yield f"  try them again with: insitu rollout --resume {s['run_dir']}"
    yield f"written to {s['run_dir']}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "none"
