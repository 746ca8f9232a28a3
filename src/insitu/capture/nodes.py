"""Nodes of a forest in creation order, each with its token delta only.

A path alternates context, sampled, context, ... from a top context node (no parent) downwards. Node ids are
list positions, so a child's id is always larger than its parent's. `chained` is a running digest of the
path's ids: recomputed at export, it proves that nothing changed since the engine received them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from insitu.capture.digests import MessageHasher, PartDigests, digest
from insitu.capture.message_history import DigestRun, MessageDigest
from insitu.errors import CaptureError
from insitu.types import Generation, IntArray, MessageSpans, SegmentKind


@dataclass(slots=True, kw_only=True)
class ContextNode:
    """Ids from outside: scaffold, user, tools, foreign assistant messages."""

    id: int
    parent: int | None
    """Sampled node that this continues; None at the top of a tree."""
    top: int
    """Top context node of the tree."""
    root_key: str
    ids: IntArray = field(repr=False)
    run: DigestRun = field(repr=False)
    wire: bytes = field(repr=False)
    """`wire_digest` of the messages as first received."""
    chained: bytes = field(repr=False)
    reader: MessageHasher = field(repr=False)
    """Hashes arguments by the schemas of this root's tools."""
    tools: bool
    """Whether the request offered tools."""
    tool_choice_none: bool
    """Whether it sent tools and forbade calls."""
    streamed: bool
    """Whether it asked for a stream."""
    echoes: frozenset[int]
    """Sampled nodes that this context references: they were re-rendered here."""
    answers: bool = False
    """The newest message is not a user's, but a tool's answer or the model's."""
    hints: tuple[tuple[str, str], ...] = ()
    """Client metadata: labels, never keys."""
    spans: MessageSpans = ()
    children: list[int] = field(default_factory=list)
    pending_samples: int = 0
    """Number of samples requested for exactly this prompt, without retries of lost_requests ones."""
    lost_requests: int = 0
    """Requests that ended without a delivered reply and were not retried yet."""


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
    """Ids sampled after a stop string: counted, but not part of the path."""
    labels: tuple[str, ...] = ()
    """Changes to the reply by the gateway, e.g. a translated text."""
    advisory: tuple[tuple[str, str], ...] = ()
    """Parameters of the request that were not followed."""
    aborted: bool = False
    """The client left before the reply was fully written."""
    delivered: int = 0
    """Order of delivery within the session, from 1; 0 = not delivered."""
    excluded: str = ""
    referenced: bool = False
    """A later request referenced this turn and had it rendered again."""
    children: list[int] = field(default_factory=list)

    @property
    def kind(self) -> SegmentKind:
        """`demonstrated` when the engine gave no logprobs."""
        return "demonstrated" if self.generation.logprobs is None else "sampled"

    @property
    def continued(self) -> bool:
        """Whether a later request continues this turn's own tokens."""
        return bool(self.children)

    @property
    def seen_by_client(self) -> bool:
        """Whether a later request contains this turn, so the client received it."""
        return self.referenced or bool(self.children)


Node = ContextNode | SampledNode


def chain(parent: bytes, ids: IntArray) -> bytes:
    """Return the digest of a path that ends in `ids` after a path with digest `parent`."""
    return digest(parent, ids.tobytes())


def frozen_ids(ids: IntArray) -> IntArray:
    """Return a read-only copy."""
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
        """Number of nodes that were added beside another."""

    def place(self, node: Node, beside: list[int]) -> None:
        """Add a node; `beside` are those with its parent, or the tops of its root key."""
        self.forks += bool(beside)
        self.all.append(node)
        beside.append(node.id)

    def context(self, node: int) -> ContextNode:
        """Return a context node. Raises CaptureError for any other."""
        found = self.get(node)
        if not isinstance(found, ContextNode):
            raise CaptureError(f"rollout {self.rollout_id}: node {node} is not a context node")
        return found

    def sampled(self, node: int) -> SampledNode:
        """Return a sampled node. Raises CaptureError for any other."""
        found = self.get(node)
        if not isinstance(found, SampledNode):
            raise CaptureError(f"rollout {self.rollout_id}: node {node} is not a sampled node")
        return found

    def is_sampled(self, node: int) -> bool:
        """Return whether this is a sampled node."""
        return 0 <= node < len(self.all) and isinstance(self.all[node], SampledNode)

    def get(self, node: int) -> Node:
        """Return a node. Raises CaptureError when there is none."""
        if not 0 <= node < len(self.all):
            raise CaptureError(f"rollout {self.rollout_id}: there is no node {node}")
        return self.all[node]

    def contexts(self) -> Iterator[ContextNode]:
        return (node for node in self.all if isinstance(node, ContextNode))

    def turns(self) -> list[SampledNode]:
        """Return the sampled nodes in the order of their turns."""
        return sorted((node for node in self.all if isinstance(node, SampledNode)), key=lambda n: n.turn)

    def below(self, root_key: str, base: int | None) -> list[ContextNode]:
        """Return the context nodes that continue `base`, or the tops of a root key."""
        ids = self.tops.get(root_key, ()) if base is None else self.all[base].children
        found = [self.all[node] for node in ids]
        return [node for node in found if isinstance(node, ContextNode)]

    def path(self, node: int) -> list[Node]:
        """Return the nodes from the top to `node`, both included."""
        nodes = [self.get(node)]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(self.all[parent])
        nodes.reverse()
        return nodes


def node_ids(node: Node) -> IntArray:
    """Return the ids of either kind of node."""
    return node.ids if isinstance(node, ContextNode) else node.generation.ids


def joined(path: list[Node]) -> IntArray:
    """Return the ids of a path."""
    return np.concatenate([node_ids(node) for node in path], dtype=np.int32)
