"""Rejection sampling over a stored run: which rollouts to imitate, and why not the others.

Every stored rollout is selected or counted under one reason. Tokens are read only of rollouts whose summary
passed, so runs of any size fit into memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from insitu.chat.renderer import ChatRenderer
from insitu.config import Config
from insitu.config.training import RowRules, SelectionKeys
from insitu.errors import RenderError
from insitu.gateway.text_log import last_record
from insitu.storage.store import Store
from insitu.storage.summaries import RolloutSummary
from insitu.types import Segment, Status
from insitu_train.plan.row_selection import cut_rows
from insitu_train.sft.distill import distill_session

Reason = Literal[
    "held_out",
    "not_graded",
    "agent_failed",
    "truncated",
    "low_reward",
    "not_rendered",
    "no_tokens",
    "overlong",
    "duplicate",
    "per_task",
]
WORDS: Mapping[Reason, str] = {
    "held_out": "of held-out tasks (sft.held_out = true takes them)",
    "not_graded": "not graded",
    "agent_failed": "of an agent that failed",
    "truncated": "cut off by a limit (train.truncated = 'keep' takes them)",
    "low_reward": "below sft.min_reward",
    "not_rendered": "whose text cannot be rendered in the model's tokens",
    "no_tokens": "without a trainable token",
    "overlong": "with all rows longer than train.max_row_tokens",
    "duplicate": "duplicates within their task",
    "per_task": "beyond sft.per_task of their task",
}
"""Why a rollout was not selected, for the report."""
TOKEN_WORDS: Mapping[str, str] = {
    "not_final": "not on the final row of their rollout (train.rows)",
    "row_cap": "in more rows than train.max_rows",
    "overlong": "in longer rows than train.max_row_tokens",
}
"""Why tokens of a selected rollout are not imitated."""


class SelectionRules(SelectionKeys, RowRules):
    """Selection criteria; see `config.sft`."""

    truncated: bool = True
    """Also select those that reached a limit."""

    @classmethod
    def of(cls, config: Config) -> SelectionRules:
        rows = config.train.pick(RowRules).model_dump()
        return config.sft.pick(cls, truncated=config.train.truncated == "keep", **rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class SftExample:
    """One selected rollout and its rows."""

    rollout_id: str
    task_id: str
    reward: float
    segments: tuple[Segment, ...] = field(repr=False)
    counted: int
    """Tokens that count in a step's mean; with train.rows final more than are imitated."""
    excluded: Mapping[str, int] = field(default_factory=dict)
    """Tokens excluded from the rows, by reason."""

    @classmethod
    def of(
        cls, rollout_id: str, task_id: str, reward: float, segments: Sequence[Segment], rules: RowRules
    ) -> SftExample:
        """Return the example with the rows that the rules keep."""
        trained = sorted((s for s in segments if s.mask.any()), key=lambda s: s.index)
        chosen = cut_rows(trained, sum(int(s.mask.sum()) for s in trained), rules)
        return cls(
            rollout_id=rollout_id,
            task_id=task_id,
            reward=reward,
            segments=chosen.rows,
            counted=chosen.counted,
            excluded=chosen.excluded,
        )

    @property
    def tokens(self) -> int:
        """Tokens to be imitated."""
        return sum(int(s.mask.sum()) for s in self.segments)

    @property
    def digest(self) -> str:
        """Hex digest of ids and masks."""
        h = hashlib.sha256()
        for s in self.segments:
            h.update(len(s.ids).to_bytes(8, "big") + s.ids.astype("<i4").tobytes() + s.mask.tobytes())
        return h.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """seen = chosen + left out, always."""

    lessons: tuple[SftExample, ...] = field(repr=False)
    """In the order of collection."""
    left_out: Mapping[Reason, int]
    seen: int
    trouble: str = ""
    """The error of the first rollout that could not be rendered."""


Tokens = Callable[[str], tuple[Segment, ...]]
"""Rollout id -> its rows; empty without any. Raises RenderError when its text cannot be rendered."""


def stored_tokens(store: Store) -> Tokens:
    """Return the source of captured rows, sampled and demonstrated."""

    def read(rollout_id: str) -> tuple[Segment, ...]:
        segments = store.rollout(rollout_id).trajectory.segments
        return tuple(s for s in segments if s.mask.any())

    return read


def distilled_tokens(records: Path, renderer: ChatRenderer, *, drop_reasoning: bool = False) -> Tokens:
    """Return the source of rows tokenized from a provider's text; see `distill_session`."""

    def read(rollout_id: str) -> tuple[Segment, ...]:
        record = last_record(records, rollout_id)
        return (
            ()
            if record is None
            else distill_session(record, renderer, rollout_id, drop_reasoning=drop_reasoning)
        )

    return read


def choose(store: Store, wanted: SelectionRules, tokens: Tokens, *, rollouts_held_out: bool) -> Selection:
    """Select among all rollouts of a run; deterministic. Raises RecordError.

    rollouts_held_out: rollouts of `insitu rollout` belong to held-out tasks.
    """
    left_out: Counter[Reason] = Counter()
    of_task: dict[str, list[tuple[int, RolloutSummary]]] = {}
    seen = 0
    for phase, step in store.phases():
        held_out = phase.startswith("eval") or (phase == "rollout" and rollouts_held_out)
        for outline in store.outcomes(phase, step):
            seen += 1
            reason = _unfit(outline, wanted, held_out=held_out)
            if reason is None:
                of_task.setdefault(outline.task_id, []).append((seen, outline))
            else:
                left_out[reason] += 1
    found: list[tuple[int, SftExample]] = []
    troubles: list[str] = []
    for candidates in of_task.values():
        found += _of_task(candidates, wanted, tokens, left_out, troubles)
    return Selection(
        lessons=tuple(lesson for _, lesson in sorted(found, key=lambda at: at[0])),
        left_out=dict(sorted(left_out.items())),
        seen=seen,
        trouble=troubles[0] if troubles else "",
    )


def _unfit(outline: RolloutSummary, wanted: SelectionRules, *, held_out: bool) -> Reason | None:
    """Return the first reason against a rollout from its summary."""
    if held_out and not wanted.held_out:
        return "held_out"
    if outline.status is Status.INFRA_FAILED or outline.reward is None:
        return "not_graded"
    if outline.status is Status.AGENT_FAILED:
        return "agent_failed"
    if outline.status is Status.TRUNCATED and not wanted.truncated:
        return "truncated"
    return None if outline.reward >= wanted.min_reward else "low_reward"


def _of_task(
    candidates: Sequence[tuple[int, RolloutSummary]],
    wanted: SelectionRules,
    tokens: Tokens,
    left_out: Counter[Reason],
    troubles: list[str],
) -> list[tuple[int, SftExample]]:
    """Return the best of one task; the latest among equals, which a better policy made."""
    kept: list[tuple[int, SftExample]] = []
    known: set[str] = set()
    for place, outline in sorted(candidates, key=lambda c: (-(c[1].reward or 0.0), -c[0])):
        if wanted.per_task and len(kept) == wanted.per_task:
            left_out["per_task"] += 1
            continue
        try:
            segments = tokens(outline.rollout_id)
        except RenderError as error:
            left_out["not_rendered"] += 1
            troubles.append(str(error))
            continue
        lesson = SftExample.of(outline.rollout_id, outline.task_id, outline.reward or 0.0, segments, wanted)
        if not lesson.tokens:
            left_out["overlong" if lesson.excluded else "no_tokens"] += 1
        elif lesson.digest in known:
            left_out["duplicate"] += 1
        else:
            known.add(lesson.digest)
            kept.append((place, lesson))
    return kept


def explain(choice: Selection) -> str:
    """Return the counts of the selection in one line."""
    parts = [f"{count} {WORDS[reason]}" for reason, count in choice.left_out.items()]
    if choice.trouble:
        parts.append(f"the first of these: {choice.trouble}")
    cut: Counter[str] = Counter()
    for lesson in choice.lessons:
        cut.update(lesson.excluded)
    parts += [f"{tokens:,} tokens of the chosen {TOKEN_WORDS[reason]}" for reason, tokens in cut.items()]
    return f"{choice.seen} rollouts, {len(choice.lessons)} chosen" + "".join(f"; {p}" for p in parts)
