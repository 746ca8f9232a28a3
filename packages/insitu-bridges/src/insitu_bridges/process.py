"""The rollout source in a process of its own: no trainer's torch, GIL or event loop is near the gateway.

    open_source -> SourceProcess --calls on a unix socket--> server.py -> RolloutSource
                       |                                                     |
                       +<------------- rollouts, from the run's store -------+

The child ends when its client disconnects, hence also when the parent is killed: its agents and sandboxes end
first. When the child dies, waiting and later calls fail with its last output.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from insitu.config import Config, dump_toml, load_config
from insitu.errors import ConfigError, EngineError
from insitu.runtime.preflight import open_mix
from insitu.storage.files import write_text
from insitu.storage.run_dir import name_run, read_store
from insitu.storage.temp_dirs import scratch_folder
from insitu.tasks.base import Split
from insitu.types import Group, Rollout
from insitu_train.channel.child import Child
from insitu_train.channel.rpc import Frame, Meta, RpcClient

END_S = 60.0
"""Most time for agents, sandboxes and the engine to end."""
DAY_S = 86400.0
"""Deadline of rollouts: the run's own limits end them before."""
WEIGHTS = "weights"


def weights_folder(run_dir: Path, version: int) -> Path:
    """Return the folder of a run where a trainer writes the weights of a version."""
    return run_dir / WEIGHTS / f"v{version:06d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """Groups for one step of a trainer."""

    step: int
    """Number of the hand-over, from 1."""
    version: int
    """Policy version of the trainer when it was handed over."""
    groups: tuple[Group, ...]


def read(config: Config | Path | str) -> Config:
    """Return a configuration, or that of a TOML file."""
    return config if isinstance(config, Config) else load_config(Path(config))


def read_named(overrides: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """Return the configuration that the environment variable INSITU_CONFIG names; raise ConfigError."""
    path = os.environ.get("INSITU_CONFIG")
    if not path:
        raise ConfigError("the environment variable INSITU_CONFIG must name insitu's configuration")
    return load_config(Path(path), overrides)


def task_ids(config: Config | Path | str, count: int, *, split: Split = "train", start: int = 0) -> list[str]:
    """Return ids of tasks, as prompts of another trainer's data set; of held-out ones at most all.

    Raises InsituError.
    """
    mix = open_mix(read(config))
    size = mix.size(split)
    if split == "eval" and size is not None:
        count = min(count, size - start)
    return [task.id for task in mix.tasks(split, start, count)]


class SourceProcess:
    """A rollout source in a child process, with the methods of `source.RolloutSource`; see `open_source`."""

    def __init__(self, child: Child, channel: RpcClient, config: Config) -> None:
        self._child, self._channel, self._config = child, channel, config
        self.run_dir = Path(config.run.dir)

    @property
    def pid(self) -> int:
        return self._child.process.pid

    async def run(self, task: str, key: int, *, evaluation: bool = False) -> Rollout:
        """Run and grade a task; see RolloutSource. Cancelling it ends the agent."""
        meta: Meta = {"task": task, "key": key, "evaluation": evaluation}
        frame = await self._call("source.run", meta, DAY_S)
        return await asyncio.to_thread(self._rollout, frame.meta["rollout"])

    async def next(self) -> RolloutBatch:
        """Return the next groups; see RolloutSource."""
        frame = await self._call("source.next", {}, DAY_S)
        return await asyncio.to_thread(self._batch, frame.meta)

    async def batches(self) -> AsyncIterator[RolloutBatch]:
        """Yield batches without end."""
        while True:
            yield await self.next()

    async def pause(self, version: int) -> None:
        """Start no attempt until `version` is in the engine."""
        await self._call("source.pause", {"version": version})

    async def load(self, version: int) -> None:
        """Load weights that were written for a version; see RolloutSource."""
        await self._call("source.load", {"version": version}, self._config.train.step_timeout_s)

    async def version(self, version: int) -> None:
        """Handle a version that the trainer has brought into the engine."""
        await self._call("source.version", {"version": version})

    async def check(self) -> None:
        """Raise EngineError with the cause when the child is dead."""
        if not self._channel.alive:
            raise await self._child.explain(EngineError("the connection to the rollout source ended"))

    async def _call(self, op: str, meta: Meta, deadline_s: float = 60.0) -> Frame:
        try:
            return await self._channel.call(op, meta, deadline_s=deadline_s)
        except EngineError as error:
            raise await self._child.explain(error) from error

    def _rollout(self, name: str) -> Rollout:
        with read_store(self.run_dir) as store:
            return store.rollout(name)

    def _batch(self, meta: Mapping[str, Any]) -> RolloutBatch:
        with read_store(self.run_dir) as store:
            groups = tuple(
                Group(id=name, task_id=task, rollouts=tuple(store.rollout(each) for each in members))
                for name, task, members in meta["groups"]
            )
        return RolloutBatch(step=meta["step"], version=meta["version"], groups=groups)


@asynccontextmanager
async def open_source(config: Config | Path | str) -> AsyncIterator[SourceProcess]:
    """Run a rollout source in a child process inside the context.

    `run.dir` is its run directory, a new one by default. Raises InsituError: what the child raised when it
    started, in one line.
    """
    config = name_run(read(config))
    with scratch_folder() as folder:
        write_text(folder / "config.toml", dump_toml(config))
        arguments = ["--socket", str(folder / "socket"), "--config", str(folder / "config.toml")]
        child = await Child.start(
            "insitu_bridges.server",
            arguments,
            os.environ,
            folder / "socket",
            folder / "log",
            "rollout source",
        )
        child.max_wait_s = END_S
        try:
            channel = await child.connect(config.train.step_timeout_s)
            try:
                await channel.call("source.open", deadline_s=config.train.step_timeout_s)
                yield SourceProcess(child, channel, config)
            except EngineError as error:
                raise await child.explain(error) from error
            finally:
                await channel.close()
        finally:
            await child.end()
