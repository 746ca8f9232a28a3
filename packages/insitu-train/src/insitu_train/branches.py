"""The turns of a trajectory as rows: which are trained, where rows end, and the turns of a row; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from insitu.errors import CaptureError
from insitu.types import SegmentKind, Turn


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
