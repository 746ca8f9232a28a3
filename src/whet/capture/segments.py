"""From a forest to training rows: chains, each sampled token trained once.

Chains are taken in turn order; a turn shared by several is masked in only in the first. Labels come from the
forest alone:
- auxiliary: a tree of single calls without tools, in a session that offers tools elsewhere: it cannot act.
  Its turns are excluded, so no row carries this label.
- main line: the first other tree; a later tree takes it over when the line is never continued after that
  tree starts and the tree has the same root key or re-renders one of the line's turns. Others: subagent.
- on the main line: `final` is the last chain; `wipe` was left behind by a later prompt (compaction, rewind,
  edit); `append` is another sample that nothing replaced.
A sub-agent that is the last thing a session did under the main line's own root key looks like compaction.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from whet.capture.ledger import account, fates, final_reason
from whet.capture.nodes import ContextNode, Node, Nodes, SampledNode, chain, joined, node_ids
from whet.errors import CaptureError
from whet.types import IntArray, Segment, SegmentKind, Trajectory, Turn, VersionRuns


@dataclass(slots=True)
class _Tree:
    """What labels need to know of the nodes under one top."""

    top: ContextNode
    tools: bool
    nodes: set[int] = field(default_factory=set)
    last: int = -1
    """Newest node."""
    first_turn: int = -1
    deep: bool = False
    """Some turn was continued."""

    def add(self, node: Node) -> None:
        self.nodes.add(node.id)
        self.last = node.id
        if isinstance(node, SampledNode):
            self.deep = self.deep or node.continued
            self.first_turn = node.turn if self.first_turn < 0 else min(self.first_turn, node.turn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Tops by role; every other top is a sub-agent's."""

    auxiliary: frozenset[int]
    main: frozenset[int]


def find_lines(nodes: Nodes) -> Lines:
    """Tell auxiliary trees and the main line apart by the rules of this module."""
    grown: dict[int, _Tree] = {}
    for node in nodes.all:
        if isinstance(node, ContextNode) and node.parent is None:
            grown[node.id] = _Tree(top=node, tools=node.tools)
        grown[node.top].add(node)
    trees = [tree for tree in grown.values() if tree.first_turn >= 0]
    acting = any(tree.tools for tree in trees)
    auxiliary = {tree.top.id for tree in trees if acting and not tree.tools and not tree.deep}
    main: list[_Tree] = []
    for tree in trees:  # in order of their first request
        if tree.top.id not in auxiliary and (not main or _takes_over(main, tree)):
            main.append(tree)
    return Lines(auxiliary=frozenset(auxiliary), main=frozenset(tree.top.id for tree in main))


def _takes_over(main: list[_Tree], tree: _Tree) -> bool:
    if main[-1].last > tree.top.id:
        return False
    known = any(line.nodes & tree.top.echoes for line in main)
    return known or tree.top.root_key == main[-1].top.root_key


def _chain_ends(nodes: Nodes, reasons: Mapping[int, str]) -> list[SampledNode]:
    """Eligible turns with no eligible turn below them, in turn order."""
    has_below: set[int] = set()
    for node in reversed(nodes.all):
        eligible = isinstance(node, SampledNode) and not reasons[node.id] and len(node.generation.ids) > 0
        if node.parent is not None and (eligible or node.id in has_below):
            has_below.add(node.parent)
    turns = (turn for turn in nodes.turns() if not reasons[turn.id] and len(turn.generation.ids))
    return [turn for turn in turns if turn.id not in has_below]


class _Labels:
    """Label of each chain end."""

    def __init__(self, nodes: Nodes, lines: Lines, ends: list[SampledNode]) -> None:
        self._lines = lines
        main_ends = [end for end in ends if end.top in lines.main]
        self._final = main_ends[-1].id if main_ends else -1
        self._prompts = [c.id for c in nodes.contexts() if c.top in lines.main]
        self._below = [0] * len(nodes.all)
        for node in reversed(nodes.all):
            own = 1 if isinstance(node, ContextNode) else 0
            if node.parent is not None:
                self._below[node.parent] += self._below[node.id] + own

    def of(self, end: SampledNode) -> str:
        if end.top not in self._lines.main:
            return "subagent"
        if end.id == self._final:
            return "final"
        later = len(self._prompts) - bisect_right(self._prompts, end.id)
        # Later prompts that are not this chain's own continuation have replaced it.
        return "wipe" if later > self._below[end.id] else "append"


def version_row(runs: VersionRuns, count: int) -> IntArray:
    """Policy version of each of `count` ids."""
    row = np.zeros(count, dtype=np.int32)
    for start, version in runs:
        row[start:] = version
    return row


def _segment(
    nodes: Nodes, path: list[Node], fresh: set[int], *, index: int, kind: SegmentKind, label: str
) -> Segment:
    """One row over `path`; the turns in `fresh` are masked in."""
    ids = joined(path)
    mask = np.zeros(len(ids), dtype=np.bool_)
    logprobs = np.zeros(len(ids), dtype=np.float32)
    versions = np.zeros(len(ids), dtype=np.int32)
    start = 0
    for node in path:
        stop = start + len(node_ids(node))
        if node.id in fresh and isinstance(node, SampledNode):
            generation = node.generation
            mask[start:stop] = True
            versions[start:stop] = version_row(generation.version_runs, stop - start)
            if generation.logprobs is not None:
                logprobs[start:stop] = generation.logprobs
        start = stop
    return Segment(
        rollout_id=nodes.rollout_id,
        index=index,
        kind=kind,
        label=label,
        ids=ids,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
    )


def build_segments(nodes: Nodes, reasons: Mapping[int, str], lines: Lines) -> tuple[Segment, ...]:
    """Rows in turn order. A row is `demonstrated` when everything it trains is; demonstrated turns in a row
    that also trains sampled ones stay context. Rows end at their last masked turn."""
    ends = _chain_ends(nodes, reasons)
    labels = _Labels(nodes, lines, ends)
    segments: list[Segment] = []
    masked: set[int] = set()
    for end in ends:
        path = nodes.path(end.id)
        turns = [node for node in path if isinstance(node, SampledNode)]
        new = [turn for turn in turns if not reasons[turn.id] and turn.id not in masked]
        drawn = [turn for turn in new if turn.generation.logprobs is not None]
        kind: SegmentKind = "sampled" if drawn else "demonstrated"
        fresh = {turn.id for turn in drawn or new}
        masked.update(turn.id for turn in new)
        while path[-1].id not in fresh:
            path.pop()
        segment = _segment(nodes, path, fresh, index=len(segments), kind=kind, label=labels.of(end))
        _check_segment(nodes, segment, path, fresh)
        segments.append(segment)
    return tuple(segments)


def _check_segment(nodes: Nodes, segment: Segment, path: list[Node], fresh: set[int]) -> None:
    """Invariants 1 and 2 again over the row itself: ids as the engine saw them, logprobs where masked."""
    chained, start = b"", 0
    for node in path:
        stop = start + len(node_ids(node))
        chained = chain(chained, segment.ids[start:stop])
        turn = node.turn if isinstance(node, SampledNode) else None
        where = f"rollout {nodes.rollout_id} segment {segment.index} turn {turn} token {start}"
        if chained != node.chained:
            raise CaptureError(f"{where}: the ids are not those the engine received and produced")
        if bool(segment.mask[start:stop].any()) != (node.id in fresh and stop > start):
            raise CaptureError(f"{where}: the mask covers what was not sampled here")
        start = stop
    if not np.isfinite(segment.logprobs).all() or (segment.logprobs > 0).any():
        raise CaptureError(f"rollout {nodes.rollout_id} segment {segment.index}: a logprob is not usable")


def build_turns(nodes: Nodes, reasons: Mapping[int, str]) -> tuple[Turn, ...]:
    """Every committed call in turn order, as deltas."""
    turns = []
    for node in nodes.turns():
        context = nodes.context(node.parent)
        generation = node.generation
        turns.append(
            Turn(
                index=node.turn,
                parent=-1 if context.parent is None else nodes.sampled(context.parent).turn,
                context_ids=context.ids,
                ids=generation.ids,
                logprobs=generation.logprobs,
                finish=generation.finish,
                version_runs=generation.version_runs,
                excluded=final_reason(node, reasons[node.id]),
            )
        )
    return tuple(turns)


def _check_once(nodes: Nodes, reasons: Mapping[int, str], segments: tuple[Segment, ...]) -> int:
    """Invariant 3: the masked tokens are exactly the trainable ones. Returns how many are trained by RL."""
    trainable = sum(
        len(turn.generation.ids) for turn in nodes.turns() if not final_reason(turn, reasons[turn.id])
    )
    trained = sum(int(segment.mask.sum()) for segment in segments if segment.kind == "sampled")
    if trained != trainable:
        raise CaptureError(
            f"rollout {nodes.rollout_id}: {trained} tokens are masked in where {trainable} may be trained"
        )
    return trained


def export(nodes: Nodes) -> Trajectory:
    """Everything a session gives to training. Raises CaptureError when an invariant is broken."""
    lines = find_lines(nodes)
    reasons = fates(nodes, lines.auxiliary)
    segments = build_segments(nodes, reasons, lines)
    trained = _check_once(nodes, reasons, segments)
    return Trajectory(
        segments=segments,
        turns=build_turns(nodes, reasons),
        ledger=account(nodes, reasons, trained),
    )
