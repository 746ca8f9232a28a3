"""Rows as Tinker `Datum`s: one per row, shifted by one token.

Tinker's losses are sums over tokens, so a row's weight folds exactly into its per-token advantages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from insitu.errors import SetupError
from insitu.install_hints import install_extra
from insitu_bridges.rows import Conversion, GroupRows, convert
from insitu_bridges.target_rows import TargetRow, first_trained, target_row
from insitu_train.plan.step import PlanRow


def to_tinker(groups: Sequence[GroupRows]) -> Conversion[list[dict[str, Any]]]:
    """Return `model_input` (ids), `loss_fn_inputs` (arrays of one length) and `mask` of each trained row.

    The mask is no input of Tinker's losses, which would refuse it: untrained tokens have advantage 0.
    """
    rows = [row for group in groups for row in group.rows]
    taken = [(row.rollout_id, row.segment) for row in rows]
    return convert([_datum(row) for row in rows], groups, taken, lost=("versions", "rewards"))


def _datum(row: PlanRow) -> dict[str, Any]:
    mask = row.mask[1:].astype(np.float32)
    return {
        "model_input": row.ids[:-1],
        "loss_fn_inputs": {
            "target_tokens": row.ids[1:].astype(np.int64),
            "logprobs": row.logprobs[1:],
            "advantages": (mask * (row.advantage * row.weight)).astype(np.float32),
        },
        "mask": mask,
    }


def datums(payload: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the payload as `tinker.Datum`s. Raises SetupError without the package."""
    try:
        import tinker
    except ImportError as error:
        raise SetupError(f"Datum needs tinker: {install_extra('tinker')}") from error
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(datum["model_input"].tolist()),
            loss_fn_inputs=datum["loss_fn_inputs"],
        )
        for datum in payload
    ]


def read_tinker(payload: Sequence[Any]) -> list[TargetRow]:
    """Return the rows of data, as made here or as JSON. Raises RecordError."""
    return [_row(datum["model_input"], datum["loss_fn_inputs"], datum["mask"]) for datum in payload]


def _row(ids: Any, inputs: Any, mask: Any) -> TargetRow:
    return target_row(
        [*ids, inputs["target_tokens"][-1]],
        [0, *mask],
        [0, *inputs["logprobs"]],
        advantage=first_trained(inputs["advantages"], mask),
    )
