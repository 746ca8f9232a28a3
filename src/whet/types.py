"""The words of whet as frozen values (docs/DESIGN.md, section 2).

Values move right along the path Task -> Sandbox -> Harness -> Gateway -> Rollout -> Group -> Trainer
and are never changed after they are made. This module knows no I/O, no async and no other module.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

# --------------------------------------------------------------------------- tasks and files


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One regular file of a tree. Links, devices and directories are not entries."""

    content: bytes
    executable: bool = False


Tree = Mapping[str, FileEntry]
"""Relative POSIX path -> file. Empty directories are not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one rollout may use. Reaching a limit is the agent's own doing: it is graded."""

    wall_s: float = 120.0
    """Seconds from the agent's start to its forced stop."""
    max_calls: int = 32
    """Model calls per session."""
    max_call_tokens: int = 512
    """Sampled tokens per model call."""
    max_session_tokens: int = 65536
    """Sampled tokens per session."""
    max_context_tokens: int = 4096
    """Prompt plus sampled tokens of one call."""
    max_prompt_tokens: int = 0
    """Prompt tokens per session, summed over its calls; 0 = no limit."""
    max_nodes: int = 1024
    """Nodes of the session's forest: a call adds two at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingPlan:
    """How a diff is judged. Holds no expected value: those are in the Oracle."""

    runner: str = "json_io"
    """Name of the runner in grade/runners."""
    entry: str = ""
    """For json_io: the module file under test, relative to the work folder."""
    protected: tuple[str, ...] = ()
    """Paths (fnmatch patterns) whose changes are dropped from the diff and recorded."""
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One immutable unit of work. Holds no secret of the solution."""

    id: str
    prompt: str
    """What the agent is told."""
    files: Tree = field(repr=False)
    """The work folder at the start."""
    grading: GradingPlan = GradingPlan()
    limits: Limits = Limits()
    family: str = ""
    """Free label for per-family statistics, e.g. the kind of fault."""
    content_hash: str = ""
    """Hex SHA-256 over prompt, files and grading plan; see `task_hash`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One hidden check of json_io: call `function(*args)`, compare with `expected` as JSON values."""

    function: str
    args: tuple[object, ...]
    expected: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """What only the grader may hold: hidden cases and the gold tree."""

    task_id: str
    cases: tuple[Case, ...] = field(repr=False)
    gold: Tree = field(repr=False)
    """Files of the solved work folder that differ from the task's."""


def task_hash(prompt: str, files: Tree, grading: GradingPlan) -> str:
    """Hex SHA-256 that names a task by content: the split and the grader's check rest on it."""
    h = hashlib.sha256()
    parts: list[bytes] = [prompt.encode(), repr(grading).encode()]
    for path in sorted(files):
        parts += [path.encode(), b"x" if files[path].executable else b"-", files[path].content]
    for part in parts:
        h.update(len(part).to_bytes(8, "big"))
        h.update(part)
    return h.hexdigest()


# --------------------------------------------------------------------------- messages (the wire's meaning)

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as the wire carries it: `id` minted by the gateway, `arguments` raw JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation in whet's own form; dialects translate to and from it."""

    role: Role
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """For role `tool`: which call this answers."""
    pointers: tuple[str, ...] = ()
    """For role `assistant`: opaque fields the agent echoes (thinking signatures, encrypted reasoning); they
    may hold a signed node pointer of the gateway. A hint only: never part of a message's meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool the agent offers. `parameters` is the JSON schema as canonical JSON text."""

    name: str
    description: str
    parameters: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One model call as the agent asked for it; sampling wishes are advisory."""

    messages: Sequence[Message]
    tools: tuple[ToolSpec, ...] = ()
    stream: bool = False
    max_tokens: int | None = None
    """May only shorten the trainer's own limit."""
    stop: tuple[str, ...] = ()
    advisory: tuple[tuple[str, str], ...] = ()
    """Sampling wishes that whet records and does not follow, as (name, JSON text)."""
    hints: tuple[tuple[str, str], ...] = ()
    """What the agent says of itself on the wire (sub-agent id, window id), as (name, value): labels, never
    keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the model said, parsed from sampled ids."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish: Finish = "stop"
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    pointer: str = ""
    """Signed node pointer for the opaque field of the wire format, empty for a synthetic reply."""
    stop: str = ""
    """The stop string of the agent that ended it, if one did; it is not part of `text`."""


# --------------------------------------------------------------------------- generation

Finish = Literal["stop", "length", "abort"]
VersionRuns = tuple[tuple[int, int], ...]
"""(start, version) pairs: from token offset `start` on, tokens were sampled by `version`."""


MIN_TEMPERATURE = 0.05
"""Of a session: vLLM changes colder ones without a word, and hardly anything is left there to be trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Neutral sampling: temperature as the trainer sets it, no top_p, no top_k, no penalties."""

    max_tokens: int
    temperature: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    """The stop id is sampled, kept and counted; generation ends after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKey:
    """Names one engine request and its random stream: the same key gives the same draws."""

    seed: int
    rollout_id: str
    turn: int
    """Ordinal of the call within its session, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an engine returns for one request."""

    ids: IntArray = field(repr=False)
    """[n] sampled ids, the stop id included."""
    logprobs: FloatArray | None = field(repr=False)
    """[n] logprob of each sampled id under the distribution it was drawn from; None = demonstrated."""
    finish: Finish
    version_runs: VersionRuns


# --------------------------------------------------------------------------- capture

SegmentKind = Literal["sampled", "demonstrated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One completed model call."""

    index: int
    """Ordinal within the session, from 0."""
    parent: int
    """Index of the turn whose sampled span this prompt continues; -1 at a root."""
    context_ids: IntArray = field(repr=False)
    """Prompt ids that are new since the parent turn; the full prompt is the walk over parents."""
    ids: IntArray = field(repr=False)
    """Sampled ids, the stop id included."""
    logprobs: FloatArray | None = field(repr=False)
    finish: Finish
    version_runs: VersionRuns
    excluded: str = ""
    """Reason from EXCLUSIONS when no token of this turn may be trained, else empty."""
    hints: tuple[tuple[str, str], ...] = ()
    """What the agent said of itself with the request, as (name, value), and the gateway's own `label`s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One training row. Arrays share one length n; logprobs and versions are 0 where mask is False."""

    rollout_id: str
    index: int
    kind: SegmentKind
    label: str
    """append, wipe, subagent, auxiliary or final."""
    ids: IntArray = field(repr=False)
    mask: BoolArray = field(repr=False)
    logprobs: FloatArray = field(repr=False)
    versions: IntArray = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The account of sampled tokens: captured = trained + sum(excluded.values()), always."""

    captured: int = 0
    trained: int = 0
    excluded: Mapping[str, int] = field(default_factory=dict)
    """Tokens by reason; reasons are `EXCLUSIONS`."""

    @property
    def balanced(self) -> bool:
        return self.captured == self.trained + sum(self.excluded.values())


EXCLUSIONS = frozenset(
    {
        "auxiliary",
        "edited",
        "retry_sibling",
        "undelivered",
        "stale",
        "degenerate",
        "overlong",
        "infra",
        "evaluation",
        "demonstrated",
        "truncated",
        "synthetic",
        "unused",
        "zero_advantage",
        "after_stop",
    }
)
"""Closed set of reasons for which a captured token is not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftNote:
    """One request that did not simply continue what was held, with the diagnosis of an edit."""

    kind: str
    """edited or fork."""
    cause: str
    """From the closed sets in capture/drift and capture/diagnosis."""
    request: int = -1
    """Index of the first turn sampled for that request; -1 when none was."""
    turn: int = -1
    """The held turn concerned: edited, left out, stepped back over or re-rendered; -1 when there is none."""
    token: int = -1
    """First sampled id of that turn that the agent's version does not share; -1 when not known."""
    tokens: int = 0
    """Sampled ids of held turns that this request re-renders as context, or leaves out."""
    detail: str = ""
    """Names of the arguments concerned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """All segments of one rollout in time order, with the ledger of its session."""

    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    ledger: Ledger
    drifts: tuple[DriftNote, ...] = ()
    """In the order of the requests."""


# --------------------------------------------------------------------------- judgement


class Outcome(enum.StrEnum):
    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    TAMPERED = "tampered"
    REFUSED = "refused"
    TEST_TIMEOUT = "test_timeout"
    INFRA = "infra"


Strength = Literal["strong", "standard", "weak"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The grader's word. `reward` is None exactly when outcome is INFRA."""

    outcome: Outcome
    reward: float | None
    strength: Strength
    passed: int = 0
    total: int = 0
    dropped_paths: tuple[str, ...] = ()
    """Protected paths the agent changed; the change was dropped."""
    reason: str = ""
    task_hash: str = ""
    diff_hash: str = ""
    duration_s: float = 0.0


class Status(enum.StrEnum):
    """How an attempt ended. Only INFRA_FAILED carries no reward."""

    OK = "ok"
    TRUNCATED = "truncated"
    AGENT_FAILED = "agent_failed"
    INFRA_FAILED = "infra_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds of one attempt by phase; always filled, also on failure."""

    queued_s: float = 0.0
    agent_s: float = 0.0
    engine_s: float = 0.0
    grade_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One slot of a group, decided."""

    id: str
    """Logical name, unique within a run and the same after resume: phase/step/group/slot."""
    task_id: str
    family: str
    status: Status
    reward: float | None
    trajectory: Trajectory
    verdict: Verdict | None
    changed: Tree
    """Files that the agent added or changed (text diffs are derived from it and the task)."""
    deleted: tuple[str, ...]
    timings: Timings
    attempt: int = 1
    error: str = ""
    """One line, for INFRA_FAILED and AGENT_FAILED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rollouts of one task that share a baseline."""

    id: str
    task_id: str
    rollouts: tuple[Rollout, ...]

    @property
    def rewards(self) -> Sequence[float]:
        """Rewards of the scorable rollouts only."""
        return [r.reward for r in self.rollouts if r.reward is not None]

    @property
    def degenerate(self) -> bool:
        """True when all scorable rewards are equal: the group carries no gradient."""
        return len(set(self.rewards)) < 2
