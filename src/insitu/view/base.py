"""What a run tells whoever watches it. Called from the controller's loop; no method blocks or raises.

`Progress` is the state behind both views: counters and moving rates, fed by the same calls. It never
touches the terminal, so what a view says can be tested without one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from insitu.storage.metrics import Metrics
from insitu.storage.score import Score

SCORE_WINDOW = 96
"""Graded rollouts over which the moving solve rate and mean reward are taken."""
RATE_WINDOW_S = 30.0
"""Seconds over which tokens/s is taken."""
PACE_WINDOW = 256
"""Finished rollouts over which the pace behind `seconds left` is taken."""


class View(Protocol):
    """Watches one run."""

    def begin(self, title: str, rollouts: int) -> None:
        """The run starts; it plans this many rollouts over all stages (0 = unknown)."""

    def stage(self, name: str, total: int = 0) -> None:
        """A new stage with `total` units: rollouts, or steps of `advance`; 0 = unknown."""

    def advance(self, done: int) -> None:
        """Units done in a stage that is not made of rollouts."""

    def rollout_started(self, rollout_id: str) -> None: ...

    def rollout_finished(self, rollout_id: str, *, reward: float | None, tokens: int) -> None:
        """`reward` None = not graded; `tokens` = sampled tokens."""

    def step_done(self, step: int, steps: int, metrics: Metrics) -> None:
        """Optimizer step `step` of `steps` is committed."""

    def eval_done(self, name: str, score: Score) -> None:
        """An evaluation (`held-out before`, `eval tasks`) has ended."""

    def note(self, text: str) -> None:
        """One line for the person."""

    def close(self) -> None:
        """Give the terminal back; idempotent."""


@dataclass(slots=True)
class Progress:
    """Counters of a run under way."""

    clock: Callable[[], float] = time.monotonic
    title: str = ""
    stage_name: str = ""
    stage_total: int = 0
    stage_done: int = 0
    planned: int = 0
    finished: int = 0
    running: set[str] = field(default_factory=set)
    evals: dict[str, Score] = field(default_factory=dict)
    started_s: float = 0.0
    _graded: deque[float] = field(default_factory=lambda: deque(maxlen=SCORE_WINDOW))
    _tokens: deque[tuple[float, int]] = field(default_factory=deque)
    _pace: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_WINDOW))

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    def begin(self, title: str, rollouts: int) -> None:
        self.title, self.planned = title, rollouts

    def stage(self, name: str, total: int) -> None:
        self.stage_name, self.stage_total, self.stage_done = name, total, 0
        self._graded.clear()

    def rollout_started(self, rollout_id: str) -> None:
        self.running.add(rollout_id)
        if not self._pace:
            self._pace.append(self.clock())

    def rollout_finished(self, rollout_id: str, reward: float | None, tokens: int) -> None:
        now = self.clock()
        self.running.discard(rollout_id)
        self.finished += 1
        self.stage_done += 1
        self._pace.append(now)
        self._tokens.append((now, tokens))
        if reward is not None:
            self._graded.append(reward)

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.started_s

    @property
    def score(self) -> Score:
        """Of the last graded rollouts of this stage."""
        return Score.of(self._graded)

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens of finished rollouts per second, over the last half minute."""
        now = self.clock()
        while self._tokens and self._tokens[0][0] < now - RATE_WINDOW_S:
            self._tokens.popleft()
        seconds = min(RATE_WINDOW_S, max(1.0, self.elapsed_s))
        return sum(tokens for _, tokens in self._tokens) / seconds

    @property
    def seconds_left(self) -> float | None:
        """From the pace of the last rollouts, pauses for training included; None until it is known."""
        left = self.planned - self.finished
        if len(self._pace) < 3 or self.planned <= 0:
            return None
        seconds = self.clock() - self._pace[0]
        return max(0, left) * seconds / (len(self._pace) - 1)


def rate_text(score: Score) -> str:
    """The solve rate, with the mean reward where some rewards are between 0 and 1."""
    if not score.total:
        return "none graded"
    return f"{score.rate:.2f}" + (f", mean reward {score.reward_mean:.2f}" if score.partial else "")


def duration(seconds: float | None) -> str:
    """A length of time for a person: 47 s, 3 min 20 s, 1 h 05 min."""
    if seconds is None:
        return "unknown"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
