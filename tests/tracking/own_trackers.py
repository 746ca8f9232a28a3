"""Trackers of the tests; they write what they get to `got.jsonl` in the folder of trackers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from insitu_view.tracking.base import TrackedRun, Tracker


class Recorder(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        self._file = run.folder / "got.jsonl"
        self._write(what="open", id=run.id, name=run.name, config=run.config)

    def _write(self, **values: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def log(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        self._write(what="log", step=step, metrics=metrics)

    def rollouts(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._write(what="rollouts", name=name, step=step, rows=rows)

    def finish(self, summary: Mapping[str, float], state: str) -> None:
        self._write(what="finish", summary=summary, state=state)


def got(path: Path, what: str = "") -> list[dict[str, Any]]:
    file = path / "trackers" / "got.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if what in ("", line["what"])]


class Hanging(Tracker):
    """Waits until the test removes the file `hang`; prints a secret before."""

    def __init__(self, run: TrackedRun) -> None:
        self._flag = run.folder / "hang"
        self._flag.write_text(str(os.getpid()))

    def log(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        print("the key is", os.environ.get("OWN_API_KEY"), flush=True)
        while self._flag.exists():
            time.sleep(0.05)


class Crashing(Recorder):
    def log(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        os.kill(os.getpid(), 9)


class Failing(Recorder):
    def log(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        raise RuntimeError(f"no route with {os.environ.get('OWN_API_KEY')}")
