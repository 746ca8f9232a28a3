"""Captured calls: turns, segments, the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from insitu.types.generation import (
    NOT_TIMED,
    BoolArray,
    CallTimes,
    ExpertArray,
    Finish,
    FloatArray,
    IntArray,
    VersionRuns,
)
from insitu.types.values import Value

SegmentKind = Literal["sampled", "demonstrated"]


MessageSpans = tuple[tuple[str, int, int, str], ...]
"""Messages of new prompt ids: (role, first id, end, name of the tool that answers); empty = not known."""


MALFORMED, UNKNOWN_TOOL = "malformed", "unknown_tool"
"""Labels of a turn whose reply has a call that did not parse, or one of a tool that was not offered."""
PARTS_LEFT_OUT = "parts_left_out"
"""Label of a turn whose new messages have an image, sound or a file, in whose place the model read a line."""
STEP = "step "
"""Label of a turn in a further step of its task, before the number of the step."""


def step_of(labels: Iterable[str]) -> int:
    """Return the step of the task that a turn with these labels belongs to, counted from 1."""
    return max((int(one[len(STEP) :]) for one in labels if one.startswith(STEP)), default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(Value):
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
    """Client metadata of the request as (name, value), and the gateway's own `label`s."""
    advisory: tuple[tuple[str, str], ...] = ()
    """`ModelRequest.advisory`: request parameters that were ignored."""
    spans: MessageSpans = ()
    times: CallTimes = NOT_TIMED

    @property
    def labels(self) -> frozenset[str]:
        """The gateway's own labels: those above, `shim` and `insitu_blocked`."""
        return frozenset(value for name, value in self.hints if name == "label")

    @property
    def step(self) -> int:
        """Step of its task, counted from 1."""
        return step_of(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment(Value):
    """One training row. Arrays share one length n; logprobs and versions are 0 where mask is False."""

    rollout_id: str
    index: int
    kind: SegmentKind
    label: str
    """One of append, wipe, subagent, auxiliary, final."""
    ids: IntArray = field(repr=False)
    mask: BoolArray = field(repr=False)
    logprobs: FloatArray = field(repr=False)
    versions: IntArray = field(repr=False)
    experts: ExpertArray | None = field(default=None, repr=False)
    """Of every token, also where mask is False, as the engine chose them; None = not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger(Value):
    """Account of sampled tokens: captured = trained + sum(excluded.values()), always."""

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
        "deadline",
        "degenerate",
        "overlong",
        "infra",
        "ungraded",
        "evaluation",
        "demonstrated",
        "truncated",
        "synthetic",
        "unused",
        "few_groups",
        "bad_step",
        "no_tokens",
        "zero_advantage",
        "after_stop",
        "not_final",
        "row_cap",
        "mismatch",
    }
)
"""Closed set of reasons for which a captured token is not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftNote(Value):
    """One request that did not simply continue the captured history, with its cause."""

    kind: str
    """edited or fork."""
    cause: str
    """From the closed set in capture/drift."""
    request: int = -1
    """Index of the first turn sampled for that request; -1 when none was."""
    turn: int = -1
    """The captured turn that was edited, omitted, reverted or re-rendered; -1 = none."""
    token: int = -1
    """First sampled id of that turn that the agent's version does not share; -1 when not known."""
    tokens: int = 0
    """Sampled ids of captured turns that this request re-renders as context, or omits."""
    detail: str = ""
    """Names of the changed arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(Value):
    """All segments of one rollout in time order, with the ledger of its session."""

    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    ledger: Ledger
    drifts: tuple[DriftNote, ...] = ()
    """In the order of the requests."""
