"""Tokens of one session, stored once, as an append-only tree of deltas.

Order of calls per request: `plan` (what does the request continue), render only `plan.replace`, `extend`,
`path_ids` to the engine, `commit` the generation, then `mark_delivered` or `mark_aborted`. A request without
a generation ends with `mark_aborted` on its context node; sending a stored reply again needs no `extend`.
Sampled ids are never encoded again: a matched turn is spliced by its stored ids. `trajectory` seals. All
failures are CaptureError with rollout, turn and token index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from insitu.capture.digests import (
    MessageHasher,
    PartDigests,
    declared_defaults,
    leading_system,
    root_key,
    system_digest,
    tools_digest,
    wire_digest,
)
from insitu.capture.drift import PromptPlan, classify, longest_match, stored_context
from insitu.capture.drift_diagnosis import Diagnosis, first_difference
from insitu.capture.drift_log import DriftLog
from insitu.capture.ledger import check_generation
from insitu.capture.message_history import Digests, History, TreeWalk
from insitu.capture.nodes import ContextNode, Nodes, SampledNode, chain, frozen_ids, joined
from insitu.capture.segments import export
from insitu.capture.turn_refs import TurnIndex
from insitu.errors import CaptureError
from insitu.types import (
    EXCLUSIONS,
    DriftNote,
    Generation,
    IntArray,
    Message,
    MessageSpans,
    ModelRequest,
    ToolSpec,
    Trajectory,
)

MAX_READERS = 64
"""Tool lists cached per session; when full, the cache is cleared."""


class Forest:
    """Capture of one session; used on one event loop."""

    def __init__(
        self,
        rollout_id: str,
        pointer_key: bytes = b"",
        reset_roles: frozenset[str] = frozenset(),
        *,
        train_auxiliary: bool = False,
    ) -> None:
        """Create an empty forest.

        `pointer_key`: a secret of this session that no agent sees; without one nothing is signed.
        `reset_roles`: roles of the messages before which turns with reasoning are rendered again without it;
        none = reasoning stays as sampled. `train_auxiliary`: side calls are trained too.
        """
        self._rollout_id = rollout_id
        self._nodes = Nodes(rollout_id)
        self._index = TurnIndex(self._nodes, pointer_key)
        self._reset_roles = reset_roles
        self._readers: dict[bytes, MessageHasher] = {}
        """By digest of the offered tools."""
        self._tools: tuple[Sequence[ToolSpec], bytes] = ((), tools_digest(()))
        self._drift_log = DriftLog(self._nodes)
        self._turns: set[int] = set()
        self._tool_names: dict[str, str] = {}
        self._train_auxiliary = train_auxiliary
        self._deliveries = 0
        self._sealed: Trajectory | None = None

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self._nodes.all)

    @property
    def drifts(self) -> tuple[DriftNote, ...]:
        """Requests that did not simply continue stored tokens, in order."""
        return self._drift_log.drifts()

    def plan(self, request: ModelRequest, fingerprint: str) -> PromptPlan:
        """Return the deepest sampled turn that the request continues; changes nothing.

        Every assistant message on the path must equal what was sampled.
        """
        self._refuse_sealed("a request")
        history = History.of(request.messages)
        tools = self._tools_digest(request.tools)
        reader = self._reader(tools)
        said, digests, system = _digested(history, reader, tools)
        key = root_key(fingerprint, system, tools)
        found = longest_match(self._nodes, self._index, key, digests, self._known_path(history, key, tools))
        # A path that a later message may invalidate is not cached.
        walk = None if self._reset_roles else found.walk(key, self._nodes.forks)
        memory = history.memory
        memory.digests, memory.system, memory.lead = digests, system, len(history) - len(said)
        memory.tools, memory.walk = tools, walk
        base = found.base
        rest, messages = digests.rest(found.start), said[found.start :]
        echoes = self._index.referenced(messages)
        stored = stored_context(self._nodes, key, base, rest)

        def parts(at: int) -> PartDigests:
            return reader.parts(messages[at])

        return PromptPlan(
            root_key=key,
            base=base,
            parent=stored,
            replace=messages,
            drift=classify(self._nodes, key, base, rest, echoes, stored, parts),
            digests=rest,
            reader=reader,
            tools=bool(request.tools),
            tool_choice_none=request.tool_choice_none,
            streamed=request.stream,
            echoes=frozenset(node.id for node in echoes),
            hints=request.hints,
        )

    def _tools_digest(self, tools: Sequence[ToolSpec]) -> bytes:
        """Return the digest of the tools; the calls of a known conversation share one object."""
        if self._tools[0] is not tools:
            self._tools = (tools, tools_digest(tools))
        return self._tools[1]

    def _reader(self, tools: bytes) -> MessageHasher:
        """Return the hasher of requests with the tools last digested, `tools`."""
        if tools not in self._readers:
            if len(self._readers) >= MAX_READERS:
                self._readers.clear()
            self._readers[tools] = MessageHasher(declared_defaults(self._tools[0]), self._reset_roles)
        return self._readers[tools]

    def _known_path(self, history: History, key: str, tools: bytes) -> TreeWalk | None:
        """Return the path of an earlier request, if this one must take it too."""
        before = history.before
        if before is None or before.walk is None:
            return None
        walk = before.walk
        same = before.tools == tools and walk.root_key == key and walk.forks == self._nodes.forks
        return walk if same and before.lead + walk.depends <= history.known else None

    def extend(
        self,
        plan: PromptPlan,
        delta: IntArray,
        diagnosis: Diagnosis | None = None,
        spans: MessageSpans = (),
    ) -> int:
        """Add the context node for `plan` with the ids rendered for it; return its id.

        `delta` is everything between `plan.base` and the sampled ids to come: close (or root block), context,
        generation prompt. A prompt that is already stored is re-used with its ids; the same messages rendered
        to other ids mean that the renderer is not pure: CaptureError. `diagnosis` explains `plan.drift` when
        that is an edit.
        """
        self._refuse_sealed("a prompt")
        self._check_delta(plan, delta)
        wire = wire_digest(plan.replace)
        stored = stored_context(self._nodes, plan.root_key, plan.base, plan.digests)
        if stored is None:
            node = self._new_context(plan, delta, wire)
            node.spans = spans
        else:
            node = self._nodes.context(stored)
            node.streamed = node.streamed or plan.streamed
            # An equivalent spelling may render differently; the stored ids are used then.
            if node.wire == wire and not np.array_equal(node.ids, delta):
                raise CaptureError(
                    f"rollout {self._rollout_id} node {stored} token {first_difference(node.ids, delta)}: "
                    "the same messages were rendered to other ids"
                )
        # A request after a lost_requests one is its retry; any other needs one more sample.
        if node.lost_requests:
            node.lost_requests -= 1
        else:
            node.pending_samples += 1
        for echo in plan.echoes:
            self._nodes.sampled(echo).referenced = True
        self._drift_log.add(plan, node.id, diagnosis)
        return node.id

    def _new_context(self, plan: PromptPlan, delta: IntArray, wire: bytes) -> ContextNode:
        base = None if plan.base is None else self._nodes.sampled(plan.base)
        node_id = len(self._nodes.all)
        node = ContextNode(
            id=node_id,
            parent=plan.base,
            top=node_id if base is None else base.top,
            root_key=plan.root_key,
            ids=frozen_ids(delta),
            run=plan.digests.run(),
            reader=plan.reader,
            wire=wire,
            chained=chain(b"" if base is None else base.chained, delta),
            tools=plan.tools,
            tool_choice_none=plan.tool_choice_none,
            streamed=plan.streamed,
            echoes=plan.echoes,
            answers=bool(plan.replace) and plan.replace[-1].role != "user",
            hints=self._drift_log.hints(plan.hints),
        )
        tops = self._nodes.tops
        self._nodes.place(node, tops.setdefault(plan.root_key, []) if base is None else base.children)
        return node

    def _check_delta(self, plan: PromptPlan, delta: IntArray) -> None:
        if delta.dtype != np.int32 or delta.ndim != 1 or (delta.size and np.minimum.reduce(delta) < 0):
            raise CaptureError(f"rollout {self._rollout_id}: a prompt must be a row of int32 ids >= 0")
        if plan.base is None and not delta.size:
            raise CaptureError(f"rollout {self._rollout_id}: a root prompt is empty")

    def path_ids(self, node: int) -> IntArray:
        """Return the ids from the root to `node`: what the engine receives, or has received and produced."""
        return joined(self._nodes.path(node))

    def commit(
        self,
        node: int,
        generation: Generation,
        reply: Message,
        *,
        turn: int,
        synthetic: bool = False,
        discarded: int = 0,
        labels: Sequence[str] = (),
        advisory: Sequence[tuple[str, str]] = (),
    ) -> int:
        """Store the generation for context node `node`; return the sampled node.

        `reply` is the message as delivered, with the minted call ids. A synthetic reply was not sampled: it
        has no logprobs and is never trained. `discarded` ids were sampled after a stop string; only the
        ledger counts them. `labels` are added to the turn's hints, `advisory` are parameters that were not
        followed. Raises CaptureError when ids, logprobs or version runs break invariant 1 or 2, and for a
        turn or call id that was used before.
        """
        self._refuse_sealed(f"turn {turn}")
        where = f"rollout {self._rollout_id} turn {turn}"
        context = self._nodes.context(node)
        check_generation(where, generation, synthetic=synthetic)
        if discarded < 0 or (synthetic and discarded):
            raise CaptureError(f"{where}: {discarded} ids cannot have been sampled behind a stop string")
        minted = [call.id for call in reply.tool_calls if call.id]
        if turn < 0 or turn in self._turns:
            raise CaptureError(f"{where}: turn numbers are used once, from 0")
        if len(set(minted)) < len(minted) or self._index.taken(minted):
            raise CaptureError(f"{where}: a minted call id was used before")
        if reply.role != "assistant":
            raise CaptureError(f"{where}: a reply has role assistant, not {reply.role}")
        kept = _frozen_generation(generation)
        meaning, parts = context.reader.both(reply)
        sampled = SampledNode(
            id=len(self._nodes.all),
            parent=node,
            top=context.top,
            turn=turn,
            generation=kept,
            meaning=meaning,
            parts=parts,
            chained=chain(context.chained, kept.ids),
            synthetic=synthetic,
            discarded=discarded,
            labels=tuple(labels),
            advisory=self._drift_log.ignored_params(advisory),
        )
        self._nodes.place(sampled, context.children)
        self._turns.add(turn)
        self._index.mint(minted, sampled.id)
        self._tool_names.update((call.id, call.name) for call in reply.tool_calls if call.id)
        return sampled.id

    def tool_name(self, call_id: str) -> str:
        """Return the name of the tool that a sampled call used; empty for another id."""
        return self._tool_names.get(call_id, "")

    def pointer(self, node: int) -> str:
        """Return the signed reference to a sampled node; empty without a key."""
        return self._index.pointer(node)

    def said(self, node: int, message: Message) -> bool:
        """Return whether a sampled node was delivered as a message equal to `message`."""
        turn = self._nodes.sampled(node)
        return turn.meaning == self._nodes.context(turn.parent).reader.meaning(message)

    def turns_named(self, message: Message) -> int:
        """Return how many turns a message references by call id or signed reference."""
        return len(self._index.of(message))

    def sampled(self, node: int) -> Generation:
        """Return the generation of a sampled node."""
        return self._nodes.sampled(node).generation

    def mark_delivered(self, node: int) -> None:
        """Record that the terminal event of this turn's reply was written. Idempotent."""
        self._refuse_sealed(f"delivery of node {node}")
        turn = self._nodes.sampled(node)
        if turn.delivered:
            return
        self._deliveries += 1
        turn.delivered = self._deliveries
        context = self._nodes.context(turn.parent)
        if turn.aborted and context.lost_requests:
            context.lost_requests -= 1

    def mark_aborted(self, node: int) -> None:
        """Record that a delivery failed (sampled node), or that there was no generation (context node).

        The turn still counts if a later request contains it. Ignored for a delivered turn.
        """
        self._refuse_sealed(f"abort of node {node}")
        found = self._nodes.get(node)
        if isinstance(found, ContextNode):
            found.lost_requests = min(found.lost_requests + 1, found.pending_samples)
        elif not found.delivered and not found.aborted:
            found.aborted = True
            context = self._nodes.context(found.parent)
            context.lost_requests = min(context.lost_requests + 1, context.pending_samples)

    def exclude(self, node: int, reason: str) -> None:
        """Exclude this turn from training for a reason from EXCLUSIONS. The first reason is kept."""
        self._refuse_sealed(f"exclusion of node {node}")
        if reason not in EXCLUSIONS:
            raise CaptureError(f"rollout {self._rollout_id}: no such reason to exclude: {reason!r}")
        turn = self._nodes.sampled(node)
        turn.excluded = turn.excluded or reason

    def trajectory(self) -> Trajectory:
        """Seal, and return segments, turns and ledger. Later changes are refused; repeated calls are cheap.

        Raises CaptureError when any invariant does not hold.
        """
        if self._sealed is None:
            self._sealed = export(self._nodes, self.drifts, train_auxiliary=self._train_auxiliary)
        return self._sealed

    def _refuse_sealed(self, what: str) -> None:
        if self._sealed is not None:
            raise CaptureError(f"rollout {self._rollout_id}: {what} came after the session was sealed")


def _digested(history: History, reader: MessageHasher, tools: bytes) -> tuple[History, Digests, bytes]:
    """Return what follows the leading system messages, its digests, and the digest of the former."""
    before = history.before
    if before is not None and before.tools == tools:
        said = history.after(before.lead)
        return said, reader.conversation(said), before.system
    lead = leading_system(history)
    said = History.of(history[lead:])
    return said, reader.conversation(said), system_digest(history[:lead])


def _frozen_generation(generation: Generation) -> Generation:
    logprobs = generation.logprobs
    if logprobs is not None:
        logprobs = logprobs.copy()
        logprobs.setflags(write=False)
    experts = generation.experts
    if experts is not None:
        experts = experts.copy()
        experts.setflags(write=False)
    return replace(
        generation,
        ids=frozen_ids(generation.ids),
        logprobs=logprobs,
        experts=experts,
        version_runs=tuple(generation.version_runs),
    )
