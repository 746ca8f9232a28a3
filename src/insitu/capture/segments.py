"""From a forest to training rows: chains, each sampled token trained once.

Chains are taken in turn order; a turn shared by several is masked in only in the first. Labels come from the
forest alone:
- auxiliary: a tree of single calls under another root key than those that can act. In a session that offers
  tools those with tools can act; in one without, those with a streamed call (agents stream their work, but
  not titles or commit messages). Without either nothing is auxiliary. Its turns are excluded, so no row has
  this label, unless the session trains them.
- main line: the first other tree; a later tree takes it over when the line is never continued after that
  tree starts and the tree has the same root key or re-renders one of the line's turns. A tree that re-renders
  one of them and whose calls were only forbidden for the request (`tool_choice` none: a plan, a final
  answer), or that has no tools and ends in an answer of a tool or of the model (a final answer, a handoff),
  is the line too. Others: subagent.
- on the main line: `final` is the last chain, of each step of the task; `wipe` was left behind by a later
  prompt (compaction, rewind, edit); `append` is another sample that nothing replaced.
A sub-agent that is the last thing a session did under the main line's own root key looks like compaction.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from insitu.capture.ledger import account, exclusion_reasons, final_reason
from insitu.capture.nodes import ContextNode, Node, Nodes, SampledNode, chain, joined, node_ids
from insitu.errors import CaptureError
from insitu.types import (
    DriftNote,
    ExpertArray,
    Generation,
    IntArray,
    Segment,
    SegmentKind,
    Trajectory,
    Turn,
    VersionRuns,
    step_of,
)

KINDS: tuple[SegmentKind, ...] = ("sampled", "demonstrated")


@dataclass(slots=True)
class _Tree:
    """Properties of the nodes under one top, for the labels."""

    top: ContextNode
    nodes: set[int] = field(default_factory=set)
    last: int = -1
    """Newest node."""
    first_turn: int = -1
    deep: bool = False
    """Some turn was continued."""
    streamed: bool = False
    """Some call was streamed."""

    def add(self, node: Node) -> None:
        self.nodes.add(node.id)
        self.last = node.id
        self.streamed = self.streamed or (isinstance(node, ContextNode) and node.streamed)
        if isinstance(node, SampledNode):
            self.deep = self.deep or node.continued
            self.first_turn = node.turn if self.first_turn < 0 else min(self.first_turn, node.turn)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    """Tops by role; every other top is a sub-agent's."""

    auxiliary: frozenset[int]
    main: frozenset[int]


def _find_lines(nodes: Nodes, *, train_auxiliary: bool = False) -> _Lines:
    """Return the auxiliary trees and the main line by the rules of this module."""
    grown: dict[int, _Tree] = {}
    for node in nodes.all:
        if isinstance(node, ContextNode) and node.parent is None:
            grown[node.id] = _Tree(top=node)
        grown[node.top].add(node)
    trees = [tree for tree in grown.values() if tree.first_turn >= 0]
    acting = _acting(trees)
    auxiliary: set[int] = set()
    main: list[_Tree] = []
    tool_choice_none: list[_Tree] = []
    for tree in trees:  # in order of their first request
        known = any(line.nodes & tree.top.echoes for line in (*main, *tool_choice_none))
        continues = not tree.top.tools and tree.top.answers and bool(tree.top.echoes)
        if known and (tree.top.tool_choice_none or continues):
            tool_choice_none.append(tree)
        elif tree.top.root_key not in acting and not (tree.deep or continues or train_auxiliary):
            auxiliary.add(tree.top.id)
        elif not main or _takes_over(main[-1], tree, known):
            main.append(tree)
    return _Lines(
        auxiliary=frozenset(auxiliary), main=frozenset(tree.top.id for tree in (*main, *tool_choice_none))
    )


def _acting(trees: list[_Tree]) -> set[str]:
    """Return the root keys of the trees that can act."""
    signs = ([tree for tree in trees if tree.top.tools], [tree for tree in trees if tree.streamed], trees)
    return {tree.top.root_key for tree in next(filter(None, signs), ())}


def _takes_over(line: _Tree, tree: _Tree, known: bool) -> bool:
    return line.last < tree.top.id and (known or tree.top.root_key == line.top.root_key)


def _eligible(nodes: Nodes, reasons: Mapping[int, str], kind: SegmentKind) -> list[SampledNode]:
    """Return the turns of one kind that may be masked in, in turn order."""
    turns = (turn for turn in nodes.turns() if turn.kind == kind and not reasons[turn.id])
    return [turn for turn in turns if len(turn.generation.ids)]


def _chain_ends(nodes: Nodes, turns: list[SampledNode]) -> list[SampledNode]:
    """Return those of `turns` with none of them below."""
    inner: set[int] = set()
    for turn in turns:
        above: int | None = turn.parent
        while above is not None and above not in inner:
            inner.add(above)
            above = nodes.get(above).parent
    return [turn for turn in turns if turn.id not in inner]


class _Labels:
    """Label of each chain end."""

    def __init__(self, nodes: Nodes, lines: _Lines, ends: list[SampledNode]) -> None:
        self._lines = lines
        main_ends = [end for end in ends if end.top in lines.main]
        self._final = {*{step_of(end.labels): end.id for end in main_ends}.values()}
        self._prompts = [c.id for c in nodes.contexts() if c.top in lines.main]
        self._below = [0] * len(nodes.all)
        for node in reversed(nodes.all):
            own = 1 if isinstance(node, ContextNode) else 0
            if node.parent is not None:
                self._below[node.parent] += self._below[node.id] + own

    def of(self, end: SampledNode) -> str:
        if end.top not in self._lines.main:
            return "subagent"
        if end.id in self._final:
            return "final"
        later = len(self._prompts) - bisect_right(self._prompts, end.id)
        # Later prompts that are not this chain's own continuation have replaced it.
        return "wipe" if later > self._below[end.id] else "append"


def version_row(runs: VersionRuns, count: int) -> IntArray:
    """Return the policy version of each of `count` ids."""
    row = np.zeros(count, dtype=np.int32)
    for start, version in runs:
        row[start:] = version
    return row


def _segment(
    nodes: Nodes, path: list[Node], fresh: set[int], *, index: int, kind: SegmentKind, label: str
) -> Segment:
    """Return one row over `path`; the turns in `fresh` are masked in."""
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
        experts=_experts(nodes, path, len(ids)),
    )


def _experts(nodes: Nodes, path: list[Node], count: int) -> ExpertArray | None:
    """Return the experts of all `count` tokens of a path, None when no turn of it has any.

    A turn has those of its own tokens but the last, and of the prompt tokens before them; so a later turn has
    the last one's.
    """
    row: ExpertArray | None = None
    stop = 0
    for node in path:
        stop += len(node_ids(node))
        found = node.generation.experts if isinstance(node, SampledNode) else None
        if found is None:
            continue
        if row is None:
            row = np.full((count, *found.shape[1:]), -1, dtype=np.int16)
        if len(found) >= stop or found.shape[1:] != row.shape[1:]:
            raise CaptureError(
                f"rollout {nodes.rollout_id} node {node.id}: experts {list(found.shape)} do not fit a path of"
                f" {stop} tokens with {list(row.shape[1:])} each"
            )
        row[stop - 1 - len(found) : stop - 1] = found
    return row


def _build_segments(nodes: Nodes, reasons: Mapping[int, str], lines: _Lines) -> tuple[Segment, ...]:
    """Return the rows in the order of their last turns.

    A row is of one kind and ends at a turn of that kind; turns of the other kind are context in it.
    """
    chains: list[tuple[SampledNode, SegmentKind]] = []
    fresh: set[int] = set()
    for kind in KINDS:
        turns = _eligible(nodes, reasons, kind)
        fresh.update(turn.id for turn in turns)
        chains += [(end, kind) for end in _chain_ends(nodes, turns)]
    chains.sort(key=lambda found: found[0].turn)
    labels = _Labels(nodes, lines, [end for end, _ in chains])
    segments: list[Segment] = []
    for end, kind in chains:
        path = nodes.path(end.id)
        turns = [node for node in path if isinstance(node, SampledNode) and node.kind == kind]
        new = {turn.id for turn in turns if turn.id in fresh}
        fresh -= new
        segment = _segment(nodes, path, new, index=len(segments), kind=kind, label=labels.of(end))
        _check_segment(nodes, segment, path, new)
        segments.append(segment)
    return tuple(segments)


def _check_segment(nodes: Nodes, segment: Segment, path: list[Node], fresh: set[int]) -> None:
    """Check invariants 1 and 2 over the row itself: the engine's ids, and logprobs where masked."""
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


_REPORTED = tuple(one.name for one in fields(Turn) if one.name in Generation.__dataclass_fields__)
"""Fields of a turn that the engine reports."""


def _build_turns(nodes: Nodes, reasons: Mapping[int, str]) -> tuple[Turn, ...]:
    """Return every committed call in turn order, as deltas."""
    turns = []
    for node in nodes.turns():
        context = nodes.context(node.parent)
        generation = node.generation
        turns.append(
            Turn(
                index=node.turn,
                parent=-1 if context.parent is None else nodes.sampled(context.parent).turn,
                context_ids=context.ids,
                **{name: getattr(generation, name) for name in _REPORTED},
                excluded=final_reason(node, reasons[node.id]),
                hints=context.hints + tuple(("label", label) for label in node.labels),
                advisory=node.advisory,
                spans=context.spans,
            )
        )
    return tuple(turns)


def _check_once(nodes: Nodes, reasons: Mapping[int, str], segments: tuple[Segment, ...]) -> int:
    """Check invariant 3, that exactly the eligible tokens are masked; return how many RL trains."""
    trained = 0
    for kind in KINDS:
        eligible = sum(len(turn.generation.ids) for turn in _eligible(nodes, reasons, kind))
        masked = sum(int(segment.mask.sum()) for segment in segments if segment.kind == kind)
        if masked != eligible:
            raise CaptureError(
                f"rollout {nodes.rollout_id}: {masked} {kind} tokens are masked in where {eligible} may be"
            )
        trained += masked if kind == "sampled" else 0
    return trained


def export(nodes: Nodes, drifts: tuple[DriftNote, ...] = (), *, train_auxiliary: bool = False) -> Trajectory:
    """Return all segments, turns and the ledger. Raises CaptureError when an invariant is broken."""
    lines = _find_lines(nodes, train_auxiliary=train_auxiliary)
    reasons = exclusion_reasons(nodes, lines.auxiliary)
    segments = _build_segments(nodes, reasons, lines)
    trained = _check_once(nodes, reasons, segments)
    return Trajectory(
        segments=segments,
        turns=_build_turns(nodes, reasons),
        ledger=account(nodes, reasons, trained),
        drifts=drifts,
    )
