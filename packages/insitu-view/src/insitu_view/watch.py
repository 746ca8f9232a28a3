"""`insitu top`: feed a view from the directory of a run, from another process; nothing is written."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from insitu.config import Config
from insitu.errors import RecordError
from insitu.progress.base import SHOWN, View, printable
from insitu.progress.plain import eval_text, step_text
from insitu.storage.metrics import new_lines, tail_metrics
from insitu.storage.queries import NEW_ROLLOUTS, RUNNING, RunReader
from insitu.storage.run_dir import check_store, read_config, run_state
from insitu.storage.score import Score
from insitu.storage.timeline import TIMELINE
from insitu_train.phases import eval_name

POLL_S = 1.0
_STAGES = {
    "collect": "rollouts of step {step} of {steps}",
    "train": "training step {step} of {steps}",
    "publish": "publishing the weights of step {step} of {steps}",
    "evaluate": "held-out tasks after step {step}",
}


def watch(path: Path, view: View, poll_s: float = POLL_S) -> None:
    """Show a run until it ends. Raises RecordError when `path` is no run or its store cannot be read."""
    watcher = _Watcher(path, view)
    while True:
        # Before looking: what is stored before the end is seen after it.
        state = run_state(path)
        watcher.look()
        if state != "running":
            break
        time.sleep(poll_s)
    view.note(_end(path))
    view.close()


class _Watcher:
    """Calls the methods of a view for what was stored since the last look."""

    def __init__(self, path: Path, view: View) -> None:
        self._path, self._view = path, view
        self._config: Config = read_config(path)
        check_store(path)
        self._metrics, self._timeline = tail_metrics(path / "metrics.jsonl"), tail_metrics(path / TIMELINE)
        self._row = 0
        self._running: set[str] = set()
        view.begin(_title(path, self._config), 0)
        view.stage("starting")

    def look(self) -> None:
        phases = [line for line in new_lines(self._timeline) if line.get("event") == "begin"]
        if phases:
            self._begin(phases[-1])
        for line in new_lines(self._metrics):
            self._line(line)
        # No store yet, or it is being made: the next look sees it.
        with contextlib.suppress(RecordError), RunReader(self._path) as reader:
            self._rollouts(reader)

    def _begin(self, line: Mapping[str, Any]) -> None:
        c, phase, step = self._config, line["phase"], line["step"]
        name = _STAGES.get(phase, phase).format(step=step, steps=c.run.steps)
        whole = step in (0, c.run.steps)
        due = [one for one in c.eval if whole or (one.due(step) and not one.beside_training)]
        beside = [one for one in c.eval if phase in ("collect", "train") and one.due(step - 1)]
        beside = [one for one in beside if one.beside_training]
        if beside:
            name += f", beside {_STAGES['evaluate'].format(step=step - 1)}"
        collected = c.collect.groups_per_step * c.collect.group_size
        collected += sum(one.count * one.samples for one in beside)
        # the number is unknown where several evaluations follow each other
        evaluated = due[0].count * due[0].samples if len(due) == 1 else 0
        sizes = {"collect": collected, "evaluate": evaluated}
        self._view.stage(printable(name), sizes.get(phase, 0))

    def _line(self, line: Mapping[str, Any]) -> None:
        event, step = line.get("event", ""), line.get("step", 0)
        if event == "step":
            self._view.step_done(step, self._config.run.steps, _shown(line))
        elif event.startswith("eval"):
            self._view.eval_done(f"{eval_name(event) or 'held-out'} step {step}", _score(line))

    def _rollouts(self, reader: RunReader) -> None:
        earlier = self._row == 0
        while found := reader.all(NEW_ROLLOUTS, row=self._row):
            for row in found:
                # Tokens of earlier rollouts would count as sampled just now.
                tokens = 0 if earlier else row["sampled"]
                self._view.rollout_finished(row["id"], reward=row["reward"], tokens=tokens)
                self._running.discard(row["id"])
            self._row = found[-1]["row"]
        running = {row["id"] for row in reader.all(RUNNING)}
        for rollout_id in running - self._running:
            self._view.rollout_started(rollout_id)
        self._running |= running


def ended_text(path: Path) -> Iterator[str]:
    """Yield the last step, the last evaluation and the end of a run that is not under way.

    Raises RecordError.
    """
    config = read_config(path)
    check_store(path)
    yield _title(path, config)
    lines = new_lines(tail_metrics(path / "metrics.jsonl"))
    for line in [line for line in lines if line.get("event") == "step"][-1:]:
        yield step_text(line["step"], config.run.steps, _shown(line))
    for line in [line for line in lines if line.get("event", "").startswith("eval")][-1:]:
        yield eval_text(f"held-out step {line['step']}", _score(line))
    yield _end(path)


def _title(path: Path, config: Config) -> str:
    return f"{path.name}: {config.agent_names}, seed {config.run.seed}"


def _end(path: Path) -> str:
    return f"the run is {run_state(path)}: insitu show {path}"


def _shown(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in SHOWN if line.get(name) is not None}


def _score(line: Mapping[str, Any]) -> Score:
    solved, total = line["solved"], line["total"]
    rate = line.get("solve_rate", solved / total if total else 0.0)
    return Score(solved=solved, total=total, rate=rate, reward_mean=line["reward_mean"] or 0.0)
