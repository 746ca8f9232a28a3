"""Rows as prime-rl's `MicroBatch`es: positional arrays, as its msgpack wire has them.

The order of the fields is that of prime-rl 0.8 (src/prime_rl/transports/rollouts/types.py). `rl_weights` is
where a row's weight belongs: it multiplies a token's loss, and 0 leaves the token out of the mean. prime-rl
divides the sum by the step's tokens, so weights are multiplied by them first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from insitu.types import BoolArray
from insitu_bridges.rows import Conversion, GroupRows, convert, step_tokens
from insitu_bridges.target_rows import TargetRow, first_trained, replayed_experts, target_row, unscaled
from insitu_train.plan.step import PlanRow


def to_prime(
    groups: Sequence[GroupRows], *, env_name: str = "insitu", temperature: float = 1.0
) -> Conversion[list[list[Any]]]:
    """Return one unpacked `MicroBatch` per trained row, as in `rollouts/step_N/rank_R.bin`."""
    rows = [row for group in groups for row in group.rows]
    taken = [(row.rollout_id, row.segment) for row in rows]
    tokens = step_tokens(groups)
    payload = [_micro_batch(replace(row, weight=row.weight * tokens), env_name, temperature) for row in rows]
    return convert(payload, groups, taken, lost=("versions", "rewards"))


def _stream(mask: BoolArray, value: float) -> list[float]:
    return np.where(mask, value, 0.0).tolist()  # type: ignore[no-any-return]


def _experts(row: PlanRow) -> list[Any] | None:
    """Return `RoutedExperts`: bytes, shape and type; prime-rl has zeros for the last token too."""
    known = replayed_experts(row.experts, len(row.ids))
    if known is None:
        return None
    whole = np.concatenate([known, np.zeros_like(known[:1])])
    return [whole.tobytes(), list(whole.shape), str(whole.dtype)]


def _micro_batch(row: PlanRow, env_name: str, temperature: float) -> list[Any]:
    length = len(row.ids)
    return [
        row.ids.tolist(),
        row.mask.tolist(),
        _stream(row.mask, row.advantage),
        row.logprobs.astype(np.float64).tolist(),
        list(range(length)),
        [length],
        [temperature] * length,
        [env_name],
        [length],
        None,  # ref_logprobs
        _experts(row),
        None,  # mm_refs
        None,  # mm_token_type_ids
        _stream(row.mask, row.weight),
    ]


def read_prime(payload: Sequence[Any]) -> list[TargetRow]:
    """Return the rows of a step's micro-batches of one row each. Raises RecordError."""
    rows = [
        target_row(
            batch[0],
            batch[1],
            batch[3],
            advantage=first_trained(batch[2], batch[1]),
            weight=first_trained(batch[13], batch[1]),
        )
        for batch in payload
    ]
    return unscaled(rows)
