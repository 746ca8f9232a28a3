"""A sealed trajectory as bytes: JSON for a person or a script, NPZ for a trainer. Pure; caller: admin.

JSON holds a list per row. NPZ holds all rows end to end: row i is `name[offsets[i]:offsets[i + 1]]`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import orjson

from whet.types import Segment, Trajectory

FORMS = ("chains",)
"""`chains`: the training rows, each sampled token masked in at most once."""


def export_json(form: str, trajectory: Trajectory) -> bytes:
    """One object: form, rows, turns, ledger."""
    told = {
        "form": form,
        "rows": trajectory.segments,
        "turns": trajectory.turns,
        "ledger": trajectory.ledger,
    }
    return orjson.dumps(told, option=orjson.OPT_SERIALIZE_NUMPY, default=_plain)


def export_npz(form: str, trajectory: Trajectory) -> bytes:
    """Arrays `ids, mask, logprobs, versions` end to end, `offsets`, and per row `label, kind, rollout_id`."""
    arrays = _rows(trajectory.segments)
    arrays["form"] = np.array(form)
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


def _plain(value: object) -> object:
    """What orjson does not write by itself: arrays that are views."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(type(value).__name__)
