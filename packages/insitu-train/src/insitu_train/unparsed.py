"""Replies whose tool calls another server may lose: malformed ones, and those of tools that were not offered.

An agent recovers from both: it reads the text, or complains of the name, and the rollout goes on. So a policy
may drift towards them while its reward holds, and fail where it is deployed (docs/models.md).
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from insitu.types import MALFORMED, UNKNOWN_TOOL, Rollout, arm_of

log = logging.getLogger(__name__)

LEAST_REPLIES = 8
"""Least replies of a step for an alarm."""
STEPS = 8
"""Steps of a mean."""
ERRORS = 3.0
"""Least rise in standard errors of the step's share."""


def unparsed_counts(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return the replies with a malformed call, with one of an unknown tool, and the share with either.

    None without captured replies.
    """
    replies = [turn.labels for rollout in rollouts for turn in rollout.trajectory.turns]
    if not replies:
        return {"malformed_calls": None, "unknown_tools": None, "unparsed_share": None}
    return {
        "malformed_calls": sum(MALFORMED in labels for labels in replies),
        "unknown_tools": sum(UNKNOWN_TOOL in labels for labels in replies),
        "unparsed_share": sum(map(_unparsed, replies)) / len(replies),
    }


def _unparsed(labels: frozenset[str]) -> bool:
    return MALFORMED in labels or UNKNOWN_TOOL in labels


class _Usual:
    """The lowest mean of up to `STEPS` steps in a row since the last alarm; None before the first step."""

    def __init__(self) -> None:
        self._held: deque[float] = deque(maxlen=STEPS)
        self.share: float | None = None

    def keep(self, share: float, alarm: bool) -> None:
        if alarm:
            self._held.clear()
            self.share = None
        self._held.append(share)
        mean = statistics.fmean(self._held)
        self.share = mean if self.share is None else min(self.share, mean)


class UnparsedAlarm:
    """Watches the share of such replies, for a jump as for a slow rise, over all and in each named part.

    A rise in one of several parts may be small in the whole. alarm_at: rise above the lowest mean so far that
    is an alarm; 0 = never. agent_of: name of the agent of a `Rollout.part`. before: metrics of the committed
    steps.
    """

    def __init__(
        self, alarm_at: float, agent_of: Callable[[str], str], before: Iterable[Mapping[str, Any]]
    ) -> None:
        self._alarm_at, self._agent_of = alarm_at, agent_of
        self._usual: defaultdict[str, _Usual] = defaultdict(_Usual)
        for metrics in before:
            for name, share in metrics.items():
                prefix, found, rest = name.partition("unparsed_share")
                if found and not rest and prefix != "effective_" and share is not None:
                    self._usual[prefix].keep(share, metrics.get(f"{prefix}unparsed_alarm", False))

    def look(self, rollouts: Sequence[Rollout]) -> tuple[dict[str, bool], list[str]]:
        """Add the next step's rollouts; return metrics that say what is an alarm, and the lines of these."""
        parts: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            if rollout.part:
                parts.setdefault(f"{arm_of(rollout.part).label}/", []).append(rollout)
        whole = self._look("", rollouts)
        found = {prefix: self._look(prefix, own) for prefix, own in parts.items()}
        flags = {f"{prefix}unparsed_alarm": bool(line) for prefix, line in {"": whole, **found}.items()}
        return flags, [line for line in ([whole] if whole else found.values()) if line]

    def _look(self, prefix: str, rollouts: Sequence[Rollout]) -> str:
        """Add a step of the whole or of one part; return an alarm or ""."""
        counts = unparsed_counts(rollouts)
        share, usual = counts["unparsed_share"], self._usual[prefix].share
        if share is None:
            return ""
        replies = sum(len(rollout.trajectory.turns) for rollout in rollouts)
        error = math.sqrt(share * (1 - share) / replies)
        alarm = usual is not None and replies >= LEAST_REPLIES
        alarm = alarm and 0 < self._alarm_at <= share - (usual or 0.0) >= ERRORS * error
        self._usual[prefix].keep(share, alarm)
        if not alarm:
            return ""
        log.warning("unparsed calls of=%s share=%.3f before=%.3f replies=%d", prefix, share, usual, replies)
        of = f" of {prefix[:-1]}" if prefix else ""
        return (
            f"{share:.0%} of the replies{of} have a malformed call or one of an unknown tool, {usual:.0%}"
            f" before (run.alarms.unparsed = {self._alarm_at:g}): {counts['malformed_calls']} malformed,"
            f" {counts['unknown_tools']} unknown; most of {self._worst(rollouts)}"
        )

    def _worst(self, rollouts: Sequence[Rollout]) -> str:
        """Return task set, agent and call with the highest share."""
        parts = {rollout.part: [r for r in rollouts if r.part == rollout.part] for rollout in rollouts}
        shares = {part: unparsed_counts(own)["unparsed_share"] or 0.0 for part, own in parts.items()}
        part = max(shares, key=lambda name: shares[name])
        task_set, agent = parts[part][0].task_set, self._agent_of(part)
        calls: dict[int, list[bool]] = {}
        for rollout in parts[part]:
            for turn in rollout.trajectory.turns:
                calls.setdefault(turn.index, []).append(_unparsed(turn.labels))
        call = max(calls, key=lambda index: (sum(calls[index]), -index))
        named = [f"task set {task_set}"] if task_set else []
        named += [f"agent {agent}"] if agent else []
        of = f"{sum(calls[call])} of {len(calls[call])}"
        return f"{', '.join(named) or 'all'} ({shares[part]:.0%}), there of call {call + 1} ({of})"
