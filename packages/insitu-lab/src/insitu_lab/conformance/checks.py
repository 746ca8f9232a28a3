"""Checks of `insitu conformance`: invariants of a session, whatever its agent did.

They compare the sealed trajectory with two independent records: the policy's replies and the engine's
prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from insitu.agents.base import AgentResult
from insitu.gateway.request import GatewayCounters
from insitu.gateway.session import Session
from insitu.types import EXCLUSIONS, IntArray, Ledger, Trajectory, Tree, Turn
from insitu_lab.conformance.agent_tools import AgentTools
from insitu_lab.conformance.scripted_policy import PARTS, RIGHT, ScriptedPolicy
from insitu_lab.exactness import training_faults
from insitu_train.demo.scripted import ScriptedEngine, SentRequest

LEAST_SPLIT = 0.2
LEAST_TRAINED = 0.99
MOST_NAMED = 8
LINES = ("main", "part")
"""Replies to the main agent and to sub-agents: all of them must be trainable. So must those to an agent that
has no tools at all; of another a call without tools may be a title."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceResult:
    """Result of one agent."""

    version: str = ""
    sampled: int = 0
    """Tokens that the policy produced."""
    trained: int = 0
    excluded: Mapping[str, int] = field(default_factory=dict)
    unexplained: int = 0
    """Tokens that are neither trained nor excluded for a named reason."""
    compactions: int | None = None
    subagents: int | None = None
    """None = the agent was not asked for any."""
    segments: tuple[str, ...] = ()
    """Labels of the rows that the session makes, in order."""
    calls: int = 0
    split: float = 0.0
    """Share of the replies with tokens that no tokenizer would choose."""
    duration_s: float = 0.0
    window_too_small: bool = False
    """The agent compacted before the task was done: its own prompt nearly fills the window."""
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Lines that explain failures and are none."""
    log: bytes = field(default=b"", repr=False)
    """Redacted output of the agent."""

    @property
    def ok(self) -> bool:
        return not self.failures

    def as_json(self) -> dict[str, object]:
        return {
            "version": self.version,
            "ok": self.ok,
            "sampled": self.sampled,
            "trained": self.trained,
            "excluded": dict(self.excluded),
            "unexplained": self.unexplained,
            "compactions": self.compactions,
            "subagents": self.subagents,
            "segments": list(self.segments),
            "notes": list(self.notes),
        }


def judge(
    version: str,
    tools: AgentTools,
    policy: ScriptedPolicy,
    engine: ScriptedEngine,
    session: Session,
    result: AgentResult,
    trajectory: Trajectory,
) -> ConformanceResult:
    """Check a sealed session."""
    ledger = trajectory.ledger
    sampled = sum(_produced(policy, sent) for sent in engine.sent)
    explained = ledger.trained + sum(n for reason, n in ledger.excluded.items() if reason in EXCLUSIONS)
    split = [reply.split for reply in policy.replies.values()]
    failures = [
        *_agent_failures(tools, result, session),
        *_exactness(trajectory.turns, engine.sent, policy),
        *training_faults(trajectory, {key.turn: answer for key, answer in engine.answers.items()}),
        *_books(trajectory, ledger, sampled, explained),
        *_lines(trajectory.turns, policy, engine.sent),
        *_coverage(tools, policy, split),
    ]
    return ConformanceResult(
        version=version,
        sampled=sampled,
        trained=ledger.trained,
        excluded=dict(ledger.excluded),
        unexplained=sampled - explained,
        compactions=policy.compactions if tools.compacts else None,
        subagents=len(policy.finished_parts) if tools.spawn is not None else None,
        segments=tuple(segment.label for segment in trajectory.segments),
        calls=len(engine.sent),
        split=sum(split) / max(1, len(split)),
        duration_s=result.duration_s,
        window_too_small=policy.window_too_small,
        failures=tuple(failures),
        notes=tuple(_cuts(trajectory.turns)),
        log=result.log,
    )


def _produced(policy: ScriptedPolicy, sent: SentRequest) -> int:
    """Return the number of tokens that the engine returned for a request; 0 if it was aborted."""
    reply = policy.replies.get(sent.key.turn)
    return 0 if reply is None else min(len(reply.ids), sent.params.max_tokens)


def _cuts(turns: Sequence[Turn]) -> Iterator[str]:
    """Yield a line if replies were cut at the `max_tokens` that the agent itself sent."""
    cut = [turn for turn in turns if turn.finish == "length" and str(len(turn.ids)) in _limits(turn)]
    if cut:
        named = ", ".join(str(turn.index) for turn in cut[:MOST_NAMED])
        more = ", ..." if len(cut) > MOST_NAMED else ""
        yield (
            f"{len(cut)} replies were cut at the max_tokens that the agent itself sent "
            f"({min(len(turn.ids) for turn in cut)} at the least; turns {named}{more}): a cut call is not run"
        )


def _limits(turn: Turn) -> set[str]:
    """Return the limits on the reply that the agent sent, by whatever name its format has for them."""
    return {value for name, value in turn.advisory if re.fullmatch(r"max_?\w*tokens", name, re.IGNORECASE)}


def _agent_failures(tools: AgentTools, result: AgentResult, session: Session) -> Iterator[str]:
    if result.exit != "finished":
        yield f"the agent {result.exit}: {result.detail}"
    if tools.solves and not task_done(result.tree):
        yield "the task is not done"
    if session.stats.infra_error:
        yield f"the session failed: {session.stats.infra_error}"
    if session.stats.budget_stop:
        yield f"the budget of {session.stats.budget_stop} ran out"
    if session.stats.malformed:
        yield f"{session.stats.malformed} replies did not parse"


def task_done(tree: Tree) -> bool:
    """Return whether the bug is fixed and the check was run."""
    fixed = "app.py" in tree and RIGHT.encode() in tree["app.py"].content
    return fixed and "ran.txt" in tree and tree["ran.txt"].content.strip() == b"checked"


def _exactness(turns: Sequence[Turn], sent: Sequence[SentRequest], policy: ScriptedPolicy) -> Iterator[str]:
    """Check that path ids are the ids that the engine received and returned."""
    paths: dict[int, IntArray] = {-1: np.zeros(0, dtype=np.int32)}
    received = {request.key.turn: request.ids for request in sent}
    for turn in turns:
        prompt = np.concatenate([paths[turn.parent], turn.context_ids])
        paths[turn.index] = np.concatenate([prompt, turn.ids])
        if turn.index not in received or not np.array_equal(prompt, received[turn.index]):
            yield f"turn {turn.index}: the path is not the prompt that the engine got"
        reply = policy.replies.get(turn.index)
        if reply is None or not np.array_equal(turn.ids, reply.ids[: len(turn.ids)]):
            yield f"turn {turn.index}: the ids kept are not those sampled"
    lost = sorted(set(policy.replies) - set(paths))
    if lost:
        yield f"turns {lost} were sampled and are not in the trajectory"


def _books(trajectory: Trajectory, ledger: Ledger, sampled: int, explained: int) -> Iterator[str]:
    if not ledger.balanced or ledger.captured != sampled or explained != sampled:
        yield f"{sampled} tokens were sampled, {ledger.captured} captured, {explained} explained"
    masked = sum(int(segment.mask.sum()) for segment in trajectory.segments)
    if masked != ledger.trained:
        yield f"{masked} tokens are masked in, {ledger.trained} are booked as trained"
    kept = sum(len(turn.ids) for turn in trajectory.turns if not turn.excluded)
    if kept != ledger.trained:
        yield f"{kept} tokens stand in turns that are not excluded, {ledger.trained} are booked as trained"


def _lines(turns: Sequence[Turn], policy: ScriptedPolicy, sent: Sequence[SentRequest]) -> Iterator[str]:
    """Check that replies to the main agent and to sub-agents are trained."""
    # The kind of a turn comes from the policy: a forest that labels every call auxiliary would lose nothing.
    kinds = {turn: reply.kind for turn, reply in policy.replies.items()}
    lines = LINES if policy.tools_offered else (*LINES, "bare")
    said = sum(_produced(policy, request) for request in sent if kinds.get(request.key.turn) in lines)
    own = [turn for turn in turns if kinds.get(turn.index) in lines]
    lost = said - sum(len(turn.ids) for turn in own if not turn.excluded)
    if not said:
        yield "the agent sent no request with the task's prompt"
    elif lost > (1 - LEAST_TRAINED) * said:
        reasons = sorted({turn.excluded for turn in own if turn.excluded})
        yield f"{lost} of {said} tokens of main line and sub-agents are not trainable: {reasons}"
    side = [turn.index for turn in own if turn.excluded == "auxiliary"]
    if side:
        yield f"turns {side} are booked as auxiliary and were said on the main line or by a sub-agent"


def traffic_failures(counters: GatewayCounters) -> Iterator[str]:
    """Check that every request was authorized and that the gateway had no internal error."""
    if counters.defects:
        yield f"the gateway itself failed at {counters.defects} requests"
    if counters.unauthorized:
        yield f"{counters.unauthorized} requests came without the session's secret"


def _coverage(tools: AgentTools, policy: ScriptedPolicy, split: Sequence[bool]) -> Iterator[str]:
    """Check that compaction, sub-agents and odd splits occurred."""
    if tools.compacts and not policy.compactions:
        yield "the agent never compacted"
    if tools.spawn is not None and len(policy.finished_parts) < PARTS:
        yield f"{len(policy.finished_parts)} of {PARTS} sub-agents finished"
    if tools.spawn is not None and not policy.overlapped:
        yield "the sub-agents did not run at the same time"
    if sum(split) < LEAST_SPLIT * len(split):
        yield f"only {sum(split)} of {len(split)} replies were split"
