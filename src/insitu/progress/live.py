"""Live terminal view (rich): stage, rollouts, solve rate, curve, what one agent does, time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from insitu.progress.base import Progress, duration, printable, rate_text
from insitu.storage.metrics import Metrics, new_lines, tail_metrics
from insitu.storage.store import Score
from insitu.storage.timeline import TIMELINE

OLD_S = 15.0
"""Age at which what an agent does is no longer shown."""
_NOTES = 4
_REFRESH_HZ = 4
_LABEL = len("  last step")
_FIRST = ("reward_mean", "loss", "tokens_trained", "max_logprob_gap")
"""Step metrics that are shown first."""
_METRICS = 6
_BARS = "▁▂▃▄▅▆▇█"
SPARK = 40
"""Most bars of the curve."""
_LATEST = 3
"""Evaluations shown after the first one."""


class LiveView:
    """View that redraws the terminal in place from the first stage until `close`."""

    def __init__(
        self,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        agent: Callable[[], str] = lambda: "",
    ) -> None:
        """Take a terminal; `agent` returns what one agent does now, in one line."""
        self._agent = agent
        self._rewards: list[float] = []
        self._progress = Progress(clock=clock)
        self._notes: deque[str] = deque(maxlen=_NOTES)
        self._metrics: Metrics = {}
        self._live = Live(
            get_renderable=self.render, console=console, refresh_per_second=_REFRESH_HZ, transient=False
        )

    def begin(self, title: str, rollouts: int) -> None:
        self._progress.begin(title, rollouts)

    def stage(self, name: str, total: int = 0) -> None:
        self._progress.stage(name, total)
        self._live.start()

    def advance(self, done: int) -> None:
        self._progress.stage_done = done

    def rollout_started(self, rollout_id: str) -> None:
        self._progress.rollout_started(rollout_id)

    def rollout_finished(self, rollout_id: str, *, reward: float | None, tokens: int) -> None:
        self._progress.rollout_finished(rollout_id, reward, tokens)

    def step_done(self, step: int, steps: int, metrics: Metrics) -> None:
        self._metrics = metrics
        if isinstance(reward := metrics.get("reward_mean"), int | float):
            self._rewards.append(reward)

    def eval_done(self, name: str, score: Score) -> None:
        self._progress.evals[name] = score

    def note(self, text: str) -> None:
        self._notes.append(text)

    def close(self) -> None:
        self._live.stop()

    def render(self) -> RenderableType:
        """Return the current display."""
        parts: list[RenderableType] = [
            Rule(Text(self._progress.title, style="bold"), align="left", style="cyan"),
            self._bar(),
            self._facts(),
            self._results(),
        ]
        if doing := self._agent():
            label = f"{'  agent':<{_LABEL + 2}}"
            parts.append(Text.assemble((label, "dim"), doing, overflow="ellipsis", no_wrap=True))
        parts += [Text(f"  {note}", style="dim", overflow="ellipsis", no_wrap=True) for note in self._notes]
        # The terminal echoes ^C after the last line: a full line would wrap and shift the next redraw.
        return Group(*parts, Text(""))

    def _bar(self) -> RenderableType:
        p = self._progress
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=p.stage_total or None, completed=p.stage_done, pulse=not p.stage_total)
        count = f"{p.stage_done}/{p.stage_total}" if p.stage_total else ""
        row.add_row(Text(f"  {p.stage_name}", style="bold green"), bar, count)
        return row

    def _facts(self) -> RenderableType:
        # Labels are never truncated: on narrow terminals the values wrap.
        p = self._progress
        grid = Table.grid(padding=(0, 2))
        for width in (_LABEL, 0):
            grid.add_column(style="dim", no_wrap=True, min_width=width)
            grid.add_column()
        if not (p.planned or p.finished or p.running):
            grid.add_row("  time left", duration(p.seconds_left))
            return grid
        rate = p.scores(rate_text) or "—"
        grid.add_row("  rollouts", f"{len(p.running)} running, {p.finished} done", "solve rate", rate)
        grid.add_row("  sampled", f"{p.tokens_per_s:.0f} tokens/s", "time left", duration(p.seconds_left))
        return grid

    def _results(self) -> RenderableType:
        """Return rows of the evaluations and of the last step's metrics."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True, min_width=_LABEL)
        grid.add_column()
        rates = [f"{name} {rate_text(s)} ({s.solved}/{s.total})" for name, s in self._progress.evals.items()]
        if len(self._rewards) > 1:
            curve = (
                f"{sparkline(self._rewards)}  mean reward {self._rewards[0]:.2f} -> {self._rewards[-1]:.2f}"
            )
            grid.add_row("  curve", Text(curve, no_wrap=True, overflow="ellipsis"))
        for label, values in (
            ("  scores", rates[:1] + rates[1:][-_LATEST:]),
            ("  last step", self._shown()),
        ):
            if values:
                grid.add_row(label, Columns([Text(value, no_wrap=True) for value in values], padding=(0, 2)))
        return grid

    def _shown(self) -> list[str]:
        """Return the metrics of the last step to show, those in _FIRST first."""
        counts = {k: v for k, v in self._metrics.items() if isinstance(v, int | float)}
        names = [name for name in _FIRST if name in counts]
        names += [name for name in counts if name not in names]
        return [
            f"{name} {counts[name]:.3g}" if isinstance(counts[name], float) else f"{name} {counts[name]}"
            for name in names[:_METRICS]
        ]


def sparkline(values: Sequence[float]) -> str:
    """Return values from 0 to 1 as bars, at most SPARK of them, each the mean of its share."""
    count = min(len(values), SPARK)
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    return "".join(_BARS[min(len(_BARS) - 1, int(max(0.0, mean) * len(_BARS)))] for mean in means)


def agent_line(path: Path) -> Callable[[], str]:
    """Return a function that returns what one agent of a run does now, in one line."""
    batches, newest, at_s = tail_metrics(path / TIMELINE), "", 0.0

    def look() -> str:
        nonlocal newest, at_s
        for line in new_lines(batches):
            if line.get("event") == "agent":
                newest = printable(f"{line['rollout']}  {line['doing']}") if "doing" in line else ""
                at_s = line["time_s"]
        return newest if time.time() - at_s < OLD_S else ""

    return look
