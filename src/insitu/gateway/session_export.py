"""Export of a sealed session: JSON for a person or a script, NPZ for a trainer; pure.

In an NPZ the rows are concatenated: row i is `name[offsets[i]:offsets[i + 1]]`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from insitu.types import Segment, Trajectory
from insitu.types.codec import dumps


def export_json(trajectory: Trajectory, *, temperature: float | None) -> bytes:
    """Return one object: temperature, rows, turns, drifts, ledger.

    The logprobs are those at `temperature`; None, for a log without it, becomes null.
    """
    content = {
        "temperature": temperature,
        "rows": trajectory.segments,
        "turns": trajectory.turns,
        "drifts": trajectory.drifts,
        "ledger": trajectory.ledger,
    }
    return dumps(content)


def export_npz(trajectory: Trajectory, *, temperature: float | None) -> bytes:
    """Return arrays `ids, mask, logprobs, versions`, `offsets` of rows, and the temperature (NaN = None)."""
    arrays = _rows(trajectory.segments)
    arrays["temperature"] = np.array(math.nan if temperature is None else temperature)
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **arrays)
    return out.getvalue()


def _rows(rows: Sequence[Segment]) -> dict[str, npt.NDArray[np.generic]]:
    return {
        "offsets": np.cumsum([0, *(len(row.ids) for row in rows)], dtype=np.int64),
        "ids": _joined([row.ids for row in rows], np.int32),
        "mask": _joined([row.mask for row in rows], np.bool_),
        "logprobs": _joined([row.logprobs for row in rows], np.float32),
        "versions": _joined([row.versions for row in rows], np.int32),
        "label": np.array([row.label for row in rows], dtype=np.str_),
        "kind": np.array([row.kind for row in rows], dtype=np.str_),
        "rollout_id": np.array([row.rollout_id for row in rows], dtype=np.str_),
    }


def _joined(parts: Sequence[npt.NDArray[np.generic]], kind: type[np.generic]) -> npt.NDArray[np.generic]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=kind)
