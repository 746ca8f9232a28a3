"""Run directory: layout, atomic writes and the single-writer lock.

    config.toml   resolved configuration          summary.json  numbers of the finished run
    run.sqlite    rollouts, turns, steps          curve.svg     learning curve
    metrics.jsonl one line per event              report.txt    final report as printed
    timeline.jsonl gauges and phases
    logs/         one file per process            checkpoints/  weights after each step
    tokenizer/    what turns ids into text         scores/       scores of trained tokens

The lock is an flock, released when its process ends, also after kill -9. Files are replaced atomically:
written to a temporary file, synced and renamed.
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
from typing import Any, Literal, Self, TextIO

import orjson

from insitu.config import RENAMED, Config, dump_toml, known_keys, load_config, model_folder, read_toml
from insitu.config.base import holds_paths, is_path
from insitu.config.training import CLIPS, W_BOUNDS
from insitu.errors import ConfigError, RecordError, SetupError
from insitu.storage.files import write_text
from insitu.storage.metrics import MetricsFile, disk_error, read_metrics
from insitu.storage.store import EmptyStore, Store
from insitu.storage.timeline import TIMELINE, Timeline
from insitu.storage.ulid import new_ulid

log = logging.getLogger(__name__)

REPORT = "report.txt"
SESSIONS = "sessions"
"""Folder of a run directory with the logs and exports of sessions, and the text of provider calls."""
KIND = "kind"
"""Key of the stored fact that names the command of a run other than training."""
STORE_FILES = ("run.sqlite", "run.sqlite-wal", "run.sqlite-shm", "metrics.jsonl", TIMELINE)
AT_START = frozenset({"config.toml", "lock", "logs/insitu.log", *STORE_FILES})
"""Files that a run has before its first rollout."""
TOKENIZER = "tokenizer"
"""Folder with the tokenizer and chat template of the run, so that a copied run still has text."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "insitu_renderer.json",
    "config.json",
)
TOKENIZER_BYTES = 20 << 20
"""Most bytes of a tokenizer that is kept."""
SCORES = "scores"
LEARNER_LOG = "logs/learner.log"
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 480
"""Longest name of ordinary file systems, and longest path of a run: SQLite takes 512 with its files."""
SPACE_BYTES = 128 << 20
"""Minimum free disk space to start a run."""


class RunDir:
    """A run directory locked by this process; a context manager that releases the lock."""

    def __init__(self, path: Path, config: Config, lock: TextIO, created: Sequence[Path] = ()) -> None:
        """Take an open lock; `created`: folders that were created for the run, outermost first."""
        self._created = tuple(created)
        self.path = path
        self.config = config
        self._lock = lock

    @classmethod
    def create(cls, config: Config) -> Self:
        """Create and lock the directory `run.dir` (empty: runs/<ULID>) and write config.toml.

        Files of an earlier run without rollouts are replaced. Raises RecordError when the directory already
        contains a run, SetupError when the disk is nearly full.
        """
        config = name_run(config)
        path = Path(config.run.dir)
        created = [folder for folder in (*reversed(path.parents), path) if not folder.exists()]
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
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
            _remove_unused_run(path)
            write_text(path / "config.toml", dump_toml(config))
            _keep_tokenizer(config, path / TOKENIZER)
        except BaseException:
            lock.close()
            raise
        return cls(path, config, lock, created)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Lock an existing run to continue it.

        Raises RecordError when it does not exist or is in use.
        """
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
    def scores(self) -> Path:
        """Scores of trained tokens; exists after the first step that recorded them."""
        return self.path / SCORES

    @property
    def host_calls(self) -> Path:
        """Log of host tool calls; exists after the first call."""
        return self.path / "host_calls.jsonl"

    def store(self) -> Store:
        """Open the store for writing."""
        return Store(self.path / "run.sqlite")

    def timeline(self) -> Timeline:
        return Timeline(self.path / TIMELINE)

    def metrics(self) -> MetricsFile:
        return MetricsFile(self.path / "metrics.jsonl")

    def change(self, config: Config) -> None:
        """Replace the stored configuration; a finished run is unfinished then."""
        self.config = config
        (self.path / "summary.json").unlink(missing_ok=True)
        write_text(self.path / "config.toml", dump_toml(config))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json atomically."""
        text = orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY).decode()
        write_text(self.path / "summary.json", text + "\n")

    def drop_unused(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove a new and still unused directory when the start failed; an exit callback."""
        if kind is None or self.path not in self._created or not _unused(self.path):
            return
        shutil.rmtree(self.path, ignore_errors=True)
        for folder in reversed(self._created[:-1]):
            with contextlib.suppress(OSError):  # not empty: another run was created there meanwhile
                folder.rmdir()

    def close(self) -> None:
        """Release the lock; idempotent."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _keep_tokenizer(config: Config, folder: Path) -> None:
    """Copy the tokenizer of a run whose model is on this machine; a failure is only logged."""
    if config.engine.kind == "upstream":
        return
    try:
        source = model_folder(config)
        found = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
        if sum(path.stat().st_size for path in found) > TOKENIZER_BYTES:
            return
        folder.mkdir(exist_ok=True)
        for path in found:
            shutil.copyfile(path, folder / path.name)
    except (OSError, ConfigError) as error:
        log.warning("tokenizer not kept error=%s", error)


def tokenizer_folder(config: Config) -> Path:
    """Return the folder with a stored run's tokenizer: its own, else the model's.

    Raises ConfigError when neither has one.
    """
    own = Path(config.run.dir) / TOKENIZER
    return own if (own / "tokenizer.json").is_file() else model_folder(config)


def name_run(config: Config) -> Config:
    """Return the configuration with absolute paths and `run.dir` set (default: a new runs/<ULID>).

    Writes nothing. Raises ConfigError for a path that no file system or SQLite takes.
    """
    # Absolute paths allow the run to be resumed from any working directory.
    config = config.mapped(lambda key, value: _absolute(value) if value and holds_paths(key) else value)
    path = Path(config.run.dir or Path("runs") / new_ulid()).absolute()
    longest = max(len(os.fsencode(name)) for name in path.parts)
    if longest > MAX_NAME_BYTES or len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(
            f"run.dir: {path.name[:40]}... is too long: at most {MAX_NAME_BYTES} bytes in a name and"
            f" {MAX_PATH_BYTES} in the whole path"
        )
    return _with_dir(config, path)


def _absolute(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_absolute, value))
    return str(Path(value).absolute()) if is_path(value) else value


def read_config(path: Path) -> Config:
    """Return the resolved configuration of a run; `run.dir` is its current location."""
    if not (path / "config.toml").exists():
        raise RecordError(f"{path} is not a run directory: it has no config.toml")
    return _with_dir(load_config(base=read_tables(path), stored=True), path)


def read_tables(path: Path) -> dict[str, Any]:
    """Return the stored configuration of a run as tables of the keys of today."""
    tables: dict[str, Any] = {**read_toml(path / "config.toml")}
    if tables.get("rollout", {}).get("start"):
        raise ConfigError(
            f"{path}: its tasks begin at rollout.start, which this insitu does not have any more"
        )
    joined = _joined(*(tables.get(name, {}) for name in ("gateway", "engine", "train")))
    for old, new in RENAMED.items():
        (table, key), (now_in, *inner, name) = old.split("."), new.split(".")
        if not isinstance(values := tables.get(table), dict) or key not in values:
            continue
        value = values.pop(key)
        if inner and (value or inner == ["alarms"]):  # no price was 0
            tables.setdefault(now_in, {}).setdefault(*inner, {})[name] = value
        elif not inner and value and (values.get("run") if table == "sft" else table == now_in):
            tables[now_in][name] = value
    return known_keys({**tables, **{name: {**tables.get(name, {}), **own} for name, own in joined.items()}})


def _joined(gateway: dict[str, Any], engine: dict[str, Any], train: dict[str, Any]) -> Mapping[str, Any]:
    """Return by table what several earlier keys say in one, and take these out of the tables."""
    found, loss = dict[str, Any](), train.get("loss", "")
    clips = train.pop("clip_low", 0.0), train.pop("clip_high", 0.0)
    if "dppo_low" in train and loss in ("dppo", "gspo"):
        clips = train[f"{loss}_low"], train[f"{loss}_high"]
    elif "dppo_low" in train and loss == "cispo":
        clips = 0.0, train["cispo_cap"] - 1
    if any(clips) and loss in CLIPS:
        found["clip"] = [own or usual for own, usual in zip(clips, CLIPS[loss], strict=True)]
    bounds = train.pop("correction_low", 0.0), train.pop("correction_high", 0.0)
    if any(bounds) and (usual := W_BOUNDS.get(train["correction"])):
        found["correction_bounds"] = [usual[0] and bounds[0], bounds[1] or usual[1]]
    if margin := train.pop("overlong_margin_tokens", 0):
        last = train["overlong_tokens"]
        found["overlong_tokens"] = [last - margin, last] if last else []
    if start := train.pop("start_timeout_s", 0.0):
        found["step_timeout_s"] = max(start, train.get("step_timeout_s", 0.0))
    if (each := engine.pop("tensor_parallel", 1)) > 1 and not engine.get("gpus"):
        engine["gpus"] = list(range(each * engine.get("replicas", 1)))
    for old in "dppo_low", "cispo_cap":
        train.pop(old, None)
    host, port = gateway.pop("host", ""), gateway.pop("port", 0)
    return {"train": found, **({"gateway": {"listen": f"{host}:{port}"}} if port else {})}


def read_store(path: Path) -> Store:
    """Open the store of a run read-only, without the lock."""
    if not (path / "run.sqlite").exists():
        raise RecordError(f"{path} holds no rollouts yet: it has no run.sqlite")
    return Store(path / "run.sqlite", readonly=True)


def check_store(path: Path) -> None:
    """Raise RecordError when the store of a run cannot be read; one that is missing or empty is no error."""
    if (path / "run.sqlite").exists():
        with contextlib.suppress(EmptyStore):
            read_store(path).close()


def restore_steps(run: RunDir, store: Store, metrics: MetricsFile) -> None:
    """Append the lines of committed steps that metrics.jsonl lacks after a kill.

    A restored line has the commit's metrics and time, without `publish_s`. Raises RecordError when it cannot
    be written.
    """
    try:
        lines = read_metrics(run.path / "metrics.jsonl")
        logged = {line.get("step") for line in lines if line.get("event") == "step"}
    except RecordError as error:  # The store is authoritative: the run continues without the old lines.
        log.warning("steps not restored error=%s", error)
        return
    for record in store.steps():
        if record.step not in logged:
            when = record.committed_s
            metrics.write({**record.metrics, "time_s": when, "event": "step", "step": record.step})


def has_rollouts(path: Path) -> bool:
    """Return whether the run directory contains a rollout or a step.

    Raises RecordError when it cannot be read.
    """
    if not (path / "run.sqlite").exists():
        return False
    try:
        with read_store(path) as store:
            return bool(store.phases()) or store.last_step() is not None
    except EmptyStore:
        return False


def read_summary(path: Path) -> Mapping[str, Any] | None:
    """Return summary.json of a finished run; None for an unfinished one."""
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


def run_state(path: Path) -> Literal["running", "finished", "stopped"]:
    """Return `running` while a process holds the lock, else `finished` or `stopped`."""
    if _is_locked(path / "lock"):
        return "running"
    return "finished" if (path / "summary.json").exists() else "stopped"


def _is_locked(path: Path) -> bool:
    """Return whether a process holds the flock; taking it would disturb a run that starts."""
    try:
        inode = str(path.stat().st_ino)
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    return any(line.split()[5].rpartition(":")[2] == inode for line in lines if " FLOCK " in line)


def _with_dir(config: Config, path: Path) -> Config:
    run = config.run.model_copy(update={"dir": str(path.absolute())})
    return config.model_copy(update={"run": run})


def _unused(path: Path) -> bool:
    """Return whether there is no rollout, no step and no file beyond those of a start.

    A learner log with a traceback counts as used.
    """
    with contextlib.suppress(RecordError, OSError):
        if has_rollouts(path):
            return False
        written = [file for file in path.rglob("*") if file.is_file() and file.stat().st_size]
        names = {str(file.relative_to(path)) for file in written} - AT_START
        if LEARNER_LOG in names and b"Traceback" not in (path / LEARNER_LOG).read_bytes():
            names.remove(LEARNER_LOG)
        return not any(name for name in names if not name.startswith(("weights/", f"{TOKENIZER}/")))
    return False


def _remove_unused_run(path: Path) -> None:
    """Remove the files of a run without rollouts; raise RecordError when it has any."""
    if has_rollouts(path):
        how = "continue it with --resume (from Python: resume=) or set another run.dir"
        raise RecordError(f"{path} holds a run already; {how}")
    try:
        for name in STORE_FILES:
            (path / name).unlink(missing_ok=True)
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
