"""Other shapes of the trained tokens, from a sealed or stored trajectory; pure.

`chains` are the segments themselves: linear rows, each sampled token masked in once. `per_request` has one
row per call, with prompts repeated. `tree` (capture/tree) holds every id once. All three train the same
tokens with the same logprobs, and their sums are those of the turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from insitu.capture.segments import version_row
from insitu.errors import CaptureError
from insitu.types import IntArray, Segment, SegmentKind, Trajectory, Turn

Form = Literal["chains", "tree", "per_request"]


def kind_of(turn: Turn) -> SegmentKind | None:
    """Return what a turn's tokens may train, None when they are excluded or there are none."""
    if not len(turn.ids) or turn.excluded not in ("", "demonstrated"):
        return None
    return "demonstrated" if turn.excluded else "sampled"


def by_index(turns: Sequence[Turn]) -> dict[int, Turn]:
    """Return the turns by index. Raises CaptureError when a parent does not come before its child."""
    known: dict[int, Turn] = {}
    for turn in sorted(turns, key=lambda turn: turn.index):
        if turn.parent != -1 and turn.parent not in known:
            raise CaptureError(f"turn {turn.index}: its parent, turn {turn.parent}, is not known")
        known[turn.index] = turn
    return known


def chain_ends(turns: dict[int, Turn]) -> list[Turn]:
    """Return the turns that end a row of their kind, in turn order: one per segment."""
    ends: list[Turn] = []
    for kind in ("sampled", "demonstrated"):
        inner: set[int] = set()
        for turn in reversed(turns.values()):
            if turn.index in inner or kind_of(turn) == kind:
                inner.add(turn.parent)
                if turn.index not in inner:
                    ends.append(turn)
    return sorted(ends, key=lambda turn: turn.index)


def chain_of(turns: Mapping[int, Turn], end: Turn) -> list[Turn]:
    """Return the turns from the root to `end`, both included."""
    path = [end]
    while path[-1].parent != -1:
        path.append(turns[path[-1].parent])
    path.reverse()
    return path


def chains(trajectory: Trajectory) -> tuple[Segment, ...]:
    """Return one row per branch; a turn shared by several is masked in only in the first."""
    return trajectory.segments


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
