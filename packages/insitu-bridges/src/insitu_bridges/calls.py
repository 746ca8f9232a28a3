"""Model calls in the rows of a rollout, for targets that take calls or messages instead of rows; pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from insitu.errors import TrainError
from insitu.types import Segment, Turn
from insitu_bridges.rows import RolloutRows
from insitu_train.branches import by_index, chain_ends, chain_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCall:
    """One call where it stands in a row: new prompt ids from `start`, sampled ids from `middle` to `stop`."""

    segment: Segment = field(repr=False)
    turn: Turn = field(repr=False)
    start: int
    middle: int
    stop: int

    @property
    def trained(self) -> bool:
        """Whether the row trains it; a call that several rows share is trained in the first."""
        return bool(self.segment.mask[self.middle : self.stop].any())


def row_calls(item: RolloutRows) -> Iterator[tuple[Segment, list[RowCall]]]:
    """Yield each chosen row with its calls from the root on. Raises TrainError when calls and rows differ."""
    trajectory = item.rollout.trajectory
    turns = by_index(trajectory.turns)
    ends = chain_ends(turns)
    if len(ends) != len(trajectory.segments):
        raise TrainError(
            f"rollout {item.rollout.id}: {len(ends)} branches for {len(trajectory.segments)} rows"
        )
    end_of = {segment.index: end for end, segment in zip(ends, trajectory.segments, strict=True)}
    for segment in item.segments:
        calls, start = [], 0
        for turn in chain_of(turns, end_of[segment.index]):
            middle = start + len(turn.context_ids)
            stop = middle + len(turn.ids)
            calls.append(RowCall(segment=segment, turn=turn, start=start, middle=middle, stop=stop))
            start = stop
        if start != len(segment.ids):
            raise TrainError(f"rollout {item.rollout.id} row {segment.index}: its calls have other ids")
        yield segment, calls
