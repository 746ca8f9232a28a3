"""Rows as prime-rl's `TrainingSample` and `MicroBatch`: positional arrays, as its msgpack wire has them.

The order of the fields is that of prime-rl 0.8 (src/prime_rl/transports/rollouts/types.py). `rl_weights` is
where a row's weight belongs: it multiplies a token's loss, and 0 leaves the token out of the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from insitu.bridges.rows import Conversion, GroupRows, convert
from insitu.bridges.target_rows import TargetRow, first_trained, replayed_experts, target_row
from insitu.training.plan.step import PlanRow
from insitu.types import BoolArray


def to_prime_samples(
    groups: Sequence[GroupRows], *, env_name: str = "insitu", temperature: float = 1.0
) -> Conversion[list[list[Any]]]:
    """Return one `TrainingSample` per trained row."""
    return _converted(groups, lambda row: _sample(row, env_name, temperature))


def to_prime(
    groups: Sequence[GroupRows], *, env_name: str = "insitu", temperature: float = 1.0
) -> Conversion[list[list[Any]]]:
    """Return one unpacked `MicroBatch` per trained row, as in `rollouts/step_N/rank_R.bin`."""
    return _converted(groups, lambda row: _micro_batch(row, env_name, temperature))


def _converted(groups: Sequence[GroupRows], make: Any) -> Conversion[list[list[Any]]]:
    rows = [row for group in groups for row in group.rows]
    taken = [(row.rollout_id, row.segment) for row in rows]
    return convert([make(row) for row in rows], groups, taken, lost=("versions", "rewards"))


def _stream(mask: BoolArray, value: float) -> list[float]:
    return np.where(mask, value, 0.0).tolist()  # type: ignore[no-any-return]


def _experts(row: PlanRow) -> list[Any] | None:
    """Return `RoutedExperts`: bytes, shape and type; prime-rl has zeros for the last token too."""
    known = replayed_experts(row.experts, len(row.ids))
    if known is None:
        return None
    whole = np.concatenate([known, np.zeros_like(known[:1])])
    return [whole.tobytes(), list(whole.shape), str(whole.dtype)]


def _sample(row: PlanRow, env_name: str, temperature: float) -> list[Any]:
    temperatures = [temperature] * len(row.ids)
    logprobs = row.logprobs.astype(np.float64).tolist()
    head = [row.ids.tolist(), row.mask.tolist(), logprobs, temperatures, env_name]
    # ref_logprobs, mm_refs, routed_experts, mm_token_type_ids, rl, ce and ref_kl weights, advantages
    weights = _stream(row.mask, row.weight)
    return [*head, None, None, _experts(row), None, weights, None, None, _stream(row.mask, row.advantage)]


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
    """Return the rows of micro-batches of one row each. Raises RecordError."""
    return [
        target_row(
            batch[0],
            batch[1],
            batch[3],
            advantage=first_trained(batch[2], batch[1]),
            weight=first_trained(batch[13], batch[1]),
        )
        for batch in payload
    ]
