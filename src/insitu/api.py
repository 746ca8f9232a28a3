"""The public Python API: `train`, `rollout` and `serve`, and `open_run` for what they leave on disk.

The blocking forms also work inside a running event loop (a notebook) and in any thread: the run then has a
thread and an event loop of its own. Nothing is printed and no signal handler is installed; cancelling the
coroutine, or Ctrl-C in the blocking form, stops agents, sandboxes and engines before it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from insitu.config import Config, load_config
from insitu.errors import ConfigError
from insitu.evaluate.resume import CHANGEABLE, resumed_config
from insitu.evaluate.run import RolloutOptions, collect_rollouts
from insitu.progress.base import View
from insitu.progress.open import open_view
from insitu.results.run import Run as Run
from insitu.serving.run import BASE as SERVE_BASE
from insitu.serving.server import ServedSession as ServedSession
from insitu.serving.server import Server as Server
from insitu.storage.run_dir import name_run, read_config, read_tables
from insitu.storage.score import Score
from insitu.types.values import Value

P = ParamSpec("P")
T = TypeVar("T")
ConfigSource = Config | Path | str | Mapping[str, Mapping[str, Any]] | None
"""A resolved Config, the path of a TOML file, or tables as nested mappings; None for the defaults."""
Overrides = Mapping[str, Any] | Sequence[str]
"""`{"table.key": value}`, or the command line's `["table.key=value"]`."""
SHORT = {
    "agent": "harness.agent",
    "model": "model.path",
    "tasks": "tasks.source",
    "reward": "reward.function",
}
"""Keyword -> key that its value belongs to, unless the value is a table."""
CANCEL_POLL_S = 0.2
"""Interval at which a blocking call inside an event loop looks whether its task was cancelled."""
EventKind = Literal["begin", "stage", "rollout_started", "rollout", "advance", "step", "evaluation", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent(Value):
    """One event of a run in progress; fields that do not belong to its kind hold their defaults."""

    kind: EventKind
    text: str = ""
    """Title, stage or evaluation name, or one line for the user."""
    step: int = 0
    """Optimizer step."""
    total: int = 0
    """Steps of the run, or units of the stage; 0 = unknown."""
    done: int = 0
    """Units done, of kind `advance`."""
    rollout_id: str = ""
    reward: float | None = None
    """Reward of a finished rollout, or mean reward of an evaluation; None = not graded."""
    tokens: int = 0
    """Sampled tokens of a finished rollout."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Metrics of a committed step."""


Progress = Callable[[RunEvent], None] | View | bool | None
"""Gets every event; True = the progress of the command line, on stdout."""


class CallbackView:
    """Turn the calls that a view gets into events for one callback; implements `view.base.View`."""

    def __init__(self, callback: Callable[[RunEvent], None]) -> None:
        self._callback = callback

    def begin(self, title: str, rollouts: int) -> None:
        self._callback(RunEvent(kind="begin", text=title, total=rollouts))

    def stage(self, name: str, total: int = 0) -> None:
        self._callback(RunEvent(kind="stage", text=name, total=total))

    def advance(self, done: int) -> None:
        self._callback(RunEvent(kind="advance", done=done))

    def rollout_started(self, rollout_id: str) -> None:
        self._callback(RunEvent(kind="rollout_started", rollout_id=rollout_id))

    def rollout_finished(self, rollout_id: str, *, reward: float | None, tokens: int) -> None:
        self._callback(RunEvent(kind="rollout", rollout_id=rollout_id, reward=reward, tokens=tokens))

    def step_done(self, step: int, steps: int, metrics: Mapping[str, Any]) -> None:
        self._callback(RunEvent(kind="step", step=step, total=steps, metrics=dict(metrics)))

    def eval_done(self, name: str, score: Score) -> None:
        mean = score.reward_mean if score.total else None
        self._callback(RunEvent(kind="evaluation", text=name, total=score.total, reward=mean))

    def note(self, text: str) -> None:
        self._callback(RunEvent(kind="note", text=text))

    def close(self) -> None:
        """Do nothing: no terminal is held."""


@contextlib.contextmanager
def viewing(progress: Progress, config: Config | None = None) -> Iterator[View]:
    """Yield the view of a call; raise ConfigError for a callback that cannot be called."""
    if progress is True:
        run_dir = None if config is None else Path(config.run.dir)
        view = open_view(sys.stdout, run_dir=run_dir)
    elif not progress:
        view = CallbackView(lambda event: None)
    elif not callable(progress) and hasattr(progress, "rollout_finished"):
        yield progress  # a view, which its owner closes
        return
    elif callable(progress) and not inspect.iscoroutinefunction(progress):
        view = CallbackView(progress)
    else:
        raise ConfigError(f"progress must be a plain function of a RunEvent or True, got {progress!a}")
    with contextlib.closing(view):
        yield view


def open_run(path: Path | str) -> Run:
    """Open a run directory for reading. Raises RecordError when it is none or its store cannot be read."""
    return Run(path)


async def rollout_async(
    config: ConfigSource = None,
    *,
    n: int | None = None,
    overrides: Overrides = (),
    resume: Path | str | None = None,
    progress: Progress = None,
    **tables: Any,
) -> Run:
    """Run and grade `n` rollouts of each task without training, and return their run.

    The other arguments are those of `train`. Raises InsituError.
    """
    if n is not None:
        tables["rollout"] = {**tables.get("rollout", {}), "samples": n}
    if "tasks" in tables and not (isinstance(tables["tasks"], str | Path) or _is_table(tables["tasks"])):
        tables["tasks"] = {"source": tables["tasks"], "eval_share": 1.0}  # no task is held back
    resolved = resolve(config, overrides, resume, tables, changeable=CHANGEABLE)
    with viewing(progress, resolved) as view:
        await collect_rollouts(resolved, view, RolloutOptions(resume=path_of(resume)))
    return Run(resolved.run.dir)


def serve(config: ConfigSource = None, *, overrides: Overrides = (), **tables: Any) -> Server:
    """Return a server of the configured model, to be used with `with` or `async with`.

    Arguments are those of `train`; the limits of a session are wide. Raises InsituError.
    """
    return Server(resolve(config, overrides, None, tables, SERVE_BASE))


def resolve(
    config: ConfigSource,
    overrides: Overrides,
    resume: Path | str | None,
    tables: Mapping[str, Any],
    base: Mapping[str, Any] | None = None,
    changeable: Sequence[str] = (),
    *,
    named: bool = True,
) -> Config:
    """Return the configuration of a new run, or the stored one of `resume`.

    `changeable`: keys that overrides of a resumed run may have. `named`: with its directory, and with
    absolute paths.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides must be a mapping or a list of table.key=value, got {overrides!a}")
    if resume is not None:
        if config is not None or tables:
            raise ConfigError("a resumed run keeps its configuration: drop config and tables")
        return resumed_config(Path(resume), overrides, changeable)
    loaded = _load(config, overrides, tables, base)
    return name_run(loaded) if named else loaded


def _load(
    config: ConfigSource, overrides: Overrides, tables: Mapping[str, Any], base: Mapping[str, Any] | None
) -> Config:
    given = _expanded(tables)
    if isinstance(config, Config):
        return load_config(None, overrides, config.model_dump(), given)
    if isinstance(config, str | Path) and Path(config).is_dir():
        return load_config(None, overrides, config_from_run(Path(config), "collect"), given)
    if isinstance(config, str | Path):
        return load_config(Path(config), overrides, base, given)
    if not isinstance(config, Mapping | None):
        raise ConfigError(f"config must be a Config, a TOML file or a mapping of tables, got {config!a}")
    layers = [dict(base or {}), config or {}]
    return load_config(None, overrides, _merged(layers), given)


SFT: Mapping[str, Mapping[str, Any]] = {
    "run": {"checkpoint_every_steps": 20},
    "train": {"lr": 1e-4, "decay": "linear", "epochs": 2},
}
"""What `insitu sft` takes instead of the values that a run of reinforcement learning had."""


def config_from_run(source: Path, table: Literal["collect", "sft"]) -> dict[str, Any]:
    """Return the configuration of a run whose rollouts another one takes, as tables.

    Raises RecordError when `source` is no run directory.
    """
    read_config(source)
    tables = read_tables(source)
    tables.setdefault("run", {})["dir"] = ""
    tables.setdefault(table, {})["run"] = str(source.absolute())
    for name, values in (SFT if table == "sft" else {}).items():
        tables.setdefault(name, {}).update(values)
    return tables


def _merged(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return tables with the values of later layers over those of earlier ones."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for table, values in layer.items():
            known = merged.get(table, {})
            whole = not (isinstance(known, Mapping) and isinstance(values, Mapping))
            merged[table] = values if whole else {**known, **values}
    return merged


def _expanded(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords as tables."""
    found: list[Mapping[str, Any]] = []
    for name, value in tables.items():
        key = SHORT.get(name)
        if key is not None and value is None:
            continue
        if key is None or _is_table(value):
            found.append({name: value})
        elif name == "model" and str(value).startswith(("http://", "https://")):
            found.append({"engine": _served_at(str(value), tables.get("engine"))})
        elif name == "agent" and isinstance(value, list | tuple):
            if not value:
                raise ConfigError("agent: the command is empty")
            found.append({"harness": {"command": tuple(value)}})
        else:
            table, _, field_name = key.partition(".")
            found.append({table: {field_name: str(value) if isinstance(value, Path) else value}})
    # Tables last: engine={"kind": "vllm"} wins over the kind that a URL stands for.
    return _merged(sorted(found, key=lambda layer: set(layer) <= set(tables)))


def _served_at(url: str, engine: object) -> dict[str, Any]:
    """Return [engine] for an address: a provider, unless the table `engine` names another kind."""
    kind = engine.get("kind", "upstream") if isinstance(engine, Mapping) else "upstream"
    return {"kind": kind, "urls": [url]}


def _is_table(value: object) -> bool:
    """Return whether a value is a table, or a list of tables [[tasks]] rather than a list of tasks."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(one, Mapping) and "source" in one for one in value)
    return isinstance(value, Mapping)


def path_of(path: Path | str | None) -> Path | None:
    """Return a path that was given as text."""
    return None if path is None else Path(path)


def blocking_form(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Return the form of a coroutine function that waits for its result; see the top of this module."""

    @functools.wraps(function)
    def waits(*args: P.args, **kwargs: P.kwargs) -> T:
        return blocking(lambda: function(*args, **kwargs))

    waits.__name__ = waits.__qualname__ = function.__name__.removesuffix("_async")
    return waits


def blocking(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end, in a thread of its own where this thread's event loop is running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(start())
    return _in_thread(start)


def _in_thread(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on a new event loop in a new thread; Ctrl-C while waiting cancels it."""
    running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = Future()

    async def main() -> T:
        task = asyncio.ensure_future(start())
        running.set_result((asyncio.get_running_loop(), task))
        return await task

    outer = asyncio.current_task()
    requests = outer.cancelling() if outer is not None else 0
    # Leaving the block waits for the thread, so nothing of a cancelled run outlives the call.
    with ThreadPoolExecutor(1, thread_name_prefix="insitu-run") as pool:
        future = pool.submit(lambda: asyncio.run(main()))
        try:
            # asyncio.run handles Ctrl-C by cancelling its task, which this call blocks: hence the polling.
            while not wait([future], CANCEL_POLL_S).done:
                if outer is not None and outer.cancelling() > requests:
                    raise asyncio.CancelledError
        except BaseException:
            either: list[Future[Any]] = [running, future]
            wait(either, return_when=FIRST_COMPLETED)
            if not future.done():
                loop, task = running.result()
                with contextlib.suppress(RuntimeError):  # it has just ended
                    loop.call_soon_threadsafe(task.cancel)
            raise
        return future.result()


rollout = blocking_form(rollout_async)
