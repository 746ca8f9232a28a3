"""A node of a fleet: the process that runs attempts with its own gateway, agents, sandboxes and grader.

    controller --node.open, node.beat, attempt.run, attempt.stop--> node
    controller <--attempt.ready, engine.generate------------------- node

It is the code of a local run with another engine and task source. It ends when the connection ends or when
its lease is over, agents and sandboxes first. Run as `python -m insitu_fleet.node --socket PATH
--lease-s SECONDS`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import platform
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from insitu.agents.base import Clock, loop_time
from insitu.attempt import AttemptSpec
from insitu.chat.load import load_renderer
from insitu.config import Config, load_config
from insitu.errors import InsituError, SetupError, TaskError
from insitu.gateway.token_backend import TokenBackend
from insitu.runtime.agents import find_setups
from insitu.runtime.run import Runtime, open_runtime
from insitu.shutdown import hard_exit
from insitu.storage.temp_dirs import remove_stale_scratch, scratch_folder
from insitu.tasks.base import Split
from insitu.types import Oracle, Rollout, Task
from insitu_fleet.engine import RemoteEngine
from insitu_fleet.values import pack, unpack
from insitu_train.channel.installed import code_identity
from insitu_train.channel.parent_watch import child_parser, main_of_child
from insitu_train.channel.rpc import NOTHING, Frame, RpcPeer, serve_peer

log = logging.getLogger(__name__)

NO_CLIENT_S = 60.0
"""The process ends when no controller connects for so long."""
END_S = 8.0
"""Time to end agents and sandboxes; then every process below is killed."""
DAY_S = 86400.0
"""Deadline of calls that have limits of their own."""
MAX_TASKS = 1024
"""Tasks whose oracles are kept, the latest used."""
Key = tuple[str, int]
"""Rollout id and attempt."""


@dataclass(slots=True, kw_only=True)
class _Kept:
    """What an attempt leaves for the run directory, and its clock."""

    clock: Clock = loop_time
    log: bytes | None = None
    artifacts: Mapping[str, bytes] = field(default_factory=dict)
    calls: Sequence[Mapping[str, object]] = ()
    partial: Rollout | None = None


class SentTasks:
    """The oracles that came with attempts; implements `tasks.base.TaskSource` for the grader."""

    name = "fleet"

    def __init__(self) -> None:
        self._held: OrderedDict[str, tuple[Oracle, Mapping[str, Any]]] = OrderedDict()

    def add(self, task: Task, oracle: Oracle, row: Mapping[str, Any]) -> None:
        """Keep what grading needs of a task."""
        self._held[task.content_hash] = (oracle, row)
        self._held.move_to_end(task.content_hash)
        while len(self._held) > MAX_TASKS:
            self._held.popitem(last=False)

    def size(self, split: Split) -> int | None:
        return 0

    def tasks(self, split: Split, start: int, count: int) -> Sequence[Task]:
        return ()

    def oracle(self, task: Task) -> Oracle:
        if task.content_hash not in self._held:
            raise TaskError(f"{task.id} was not sent to this node")
        return self._held[task.content_hash][0]

    def row(self, task: Task) -> Mapping[str, Any]:
        return self._held[task.content_hash][1] if task.content_hash in self._held else {}


class Node:
    """Answers the controller."""

    def __init__(self) -> None:
        self.asked: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        """The call `node.open`."""
        self.opened: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self.controller = RpcPeer("the controller", {"node.open": self._open, "node.beat": self._beat})
        self._runtime: Runtime
        self._source = SentTasks()
        self._running: dict[Key, tuple[asyncio.Task[Rollout], _Kept]] = {}

    @asynccontextmanager
    async def runtime(self, call: Frame) -> AsyncIterator[None]:
        """Run what attempts need inside the context. Raises InsituError."""
        with contextlib.suppress(OSError):  # relative paths of the configuration
            os.chdir(call.meta["cwd"])
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(scratch_folder())
            for name, content in call.arrays.items():
                (folder / Path(name).name).write_bytes(content.tobytes())
            config = _config(call.meta["config"], folder)
            renderer = await asyncio.to_thread(load_renderer, folder, config.model.renderer)
            engine = RemoteEngine(self.controller, call.meta["engine"], DAY_S)
            setups = await asyncio.to_thread(find_setups, config.arms)
            self._runtime = await stack.enter_async_context(
                open_runtime(config, TokenBackend(engine, renderer), self._source, setups)
            )
            self.controller.handlers |= {
                "attempt.run": self._run,
                "attempt.stop": self._stop,
                "node.check": self._check,
            }
            yield

    async def _open(self, call: Frame) -> Frame:
        here, there = await asyncio.to_thread(code_identity), call.meta["insitu"]
        if here != there:
            raise SetupError(f"has insitu {here}, the controller {there}")
        if not self.asked.done():
            self.asked.set_result(call)
        return await asyncio.shield(self.opened)

    async def _beat(self, call: Frame) -> Frame:
        now = loop_time()
        sessions = self._runtime.gateway.open_sessions() if self._running else []
        return Frame(
            meta={
                "lags": [[*key, now - kept.clock()] for key, (_, kept) in self._running.items()],
                "sessions": [
                    [one.public_id, one.rollout_id, one.stats.sampled_tokens, one.stats.doing]
                    for one in sessions
                ],
            }
        )

    async def _check(self, call: Frame) -> Frame:
        """Start an agent in a sandbox and return what the node is."""
        async with self._runtime.workers.lease():
            pass
        agents, versions = self._runtime.agents
        return Frame(
            meta={
                "host": platform.node(),
                "cores": os.cpu_count(),
                "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
                "agents": f"{agents} {versions}",
            }
        )

    async def _run(self, call: Frame) -> Frame:
        spec, oracle, row = await asyncio.to_thread(unpack, call)
        self._source.add(spec.task, oracle, row)
        key, kept = (spec.rollout_id, spec.attempt), _Kept()
        attempt = asyncio.create_task(self._attempt(spec, kept))
        self._running[key] = attempt, kept
        try:
            rollout = await attempt
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if kept.partial is None or (current is not None and current.cancelling()):
                raise
            rollout = kept.partial
        finally:
            del self._running[key]
        return await asyncio.to_thread(pack, rollout, kept.log, kept.artifacts, kept.calls)

    async def _attempt(self, spec: AttemptSpec, kept: _Kept) -> Rollout:
        def on_start(clock: Clock = loop_time, /) -> None:
            kept.clock = clock

        def on_cancelled(rollout: Rollout) -> None:
            kept.partial = rollout

        def keep_log(rollout: Rollout, output: bytes) -> None:
            kept.log = output

        def keep_artifacts(rollout: Rollout, artifacts: Mapping[str, bytes]) -> None:
            kept.artifacts = artifacts

        def keep_calls(rollout_id: str, attempt: int, calls: Sequence[Mapping[str, object]]) -> None:
            kept.calls = calls

        async def ready() -> None:
            key = [spec.rollout_id, spec.attempt]
            await self.controller.call("attempt.ready", {"key": key}, deadline_s=DAY_S)

        executor = self._runtime.executor(keep_log, keep_artifacts, keep_calls)
        return await executor.run(spec, on_start, on_cancelled, ready)

    async def _stop(self, call: Frame) -> Frame:
        """Cancel an attempt: `attempt.run` then answers with what there is."""
        rollout_id, attempt = call.meta["key"]
        if (rollout_id, attempt) in self._running:
            self._running[rollout_id, attempt][0].cancel()
        return NOTHING


def _config(text: str, folder: Path) -> Config:
    """Return the controller's configuration with the model files that came with it."""
    file = folder / "config.toml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, {"model.path": str(folder), "fleet.kind": "none", "run.dir": ""})


async def _offer(node: Node) -> None:
    """Open the runtime and answer until the connection ends; a failed start is the answer to `node.open`."""
    controller = node.controller
    call = await node.asked
    try:
        async with node.runtime(call):
            node.opened.set_result(NOTHING)
            await controller.ended.wait()
            _kill_later()
            await controller.answered()
    except InsituError as error:
        if node.opened.done():
            raise
        node.opened.set_exception(error)
        await controller.ended.wait()


def _kill_later() -> None:
    """Kill everything if the end takes too long."""
    timer = threading.Timer(END_S, hard_exit)
    timer.daemon = True
    timer.start()


async def _watch_lease(controller: RpcPeer, lease_s: float) -> None:
    """End the connection once the controller has been silent for the lease."""
    # Polled, not an event: every received byte renews the lease.
    while (left_s := controller.heard_s + lease_s - loop_time()) > 0:  # noqa: ASYNC110
        await asyncio.sleep(left_s)
    line = f"lease over: the controller did not call for {lease_s:g} s"
    log.warning("%s", line)
    controller.end(line)


async def _main(socket: Path, lease_s: float) -> None:
    node, connected = Node(), asyncio.Event()
    controller = node.controller

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await serve_peer(controller, reader, writer)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, controller.end, "the node was terminated")
    remove_stale_scratch()
    async with await asyncio.start_unix_server(serve, socket):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(connected.wait(), NO_CLIENT_S)
            lease = asyncio.create_task(_watch_lease(controller, lease_s))
            offering = asyncio.create_task(_offer(node))
            ended = asyncio.create_task(controller.ended.wait())
            await asyncio.wait({offering, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not node.opened.done():  # else it ends by itself
                offering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await offering
            for task in (lease, ended):
                task.cancel()


def main(argv: Sequence[str]) -> int:
    """Return 0, or 1 with one line on standard error."""
    parser = child_parser("insitu_fleet.node", __doc__, socket=Path, lease_s=float)

    def run(args: argparse.Namespace) -> None:
        asyncio.run(_main(args.socket, args.lease_s))

    return main_of_child(parser, run, argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
