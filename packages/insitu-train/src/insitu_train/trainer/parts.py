"""Rows that only all ranks together hold: which rank computes which of their tokens, and with what.

The planner of memory says which (memory/plan.py); all ranks then agree, compute those rows first, and use the
same memory options, since a layer that is computed again gathers keys and values again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from insitu.errors import TrainError
from insitu_train.loss.fused_head import Objective
from insitu_train.memory.plan import LADDER
from insitu_train.model.base import MemoryOptions
from insitu_train.plan.packing import ALL, MicroBatch
from insitu_train.plan.step import StepPlan
from insitu_train.trainer.batch import own_mask
from insitu_train.trainer.distributed import Ranks

T = TypeVar("T")


def divided(plan: StepPlan, chosen: Mapping[MicroBatch, MemoryOptions | None], ranks: Ranks) -> StepPlan:
    """Return the plan with those micro-batches for all ranks for which some rank has chosen None.

    They come first, and their rows keep the trained tokens that this rank predicts. The same plan when there
    are none.
    """
    lacking = ranks.most([int(batch in chosen and chosen[batch] is None) for batch in plan.batches])
    if not any(lacking):
        return plan
    return _shared(plan, [batch for batch, lacks in zip(plan.batches, lacking, strict=True) if lacks], ranks)


def _shared(plan: StepPlan, batches: Collection[MicroBatch], ranks: Ranks) -> StepPlan:
    rows, shared = list(plan.rows), []
    for batch in batches:
        (at,) = batch.rows
        rows[at] = replace(rows[at], mask=own_mask(rows[at], ranks.rank, ranks.world))
        shared.append(replace(batch, rank=ALL, prefix=0, tokens=len(rows[at].ids) - 1, layout="prefix"))
    before = [batch for batch in plan.batches if batch.rank == ALL]
    alone = [batch for batch in plan.batches if batch.rank != ALL and batch not in batches]
    return replace(plan, rows=tuple(rows), batches=(*before, *shared, *alone))


def agreed(chosen: Mapping[MicroBatch, MemoryOptions], ranks: Ranks) -> dict[MicroBatch, MemoryOptions]:
    """Return the options of the micro-batches of all ranks: the most economical that one has chosen."""
    shared = [batch for batch in chosen if batch.rank == ALL]
    # where moments are is each rank's own matter
    ladder = [replace(options, offload_optimizer=False) for options in LADDER]
    steps = [ladder.index(replace(chosen[batch], offload_optimizer=False)) for batch in shared]
    return {
        batch: replace(LADDER[step], offload_optimizer=chosen[batch].offload_optimizer)
        for batch, step in zip(shared, ranks.most(steps) if shared else [], strict=True)
    }


class SharedTime:
    """Seconds in which this rank computed rows of all ranks, waiting for the others included."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def over(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a pass and add the time until the next one is asked for."""
        for batch in batches:
            began = time.monotonic()
            yield batch
            if batch.rank == ALL:
                self.seconds += time.monotonic() - began


def described(
    shared: Sequence[MicroBatch], chosen: Mapping[MicroBatch, MemoryOptions], world: int, seconds: float
) -> str:
    """Return a note on the rows that all ranks computed in so many seconds; empty without any."""
    if not shared:
        return ""
    longest = max(shared, key=lambda batch: batch.tokens)
    rows = (
        "a row that no rank holds was" if len(shared) == 1 else f"{len(shared)} rows that no rank holds were"
    )
    return (
        f"{rows} computed by {world} ranks together in {seconds:.1f} s ({longest.tokens + 1:,} tokens,"
        f" memory options: {chosen[longest]})"
    )


class HeldError:
    """The first error of a rank's loss, kept while other ranks compute the same layers and wait for it."""

    def __init__(self) -> None:
        self.error: TrainError | None = None

    def instead(self, loss: Objective) -> Objective:
        """Return the loss with zeros from its first error on."""

        def held(logp: Tensor, part: slice) -> Tensor:
            if self.error is None:
                try:
                    return loss(logp, part)
                except TrainError as error:
                    self.error = error
            return logp * 0.0

        return held

    def before(self, work: Callable[[], T]) -> T:
        """Return `work()`, or raise the error: to be called where the error reaches all ranks."""
        if self.error is not None:
            raise self.error
        return work()
