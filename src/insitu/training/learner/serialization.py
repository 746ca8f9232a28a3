"""Plans and results as frames of the learner's channel.

A plan is JSON scalars and one flat array per kind; its digest is verified on arrival.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from insitu.errors import TrainError, boundary
from insitu.plan.packing import MicroBatch
from insitu.plan.step import PlanRow, StepPlan, plan_digest
from insitu.training.options import StepResult
from insitu.types import Ledger

Array = npt.NDArray[Any]


def encode_plan(plan: StepPlan) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return (meta, arrays) of a frame."""
    meta = {
        "digest": plan.digest,
        "groups": plan.groups,
        "skipped": plan.skipped,
        "ledger": asdict(plan.ledger),
        "rows": [[r.group_id, r.rollout_id, r.part, r.segment, len(r.ids)] for r in plan.rows],
        "batches": [[b.prefix, b.tokens, b.rank, b.layout, list(b.rows)] for b in plan.batches],
    }
    arrays: dict[str, Array] = {
        "advantage": np.array([r.advantage for r in plan.rows], np.float64),
        "weight": np.array([r.weight for r in plan.rows], np.float64),
        "ids": _joined([r.ids for r in plan.rows], np.int32),
        "mask": _joined([r.mask for r in plan.rows], np.bool_),
        "logprobs": _joined([r.logprobs for r in plan.rows], np.float32),
        "versions": _joined([r.versions for r in plan.rows], np.int32),
    }
    for i, row in enumerate(plan.rows):
        if row.experts is not None:
            arrays[f"experts.{i}"] = row.experts
    return meta, arrays


def _joined(parts: list[Any], dtype: type[np.generic]) -> Array:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)


def decode_plan(meta: Mapping[str, Any], arrays: Mapping[str, Array]) -> StepPlan:
    """Return the plan of a frame. Raises TrainError when its digest differs."""
    with boundary(TrainError, "read a plan"):
        try:
            plan = _plan(meta, arrays)
        except (KeyError, TypeError) as error:
            raise TrainError(f"read a plan: {error!r}") from error
    if plan_digest(plan) != plan.digest:
        raise TrainError(f"the received plan has a wrong checksum ({plan.digest[:12]})")
    return plan


def _plan(meta: Mapping[str, Any], arrays: Mapping[str, Array]) -> StepPlan:
    rows = []
    start = 0
    for i, (group_id, rollout_id, part, segment, length) in enumerate(meta["rows"]):
        own = slice(start, start + int(length))
        rows.append(
            PlanRow(
                group_id=group_id,
                rollout_id=rollout_id,
                part=part,
                segment=int(segment),
                advantage=float(arrays["advantage"][i]),
                weight=float(arrays["weight"][i]),
                ids=arrays["ids"][own],
                mask=arrays["mask"][own],
                logprobs=arrays["logprobs"][own],
                versions=arrays["versions"][own],
                experts=arrays.get(f"experts.{i}"),
            )
        )
        start = own.stop
    return StepPlan(
        rows=tuple(rows),
        batches=tuple(
            MicroBatch(
                prefix=int(prefix),
                tokens=int(tokens),
                rank=int(rank),
                layout=layout,
                rows=tuple(int(r) for r in members),
            )
            for prefix, tokens, rank, layout, members in meta["batches"]
        ),
        ledger=Ledger(**meta["ledger"]),
        groups=int(meta["groups"]),
        skipped=str(meta["skipped"]),
        digest=str(meta["digest"]),
    )


def decode_result(meta: Mapping[str, Any]) -> StepResult:
    """Return the StepResult of a reply. Raises TrainError when a field is missing."""
    try:
        return StepResult(**{f.name: meta[f.name] for f in fields(StepResult)})
    except KeyError as error:
        raise TrainError(f"the learner's result lacks {error}") from error
