"""The Forest: every token of one session, held once, as an append-only tree of deltas.

The gateway's order per call: `plan` (what does the request continue), render only `plan.replace`, `extend`,
`path_ids` to the engine, `commit` the generation, then `mark_delivered` or `mark_aborted`. A request that
gets no generation ends with `mark_aborted` on its context node; replaying a held reply needs no `extend`.
Nothing sampled is ever encoded again: a matched turn is spliced by its stored ids. `trajectory` seals.
All failures are CaptureError naming rollout, turn and token index.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from insitu.capture.digests import (
    DigestedMessages,
    MessageHasher,
    declared_defaults,
    leading_system,
    root_key,
    system_digest,
    tools_digest,
    wire_digest,
)
from insitu.capture.drift import PromptPlan, classify, held_context, longest_match
from insitu.capture.drift_diagnosis import Diagnosis, first_difference
from insitu.capture.drift_log import DriftLog
from insitu.capture.export import Form, chains, per_request
from insitu.capture.ledger import check_generation
from insitu.capture.message_history import History, TreeWalk
from insitu.capture.nodes import ContextNode, Nodes, SampledNode, chain, frozen_ids, joined
from insitu.capture.segments import export
from insitu.capture.tree import TokenTree, WeightMode, tree
from insitu.capture.turn_refs import TurnIndex
from insitu.errors import CaptureError
from insitu.types import (
    EXCLUSIONS,
    DriftNote,
    Generation,
    IntArray,
    Message,
    ModelRequest,
    Segment,
    ToolSpec,
    Trajectory,
)

MAX_READERS = 64
"""Tool lists remembered per session; past that, all are read anew."""


class Forest:
    """One session's capture. Not thread-safe: one event loop owns it."""

    def __init__(
        self,
        rollout_id: str,
        pointer_key: bytes = b"",
        asking: frozenset[str] = frozenset(),
        *,
        train_auxiliary: bool = False,
    ) -> None:
        """`pointer_key` is a secret of this session that no agent sees; without one nothing is signed.
        `asking`: roles of the messages before which turns with reasoning are not spliced but rendered again,
        without it; none = it stays as it was sampled. `train_auxiliary`: side calls are trained too."""
        self._rollout_id = rollout_id
        self._nodes = Nodes(rollout_id)
        self._names = TurnIndex(self._nodes, pointer_key)
        self._asking = asking
        self._readers: dict[bytes, MessageHasher] = {}
        """By digest of the offered tools."""
        self._tools: tuple[Sequence[ToolSpec], bytes] = ((), tools_digest(()))
        self._notes = DriftLog(self._nodes)
        self._turns: set[int] = set()
        self._train_auxiliary = train_auxiliary
        self._deliveries = 0
        self._sealed: Trajectory | None = None

    def __len__(self) -> int:
        """Number of nodes, for the session's budget."""
        return len(self._nodes.all)

    @property
    def drifts(self) -> tuple[DriftNote, ...]:
        """Requests so far that did not simply continue what was held, in order."""
        return self._notes.drifts()

    def plan(self, request: ModelRequest, fingerprint: str) -> PromptPlan:
        """Find the deepest sampled turn that the request continues. Changes nothing.

        Every assistant message on the way must mean what was sampled.
        """
        self._refuse_sealed("a request")
        tools = self._tools_digest(request.tools)
        told, system, lead = self._read(request.messages, tools)
        key = root_key(fingerprint, system, tools)
        found = longest_match(self._nodes, self._names, key, told, self._walked(request.messages, key, tools))
        if isinstance(request.messages, History):
            # A way that a later question closes is not remembered.
            walk = None if self._asking else found.walk(key, self._nodes.forks)
            request.messages.memory.told = told.told(system, tools, lead, walk)
        base = found.base
        rest = told.rest(found.start)
        echoes = self._names.echoed(rest.messages)
        held = held_context(self._nodes, key, base, rest)
        return PromptPlan(
            root_key=key,
            base=base,
            parent=held,
            replace=tuple(rest.messages),
            drift=classify(self._nodes, key, base, rest, echoes, held),
            told=rest,
            tools=bool(request.tools),
            tool_choice_none=request.tool_choice_none,
            streamed=request.stream,
            echoes=frozenset(node.id for node in echoes),
            hints=request.hints,
        )

    def _tools_digest(self, tools: Sequence[ToolSpec]) -> bytes:
        """The same object comes with every call of a conversation that `gateway/bodies` knows."""
        if self._tools[0] is not tools:
            self._tools = (tools, tools_digest(tools))
        return self._tools[1]

    def _reader(self, tools: bytes) -> MessageHasher:
        """Of requests that offer the tools last digested, `tools`."""
        if tools not in self._readers:
            if len(self._readers) >= MAX_READERS:
                self._readers.clear()
            self._readers[tools] = MessageHasher(declared_defaults(self._tools[0]), self._asking)
        return self._readers[tools]

    def _read(self, messages: Sequence[Message], tools: bytes) -> tuple[DigestedMessages, bytes, int]:
        """The conversation after the leading system messages, the digest of those and how many they are."""
        reader = self._reader(tools)
        before = messages.before if isinstance(messages, History) else None
        if isinstance(messages, History) and before is not None and before.tools == tools:
            return reader.conversation(messages.after(before.lead)), before.system, before.lead
        lead = leading_system(messages)
        return reader.conversation(messages[lead:]), system_digest(messages[:lead]), lead

    def _walked(self, messages: Sequence[Message], key: str, tools: bytes) -> TreeWalk | None:
        """The part of the way that an earlier request went, if this one must go it too."""
        before = messages.before if isinstance(messages, History) else None
        if not isinstance(messages, History) or before is None or before.walk is None:
            return None
        walk = before.walk
        same = before.tools == tools and walk.root_key == key and walk.forks == self._nodes.forks
        return walk if same and before.lead + walk.depends <= messages.known else None

    def extend(self, plan: PromptPlan, delta: IntArray, diagnosis: Diagnosis | None = None) -> int:
        """Open one request: the context node for `plan`, with the ids rendered for it; returns its id.

        `delta` is everything between `plan.base` and the sampled span to come: close (or root block),
        context, generation prompt. A prompt that is held already is re-used with its stored ids; the same
        messages rendered to other ids are a family that is not pure: CaptureError. `diagnosis` explains
        `plan.drift` when that is an edit.
        """
        self._refuse_sealed("a prompt")
        self._check_delta(plan, delta)
        wire = wire_digest(plan.replace)
        held = held_context(self._nodes, plan.root_key, plan.base, plan.told)
        if held is None:
            node = self._new_context(plan, delta, wire)
        else:
            node = self._nodes.context(held)
            node.streamed = node.streamed or plan.streamed
            # Other spelling of the same meaning may render differently; then the held ids stand.
            if node.wire == wire and not np.array_equal(node.ids, delta):
                raise CaptureError(
                    f"rollout {self._rollout_id} node {held} token {first_difference(node.ids, delta)}: "
                    "the same messages were rendered to other ids"
                )
        # A request after a lost one wants the same sample again; any other wants one more.
        if node.lost:
            node.lost -= 1
        else:
            node.wanted += 1
        for echo in plan.echoes:
            self._nodes.sampled(echo).echoed = True
        self._notes.add(plan, node.id, diagnosis)
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
            run=plan.told.run(),
            reader=plan.told.reader,
            wire=wire,
            chained=chain(b"" if base is None else base.chained, delta),
            tools=plan.tools,
            tool_choice_none=plan.tool_choice_none,
            streamed=plan.streamed,
            echoes=plan.echoes,
            answers=bool(plan.replace) and plan.replace[-1].role != "user",
            hints=self._notes.hints(plan.hints),
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
        """Full ids from the root to `node`: what the engine receives, or has received and produced."""
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
        """Keep what the engine produced for context node `node`; returns the sampled node.

        `reply` is the message as delivered, with the gateway's minted call ids. A synthetic reply was not
        sampled: it carries no logprobs and is never trained. `discarded` ids were sampled behind
        a stop string: the ledger counts them, nothing else knows them. `labels` join the turn's hints,
        `advisory` is what the agent wished for it. Raises CaptureError when ids, logprobs or version runs
        break invariant 1 or 2, and for a turn or call id that was used before.
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
        if len(set(minted)) < len(minted) or self._names.taken(minted):
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
            advisory=self._notes.ignored_params(advisory),
        )
        self._nodes.place(sampled, context.children)
        self._turns.add(turn)
        self._names.mint(minted, sampled.id)
        return sampled.id

    def pointer(self, node: int) -> str:
        """Signed pointer to a sampled node, for the reply's opaque field; empty without a key."""
        return self._names.pointer(node)

    def said(self, node: int, message: Message) -> bool:
        """Whether a sampled node was delivered as a message that means `message`."""
        turn = self._nodes.sampled(node)
        return turn.meaning == self._nodes.context(turn.parent).reader.meaning(message)

    def turns_named(self, message: Message) -> int:
        """How many held turns a message names by call id or pointer."""
        return len(self._names.of(message))

    def sampled(self, node: int) -> Generation:
        """What the engine produced at a sampled node, for `Family.close`."""
        return self._nodes.sampled(node).generation

    def mark_delivered(self, node: int) -> None:
        """The terminal event of this turn's reply was written to the client. Idempotent; final."""
        self._refuse_sealed(f"delivery of node {node}")
        turn = self._nodes.sampled(node)
        if turn.delivered:
            return
        self._deliveries += 1
        turn.delivered = self._deliveries
        context = self._nodes.context(turn.parent)
        if turn.aborted and context.lost:
            context.lost -= 1

    def mark_aborted(self, node: int) -> None:
        """The client left before the reply was fully written (sampled node; ignored when delivered), or the
        request ended without a generation (context node). The turn still counts if a later request echoes
        it."""
        self._refuse_sealed(f"abort of node {node}")
        found = self._nodes.get(node)
        if isinstance(found, ContextNode):
            found.lost = min(found.lost + 1, found.wanted)
        elif not found.delivered and not found.aborted:
            found.aborted = True
            context = self._nodes.context(found.parent)
            context.lost = min(context.lost + 1, context.wanted)

    def exclude(self, node: int, reason: str) -> None:
        """Never train this turn, for a reason from EXCLUSIONS. The first reason stands."""
        self._refuse_sealed(f"exclusion of node {node}")
        if reason not in EXCLUSIONS:
            raise CaptureError(f"rollout {self._rollout_id}: no such reason to exclude: {reason!r}")
        turn = self._nodes.sampled(node)
        turn.excluded = turn.excluded or reason

    def trajectory(self) -> Trajectory:
        """Seal, and export segments, turns and ledger. Later changes are refused; asking again is free.

        Raises CaptureError when any invariant does not hold over what is exported.
        """
        if self._sealed is None:
            self._sealed = export(self._nodes, self.drifts, train_auxiliary=self._train_auxiliary)
        return self._sealed

    def export(self, form: Form, weights: WeightMode = "once") -> tuple[Segment, ...] | TokenTree:
        """The sealed session in one of three shapes that train the same tokens; seals if need be.

        Raises CaptureError as `trajectory` does.
        """
        sealed = self.trajectory()
        if form == "tree":
            return tree(sealed, weights)
        return per_request(sealed) if form == "per_request" else chains(sealed)

    def _refuse_sealed(self, what: str) -> None:
        if self._sealed is not None:
            raise CaptureError(f"rollout {self._rollout_id}: {what} came after the session was sealed")


def _frozen_generation(generation: Generation) -> Generation:
    logprobs = generation.logprobs
    if logprobs is not None:
        logprobs = logprobs.copy()
        logprobs.setflags(write=False)
    return Generation(
        ids=frozen_ids(generation.ids),
        logprobs=logprobs,
        finish=generation.finish,
        version_runs=tuple(generation.version_runs),
    )
