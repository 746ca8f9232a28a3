"""The follower of a run: a process that sends metrics.jsonl to one tracker and ends with the run.

    python -m insitu_view.tracking.follow RUN NAME

It reads the run directory and writes `trackers/` and its own log there, nothing else, so that a tracker that
hangs, fails or is slow cannot touch the run. What was sent is stored by event and step: a resumed run, or a
replay of one that ended (`insitu track`), goes on behind it under the same id. Standard output gets one JSON
object at the end, {"sent": lines}; what the tracker prints goes to the log, redacted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from insitu import registry
from insitu.errors import InsituError, RecordError, SetupError, boundary, user_code
from insitu.storage.files import write_text
from insitu.storage.metrics import tail_metrics
from insitu.storage.queries import RunReader
from insitu.storage.run_dir import read_config, read_summary, run_state
from insitu.storage.ulid import new_ulid
from insitu_train.redaction import Redaction
from insitu_view.tracking.base import TrackedRun, Tracker
from insitu_view.tracking.names import numbers

POLL_S = 1.0
STUCK_S = 60.0
"""Time without progress after the end of the run in which the tracker may still send."""
NICE = 10
MAX_LOG_BYTES = 1 << 20
TABLE_ROWS = 64
"""Most rollouts in the table of an evaluation."""
TABLE = ("id", "task", "category", "status", "reward", "outcome", "passed", "total", "calls", "sampled")
"""Columns of that table: no text of agents, tests or prompts."""
EXIT_STUCK = 3
FOLDER = "trackers"


def file_name(tracker: str) -> str:
    """Return the name of a tracker as part of a file name."""
    return re.sub(r"[^\w.-]+", "-", tracker).strip("-")


def log_path(path: Path, tracker: str) -> Path:
    return path / "logs" / f"tracker-{file_name(tracker)}.log"


class Follower:
    """Sends one run to one tracker."""

    def __init__(self, path: Path, name: str) -> None:
        """Read the configuration and what was sent; raise RecordError when `path` is no run."""
        self._path, self._name = path, name
        self._config = read_config(path)
        self._redaction = Redaction()
        self._folder = path / FOLDER
        self._file = self._folder / f"{file_name(name)}.json"
        self._state: dict[str, Any] = {"id": new_ulid(), "sent": {}, "ended": ""}
        if self._file.exists():
            with boundary(RecordError, f"cannot read {self._file}"):
                self._state = orjson.loads(self._file.read_bytes())
        self._tracker: Tracker | None = None
        self.lines = 0
        """Lines sent by this process."""
        self.progress_s = time.monotonic()
        """Reading of time.monotonic() when the last line was sent."""

    def run(self) -> None:
        """Send what is new until the run ends."""
        batches = tail_metrics(self._path / "metrics.jsonl")
        while True:
            # Before reading: what is written before the end is read after it.
            state = run_state(self._path)
            sent = self.lines
            for line in next(batches):
                self._send(line)
            if self.lines > sent:
                self._save()
            if state != "running":
                break
            time.sleep(POLL_S)
        self._finish(state)

    def _open(self) -> Tracker:
        if self._tracker is None:
            run = TrackedRun(
                id=self._state["id"],
                name=self._redaction.text(self._path.name),
                project=self._config.track.project,
                folder=self._folder.absolute(),
                config=self._redaction.value(self._config.model_dump(mode="json")),
            )
            self._save()
            self._tracker = registry.find("trackers", self._name)(run)
        return self._tracker

    def _send(self, line: Mapping[str, Any]) -> None:
        event, step = line.get("event"), line.get("step")
        if not isinstance(event, str) or not isinstance(step, int) or step <= self._last(event):
            return
        if metrics := numbers(line):
            self._open().log(step, metrics, line["time_s"])
        if event != "step" and (rows := self._rollouts(event, step)):
            self._open().rollouts(event, step, rows)
        self._state["sent"][event] = step
        self._state["ended"] = ""
        self.lines += 1
        self.progress_s = time.monotonic()

    def _last(self, event: str) -> int:
        sent: int = self._state["sent"].get(event, -1)
        return sent

    def _rollouts(self, phase: str, step: int) -> list[dict[str, Any]]:
        with contextlib.suppress(RecordError), RunReader(self._path) as reader:
            page = reader.page({"phase": phase, "step": step}, sort="id", limit=TABLE_ROWS)
            rows = [{name: row[name] for name in TABLE} for row in page.rows]
            found: list[dict[str, Any]] = self._redaction.value(rows)
            return found
        return []

    def _finish(self, state: str) -> None:
        """Send the summary once per end of the run."""
        if self._state["ended"] == state and self._tracker is None:
            return
        summary = read_summary(self._path) or {}
        plain = {k: float(v) for k, v in summary.items() if isinstance(v, int | float)}
        self._open().finish(plain, state)
        self._state["ended"] = state
        self._save()

    def _save(self) -> None:
        self._folder.mkdir(exist_ok=True)
        write_text(self._file, orjson.dumps(self._state).decode())


@contextlib.contextmanager
def _only(path: Path) -> Iterator[None]:
    """Wait until the follower of an earlier process of the run has ended, at most STUCK_S."""
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as lock:
        ends_s = time.monotonic() + STUCK_S + 5
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > ends_s:
                    raise RecordError("another follower sends this run to the same tracker") from None
                time.sleep(POLL_S)
        yield


def _watch(path: Path, follower: Follower, say: Callable[[str], None]) -> None:
    """End this process when the run has ended and its tracker makes no progress."""
    ended_s = float("inf")
    while True:
        time.sleep(POLL_S)
        if run_state(path) == "running":
            ended_s = float("inf")
            continue
        ended_s = min(ended_s, time.monotonic())
        if time.monotonic() - max(ended_s, follower.progress_s) > STUCK_S:
            say(f"the tracker did nothing for {STUCK_S:g} s after the end of the run")
            os._exit(EXIT_STUCK)


class _Log:
    """The log of a follower; also what its tracker prints, through a pipe."""

    def __init__(self, path: Path) -> None:
        self._redaction = Redaction()
        self._file = path.open("ab", buffering=0)
        read, write = os.pipe()
        self._pipe = os.fdopen(read, "rb")
        for descriptor in (1, 2):
            os.dup2(write, descriptor)
        os.close(write)
        threading.Thread(target=self._copy, daemon=True).start()

    def _copy(self) -> None:
        for line in self._pipe:
            self.say(line.decode("utf-8", "replace").rstrip())

    def say(self, text: str) -> None:
        """Write one line, until the log is full."""
        with contextlib.suppress(OSError):
            if self._file.tell() < MAX_LOG_BYTES:
                self._file.write((self._redaction.text(text) + "\n").encode("utf-8", "replace"))


def main(path: Path, name: str) -> int:
    """Follow a run to its end; return the exit code."""
    out = os.dup(1)
    file = log_path(path, name)
    try:
        file.parent.mkdir(exist_ok=True)
        log = _Log(file)
    except OSError as error:
        print(f"cannot write {file}: {error.strerror}", file=sys.stderr)
        return 1
    try:
        with _only(path / FOLDER / f"{file_name(name)}.lock"):
            follower = Follower(path, name)
            threading.Thread(target=_watch, args=(path, follower, log.say), daemon=True).start()
            with user_code(SetupError, name):
                follower.run()
    except (InsituError, OSError) as error:
        log.say(f"insitu: {error}")
        return 1
    with contextlib.suppress(OSError):
        os.write(out, orjson.dumps({"sent": follower.lines}) + b"\n")
    return 0


if __name__ == "__main__":
    os.nice(NICE)
    code = main(Path(sys.argv[1]), sys.argv[2])
    # Threads of a tracker that do not end must not keep the process.
    os._exit(code)
