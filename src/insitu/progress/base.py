"""View interface for the progress of a run, and the counters behind the views.

View methods neither block nor raise. `Progress` holds counters and moving rates and does not use the
terminal.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from insitu.storage.metrics import Metrics
from insitu.storage.score import Score

SCORE_WINDOW = 96
"""Window of the moving solve rate and mean reward, in graded rollouts."""
RATE_WINDOW_S = 30.0
"""Window of tokens/s."""
PACE_WINDOW = 256
"""Window of the pace behind `seconds_left`, in finished rollouts."""

SHOWN = (
    "reward_mean",
    "effective_groups",
    "calls_mean",
    "entropy",
    "max_logprob_gap",
    "tokens_trained",
    "step_s",
    "staleness_max",
    "waited_s",
    "wasted",
    "evaluate_s",
)
"""Metrics of a step for the view, where present; metrics.jsonl has all."""


class View(Protocol):
    """Observer of one run."""

    def begin(self, title: str, rollouts: int) -> None:
        """Start the view; `rollouts` is the planned number over all stages (0 = unknown)."""

    def stage(self, name: str, total: int = 0) -> None:
        """Start a stage with `total` units: rollouts, or units of `advance`; 0 = unknown."""

    def advance(self, done: int) -> None:
        """Set the completed units of a stage that does not consist of rollouts."""

    def rollout_started(self, rollout_id: str) -> None: ...

    def rollout_finished(self, rollout_id: str, *, reward: float | None, tokens: int) -> None:
        """Record a finished rollout; `reward` None = not graded, `tokens` = sampled tokens."""

    def step_done(self, step: int, steps: int, metrics: Metrics) -> None:
        """Record that optimizer step `step` of `steps` is committed."""

    def eval_done(self, name: str, score: Score) -> None:
        """Record the score of a finished evaluation (`held-out before`, `eval tasks`)."""

    def note(self, text: str) -> None:
        """Show one line of text."""

    def close(self) -> None:
        """Release the terminal; idempotent."""


@dataclass(slots=True)
class Progress:
    """Counters of a running run."""

    clock: Callable[[], float] = time.monotonic
    title: str = ""
    stage_name: str = ""
    stage_total: int = 0
    stage_done: int = 0
    stage_started_s: float = 0.0
    planned: int = 0
    finished: int = 0
    running: set[str] = field(default_factory=set)
    evals: dict[str, Score] = field(default_factory=dict)
    started_s: float = 0.0
    _graded: dict[str, deque[float]] = field(default_factory=dict)
    """Newest rewards of this stage by phase: an evaluation may run beside training."""
    _tokens: deque[tuple[float, int]] = field(default_factory=deque)
    _pace: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_WINDOW))

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    def begin(self, title: str, rollouts: int) -> None:
        self.title, self.planned = title, rollouts

    def stage(self, name: str, total: int) -> None:
        self.stage_name, self.stage_total, self.stage_done = name, total, 0
        self.stage_started_s = self.clock()
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
            phase = rollout_id.partition("/")[0] if "/" in rollout_id else ""
            self._graded.setdefault(phase, deque(maxlen=SCORE_WINDOW)).append(reward)

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.started_s

    def scores(self, text: Callable[[Score], str]) -> str:
        """Return the score of this stage's last graded rollouts as text, by phase if of several."""
        found = {phase: text(Score.of(rewards)) for phase, rewards in sorted(self._graded.items())}
        if len(found) < 2:
            return "".join(found.values())
        return ", ".join(f"{phase} {score}" for phase, score in found.items())

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens of finished rollouts per second, over RATE_WINDOW_S."""
        now = self.clock()
        while self._tokens and self._tokens[0][0] < now - RATE_WINDOW_S:
            self._tokens.popleft()
        seconds = min(RATE_WINDOW_S, max(1.0, self.elapsed_s))
        return sum(tokens for _, tokens in self._tokens) / seconds

    @property
    def seconds_left(self) -> float | None:
        """Estimate from the pace of the last rollouts, including training time; None if unknown.

        Without planned rollouts it is the time left of the stage.
        """
        if self.planned <= 0:
            pace = (self.clock() - self.stage_started_s) / self.stage_done if self.stage_done else 0.0
            return max(0, self.stage_total - self.stage_done) * pace or None
        remaining = self.planned - self.finished
        if len(self._pace) < 3:
            return None
        seconds = self.clock() - self._pace[0]
        return max(0, remaining) * seconds / (len(self._pace) - 1)


def printable(text: object) -> str:
    """Return one line of text; characters that could change the terminal become question marks."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def rounded(rate: float) -> str:
    """Return a share with two digits; 0.125 is rounded up, as the viewer's percentages are."""
    return f"{math.floor(100 * rate + 0.5) / 100:.2f}"


def change_text(change: Mapping[str, float]) -> str:
    """Return text such as `+0.06 (95 % -0.10 to +0.21)`."""
    value, low, high = (
        ("+" if change[name] > 0 else "") + rounded(change[name]) for name in ("value", "low", "high")
    )
    return f"{value} (95 % {low} to {high})"


def rate_text(score: Score) -> str:
    """Return the solve rate as text, with the mean reward if there are partial rewards."""
    if not score.total:
        return "none graded"
    return rounded(score.rate) + (f", mean reward {score.reward_mean:.2f}" if score.partial else "")


def duration(seconds: float | None) -> str:
    """Return a duration as text: 47 s, 3 min 20 s, 1 h 05 min."""
    if seconds is None:
        return "unknown"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
