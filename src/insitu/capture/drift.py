"""Relation of a request to the stored tokens, and what must be rendered.

`clean` continues or repeats stored tokens; `edited` contains an assistant message that is not what was
sampled; `fork` leaves the newest line. Every drift has a named cause. Pure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from insitu.capture.digests import MessageHasher, PartDigests
from insitu.capture.message_history import Digests, TreeWalk
from insitu.capture.nodes import ContextNode, Nodes, SampledNode
from insitu.capture.turn_refs import TurnIndex
from insitu.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Relation of a request to the stored tokens, with causes by kind.

    clean: `first` (first request of the session), `append`, `same_prompt` (retry or parallel twin).

    edited: `text`, `tool name`, `arguments`, `reasoning` (first difference in wire order), `missing` (the
    turn was left out), `foreign` (an assistant message that was not sampled). `diagnosis` is more precise.

    fork: `new_root`, `rewind`, `context` (messages before a known turn were rewritten), `retention` (the
    renderer drops a turn's reasoning here).
    """

    kind: Literal["clean", "edited", "fork"]
    cause: str
    turn: int | None = None
    """The turn concerned: edited, left out, rewound or re-rendered."""
    node: int | None = None
    """Its sampled node."""
    at: int = 0
    """For an edit: index of the edited message among the messages to render."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """What a request continues and what must still be rendered."""

    root_key: str
    base: int | None
    """Sampled node to continue; None = render the root block first."""
    parent: int | None
    """Context node with exactly this prompt (retry or twin), else None."""
    replace: tuple[Message, ...]
    """Context messages to render after `base`: user, tool, mid-list system, edited and foreign assistant."""
    drift: Drift
    digests: Digests = field(repr=False)
    """Digests of `replace`, for `extend`."""
    reader: MessageHasher = field(repr=False)
    """Made them; hashes the reply too."""
    tools: bool
    tool_choice_none: bool
    """The request sent tools and forbade calls."""
    streamed: bool
    """The request asked for a stream."""
    echoes: frozenset[int] = field(repr=False)
    """Sampled nodes referenced by turn references or by_call_id call ids in `replace`."""
    hints: tuple[tuple[str, str], ...] = ()


class _PrefixMatch(NamedTuple):
    """Longest match of a request in a tree."""

    base: int | None
    """Deepest sampled node that it completely matches."""
    start: int
    """Number of matched messages."""
    depends: int | None
    """Number of messages that decided the match, if only a new fork could change it; else None."""

    def walk(self, root_key: str, forks: int) -> TreeWalk | None:
        """Return the path for later requests that begin with the same messages."""
        if self.base is None or self.depends is None:
            return None
        return TreeWalk(
            root_key=root_key, base=self.base, start=self.start, depends=self.depends, forks=forks
        )


def longest_match(
    nodes: Nodes, index: TurnIndex, root_key: str, digests: Digests, known: TreeWalk | None = None
) -> _PrefixMatch:
    """Return the deepest sampled node that the messages completely match, from the end of `known`.

    Among equals, one with a valid turn reference wins, then one with matching call ids, then the one
    delivered last; references are read only where the path splits, since earlier ones are common to all.
    """
    base, start, depends = (None, 0, 0) if known is None else (known.base, known.start, known.depends)
    found = _matching_children(nodes, root_key, base, digests, start)
    while len(found.turns) == 1:
        turn, end = found.turns[0]
        base, start, depends = turn.id, end + 1, max(depends, found.depends)
        found = _matching_children(nodes, root_key, base, digests, start)
    if not found.turns:
        return _PrefixMatch(base, start, depends if depends <= len(digests) else None)
    return _best(nodes, index, root_key, digests, [(base, start, 0, 0)])


def _best(
    nodes: Nodes,
    index: TurnIndex,
    root_key: str,
    digests: Digests,
    reached: list[tuple[int | None, int, int, int]],
) -> _PrefixMatch:
    """Return the best of several paths from where they split."""
    best = (0, 0, 0, 0, -1)  # messages, turns named by pointer, by call id, order of delivery, node
    while reached:
        base, start, by_reference, by_call_id = reached.pop()
        for turn, end in _matching_children(nodes, root_key, base, digests, start).turns:
            message = digests.echoes[end]
            hits = (
                by_reference + (turn.id in index.pointed(message)),
                by_call_id + (turn.id in index.minters(message)),
            )
            best = max(best, (end + 1, *hits, turn.delivered, turn.id))
            if turn.children:
                reached.append((turn.id, end + 1, *hits))
    return _PrefixMatch(best[4], best[0], None)


class _MatchedChildren(NamedTuple):
    turns: list[tuple[SampledNode, int]]
    """Each with the index of its message."""
    depends: int
    """Number of messages that decide it."""


def _matching_children(
    nodes: Nodes, root_key: str, base: int | None, digests: Digests, start: int
) -> _MatchedChildren:
    """Return the turns below `base` that the messages continue."""
    found: list[tuple[SampledNode, int]] = []
    last, depends = len(digests) - 1, 0
    for context in nodes.below(root_key, base):
        run = context.run
        end = start + len(run)
        depends = max(depends, end + 1)
        if end > last or not digests.contains(run, start):
            continue
        if not context.children:
            depends = sys.maxsize  # its first answer may come next
        for child in context.children:
            turn = nodes.sampled(child)
            # A turn whose reasoning is dropped by now cannot be spliced and is rendered again.
            kept = end > digests.reset_at or not turn.meaning.reasoning
            if kept and digests.matches(end, turn.meaning):
                found.append((turn, end))
    return _MatchedChildren(found, depends)


def stored_context(nodes: Nodes, root_key: str, base: int | None, digests: Digests) -> int | None:
    """Return the context node below `base` with exactly these messages, if any."""
    for node in nodes.below(root_key, base):
        if len(node.run) == len(digests) and digests.contains(node.run, 0):
            return node.id
    return None


def difference(stored: PartDigests, got: PartDigests) -> str:
    """Return the first part, in wire order, in which an assistant message differs; empty if none."""
    if got.reasoning and stored.reasoning != got.reasoning:
        return "reasoning"
    if stored.text != got.text:
        return "text"
    if stored.names != got.names:
        return "tool name"
    return "" if stored.arguments == got.arguments else "arguments"


def classify(
    nodes: Nodes,
    root_key: str,
    base: int | None,
    digests: Digests,
    referenced: Sequence[SampledNode],
    stored: int | None,
    parts: Callable[[int], PartDigests],
) -> Drift:
    """Return the drift of a request with the messages `digests` after `base`.

    `referenced` are the turns that these messages reference, in request order; `stored` is their
    `stored_context`, `parts` digests the parts of one of them that is an assistant's.
    """
    if stored is not None:
        continued = any(nodes.sampled(child).continued for child in nodes.context(stored).children)
        return Drift(kind="fork", cause="rewind") if continued else Drift(kind="clean", cause="same_prompt")
    edited = _edit(nodes, nodes.below(root_key, base), digests, referenced, parts)
    if edited is not None:
        return edited
    if referenced:
        return Drift(kind="fork", cause="context", turn=referenced[0].turn, node=referenced[0].id)
    if base is None:
        return Drift(kind="fork", cause="new_root") if nodes.all else Drift(kind="clean", cause="first")
    if digests.echoes:
        return Drift(kind="edited", cause="foreign")
    if nodes.sampled(base).continued:
        return Drift(kind="fork", cause="rewind")
    return Drift(kind="clean", cause="append")


def _edit(
    nodes: Nodes,
    below: Sequence[ContextNode],
    digests: Digests,
    referenced: Sequence[SampledNode],
    parts: Callable[[int], PartDigests],
) -> Drift | None:
    """Return the edit that made the request leave the longest prompt it starts with, if any."""
    prompts = [c for c in below if c.children and len(c.run) < len(digests) and digests.contains(c.run, 0)]
    if not prompts:
        return None
    prompt = max(prompts, key=lambda c: len(c.run))
    named = {node.id for node in referenced}
    turns = [nodes.sampled(child) for child in prompt.children]
    turn = max(turns, key=lambda s: (s.id in named, s.delivered, s.id))
    at = len(prompt.run)
    if at in digests.echoes:
        cause = difference(turn.parts, parts(at))
        if not cause:
            return Drift(kind="fork", cause="retention", turn=turn.turn, node=turn.id)
        return Drift(kind="edited", cause=cause, turn=turn.turn, node=turn.id, at=at)
    if turn.continued:  # the agent had accepted it, so this is a rewind
        return Drift(kind="fork", cause="rewind", turn=turn.turn, node=turn.id)
    return Drift(kind="edited", cause="missing", turn=turn.turn, node=turn.id, at=at)
