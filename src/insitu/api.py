"""The public Python API: `train`, `rollout` and `serve`, and `open_run` for what they leave on disk.

The blocking forms also work inside a running event loop (a notebook) and in any thread: the run then has a
thread and an event loop of its own. Nothing is printed and no signal handler is installed; cancelling the
coroutine, or Ctrl-C in the blocking form, stops agents, sandboxes and engines before it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from insitu.bridges.hub_runs import check_hub, fetch_run, pushing_checkpoints, repo_of
from insitu.config import Config, load_config
from insitu.demo.run import DemoOptions as DemoOptions
from insitu.demo.run import run_demo as demo_with
from insitu.engines.server_command import describe_servers as describe_servers
from insitu.errors import ConfigError, RecordError
from insitu.evaluate.resume import CHANGEABLE
from insitu.evaluate.resume import TRAINING as TRAINING
from insitu.evaluate.resume import resumed_config as resumed_config
from insitu.evaluate.run import REPORT, collect_rollouts
from insitu.evaluate.run import RolloutOptions as RolloutOptions
from insitu.progress.base import View
from insitu.progress.open import open_view
from insitu.runtime.gateway import read_tools as read_tools
from insitu.runtime.preflight import check_at_hand as check_at_hand
from insitu.serving.run import BASE as SERVE_BASE
from insitu.serving.run import ServeOptions as ServeOptions
from insitu.serving.run import serve as serve_with
from insitu.serving.server import ServedSession as ServedSession
from insitu.serving.server import Server as Server
from insitu.storage.run_dir import name_run as name_run
from insitu.storage.run_dir import read_config as read_config
from insitu.storage.run_dir import read_summary as read_summary
from insitu.storage.run_dir import read_tables
from insitu.storage.score import Score
from insitu.training.learner.process import describe_memory as describe_memory
from insitu.training.loop import TrainOptions as TrainOptions
from insitu.training.run import run_training
from insitu.training.sft.run import run_sft
from insitu.types.values import Value
from insitu.view.run import Run as Run
from insitu.view.run_report import finish

__all__ = ["SERVE_BASE", "demo_with", "serve_with"]

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


Progress = Callable[[RunEvent], None] | bool | None
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
        view = open_view(sys.stdout, plain=config is not None and config.run.plain, run_dir=run_dir)
    elif not progress:
        view = CallbackView(lambda event: None)
    elif callable(progress) and not inspect.iscoroutinefunction(progress):
        view = CallbackView(progress)
    else:
        raise ConfigError(f"progress must be a plain function of a RunEvent or True, got {progress!a}")
    with contextlib.closing(view):
        yield view


def open_run(path: Path | str) -> Run:
    """Open a run directory for reading. Raises RecordError when it is none or its store cannot be read."""
    return Run(path)


async def train_with(config: Config, view: View, options: TrainOptions) -> str:
    """Train with a view of the progress, write the report of the run and return it. Raises InsituError."""
    check_hub(config)
    async with pushing_checkpoints(config, view.note):
        summary = await run_training(config, view, options)
        return finish(Path(config.run.dir), summary)


async def rollout_with(config: Config, view: View, options: RolloutOptions) -> str:
    """Run and grade rollouts with a view of the progress and return the report. Raises InsituError."""
    await collect_rollouts(config, view, options)
    return (Path(config.run.dir) / REPORT).read_text(encoding="utf-8")


async def sft_with(config: Config, view: View, options: TrainOptions) -> str:
    """Imitate stored rollouts with a view of the progress and return the report. Raises InsituError."""
    await run_sft(config, view, options)
    return (Path(config.run.dir) / REPORT).read_text(encoding="utf-8")


async def train_async(
    config: ConfigSource = None,
    *,
    overrides: Overrides = (),
    resume: Path | str | None = None,
    progress: Progress = None,
    **tables: Any,
) -> Run:
    """Train and return the finished run; the coroutine form of `train`."""
    if str(resume or "").startswith("hub:"):
        resolved, found = await asyncio.to_thread(from_hub, str(resume), config, overrides, tables)
        resume = resolved.run.dir if found else None
    else:
        resolved = resolve(config, overrides, resume, tables, changeable=TRAINING)
    with viewing(progress, resolved) as view:
        await train_with(resolved, view, TrainOptions(resume=_path(resume)))
    return Run(resolved.run.dir)


def train(
    config: ConfigSource = None,
    *,
    overrides: Overrides = (),
    resume: Path | str | None = None,
    progress: Progress = None,
    **tables: Any,
) -> Run:
    """Train the configured model on the configured tasks and return the finished run.

    `config` is a Config, a TOML file, a mapping of tables, or a run directory of `serve` whose rewarded
    sessions are trained on instead of rollouts of an agent; keywords and then `overrides`
    (`{"run.steps": 8}`) win over it. A keyword is a table (`run={"steps": 8}`) or one of these:
    `agent` (name, path, command as a list, or Recipe), `model` (folder, or URL of a provider),
    `tasks` (list of Task, name or path of a source), `reward` (function or its path). `resume` continues a
    run directory, a finished one with `overrides={"run.steps": 16}`, and takes no other configuration.
    `progress` gets every RunEvent on the run's event loop and must return at once; True prints the progress
    that the command line shows. Raises InsituError.
    """
    return blocking(
        lambda: train_async(config, overrides=overrides, resume=resume, progress=progress, **tables)
    )


async def rollout_async(
    config: ConfigSource = None,
    *,
    n: int | None = None,
    overrides: Overrides = (),
    resume: Path | str | None = None,
    progress: Progress = None,
    **tables: Any,
) -> Run:
    """Run and grade rollouts without training; the coroutine form of `rollout`."""
    if n is not None:
        tables["rollout"] = {**tables.get("rollout", {}), "samples": n}
    if "tasks" in tables and not (isinstance(tables["tasks"], str | Path) or _is_table(tables["tasks"])):
        tables["tasks"] = {"source": tables["tasks"], "eval_share": 1.0}  # no task is held back
    resolved = resolve(config, overrides, resume, tables, changeable=CHANGEABLE)
    with viewing(progress, resolved) as view:
        await rollout_with(resolved, view, RolloutOptions(resume=_path(resume)))
    return Run(resolved.run.dir)


def rollout(
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
    return blocking(
        lambda: rollout_async(config, n=n, overrides=overrides, resume=resume, progress=progress, **tables)
    )


async def sft_async(
    run: Path | str | None = None,
    *,
    overrides: Overrides = (),
    resume: Path | str | None = None,
    progress: Progress = None,
    **tables: Any,
) -> Run:
    """Imitate the best stored rollouts of a run; the coroutine form of `sft`."""
    if run is None and resume is None:
        raise ConfigError("give the run directory with the rollouts to imitate, or resume")
    source = None if run is None else config_from_run(Path(run), "sft")
    resolved = resolve(source, overrides, resume, tables)
    with viewing(progress, resolved) as view:
        await sft_with(resolved, view, TrainOptions(resume=_path(resume)))
    return Run(resolved.run.dir)


def sft(
    run: Path | str | None = None,
    *,
    overrides: Overrides = (),
    resume: Path | str | None = None,
    progress: Progress = None,
    **tables: Any,
) -> Run:
    """Imitate the best stored rollouts of a run (supervised fine-tuning) and return the new run.

    `run` is the directory of any run with rewarded rollouts, whose configuration is used; `sft={...}` says
    which are imitated. The other arguments are those of `train`. Raises InsituError.
    """
    return blocking(lambda: sft_async(run, overrides=overrides, resume=resume, progress=progress, **tables))


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
) -> Config:
    """Return the configuration of a new run with its directory named, or the stored one of `resume`.

    `changeable`: keys that overrides of a resumed run may have.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides must be a mapping or a list of table.key=value, got {overrides!a}")
    if resume is not None:
        if config is not None or tables:
            raise ConfigError("a resumed run keeps its configuration: drop config and tables")
        return resumed_config(Path(resume), overrides, changeable)
    given = _expanded(tables)
    if isinstance(config, Config):
        return name_run(load_config(None, overrides, config.model_dump(), given))
    if isinstance(config, str | Path) and Path(config).is_dir():
        return name_run(load_config(None, overrides, config_from_run(Path(config), "collect"), given))
    if isinstance(config, str | Path):
        return name_run(load_config(Path(config), overrides, base, given))
    if not isinstance(config, Mapping | None):
        raise ConfigError(f"config must be a Config, a TOML file or a mapping of tables, got {config!a}")
    layers = [dict(base or {}), config or {}]
    return name_run(load_config(None, overrides, _merged(layers), given))


def from_hub(
    where: str,
    config: ConfigSource = None,
    overrides: Overrides = (),
    tables: Mapping[str, Any] | None = None,
) -> tuple[Config, bool]:
    """Fetch the run at hub:ORG/NAME and return its configuration and True.

    With a configuration, its `run.dir` is where the run is put, and where there is no run yet it is returned
    with False. Raises ConfigError, RecordError, SetupError.
    """
    given = None if config is None else resolve(config, overrides, None, tables or {})
    run = Path("runs", repo_of(where).rpartition("/")[2]) if given is None else Path(given.run.dir)
    if fetch_run(where, run):
        # With a configuration they are for a new run too: a job that is submitted again repeats them.
        return resumed_config(run, overrides, TRAINING, ignore_others=given is not None), True
    if given is None:
        raise RecordError(f"{where} has no checkpoint of a run")
    return given, False


def config_from_run(source: Path, table: Literal["collect", "sft"]) -> dict[str, Any]:
    """Return the configuration of a run whose rollouts another one takes, as tables.

    Raises RecordError when `source` is no run directory.
    """
    read_config(source)
    tables = read_tables(source)
    tables.setdefault("run", {})["dir"] = ""
    tables.setdefault(table, {})["run"] = str(source.absolute())
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
    return {"kind": kind, **({"urls": [url]} if kind in ("vllm", "sglang") else {"url": url})}


def _is_table(value: object) -> bool:
    """Return whether a value is a table, or a list of tables [[tasks]] rather than a list of tasks."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(one, Mapping) and "source" in one for one in value)
    return isinstance(value, Mapping)


def _path(path: Path | str | None) -> Path | None:
    return None if path is None else Path(path)


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
