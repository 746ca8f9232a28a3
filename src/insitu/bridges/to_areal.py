"""Rollouts as AReaL's trajectories: arrays [rows, tokens] padded on the right, ready for torch.from_numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from insitu.bridges.rows import Conversion, GroupRows, RolloutRows, convert, unscored
from insitu.bridges.target_rows import TargetRow, target_row

PROMPT_VERSION = -1
"""Version of tokens that were not sampled."""


def to_areal(groups: Sequence[GroupRows]) -> Conversion[list[dict[str, npt.NDArray[Any]]]]:
    """Return a dictionary of arrays per rollout that can be compared with others."""
    items = [item for group in groups for item in group.scored]
    taken = [(item.rollout.id, segment.index) for item in items for segment in item.segments]
    return convert([_arrays(item) for item in items], groups, taken, unscored(groups), lost=("weights",))


def _arrays(item: RolloutRows) -> dict[str, npt.NDArray[Any]]:
    shape = (len(item.segments), max(len(segment.ids) for segment in item.segments))
    found: dict[str, npt.NDArray[Any]] = {
        "input_ids": np.zeros(shape, np.int32),
        "attention_mask": np.zeros(shape, np.bool_),
        "loss_mask": np.zeros(shape, np.int32),
        "logprobs": np.zeros(shape, np.float32),
        "versions": np.full(shape, PROMPT_VERSION, np.int32),
        "rewards": np.full(shape[0], item.rollout.reward, np.float32),
    }
    for row, segment in enumerate(item.segments):
        end = len(segment.ids)
        found["input_ids"][row, :end] = segment.ids
        found["attention_mask"][row, :end] = True
        found["loss_mask"][row, :end] = segment.mask
        found["logprobs"][row, :end] = segment.logprobs
        found["versions"][row, :end] = np.where(segment.mask, segment.versions, PROMPT_VERSION)
    return found


def read_areal(payload: Sequence[Any]) -> list[TargetRow]:
    """Return the rows of trajectories, as made here or as JSON. Raises RecordError."""
    names = ("input_ids", "loss_mask", "logprobs", "versions")
    rows = []
    for arrays in payload:
        kept = np.array(arrays["attention_mask"], np.bool_)
        for row, reward in enumerate(arrays["rewards"]):
            lists = (np.array(arrays[name][row])[kept[row]] for name in names)
            rows.append(target_row(*lists, reward=float(reward)))
    return rows
