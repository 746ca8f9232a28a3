"""How a request relates to the tokens already held, and what is left to render.

`clean` continues or repeats what is held; `edited` shows an assistant message that is not what was sampled;
`fork` leaves the newest line. Every drift has a named cause. Pure; `forest` asks once per request.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from insitu.capture.digests import DigestedMessages, PartDigests
from insitu.capture.message_history import TreeWalk
from insitu.capture.nodes import ContextNode, Nodes, SampledNode
from insitu.capture.turn_refs import TurnIndex
from insitu.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Causes by kind.

    clean: `first` (first request of the session), `append`, `same_prompt` (retry or twin).
    edited: `text`, `tool name`, `arguments`, `reasoning` (first difference in wire order), `missing` (the
    turn was left out), `foreign` (an assistant message nobody sampled). `diagnosis` names edits finer.
    fork: `new_root`, `rewind`, `context` (what stood before a known turn was rewritten), `retention` (the
    family drops a turn's reasoning here).
    """

    kind: Literal["clean", "edited", "fork"]
    cause: str
    turn: int | None = None
    """The held turn concerned: edited, left out, stepped back over or re-rendered."""
    node: int | None = None
    """Its sampled node."""
    at: int = 0
    """For an edit of a held turn: where its echo should stand among the messages to render."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """What a request continues and what the gateway must still render."""

    root_key: str
    base: int | None
    """Sampled node to continue; None = render the root block first."""
    parent: int | None
    """Context node that already holds this very prompt (retry or twin), else None."""
    replace: tuple[Message, ...]
    """Context messages to render after `base`: user, tool, mid-list system, edited and foreign assistant."""
    drift: Drift
    told: DigestedMessages = field(repr=False)
    """Meanings of `replace`, for `extend`."""
    tools: bool
    tool_choice_none: bool
    """The request sent tools and let none be called."""
    streamed: bool
    """The request asked for a stream."""
    echoes: frozenset[int] = field(repr=False)
    """Sampled nodes named by pointers or minted call ids in `replace`."""
    hints: tuple[tuple[str, str], ...] = ()


class PrefixMatch(NamedTuple):
    """Where a request's way down a tree ends."""

    base: int | None
    """Deepest sampled node that it fully matches."""
    start: int
    """Messages that this accounts for."""
    depends: int | None
    """Messages that decided the way, when no others and no answer to come can change it but a new fork."""

    def walk(self, root_key: str, forks: int) -> TreeWalk | None:
        """For later requests that begin with the same messages."""
        if self.base is None or self.depends is None:
            return None
        return TreeWalk(
            root_key=root_key, base=self.base, start=self.start, depends=self.depends, forks=forks
        )


def longest_match(
    nodes: Nodes, names: TurnIndex, root_key: str, told: DigestedMessages, known: TreeWalk | None = None
) -> PrefixMatch:
    """The deepest sampled node that `told` fully matches, from where `known` ends.

    Between equals the one named by a valid pointer wins, then by call ids, then the one delivered last; names
    are read only where the path splits, since those above are common to all.
    """
    base, start, depends = (None, 0, 0) if known is None else (known.base, known.start, known.depends)
    found = _taken_up(nodes, root_key, base, told, start)
    while len(found.turns) == 1:
        turn, end = found.turns[0]
        base, start, depends = turn.id, end + 1, max(depends, found.depends)
        found = _taken_up(nodes, root_key, base, told, start)
    if not found.turns:
        return PrefixMatch(base, start, depends if depends <= len(told) else None)
    return _best(nodes, names, root_key, told, [(base, start, 0, 0)])


def _best(
    nodes: Nodes,
    names: TurnIndex,
    root_key: str,
    told: DigestedMessages,
    reached: list[tuple[int | None, int, int, int]],
) -> PrefixMatch:
    """The best of the ways from where they split."""
    best = (0, 0, 0, 0, -1)  # messages, turns named by pointer, by call id, order of delivery, node
    while reached:
        base, start, pointed, minted = reached.pop()
        for turn, end in _taken_up(nodes, root_key, base, told, start).turns:
            message = told.echo(end)
            hits = (
                pointed + (turn.id in names.pointed(message)),
                minted + (turn.id in names.minters(message)),
            )
            best = max(best, (end + 1, *hits, turn.delivered, turn.id))
            if turn.children:
                reached.append((turn.id, end + 1, *hits))
    return PrefixMatch(best[4], best[0], None)


class _MatchedChildren(NamedTuple):
    turns: list[tuple[SampledNode, int]]
    """Each with the index of its echo."""
    depends: int
    """Messages that decide it."""


def _taken_up(
    nodes: Nodes, root_key: str, base: int | None, told: DigestedMessages, start: int
) -> _MatchedChildren:
    """Turns right below `base` that `told` goes on with."""
    found: list[tuple[SampledNode, int]] = []
    last, depends = len(told) - 1, 0
    for context in nodes.below(root_key, base):
        run = context.run
        end = start + len(run)
        depends = max(depends, end + 1)
        if end > last or not told.holds(run, start):
            continue
        if not context.children:
            depends = sys.maxsize  # its first answer may be said next
        for child in context.children:
            turn = nodes.sampled(child)
            # Reasoning that is dropped by now cannot be spliced: such a turn is rendered again.
            kept = end > told.question or not turn.meaning.reasoning
            if kept and told.says(end, turn.meaning):
                found.append((turn, end))
    return _MatchedChildren(found, depends)


def held_context(nodes: Nodes, root_key: str, base: int | None, told: DigestedMessages) -> int | None:
    """The context node under `base` that holds exactly these messages, if any."""
    for node in nodes.below(root_key, base):
        if len(node.run) == len(told) and told.holds(node.run, 0):
            return node.id
    return None


def difference(held: PartDigests, got: PartDigests) -> str:
    """The first part, in wire order, in which an echoed assistant message differs; empty if none."""
    if got.reasoning and held.reasoning != got.reasoning:
        return "reasoning"
    if held.text != got.text:
        return "text"
    if held.names != got.names:
        return "tool name"
    return "" if held.arguments == got.arguments else "arguments"


def classify(
    nodes: Nodes,
    root_key: str,
    base: int | None,
    told: DigestedMessages,
    echoes: Sequence[SampledNode],
    held: int | None,
) -> Drift:
    """Name the drift of a request whose messages after `base` are `told`.

    `echoes` are the held turns that these messages name, in request order; `held` is their `held_context`.
    """
    if held is not None:
        gone_past = any(nodes.sampled(child).continued for child in nodes.context(held).children)
        return Drift(kind="fork", cause="rewind") if gone_past else Drift(kind="clean", cause="same_prompt")
    edited = _edit(nodes, nodes.below(root_key, base), told, echoes)
    if edited is not None:
        return edited
    if echoes:
        return Drift(kind="fork", cause="context", turn=echoes[0].turn, node=echoes[0].id)
    if base is None:
        return Drift(kind="fork", cause="new_root") if nodes.all else Drift(kind="clean", cause="first")
    if any(message.role == "assistant" for message in told.messages):
        return Drift(kind="edited", cause="foreign")
    if nodes.sampled(base).continued:
        return Drift(kind="fork", cause="rewind")
    return Drift(kind="clean", cause="append")


def _edit(
    nodes: Nodes, below: Sequence[ContextNode], told: DigestedMessages, echoes: Sequence[SampledNode]
) -> Drift | None:
    """The edit that made the request leave the longest held prompt it starts with, if that is the cause."""
    prompts = [c for c in below if c.children and len(c.run) < len(told) and told.holds(c.run, 0)]
    if not prompts:
        return None
    prompt = max(prompts, key=lambda c: len(c.run))
    named = {node.id for node in echoes}
    turns = [nodes.sampled(child) for child in prompt.children]
    turn = max(turns, key=lambda s: (s.id in named, s.delivered, s.id))
    at = len(prompt.run)
    got = told.messages[at]
    if got.role == "assistant":
        cause = difference(turn.parts, told.reader.parts(got))
        if not cause:
            return Drift(kind="fork", cause="retention", turn=turn.turn, node=turn.id)
        return Drift(kind="edited", cause=cause, turn=turn.turn, node=turn.id, at=at)
    if turn.continued:  # the agent had accepted it: this is a step back, not a turn that was never taken up
        return Drift(kind="fork", cause="rewind", turn=turn.turn, node=turn.id)
    return Drift(kind="edited", cause="missing", turn=turn.turn, node=turn.id, at=at)
