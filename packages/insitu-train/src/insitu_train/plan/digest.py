"""SHA-256 of a plan's content, which does not depend on micro-batches: a resumed run may pack otherwise.

Only ids that a row does not share with the previous row in sorted order are hashed; with the lengths and the
shared prefixes they determine the rest.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from insitu.types import FloatArray
from insitu_train.plan.prefix import Sorted, sort_rows

if TYPE_CHECKING:
    from insitu_train.plan.step import PlanRow, StepPlan
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")
_MANY = 1 << 20
"""Tokens from which threads pay."""


def map_threaded(work: Callable[[A], B], rows: Sequence[A], tokens: int) -> list[B]:
    """Return [work(row) for row in rows]; tokens: number of tokens of all rows."""
    if tokens < _MANY or len(rows) < 2:
        return [work(row) for row in rows]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(work, rows))


def plan_digest(
    plan: StepPlan,
    known: Sorted | None = None,
    logprobs: Sequence[FloatArray] | None = None,
    *,
    packed: bool = False,
) -> str:
    """Return the hex SHA-256 over a plan, except its own digest and its micro-batches (but for `packed`).

    known: result of `sort_rows` for the rows. logprobs: those of each row's trained tokens. Both are computed
    when missing.
    """
    found = known or sort_rows([row.ids for row in plan.rows], [row.experts for row in plan.rows])
    shared = dict(zip(found.order, found.shared, strict=True))
    ledger = [plan.ledger.captured, plan.ledger.trained, sorted(plan.ledger.excluded.items())]
    batches = [[b.prefix, b.tokens, b.rank, b.layout, *b.rows] for b in plan.batches]
    names = [[r.group_id, r.rollout_id, r.segment, len(r.ids), *filter(None, [r.part])] for r in plan.rows]
    h = hashlib.sha256()
    content = [ledger, plan.groups, plan.skipped, names, found.order, found.shared]
    if packed:
        content.insert(3, batches)
    h.update(json.dumps(content).encode())

    def one(i: int) -> bytes:
        return _row_digest(plan.rows[i], shared[i], None if logprobs is None else logprobs[i])

    parts = map_threaded(one, range(len(plan.rows)), sum(len(row.ids) for row in plan.rows))
    h.update(b"".join(parts))
    return h.hexdigest()


def is_plan(plan: StepPlan, digest: str) -> bool:
    """Return whether `digest` was stored for this plan. Runs of earlier versions have one with batches."""
    return digest == plan.digest or digest == plan_digest(plan, packed=True)


def _row_digest(row: PlanRow, shared: int, logprobs: FloatArray | None) -> bytes:
    h = hashlib.sha256(struct.pack("<dd", row.advantage, row.weight))
    h.update(np.ascontiguousarray(row.ids[shared:], "<i4").data)
    edges = np.flatnonzero(row.versions[1:] != row.versions[:-1])
    h.update(struct.pack("<q", len(edges)))
    h.update(edges.astype("<i8").data)
    h.update(np.append(row.versions[edges], row.versions[-1:]).astype("<i4").data)
    h.update(np.packbits(row.mask).data)
    mu = row.logprobs[row.mask] if logprobs is None else logprobs
    h.update(np.ascontiguousarray(mu, "<f4").data)
    if row.experts is not None:
        h.update(struct.pack("<qq", *row.experts.shape[1:]))
        h.update(np.ascontiguousarray(row.experts[shared:], "<i2").data)
    return h.digest()
