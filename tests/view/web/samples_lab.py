"""Runs with two evaluations that have several rollouts of each task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from run_lab import Flavour, make_rollout

from insitu.config import load_config
from insitu.evaluate.result import EvalResult
from insitu.storage.run_dir import RunDir
from insitu.storage.store import Store
from insitu.types import Group, Ledger
from insitu_train.evaluations import evaluations_summary, heldout_summary, result_of
from insitu_train.run_report import finish

Rewards = Sequence[Sequence[float | None]]
BEFORE: Rewards = [(1, 0, 0), *[(0, 0, 0)] * 5]
AFTER: Rewards = [(1, 0, 0), (1, 0, 0), *[(0, 0, 0)] * 4]
UNGRADED: Rewards = [(1, None, None), (1, 1, 0), *[(0, 0, 0)] * 3, (None, None, None)]
STEP = 2


def put(store: Store, phase: str, step: int, rewards: Rewards) -> EvalResult:
    """Store an evaluation and return its result as training computes it."""
    groups = []
    for number, row in enumerate(rewards):
        rollouts = tuple(
            replace(
                make_rollout(Flavour(), phase, step, number, slot, bool(reward)),
                reward=reward,
                category="ab"[number % 2],
            )
            for slot, reward in enumerate(row)
        )
        for slot, rollout in enumerate(rollouts):
            store.put_rollout(phase, step, number, slot, rollout)
        group = Group(id=f"{phase}/{step:05d}/{number:03d}", task_id=rollouts[0].task_id, rollouts=rollouts)
        groups.append(group)
    return result_of(groups, len(rewards[0]))


def stored(path: Path, before: Rewards, after: Rewards) -> tuple[dict[str, Any], str]:
    """Write a run with two evaluations; return its summary and its report."""
    config = load_config(None, [f"run.dir={path}", f"run.steps={STEP}"], {"eval": {"count": len(before)}})
    with RunDir.create(config) as run, run.store() as store:
        first, last = put(store, "eval_before", 0, before), put(store, "eval_after", STEP, after)
        summary = {
            **heldout_summary("before", first),
            **heldout_summary("after", last),
            "evaluations": evaluations_summary({"heldout": first}, {"heldout": last}),
            "agent": "script", "seed": 0, "wall_s": 1.0, "rl_steps": STEP, "updates": STEP, "rollouts": 36,
            "ledger": asdict(Ledger(captured=0, trained=0)), "mismatched": 0, "max_logprob_gap_seen": 0.0,
            "best_step": None, "best_heldout_reward": None, "stopped_early": False,
        }  # fmt: skip
        run.write_summary(summary)
    return summary, finish(path, summary)
