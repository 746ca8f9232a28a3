"""How a request relates to the tokens already held, and what is left to render.

`clean` continues or repeats what is held; `edited` shows an assistant message that is not what was sampled;
`fork` leaves the newest line. Every drift has a named cause. Pure; `forest` asks once per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from whet.capture.match import MessageKey, same, same_run
from whet.capture.nodes import ContextNode, Nodes, SampledNode
from whet.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Causes by kind.

    clean: `first` (first request of the session), `append`, `same_prompt` (retry or twin).
    edited: `text`, `tool name`, `arguments`, `reasoning` (first difference in wire order), `missing` (the
    turn was left out), `foreign` (an assistant message nobody sampled).
    fork: `new_root`, `rewind`, `context` (what stood before a known turn was rewritten).
    """

    kind: Literal["clean", "edited", "fork"]
    cause: str
    turn: int | None = None
    """The held turn concerned: edited, left out, stepped back over or re-rendered."""


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
    keys: tuple[MessageKey, ...] = field(repr=False)
    """Keys of `replace`, for `extend`."""
    tools: bool
    echoes: frozenset[int] = field(repr=False)
    """Sampled nodes named by pointers or minted call ids in `replace`."""


def difference(held: MessageKey, got: MessageKey) -> str:
    """The first part, in wire order, in which an echoed assistant message differs; empty if none."""
    if same(held, got):
        return ""
    if got.reasoning and held.reasoning != got.reasoning:
        return "reasoning"
    if held.text != got.text:
        return "text"
    return "tool name" if held.names != got.names else "arguments"


def held_context(nodes: Nodes, root_key: str, base: int | None, keys: Sequence[MessageKey]) -> int | None:
    """The context node under `base` that holds exactly these messages, if any."""
    for node in nodes.below(root_key, base):
        if len(node.keys) == len(keys) and same_run(node.keys, keys, 0):
            return node.id
    return None


def classify(
    nodes: Nodes, root_key: str, base: int | None, keys: Sequence[MessageKey], echoes: Sequence[SampledNode]
) -> Drift:
    """Name the drift of a request whose messages after `base` have `keys`.

    `echoes` are the held turns whose minted call ids occur among these messages, in request order.
    """
    held = held_context(nodes, root_key, base, keys)
    if held is not None:
        gone_past = any(nodes.sampled(child).continued for child in nodes.context(held).children)
        return Drift(kind="fork", cause="rewind") if gone_past else Drift(kind="clean", cause="same_prompt")
    edited = _edit(nodes, nodes.below(root_key, base), keys, echoes)
    if edited is not None:
        return edited
    if echoes:
        return Drift(kind="fork", cause="context", turn=echoes[0].turn)
    if base is None:
        return Drift(kind="fork", cause="new_root") if nodes.all else Drift(kind="clean", cause="first")
    if any(key.role == "assistant" for key in keys):
        return Drift(kind="edited", cause="foreign")
    if nodes.sampled(base).continued:
        return Drift(kind="fork", cause="rewind")
    return Drift(kind="clean", cause="append")


def _edit(
    nodes: Nodes, below: Sequence[ContextNode], keys: Sequence[MessageKey], echoes: Sequence[SampledNode]
) -> Drift | None:
    """The edit that made the request leave the longest held prompt it starts with, if that is the cause."""
    prompts = [c for c in below if c.children and len(c.keys) < len(keys) and same_run(c.keys, keys, 0)]
    if not prompts:
        return None
    prompt = max(prompts, key=lambda c: len(c.keys))
    named = {node.id for node in echoes}
    turns = [nodes.sampled(child) for child in prompt.children]
    turn = max(turns, key=lambda s: (s.id in named, s.delivered, s.id))
    got = keys[len(prompt.keys)]
    if got.role == "assistant":
        return Drift(kind="edited", cause=difference(turn.key, got), turn=turn.turn)
    if turn.continued:  # the agent had accepted it: this is a step back, not a turn that was never taken up
        return Drift(kind="fork", cause="rewind", turn=turn.turn)
    return Drift(kind="edited", cause="missing", turn=turn.turn)
