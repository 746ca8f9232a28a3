"""Weights & Biases. WANDB_MODE=offline keeps the run in `trackers/wandb/` for `wandb sync`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from insitu_view.tracking.base import TrackedRun, Tracker

STOPPED = 130
"""Exit code of a run that did not finish."""


class Wandb(Tracker):
    """Sends to a run whose id is that of the run."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=run.project,
            id=run.id,
            name=run.name,
            resume="allow",
            dir=run.folder,
            config=dict(run.config),
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True, silent=True),
        )
        # Not wandb's own counter: an evaluation after step 3 is sent after step 3, and both belong to 3.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        self._run.log({"step": step, **metrics})

    def rollouts(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = list(rows[0])
        table = self._wandb.Table(columns=columns, data=[list(row.values()) for row in rows])
        self._run.log({"step": step, f"rollouts/{name}": table})

    def finish(self, summary: Mapping[str, float], state: str) -> None:
        self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})
        self._run.finish(exit_code=0 if state == "finished" else STOPPED)
