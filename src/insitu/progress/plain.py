"""Plain text view: one line per event, for logs, pipes and screen readers.

Rollouts are summarized in one line at most every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from insitu.progress.base import Progress, duration, rounded
from insitu.storage.metrics import Metrics
from insitu.storage.store import Score

_EVERY_S = 10.0


class PlainView:
    """View that writes lines to a stream."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._progress = Progress(clock=clock)
        self._written_s = clock()

    def begin(self, title: str, rollouts: int) -> None:
        self._progress.begin(title, rollouts)
        self._write(title + (f", {rollouts} rollouts planned" if rollouts else ""))

    def stage(self, name: str, total: int = 0) -> None:
        self._progress.stage(name, total)
        self._write(f"{name}" + (f" ({total})" if total else ""))

    def advance(self, done: int) -> None:
        self._progress.stage_done = done
        self._write_progress()

    def rollout_started(self, rollout_id: str) -> None:
        self._progress.rollout_started(rollout_id)

    def rollout_finished(self, rollout_id: str, *, reward: float | None, tokens: int) -> None:
        self._progress.rollout_finished(rollout_id, reward, tokens)
        self._write_progress()

    def step_done(self, step: int, steps: int, metrics: Metrics) -> None:
        self._write(f"{step_text(step, steps, metrics)} left={duration(self._progress.seconds_left)}")

    def eval_done(self, name: str, score: Score) -> None:
        self._progress.evals[name] = score
        self._write(eval_text(name, score))

    def note(self, text: str) -> None:
        self._write(text)

    def close(self) -> None:
        self._stream.flush()

    def _write_progress(self) -> None:
        p = self._progress
        if p.clock() - self._written_s < _EVERY_S:
            return
        total = f"/{p.stage_total}" if p.stage_total else ""
        rate = p.scores(_rate_text)
        if p.finished or p.running:
            rate = f", {len(p.running)} running{rate and ' ' + rate} tokens/s={p.tokens_per_s:.0f}"
        self._write(f"{p.stage_name}: {p.stage_done}{total} done{rate} left={duration(p.seconds_left)}")

    def _write(self, text: str) -> None:
        self._written_s = self._progress.clock()
        self._stream.write(f"[{self._progress.elapsed_s:7.1f} s] {text}\n")
        self._stream.flush()


def step_text(step: int, steps: int, metrics: Metrics) -> str:
    tail = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in metrics.items())
    return f"step {step}/{steps} {tail}"


def eval_text(name: str, score: Score) -> str:
    mean = f", mean reward {score.reward_mean:.3f}" if score.partial else ""
    return f"{name}: {score.rate:.3f} ({score.solved}/{score.total} solved){mean}"


def _rate_text(score: Score) -> str:
    return f"solved={rounded(score.rate)}" + (f" reward={score.reward_mean:.2f}" if score.partial else "")
