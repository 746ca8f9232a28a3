"""Plans supervised steps: rows and micro-batches with advantage 1.

The loss of a step is the mean of -logp over its counted tokens. Which examples form a step depends on seed,
epoch and ids alone, so a resumed run repeats it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from insitu.errors import TrainError
from insitu.training.plan.step import PlanConfig, StepPlan, cut_row, pack_rows, plan_digest
from insitu.training.sft.selection import SftExample
from insitu.types import Ledger


def schedule(ids: Sequence[str], *, per_step: int, epochs: int, seed: int) -> list[tuple[int, ...]]:
    """Return indices into `ids` for every step; each epoch has each index once, in its own order."""
    steps: list[tuple[int, ...]] = []
    for epoch in range(epochs):
        keys = [hashlib.sha256(f"{seed}\0{epoch}\0{name}".encode()).digest() for name in ids]
        order = sorted(range(len(ids)), key=lambda i: keys[i])
        steps += [tuple(order[at : at + per_step]) for at in range(0, len(order), per_step)]
    return steps


def plan_examples(examples: Sequence[SftExample], config: PlanConfig) -> StepPlan:
    """Plan one step over `examples`. Raises TrainError for a token that cannot be a target."""
    tokens = sum(example.tokens for example in examples)
    if not tokens:
        raise TrainError("a supervised step has no token to train")
    weight = 1.0 / sum(example.counted for example in examples)
    rows = tuple(
        cut_row(example.task_id, example.rollout_id, segment, 1.0, weight)
        for example in examples
        for segment in example.segments
        if segment.mask.any()
    )
    plan = StepPlan(
        rows=rows,
        batches=pack_rows(rows, config),
        ledger=Ledger(captured=tokens, trained=tokens),
        groups=len({example.task_id for example in examples}),
    )
    return replace(plan, digest=plan_digest(plan))
