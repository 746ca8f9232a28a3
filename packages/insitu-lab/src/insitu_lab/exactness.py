"""Comparison of trained rows with the ids and logprobs that a scripted engine returned.

Derived from the engine's own record, not from the forest, so that a shifted or mis-sliced row is detected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from insitu.types import Generation, IntArray, Segment, Trajectory


def training_faults(trajectory: Trajectory, answers: Mapping[int, Generation]) -> Iterator[str]:
    """Yield one line for each row whose ids, mask or logprobs are not the engine's.

    `answers`: by turn.
    """
    parents = {turn.index: turn.parent for turn in trajectory.turns}
    contexts = {turn.index: turn.context_ids for turn in trajectory.turns}
    kept = {turn.index: len(turn.ids) for turn in trajectory.turns}
    if not answers.keys() >= parents.keys():
        yield f"turns {sorted(parents.keys() - answers.keys())} were not requested from the engine"
        return
    rows: list[tuple[IntArray, IntArray, IntArray]] = []
    for end in parents:
        path = [end]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        rows.append(_row(path, contexts, kept, answers))
    used: set[int] = set()
    for segment in trajectory.segments:
        # Two replies may be equal, but their logprobs are not.
        masked = (_masked(segment, row, answers) for row in rows)
        turns = next((found for found in masked if found), set())
        if not turns or turns & used:
            yield f"segment {segment.index}: ids, mask or logprobs are not those of the engine"
        used |= turns


def _row(
    path: list[int],
    contexts: Mapping[int, IntArray],
    kept: Mapping[int, int],
    answers: Mapping[int, Generation],
) -> tuple[IntArray, IntArray, IntArray]:
    """Return ids, turn and offset in its reply of each position of `path`; -1 in contexts."""
    ids, turns, places = [], [], []
    for turn in path:
        around, count = contexts[turn], kept[turn]
        ids += [around, answers[turn].ids[:count]]
        turns += [np.full(len(around), -1), np.full(count, turn)]
        places += [np.full(len(around), -1), np.arange(count)]
    return tuple(np.concatenate(part).astype(np.int32) for part in (ids, turns, places))  # type: ignore[return-value]


def _masked(
    segment: Segment, row: tuple[IntArray, IntArray, IntArray], answers: Mapping[int, Generation]
) -> set[int]:
    """Return the turns that the segment trains if it is this row, else none."""
    ids, turns, places = row
    if not np.array_equal(segment.ids, ids):
        return set()
    found = {int(turn) for turn in turns[segment.mask]}
    whole = np.isin(turns, list(found)) if found and -1 not in found else np.zeros(len(ids), dtype=np.bool_)
    wanted = np.zeros(len(ids), dtype=np.float32)
    for turn in found - {-1}:
        logprobs = answers[turn].logprobs
        if logprobs is not None:
            wanted[turns == turn] = logprobs[places[turns == turn]]
    same = np.array_equal(segment.mask, whole) and np.array_equal(segment.logprobs, wanted)
    return found if same else set()
