"""The store under a forest: nodes in creation order, each with its token delta only.

A path alternates context, sampled, context, ... from a top context node (no parent) downwards. Node ids are
list positions, so a child's id is always larger than its parent's. `chained` is a running digest of the
path's ids: recomputed at export, it proves that nothing changed since the engine saw them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from insitu.capture.digests import DigestRun, MessageDigest, MessageHasher, PartDigests, digest
from insitu.errors import CaptureError
from insitu.types import Generation, IntArray, SegmentKind


@dataclass(slots=True, kw_only=True)
class ContextNode:
    """Ids that came from outside: scaffold, user, tools, foreign assistant messages."""

    id: int
    parent: int | None
    """Sampled node that this continues; None at the top of a tree."""
    top: int
    """Top context node of the tree."""
    root_key: str
    ids: IntArray = field(repr=False)
    run: DigestRun = field(repr=False)
    wire: bytes = field(repr=False)
    """`wire_digest` of the messages as they first came."""
    chained: bytes = field(repr=False)
    reader: MessageHasher = field(repr=False)
    """Knows what the tools of this root make of arguments."""
    tools: bool
    """Whether the request offered tools."""
    tool_choice_none: bool
    """Whether it sent tools and let none be called."""
    streamed: bool
    """Whether it asked for a stream."""
    echoes: frozenset[int]
    """Sampled nodes that this context names by call id or pointer: they were re-rendered here."""
    answers: bool = False
    """The newest message is no user's: a tool's answer, or what the model said."""
    hints: tuple[tuple[str, str], ...] = ()
    """What the agent said of itself: labels, never keys."""
    children: list[int] = field(default_factory=list)
    wanted: int = 0
    """How many samples of exactly this prompt were asked for; a retry of a lost one asks for no other."""
    lost: int = 0
    """Requests that ended without a delivered reply and were not asked again yet."""


@dataclass(slots=True, kw_only=True)
class SampledNode:
    """Ids that the engine produced in one turn."""

    id: int
    parent: int
    top: int
    turn: int
    generation: Generation
    meaning: MessageDigest = field(repr=False)
    parts: PartDigests = field(repr=False)
    chained: bytes = field(repr=False)
    synthetic: bool
    discarded: int = 0
    """Ids sampled behind a stop string: counted, but not part of the path."""
    labels: tuple[str, ...] = ()
    """What the gateway did to the reply, a translated text for instance."""
    advisory: tuple[tuple[str, str], ...] = ()
    """What the agent wished for this call and did not get."""
    aborted: bool = False
    """The client left before the reply was fully written."""
    delivered: int = 0
    """Order of delivery within the session, from 1; 0 = not delivered."""
    excluded: str = ""
    echoed: bool = False
    """A later request named this turn by call id or pointer and had it rendered anew."""
    children: list[int] = field(default_factory=list)

    @property
    def kind(self) -> SegmentKind:
        """`demonstrated` when the engine gave no logprobs."""
        return "demonstrated" if self.generation.logprobs is None else "sampled"

    @property
    def continued(self) -> bool:
        """A later request goes on from this turn's own tokens."""
        return bool(self.children)

    @property
    def taken_up(self) -> bool:
        """A later request shows this turn, so the client had it."""
        return self.echoed or bool(self.children)


Node = ContextNode | SampledNode


def chain(parent: bytes, ids: IntArray) -> bytes:
    """Digest of a path that ends in `ids` after a path with digest `parent`."""
    return digest(parent, ids.tobytes())


def frozen_ids(ids: IntArray) -> IntArray:
    """A read-only copy."""
    copy = ids.copy()
    copy.setflags(write=False)
    return copy


class Nodes:
    """Nodes of one session by id, and the tops by root key."""

    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self.all: list[Node] = []
        self.tops: dict[str, list[int]] = {}
        self.forks = 0
        """How often a node came to stand beside another."""

    def place(self, node: Node, beside: list[int]) -> None:
        """Keep a node; `beside` are those with its parent, or the tops of its root key."""
        self.forks += bool(beside)
        self.all.append(node)
        beside.append(node.id)

    def context(self, node: int) -> ContextNode:
        """Raises CaptureError when `node` is not a context node."""
        found = self.get(node)
        if not isinstance(found, ContextNode):
            raise CaptureError(f"rollout {self.rollout_id}: node {node} is not a context node")
        return found

    def sampled(self, node: int) -> SampledNode:
        """Raises CaptureError when `node` is not a sampled node."""
        found = self.get(node)
        if not isinstance(found, SampledNode):
            raise CaptureError(f"rollout {self.rollout_id}: node {node} is not a sampled node")
        return found

    def is_sampled(self, node: int) -> bool:
        """Whether there is such a node, and an engine produced it."""
        return 0 <= node < len(self.all) and isinstance(self.all[node], SampledNode)

    def get(self, node: int) -> Node:
        """Raises CaptureError when there is no such node."""
        if not 0 <= node < len(self.all):
            raise CaptureError(f"rollout {self.rollout_id}: there is no node {node}")
        return self.all[node]

    def contexts(self) -> Iterator[ContextNode]:
        return (node for node in self.all if isinstance(node, ContextNode))

    def turns(self) -> list[SampledNode]:
        """Sampled nodes by turn, the order in which they were asked for."""
        return sorted((node for node in self.all if isinstance(node, SampledNode)), key=lambda n: n.turn)

    def below(self, root_key: str, base: int | None) -> list[ContextNode]:
        """Context nodes that continue `base`, or the tops of a root key."""
        ids = self.tops.get(root_key, ()) if base is None else self.all[base].children
        found = [self.all[node] for node in ids]
        return [node for node in found if isinstance(node, ContextNode)]

    def path(self, node: int) -> list[Node]:
        """Nodes from the top to `node`, both included."""
        nodes = [self.get(node)]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(self.all[parent])
        nodes.reverse()
        return nodes


def node_ids(node: Node) -> IntArray:
    """The delta of either kind of node."""
    return node.ids if isinstance(node, ContextNode) else node.generation.ids


def joined(path: list[Node]) -> IntArray:
    """Full ids of a path."""
    return np.concatenate([node_ids(node) for node in path], dtype=np.int32)
