"""Another shape of the trained tokens, an oracle of the segments: one row per call, with prompts repeated."""

from __future__ import annotations

import numpy as np

from insitu.capture.segments import version_row
from insitu.errors import CaptureError
from insitu.types import IntArray, Segment, SegmentKind, Trajectory, Turn
from insitu_train.branches import by_index, chain_ends, chain_of, kind_of


def per_request(trajectory: Trajectory) -> tuple[Segment, ...]:
    """Return one row per trained call: its whole prompt, then its reply, masked in.

    Rows have the label of the chain that trains the call. Raises CaptureError when segments and turns do not
    match.
    """
    turns = by_index(trajectory.turns)
    labels = _labels(trajectory, turns)
    rows: list[Segment] = []
    for turn in turns.values():
        kind = kind_of(turn)
        if kind is not None:
            chain = labels[turn.index]
            rows.append(_row(turns, turn, kind, index=len(rows), chain=chain))
    return tuple(rows)


def _labels(trajectory: Trajectory, turns: dict[int, Turn]) -> dict[int, Segment]:
    """Return the segment in which each turn is masked in."""
    ends = chain_ends(turns)
    if len(ends) != len(trajectory.segments):
        raise CaptureError(f"{len(trajectory.segments)} segments for {len(ends)} branches")
    owner: dict[int, Segment] = {}
    for end, segment in zip(ends, trajectory.segments, strict=True):
        index = end.index
        while index != -1:
            turn = turns[index]
            if kind_of(turn) == segment.kind:
                if index in owner:
                    break
                owner[index] = segment
            index = turn.parent
    return owner


def _row(turns: dict[int, Turn], turn: Turn, kind: SegmentKind, *, index: int, chain: Segment) -> Segment:
    ids: IntArray = np.concatenate([part for t in chain_of(turns, turn) for part in (t.context_ids, t.ids)])
    start = len(ids) - len(turn.ids)
    mask = np.zeros(len(ids), dtype=np.bool_)
    logprobs = np.zeros(len(ids), dtype=np.float32)
    versions = np.zeros(len(ids), dtype=np.int32)
    mask[start:] = True
    versions[start:] = version_row(turn.version_runs, len(turn.ids))
    if turn.logprobs is not None:
        logprobs[start:] = turn.logprobs
    return Segment(
        rollout_id=chain.rollout_id,
        index=index,
        kind=kind,
        label=chain.label,
        ids=ids,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
    )
