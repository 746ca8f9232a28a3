"""The runs that the viewer serves: found at the given paths, looked up by name, never by a joined path."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from insitu.config import Config
from insitu.errors import InsituError, RecordError
from insitu.storage.open_run import kind_of
from insitu.storage.pass_at_k import TaskCounts
from insitu.storage.queries import HELDOUT_TASKS, LAST_ROLLOUT, RunReader, ulid_seconds
from insitu.storage.run_dir import check_store, read_config, read_summary, run_state
from insitu.storage.score import Score
from insitu.storage.store import EmptyStore
from insitu_train.phases import is_heldout

SPARK_POINTS = 60
WATCHED = (
    "run.sqlite",
    "run.sqlite-wal",
    "metrics.jsonl",
    "timeline.jsonl",
    "logs/insitu.log",
    "summary.json",
)
"""Files of a run whose size or time changes when there is something new to show."""


@dataclass(frozen=True, slots=True)
class RunHandle:
    """One run directory under its name in addresses."""

    name: str
    path: Path

    def config(self) -> Config:
        return _config(self.path, _size_and_time(self.path / "config.toml"))

    def reader(self) -> RunReader:
        """Open the store; raise EmptyStore when there is none yet, RecordError when it cannot be read."""
        if not (self.path / "run.sqlite").exists():
            raise EmptyStore(f"{self.name} holds no rollouts yet")
        return RunReader(self.path)

    def signature(self) -> tuple[tuple[int, int], ...]:
        """Return (size, time) of the watched files: equal signatures mean that nothing changed."""
        return tuple(_size_and_time(self.path / name) for name in WATCHED)

    def state(self) -> str:
        """Return `running`, `finished` or `stopped`."""
        return run_state(self.path)


@lru_cache(maxsize=64)
def _config(path: Path, _stamp: tuple[int, int]) -> Config:
    return read_config(path)


class Runs:
    """Run directories at the given paths, and in folders among them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Take the paths.

        Raises RecordError when one of them is neither a run nor a folder of runs, and InsituError when they
        are runs of which none can be read.
        """
        self._paths = [path.resolve() for path in paths]
        for path in self._paths:
            if not path.is_dir():
                raise RecordError(f"there is no folder {path}: give a run directory, or a folder of runs")
            if not os.access(path, os.R_OK | os.X_OK):
                raise RecordError(f"cannot read {path}: permission denied")
            if not any(_runs_at(path)) and path.name != "runs":
                raise RecordError(f"{path} is not a run directory and holds none that can be read")
        problems = [_problem(path) for path in self._paths]
        if problems and all(problems):
            raise next(filter(None, problems))

    def all(self) -> list[RunHandle]:
        """Return every run, newest last written first; equal names get their folder before them."""
        paths = list(dict.fromkeys(run for path in self._paths for run in _runs_at(path)))
        names = [path.name for path in paths]
        handles = [
            RunHandle(path.name if names.count(path.name) == 1 else f"{path.parent.name}~{path.name}", path)
            for path in paths
        ]
        return sorted(handles, key=lambda run: max(run.signature(), key=lambda s: s[1])[1], reverse=True)

    def named(self, name: str) -> RunHandle:
        """Return the run with a name; raise RecordError when there is none."""
        for run in self.all():
            if run.name == name:
                return run
        raise RecordError(f"no run is called {name}")


def run_info(run: RunHandle, reader: RunReader | None = None) -> Mapping[str, Any]:
    """Return what the list of runs shows of a run; `problem` says why something of it cannot be read.

    `reader`: an open store of the run; None = it is opened here.
    """
    info: dict[str, Any] = {
        "name": run.name, "path": str(run.path), "state": run.state(), "problem": "", "kind": "train",
        "agent": "", "model": "", "tasks": "", "task_sets": [], "engine": "", "seed": None, "step": 0,
        "steps": None,
        "rollouts": 0, "heldout_before": None, "heldout_now": None, "spark": [], "last_write_s": None,
        "store_bytes": sum(size for size, _ in run.signature()), "private": _private(run.path),
        "has_tokens": True, "started_s": None, "last_rollout_s": None,
    }  # fmt: skip
    written = max(when for _, when in run.signature())
    info["last_write_s"] = written / 1e9 if written else None
    try:
        config = run.config()
        model = config.engine.model if config.engine.kind == "upstream" else Path(config.model.path).name
        info |= {
            "agent": config.agent_names,
            "model": model or "warm start of the demo",
            "tasks": " + ".join(f"{one.source} {Path(one.path).name}".strip() for one in config.tasks),
            "task_sets": config.set_names,
            "engine": config.engine.kind,
            "seed": config.run.seed,
            "steps": config.run.steps,
            "has_tokens": config.engine.kind != "upstream",
        }
        with contextlib.nullcontext(reader) if reader else run.reader() as opened:
            info |= _stored_info(opened)
        if info["kind"] == "serve":  # agent and tasks are not those of the configuration
            info |= {"agent": "served sessions", "tasks": "", "task_sets": []}
    except EmptyStore:
        info["problem"] = "no rollouts yet"
    except InsituError as error:
        info["problem"] = without_paths(error, run)
    return info


def _stored_info(reader: RunReader) -> dict[str, Any]:
    rates = [row["solved"] / row["total"] for row in reader.step_scores()]
    stride = max(1, -(-len(rates) // SPARK_POINTS))
    points = [by[""].rate for (phase, _), by in evaluation_scores(reader).items() if is_heldout(phase)]
    last, newest = reader.last_step(), reader.one(LAST_ROLLOUT)
    return {
        "kind": kind_of(reader),
        "step": 0 if last is None else last.step,
        "rollouts": reader.count({}),
        "heldout_before": points[0] if points else None,
        "heldout_now": points[-1] if len(points) > 1 else None,
        "spark": [round(rate, 4) for rate in rates[::stride]],
        "last_rollout_s": None if newest is None else ulid_seconds(newest["ulid"]),
    }


def evaluation_scores(reader: RunReader) -> dict[tuple[str, int], dict[str, Score]]:
    """Return the scores outside of training by phase and step, in order, and category ("" = total)."""
    found: dict[tuple[str, int], dict[str, list[TaskCounts]]] = {}
    for row in reader.all(HELDOUT_TASKS):
        counts = TaskCounts(**{name: row[name] for name in ("graded", "resolved", "reward_sum")})
        of = found.setdefault((row["phase"], row["step"]), {"": []})
        for category in {"", row["category"]}:
            of.setdefault(category, []).append(counts)
    return {
        place: {category: Score.of_tasks(tasks) for category, tasks in by.items()}
        for place, by in found.items()
    }


def summary_of(run: RunHandle) -> Mapping[str, Any] | None:
    """Return summary.json, None when there is none or it cannot be read."""
    with contextlib.suppress(RecordError):
        return read_summary(run.path)
    return None


def without_paths(error: BaseException, run: RunHandle | None) -> str:
    """Return the message of an error in one line, with the run's name for its path."""
    text = " ".join(str(error).split())
    if run is not None:
        text = text.replace(f"{run.path}/", "").replace(str(run.path), run.name)
    return text


def open_inside(root: Path, path: Path, limit: int, *, from_end: bool = False) -> tuple[bytes, int]:
    """Return the first or last `limit` bytes of a regular file below `root`, and its size.

    No link is followed.

    Raises RecordError.
    """
    if not path.parent.resolve().is_relative_to(root.resolve()):
        raise RecordError("the file is outside of the run directory")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise RecordError(f"{path.name} is not a regular file")
            file.seek(max(0, found.st_size - limit) if from_end else 0)
            return file.read(limit), found.st_size
    except OSError as error:
        raise RecordError(f"there is no readable {path.name}") from error


def _problem(path: Path) -> InsituError | None:
    """Return why a run cannot be read; None for a folder of runs."""
    if not (path / "config.toml").is_file():
        return None
    try:
        read_config(path)
        check_store(path)
    except InsituError as error:
        if (path / "run.sqlite").exists():
            return error
        return RecordError(f"{path} is not a run of insitu: {without_paths(error, RunHandle('', path))}")
    return None


def _runs_at(path: Path) -> Iterator[Path]:
    if (path / "config.toml").is_file():
        yield path
        return
    with contextlib.suppress(OSError):
        for child in sorted(path.iterdir()):
            # One that may not be read hides no other.
            with contextlib.suppress(OSError):
                if not child.is_symlink() and (child / "config.toml").is_file():
                    yield child


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _private(path: Path) -> bool:
    """Return whether other users of the machine cannot read the directory itself."""
    with contextlib.suppress(OSError):
        return not path.stat().st_mode & (stat.S_IROTH | stat.S_IXOTH)
    return True


def one_run(path: Path) -> RunHandle:
    """Return the run at a path. Raises RecordError when it is not a run directory."""
    run = RunHandle(path.resolve().name, path)
    run.config()
    return run


_FACTS = ("name", "state", "problem", "kind", "agent", "model", "tasks", "step", "steps", "rollouts")
"""Facts of a run that a notebook shows."""


def facts_of(path: Path) -> Mapping[str, object]:
    """Return the facts of a run that are known."""
    info = run_info(one_run(path))
    return {name: info[name] for name in _FACTS if info[name] not in ("", None)}
