"""Alarms for a number that jumps up: the mean reward, or the share of tokens lost to agent behaviour.

A jump of the reward may be a hole in the grader; tokens that are suddenly excluded mean that agents have
begun to edit, drop or truncate history. Slow change is learning and raises no alarm.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from insitu.types import Ledger

log = logging.getLogger(__name__)

STEPS = 8
"""Earlier steps whose mean is the baseline; a lasting change is soon part of it."""
LEAST_STEPS = 4
LEAST_GROUPS = 4
"""Least groups of a step for an alarm."""
SPREADS = 3.0
"""Least jump in standard deviations of those steps."""
NAMED = 3
"""Most reasons that an alarm names."""
OTHER_REASONS = frozenset(
    {"degenerate", "zero_advantage", "few_groups", "no_tokens", "evaluation", "demonstrated", "mismatch"}
    | {"infra", "ungraded", "stale", "deadline", "unused"}
)
"""Reasons that follow from rewards, rounding, the schedule or the infrastructure, which has its own alarm."""


def lost_reasons(ledger: Ledger) -> list[tuple[str, int]]:
    """Return (reason, tokens) of a step's excluded tokens except `FATES`, most first."""
    lost = [item for item in ledger.excluded.items() if item[0] not in OTHER_REASONS]
    return sorted(lost, key=lambda item: (-item[1], item[0]))


def lost_share(ledger: Ledger) -> float:
    """Return the share of a step's captured tokens excluded for these reasons."""
    lost = sum(tokens for _, tokens in lost_reasons(ledger))
    return lost / ledger.captured if ledger.captured else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A step's value against earlier ones."""

    rise: float
    """Above their mean; 0 where there are too few."""
    usual: float
    """Their mean."""
    alarm: bool


class SpikeDetector:
    """Watches one number. alarm_at: rise above the mean that is a spike; 0 = never."""

    def __init__(self, name: str, alarm_at: float, before: Iterable[float] = ()) -> None:
        self._name, self._alarm_at = name, alarm_at
        self._held: deque[float] = deque(before, STEPS)

    def look(self, value: float, groups: int) -> Spike:
        """Add the next step's value, computed from `groups` groups."""
        earlier, usual = list(self._held), statistics.fmean(self._held) if self._held else 0.0
        self._held.append(value)
        if len(earlier) < LEAST_STEPS:
            return Spike(rise=0.0, usual=usual, alarm=False)
        rise = value - usual
        spike = 0 < self._alarm_at <= rise and rise >= SPREADS * statistics.pstdev(earlier)
        spike = spike and groups >= LEAST_GROUPS
        if spike:
            log.warning("spike of=%s value=%.3f mean=%.3f steps=%d", self._name, value, usual, len(earlier))
        return Spike(rise=rise, usual=usual, alarm=spike)
