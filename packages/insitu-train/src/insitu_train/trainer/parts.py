"""Rows that only several ranks together hold: which rank computes which of their tokens, and with what.

The planner of memory says how many a row needs (memory/plan.py); all ranks then agree who computes it, and
compute such rows first. Ranks of a row use the same memory options, since a layer that is computed again
gathers keys and values again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from torch import Tensor

from insitu.errors import TrainError
from insitu_train.loss.fused_head import Objective
from insitu_train.memory.plan import LADDER
from insitu_train.model.base import PLAIN, MemoryOptions
from insitu_train.plan.packing import MicroBatch
from insitu_train.plan.step import StepPlan
from insitu_train.trainer.batch import own_mask
from insitu_train.trainer.distributed import RankLostError, Ranks

T = TypeVar("T")


def divided(plan: StepPlan, chosen: Mapping[MicroBatch, MemoryOptions | int], ranks: Ranks) -> StepPlan:
    """Return the plan with those micro-batches for several ranks for which one has chosen how many.

    They come first, and their rows keep the trained tokens that this rank predicts. The same plan when there
    are none.
    """
    asked = [chosen.get(batch, 0) for batch in plan.batches]
    needed = ranks.most([n if isinstance(n, int) else 0 for n in asked])
    if not any(needed):
        return plan
    return _shared(plan, {batch: n for batch, n in zip(plan.batches, needed, strict=True) if n}, ranks)


def _shared(plan: StepPlan, needed: Mapping[MicroBatch, int], ranks: Ranks) -> StepPlan:
    rows, shared = list(plan.rows), []
    alone = [batch for batch in plan.batches if batch.ranks == 1 and batch not in needed]
    load = [sum(one.tokens for one in alone if one.rank % ranks.world == r) for r in range(ranks.world)]
    for batch, size in needed.items():
        (at,) = batch.rows
        tokens = len(rows[at].ids) - 1
        first = min(range(0, ranks.world, size), key=lambda r: sum(load[r : r + size]))
        load[first : first + size] = [n + tokens // size for n in load[first : first + size]]
        mine = first <= ranks.rank < first + size
        mask = own_mask(rows[at], ranks.rank - first, size) if mine else np.zeros_like(rows[at].mask)
        rows[at] = replace(rows[at], mask=mask)
        shared.append(replace(batch, rank=first, ranks=size, prefix=0, tokens=tokens, layout="prefix"))
    before = [batch for batch in plan.batches if batch.ranks > 1]
    return replace(plan, rows=tuple(rows), batches=(*before, *shared, *alone))


def agreed(
    batches: Sequence[MicroBatch], chosen: Mapping[MicroBatch, MemoryOptions], ranks: Ranks
) -> dict[MicroBatch, MemoryOptions]:
    """Return the options of the micro-batches of several ranks: the most economical that one has chosen."""
    shared = [batch for batch in batches if batch.ranks > 1]
    # where moments are is each rank's own matter
    ladder = [replace(options, offload_optimizer=False) for options in LADDER]
    own = [replace(chosen.get(batch, PLAIN), offload_optimizer=False) for batch in shared]
    return {
        batch: replace(LADDER[step], offload_optimizer=chosen.get(batch, PLAIN).offload_optimizer)
        for batch, step in zip(shared, ranks.most([*map(ladder.index, own)]) if shared else [], strict=True)
    }


class SharedTime:
    """Seconds in which this rank computed rows of several ranks, waiting for the others included."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def over(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a pass and add the time until the next one is asked for."""
        for batch in batches:
            began = time.monotonic()
            yield batch
            if batch.ranks > 1:
                self.seconds += time.monotonic() - began


def described(
    shared: Sequence[MicroBatch], chosen: Mapping[MicroBatch, MemoryOptions], world: int, seconds: float
) -> str:
    """Return a note on the rows that several ranks computed in so many seconds; empty without any."""
    if not shared:
        return ""
    longest = max(shared, key=lambda batch: batch.tokens)
    who = f"{world} ranks" if longest.ranks == world else f"{longest.ranks} of {world} ranks"
    rows = (
        "a row that no rank holds was" if len(shared) == 1 else f"{len(shared)} rows that no rank holds were"
    )
    return (
        f"{rows} computed by {who} together in {seconds:.1f} s ({longest.tokens + 1:,} tokens,"
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

    def kept(self, work: Callable[[], T]) -> T | None:
        """Return `work()`, or None and keep its error: ranks of another row may wait for this one."""
        try:
            return work()
        except RankLostError:
            raise
        except TrainError as error:
            self.error = self.error or error
            return None

    def before(self, work: Callable[[], T]) -> T:
        """Return `work()`, or raise the error: to be called where the error reaches all ranks."""
        if self.error is not None:
            raise self.error
        return work()
