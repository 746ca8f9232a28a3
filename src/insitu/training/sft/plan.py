"""Lessons in, complete supervised steps out: the planner's rows and micro-batches with every advantage 1.

The loss of a step is the mean of -logp over the tokens that count, whatever rollout, row or micro-batch they
are in.
Which lessons meet in which step is a function of seed, pass and ids alone, so a resumed run repeats it. No
torch. Caller: run.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from insitu.errors import TrainError
from insitu.training.plan.step import PlanConfig, PlanRow, StepPlan, pack_rows, plan_digest
from insitu.training.sft.selection import SftExample
from insitu.types import Ledger, Segment


def schedule(ids: Sequence[str], *, per_step: int, epochs: int, seed: int) -> list[tuple[int, ...]]:
    """Indices into `ids` for every step; each pass has each index once, in an order of its own."""
    steps: list[tuple[int, ...]] = []
    for epoch in range(epochs):
        keys = [hashlib.sha256(f"{seed}\0{epoch}\0{name}".encode()).digest() for name in ids]
        order = sorted(range(len(ids)), key=lambda i: keys[i])
        steps += [tuple(order[at : at + per_step]) for at in range(0, len(order), per_step)]
    return steps


def plan_lessons(lessons: Sequence[SftExample], config: PlanConfig) -> StepPlan:
    """One step over `lessons`; of the planner's choices those of micro-batches count. Raises TrainError for a
    token that cannot be a target."""
    tokens = sum(lesson.tokens for lesson in lessons)
    if not tokens:
        raise TrainError("a supervised step without a token to train")
    weight = 1.0 / sum(lesson.counted for lesson in lessons)
    rows = tuple(
        _row(lesson, segment, weight)
        for lesson in lessons
        for segment in lesson.segments
        if segment.mask.any()
    )
    plan = StepPlan(
        rows=rows,
        batches=pack_rows(rows, config),
        ledger=Ledger(captured=tokens, trained=tokens),
        groups=len({lesson.task_id for lesson in lessons}),
    )
    return replace(plan, digest=plan_digest(plan))


def _row(lesson: SftExample, segment: Segment, weight: float) -> PlanRow:
    """Cut after its last target."""
    if segment.mask[0]:
        raise TrainError(
            f"rollout {lesson.rollout_id} segment {segment.index} token 0: the first token has no predecessor"
            " and cannot be trained"
        )
    end = len(segment.mask) - int(segment.mask[::-1].argmax())
    return PlanRow(
        group_id=lesson.task_id,
        rollout_id=lesson.rollout_id,
        segment=segment.index,
        advantage=1.0,
        weight=weight,
        ids=segment.ids[:end],
        mask=segment.mask[:end],
        logprobs=segment.logprobs[:end],
        versions=segment.versions[:end],
    )
