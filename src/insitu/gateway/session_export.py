"""Export of a sealed session: JSON for a person or a script, NPZ for a trainer; pure.

Forms are those of `Forest.export`. In an NPZ the rows of `chains` and `per_request` are concatenated: row i
is `name[offsets[i]:offsets[i + 1]]`. A `tree` is its own arrays, with the kinds of its nodes as text.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import orjson

from insitu.capture.export import Form
from insitu.capture.tree import TokenTree
from insitu.types import Segment, Trajectory

FORMS: Mapping[str, Form] = {"chains": "chains", "tree": "tree", "per_request": "per_request"}

Shape = Sequence[Segment] | TokenTree


def export_json(form: str, shape: Shape, trajectory: Trajectory, *, temperature: float | None) -> bytes:
    """Return one object: form, temperature, rows or tree, turns, drifts, ledger.

    The logprobs are those at `temperature`; None, for a log without it, becomes null.
    """
    content = {
        "form": form,
        "temperature": temperature,
        "tree" if isinstance(shape, TokenTree) else "rows": shape,
        "turns": trajectory.turns,
        "drifts": trajectory.drifts,
        "ledger": trajectory.ledger,
    }
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY, default=_plain)


def export_npz(form: str, shape: Shape, trajectory: Trajectory, *, temperature: float | None) -> bytes:
    """Return arrays `ids, mask, logprobs, versions`, those of the form, and the temperature (NaN = None)."""
    arrays = _tree(shape) if isinstance(shape, TokenTree) else _rows(shape)
    arrays["form"] = np.array(form)
    arrays["temperature"] = np.array(math.nan if temperature is None else temperature)
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **arrays)
    return out.getvalue()


def _tree(shape: TokenTree) -> dict[str, npt.NDArray[np.generic]]:
    found = {field.name: shape.__getattribute__(field.name) for field in dataclasses.fields(shape)}
    return {name: np.asarray(value) for name, value in found.items()}


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
    """Convert what orjson does not write: arrays that are views."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(type(value).__name__)
