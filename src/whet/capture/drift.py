"""How a request relates to the tokens already held, and what is left to render.

`clean` continues or repeats what is held; `edited` shows an assistant message that is not what was sampled;
`fork` leaves the newest line. Every drift has a named cause. Pure; `forest` asks once per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from whet.capture.match import Conversation, Parts
from whet.capture.nodes import ContextNode, Nodes, SampledNode
from whet.capture.pointer import Names
from whet.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Causes by kind.

    clean: `first` (first request of the session), `append`, `same_prompt` (retry or twin).
    edited: `text`, `tool name`, `arguments`, `reasoning` (first difference in wire order), `missing` (the
    turn was left out), `foreign` (an assistant message nobody sampled). `diagnosis` names edits finer.
    fork: `new_root`, `rewind`, `context` (what stood before a known turn was rewritten).
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
    told: Conversation = field(repr=False)
    """Meanings of `replace`, for `extend`."""
    tools: bool
    echoes: frozenset[int] = field(repr=False)
    """Sampled nodes named by pointers or minted call ids in `replace`."""
    hints: tuple[tuple[str, str], ...] = ()


def deepest(nodes: Nodes, names: Names, root_key: str, told: Conversation) -> tuple[int | None, int]:
    """(deepest sampled node that `told` fully matches, messages it accounts for); (None, 0) without one.

    Between equals the one named by a valid pointer wins, then by call ids, then the one delivered last; names
    are read only where the path splits, since those above are common to all.
    """
    best = (0, 0, 0, 0, -1)  # messages, turns named by pointer, by call id, order of delivery, node
    reached: list[tuple[int | None, int, int, int]] = [(None, 0, 0, 0)]
    split = False
    while reached:
        base, start, pointed, minted = reached.pop()
        found = _taken_up(nodes, root_key, base, told, start)
        split = split or len(found) > 1
        for turn, end in found:
            hits = (pointed, minted)
            if split:
                message = told.echo(end)
                hits = (
                    pointed + (turn.id in names.pointed(message)),
                    minted + (turn.id in names.minters(message)),
                )
            best = max(best, (end + 1, *hits, turn.delivered, turn.id))
            if turn.children:
                reached.append((turn.id, end + 1, *hits))
    return (best[4], best[0]) if best[0] else (None, 0)


def _taken_up(
    nodes: Nodes, root_key: str, base: int | None, told: Conversation, start: int
) -> list[tuple[SampledNode, int]]:
    """Turns right below `base` that `told` goes on with, each with the index of its echo."""
    found: list[tuple[SampledNode, int]] = []
    last = len(told) - 1
    for context in nodes.below(root_key, base):
        run = context.run
        end = start + len(run)
        if end <= last and context.children and told.holds(run, start):
            for child in context.children:
                turn = nodes.sampled(child)
                if told.says(end, turn.meaning):
                    found.append((turn, end))
    return found


def held_context(nodes: Nodes, root_key: str, base: int | None, told: Conversation) -> int | None:
    """The context node under `base` that holds exactly these messages, if any."""
    for node in nodes.below(root_key, base):
        if len(node.run) == len(told) and told.holds(node.run, 0):
            return node.id
    return None


def difference(held: Parts, got: Parts) -> str:
    """The first part, in wire order, in which an echoed assistant message differs; empty if none."""
    if got.reasoning and held.reasoning != got.reasoning:
        return "reasoning"
    if held.text != got.text:
        return "text"
    if held.names != got.names:
        return "tool name"
    return "" if held.arguments == got.arguments else "arguments"


def classify(
    nodes: Nodes, root_key: str, base: int | None, told: Conversation, echoes: Sequence[SampledNode]
) -> Drift:
    """Name the drift of a request whose messages after `base` are `told`.

    `echoes` are the held turns that these messages name, in request order.
    """
    held = held_context(nodes, root_key, base, told)
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
    nodes: Nodes, below: Sequence[ContextNode], told: Conversation, echoes: Sequence[SampledNode]
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
        return Drift(kind="edited", cause=cause, turn=turn.turn, node=turn.id, at=at)
    if turn.continued:  # the agent had accepted it: this is a step back, not a turn that was never taken up
        return Drift(kind="fork", cause="rewind", turn=turn.turn, node=turn.id)
    return Drift(kind="edited", cause="missing", turn=turn.turn, node=turn.id, at=at)
