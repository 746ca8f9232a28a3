"""The run directory: the product's memory on disk, and the lock that gives it one writer.

    config.toml   resolved configuration          summary.json  numbers of the finished run
    run.sqlite    rollouts, turns, steps          curve.svg     learning curve
    metrics.jsonl one line per event              report.txt    what the person saw at the end
    logs/         one file per process            checkpoints/  weights after each step

The lock is the kernel's (flock), so it vanishes with its process, also after kill -9. Files that replace
another are written beside it, synced and renamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import orjson

from insitu.config import Config, dump_toml, load_config
from insitu.errors import RecordError, SetupError
from insitu.storage.metrics import MetricsFile, disk_error, read_metrics
from insitu.storage.store import EmptyStore, Store
from insitu.storage.ulid import new_ulid

log = logging.getLogger(__name__)

KIND = "kind"
"""Fact of a run: the verb whose run it is, where that is not training."""
STORE_FILES = ("run.sqlite", "run.sqlite-wal", "run.sqlite-shm", "metrics.jsonl")
AT_START = frozenset({"config.toml", "lock", "logs/insitu.log", *STORE_FILES})
"""Files that every run has before its first rollout."""
LEARNER_LOG = "logs/learner.log"
SPACE_BYTES = 128 << 20
"""Free space below which a run does not start."""


class RunDir:
    """An existing run directory held by this process. A context manager that gives the lock back."""

    def __init__(self, path: Path, config: Config, lock: TextIO, made: Sequence[Path] = ()) -> None:
        """`made`: folders that were made for it, the outermost first."""
        self._made = tuple(made)
        self.path = path
        self.config = config
        self._lock = lock

    @classmethod
    def create(cls, config: Config) -> Self:
        """Make the directory named by `run.dir` (empty: runs/<ULID>), lock it, write config.toml. What a run
        left that ended before its first rollout is replaced.
        Raises RecordError when it holds a run already, SetupError when the disk is nearly full."""
        config = name_run(config)
        path = Path(config.run.dir)
        made = [folder for folder in (*reversed(path.parents), path) if not folder.exists()]
        try:
            (path / "logs").mkdir(parents=True, exist_ok=True)
            (path / "checkpoints").mkdir(exist_ok=True)
        except OSError as error:
            raise disk_error(path, error) from error
        free = shutil.disk_usage(path).free
        if free < SPACE_BYTES:
            raise SetupError(
                f"{path} has {free >> 20} MiB free; a run needs at least {SPACE_BYTES >> 20} MiB"
            )
        lock = _take_lock(path)
        try:
            _make_empty(path)
            write_text(path / "config.toml", dump_toml(config))
        except BaseException:
            lock.close()
            raise
        return cls(path, config, lock, made)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Lock an existing run to continue it. Raises RecordError when there is none or it is in use."""
        config = read_config(path)
        return cls(path.absolute(), config, _take_lock(path))

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def artifacts(self) -> Path:
        return self.path / "artifacts"

    @property
    def host_calls(self) -> Path:
        """Calls of host tools; there once there was one."""
        return self.path / "host_calls.jsonl"

    @property
    def curve(self) -> Path:
        return self.path / "curve.svg"

    def store(self) -> Store:
        """The writer's store."""
        return Store(self.path / "run.sqlite")

    def metrics(self) -> MetricsFile:
        return MetricsFile(self.path / "metrics.jsonl")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, wholly or not at all."""
        text = orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY).decode()
        write_text(self.path / "summary.json", text + "\n")

    def drop_unused(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """At the end of a start that failed: remove the directory when it was made for it and holds nothing
        that a person could miss."""
        if kind is None or self.path not in self._made or not _unused(self.path):
            return
        shutil.rmtree(self.path, ignore_errors=True)
        for folder in reversed(self._made[:-1]):
            with contextlib.suppress(OSError):  # another run has been put there since
                folder.rmdir()

    def close(self) -> None:
        """Give the lock back; idempotent."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def name_run(config: Config) -> Config:
    """The configuration with absolute paths, so that the run can be continued from any folder: `run.dir` is
    the one given, or a new runs/<ULID>. Writes nothing."""
    tables = {
        "model": ("path",),
        "tasks": ("path", "assets", "images", "allowlist"),
        "engine": ("publish_dir",),
        "train": ("reference",),
        "gateway": ("tools",),
    }
    changed = {}
    for name, keys in tables.items():
        table = config.__dict__[name]
        found = {key: str(Path(table.__dict__[key]).absolute()) for key in keys if table.__dict__[key]}
        changed[name] = table.model_copy(update=found)
    config = config.model_copy(update=changed)
    return _with_dir(config, Path(config.run.dir or Path("runs") / new_ulid()))


def read_config(path: Path) -> Config:
    """The resolved configuration of a run; `run.dir` is where the run lies now."""
    if not (path / "config.toml").exists():
        raise RecordError(f"{path} is not a run directory: it has no config.toml")
    return _with_dir(load_config(path / "config.toml"), path)


def read_store(path: Path) -> Store:
    """The store of a run, to look at only; needs no lock and no living process."""
    if not (path / "run.sqlite").exists():
        raise RecordError(f"{path} holds no rollouts yet: it has no run.sqlite")
    return Store(path / "run.sqlite", readonly=True)


def restore_steps(run: RunDir, store: Store, metrics: MetricsFile) -> None:
    """Write the line of every committed step that metrics.jsonl lacks: a kill came between the two. It has
    what was committed, so no `publish_s`, and the commit's time. Raises RecordError when it cannot write."""
    try:
        lines = read_metrics(run.path / "metrics.jsonl")
        told = {line.get("step") for line in lines if line.get("event") == "step"}
    except RecordError as error:  # the store is the authority: a run goes on without this file's past
        log.warning("steps not restored error=%s", error)
        return
    for record in store.steps():
        if record.step not in told:
            when = record.committed_s
            metrics.write({**record.metrics, "time_s": when, "event": "step", "step": record.step})


def has_rollouts(path: Path) -> bool:
    """True when the run directory holds a rollout or a step: something to lose. Raises RecordError when it
    cannot be read."""
    if not (path / "run.sqlite").exists():
        return False
    try:
        with read_store(path) as store:
            return bool(store.phases()) or store.last_step() is not None
    except EmptyStore:
        return False


def read_summary(path: Path) -> Mapping[str, Any] | None:
    """summary.json of a finished run; None while it is not finished."""
    file = path / "summary.json"
    if not file.exists():
        return None
    try:
        summary: Mapping[str, Any] = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise RecordError(f"cannot read {file}: {error}") from error
    if not isinstance(summary, dict):
        raise RecordError(f"cannot read {file}: it is not a summary")
    return summary


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Replace a file atomically and durably; `private`: only its owner may read it. Raises
    RecordError, naming a full disk as such."""
    beside = path.with_name(path.name + ".part")
    try:
        with beside.open("w", encoding="utf-8") as file:
            if private:
                os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except (OSError, UnicodeError) as error:
        raise disk_error(path, error) from error


def _with_dir(config: Config, path: Path) -> Config:
    run = config.run.model_copy(update={"dir": str(path.absolute())})
    return config.model_copy(update={"run": run})


def _unused(path: Path) -> bool:
    """No rollout, no step, and no file but those of a start; a learner's traceback is none."""
    with contextlib.suppress(RecordError, OSError):
        if has_rollouts(path):
            return False
        written = [file for file in path.rglob("*") if file.is_file() and file.stat().st_size]
        names = {str(file.relative_to(path)) for file in written} - AT_START
        if LEARNER_LOG in names and b"Traceback" not in (path / LEARNER_LOG).read_bytes():
            names.remove(LEARNER_LOG)
        return not any(name for name in names if not name.startswith("weights/"))
    return False


def _make_empty(path: Path) -> None:
    """Remove the files of a run without rollouts. Raises RecordError when there are any."""
    if has_rollouts(path):
        raise RecordError(f"{path} holds a run already; continue it with --resume, or give another run.dir")
    stale = [path / name for name in STORE_FILES]
    try:
        for file in stale:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(path, error) from error


def _take_lock(path: Path) -> TextIO:
    try:
        lock = (path / "lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise disk_error(path / "lock", error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise RecordError(f"{path} is in use by process {holder}; wait for it or stop it") from error
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock
