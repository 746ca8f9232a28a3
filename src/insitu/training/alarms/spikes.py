"""A number of the steps that leaps: the mean reward, or the share of sampled tokens lost to what agents do.

A reward that leaps may have found a hole in the grader, and tokens that are suddenly excluded tell of agents
that have begun to edit, drop or cut short what they were given. Slow change is learning, and is not told.
Fed once per step, by training/alarms/step.py.
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
"""Steps before, of which the mean is what a leap is measured from. A lasting change is told once or twice:
after that it is in the mean, and in the spread."""
LEAST_STEPS = 4
LEAST_GROUPS = 4
"""Of a step: fewer tasks say nothing about a mean."""
SPREADS = 3.0
"""A leap is at least this many standard deviations of those steps: small batches jump about."""
NAMED = 3
"""Reasons that one alarm names at most."""
FATES = frozenset(
    {"degenerate", "zero_advantage", "few_groups", "no_tokens", "evaluation", "demonstrated", "mismatch"}
    | {"infra", "ungraded", "stale", "deadline", "unused"}
)
"""Reasons that follow from rewards, rounding, the schedule or the infrastructure, which has its own alarm."""


def lost_reasons(ledger: Ledger) -> list[tuple[str, int]]:
    """(reason, tokens) of a step's excluded tokens but for `FATES`, most first."""
    lost = [item for item in ledger.excluded.items() if item[0] not in FATES]
    return sorted(lost, key=lambda item: (-item[1], item[0]))


def lost_share(ledger: Ledger) -> float:
    """Share of a step's captured tokens that are excluded for these reasons; 0 of nothing."""
    lost = sum(tokens for _, tokens in lost_reasons(ledger))
    return lost / ledger.captured if ledger.captured else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """What one step's value is against those before."""

    rise: float
    """Over their mean; 0 where there are too few."""
    usual: float
    """Their mean."""
    alarm: bool


class SpikeDetector:
    """Watches one number. `alarm_at`: rise over the mean of the steps before from which it is a leap; 0 =
    never. `before`: values of earlier steps, of earlier processes too."""

    def __init__(self, name: str, alarm_at: float, before: Iterable[float] = ()) -> None:
        self._name, self._alarm_at = name, alarm_at
        self._held: deque[float] = deque(before, STEPS)

    def look(self, value: float, groups: int) -> Spike:
        """The next step's value, made of so many groups. It is remembered."""
        held, usual = list(self._held), statistics.fmean(self._held) if self._held else 0.0
        self._held.append(value)
        if len(held) < LEAST_STEPS:
            return Spike(rise=0.0, usual=usual, alarm=False)
        rise = value - usual
        leapt = 0 < self._alarm_at <= rise and rise >= SPREADS * statistics.pstdev(held)
        leapt = leapt and groups >= LEAST_GROUPS
        if leapt:
            log.warning("leap of=%s value=%.3f usual=%.3f steps=%d", self._name, value, usual, len(held))
        return Spike(rise=rise, usual=usual, alarm=leapt)
