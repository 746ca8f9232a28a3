"""The controller's side of a fleet: chooses a node for each attempt, and notices nodes that are lost.

    Collector -> FleetAttempts.run -> free node --attempt.run--> finished attempt -> run directory
                                          |
                 lost: its attempts are infrastructure failures, which the collector repeats elsewhere

Ids, admission, ledger and storage stay here. An attempt is decided by the reply to its own call: what a lost
node still sends is dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from insitu._version import __version__
from insitu.agents.base import loop_time
from insitu.backoff import backoff_s
from insitu.collect.breaker import LOST
from insitu.config import Config, dump_toml, model_folder
from insitu.config.fleet import FleetTable
from insitu.engines.base import Engine
from insitu.errors import EngineError, InsituError, SetupError
from insitu.storage.run_dir import RunDir
from insitu.storage.temp_dirs import remove_stale_scratch
from insitu.tasks.base import TaskSource
from insitu_fleet.attempts import FleetAttempts, Gate
from insitu_fleet.engine import EngineCalls
from insitu_fleet.links import Link, ProcessLink
from insitu_train.channel.installed import code_identity
from insitu_train.channel.rpc import NOTHING, Array, Frame, Meta, RpcPeer

START_S = 300.0
"""Timeout of a node's start: the first one on a machine unpacks agents there."""
STARTS = 5
"""Failed starts in a row after which a node is given up."""
PAUSE_S = 1.0
"""Before the second start."""
WEIGHTS = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf"))
GARBAGE = 50_000
"""New objects after which Python looks for cycles. A finished rollout is read through some hundred lists
without any; with Python's 700 the objects of open sessions would be searched for each."""
Key = tuple[str, int]
"""Rollout id and attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStats:
    """Counters of a session that a view shows."""

    sampled_tokens: int
    doing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSession:
    """A session on a node, as of its last beat."""

    public_id: str
    rollout_id: str
    stats: RemoteStats


@dataclass(slots=True, eq=False)
class FleetNode:
    """One node as the controller sees it."""

    link: Link
    peer: RpcPeer | None = None
    """None while it is being started."""
    running: int = 0
    starts: int = 0
    losses: int = 0
    late: int = 0
    """Answers that came after the node was lost, or after their call was given up."""
    lost_tokens: int = 0
    """Tokens that attempts of lost nodes had sampled at their last beat; they are in no ledger."""
    gone: str = ""
    """Why it is started no more."""
    failures: int = 0
    """Failed starts in a row."""
    beating: asyncio.Task[None] | None = None
    lags: Mapping[Key, float] = field(default_factory=dict)
    """Seconds by which the clock of an attempt is behind, because its calls waited for the engine."""
    sessions: Sequence[RemoteSession] = ()

    @property
    def up(self) -> bool:
        """Whether it takes attempts."""
        return self.peer is not None and self.peer.alive

    def loss(self, error: EngineError) -> str:
        """Return the cause of all attempts that ended with this start of the node."""
        return f"{LOST}{self.link.name}, start {self.starts}: {error}"


class Fleet:
    """Nodes and their places; use `open_fleet`."""

    def __init__(
        self,
        config: Config,
        links: Sequence[Link],
        engine: Engine,
        source: TaskSource,
        agents: tuple[str, str],
        say: Callable[[str], None],
    ) -> None:
        """Take links that are not open; `say` gets lines for the user."""
        self.nodes = [FleetNode(link) for link in links]
        self.config, self.source, self.agents = config, source, agents
        self.gates: dict[Key, Gate] = {}
        """Of the attempts on all nodes."""
        self._engine, self._say = EngineCalls(engine), say
        self._places = config.harness.workers
        self._queue: deque[asyncio.Future[FleetNode]] = deque()
        """Attempts that wait for a node, in order."""
        self._keeping: list[asyncio.Task[None]] = []
        self._threshold = gc.get_threshold()

    def attempts(self, run: RunDir) -> FleetAttempts:
        """Return the runner of attempts, which keeps logs, artifacts and host calls in the run."""
        return FleetAttempts(self, run)

    def open_sessions(self) -> Sequence[RemoteSession]:
        """Return the sessions of all nodes."""
        return [session for node in self.nodes for session in node.sessions]

    def gauges(self) -> Mapping[str, int]:
        """Return the state of the fleet in numbers."""
        return {
            "nodes": sum(node.up for node in self.nodes),
            "nodes_lost": sum(node.losses for node in self.nodes),
            "late_answers": sum(node.late + (node.peer.late if node.peer else 0) for node in self.nodes),
            "lost_tokens": sum(node.lost_tokens for node in self.nodes),
        }

    # ------------------------------------------------------------------ places

    @asynccontextmanager
    async def place(self) -> AsyncIterator[FleetNode]:
        """Wait for a place on a node and hold it inside the context. Raises SetupError if no node is left."""
        taken: asyncio.Future[FleetNode] = asyncio.get_running_loop().create_future()
        self._queue.append(taken)
        self._assign()
        try:
            node = await taken
        except asyncio.CancelledError:
            if taken.done() and not taken.cancelled() and taken.exception() is None:
                self._leave(taken.result())
            raise
        try:
            yield node
        finally:
            self._leave(node)

    def _leave(self, node: FleetNode) -> None:
        node.running -= 1
        self._assign()

    def _assign(self) -> None:
        """Give free places to the attempts that wait longest."""
        while self._queue:
            free = [node for node in self.nodes if node.running < self._places and node.up]
            if not free and not all(node.gone for node in self.nodes):
                return
            waiting = self._queue.popleft()
            if waiting.done():
                continue
            if free:
                node = min(free, key=lambda one: one.running)
                node.running += 1
                waiting.set_result(node)
            else:
                gone = "; ".join(f"{node.link.name}: {node.gone}" for node in self.nodes)
                waiting.set_exception(SetupError(f"no node of the fleet is left: {gone}"))

    # ------------------------------------------------------------------ nodes

    async def start(self) -> None:
        """Start all nodes. Raises SetupError with the first one that cannot start."""
        gc.set_threshold(GARBAGE)
        starting = [asyncio.create_task(self._start(node)) for node in self.nodes]
        try:
            await asyncio.gather(*starting)
        except InsituError as error:
            raise error if isinstance(error, SetupError) else SetupError(str(error)) from error
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        self._keeping = [asyncio.create_task(self._keep(node)) for node in self.nodes]

    async def check(self) -> Sequence[tuple[str, str, bool]]:
        """Start every node and an agent there; return its name, what was found, and whether it works."""

        async def one(node: FleetNode) -> tuple[str, str, bool]:
            try:
                await self._start(node)
                if node.peer is None:
                    raise EngineError("it is not connected")
                meta = (await node.peer.call("node.check", deadline_s=START_S)).meta
            except InsituError as error:
                return node.link.name, str(error).removeprefix(f"node {node.link.name}: "), False
            size = f"{meta['cores']} cores, {meta['memory_gib']} GiB"
            found = f"{meta['host']}, {size}, insitu {__version__}; started {meta['agents']}"
            return node.link.name, found, True

        return await asyncio.gather(*(one(node) for node in self.nodes))

    async def close(self) -> None:
        """End all nodes: their agents and sandboxes end first."""
        gc.set_threshold(*self._threshold)
        tasks = [*self._keeping, *(node.beating for node in self.nodes if node.beating is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(node.link.close(lost=False) for node in self.nodes), return_exceptions=True)

    async def _start(self, node: FleetNode) -> None:
        """Start a node and open what attempts need there. Raises InsituError that names it."""
        node.starts += 1
        try:
            peer = await node.link.open({"attempt.ready": partial(self._ready, node)}, START_S)
            peer.handlers |= self._engine.handlers(peer)
            node.beating = asyncio.create_task(self._beat(node, peer))
            meta, files = await asyncio.to_thread(opening, self.config)
            meta["engine"] = self._engine.info()
            await peer.call("node.open", meta, files, deadline_s=START_S)
        except InsituError as error:
            cause = await node.link.explain(error) if isinstance(error, EngineError) else error
            await self._end(node)
            raise type(cause)(f"node {node.link.name}: {cause}") from error
        except BaseException:
            await self._end(node)
            raise
        node.peer, node.failures = peer, 0
        self._assign()

    async def _end(self, node: FleetNode) -> None:
        """End a node that is lost or did not start."""
        if node.beating is not None:
            node.beating.cancel()
        await node.link.close(lost=True)
        # of a process of this machine: its sandboxes have died with it
        await asyncio.to_thread(remove_stale_scratch)

    async def _keep(self, node: FleetNode) -> None:
        """Start the node again whenever it is lost."""
        while not node.gone:
            if node.peer is not None and node.beating is not None:
                await asyncio.wait({node.beating})
                await self._lose(node, node.peer)
            try:
                await self._start(node)
            except InsituError as error:
                node.failures += 1
                if node.failures < STARTS:
                    await asyncio.sleep(backoff_s(node.failures, PAUSE_S))
                else:
                    node.gone = str(error).removeprefix(f"node {node.link.name}: ")
                    self._say(f"the fleet goes on without a node: {error}")
                    self._assign()

    async def _beat(self, node: FleetNode, peer: RpcPeer) -> None:
        """Renew the node's lease until its connection ends; end it when the node does not answer."""
        fleet = self.config.fleet
        while peer.alive:
            try:
                frame = await peer.call("node.beat", deadline_s=fleet.lost_s)
            except EngineError as error:
                peer.end(str(error))
                return
            node.lags = {(name, attempt): lag for name, attempt, lag in frame.meta["lags"]}
            node.sessions = [
                RemoteSession(
                    public_id=public_id,
                    rollout_id=rollout_id,
                    stats=RemoteStats(sampled_tokens=tokens, doing=doing),
                )
                for public_id, rollout_id, tokens, doing in frame.meta["sessions"]
            ]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(peer.ended.wait(), fleet.beat_s)

    async def _lose(self, node: FleetNode, peer: RpcPeer) -> None:
        """Take a node out whose connection has ended; its attempts end with it."""
        error = await node.link.explain(peer.gone)
        again = f"; its {node.running} attempts are repeated" if node.running else ""
        self._say(f"{node.loss(error)}{again}")
        node.losses += 1
        node.lost_tokens += sum(session.stats.sampled_tokens for session in node.sessions)
        node.peer, node.sessions, node.lags = None, (), {}
        await self._end(node)
        node.late += peer.late

    async def _ready(self, node: FleetNode, call: Frame) -> Frame:
        """Let a node begin an attempt when the collector does."""
        rollout_id, attempt = key = tuple(call.meta["key"])
        gate = self.gates.get(key)
        if gate is None:
            raise EngineError(f"{rollout_id}, attempt {attempt}: the collector has given it up")
        await gate.ready()
        gate.on_start(lambda: loop_time() - node.lags.get(key, 0.0))
        return NOTHING


def opening(config: Config) -> tuple[Meta, Mapping[str, Array]]:
    """Return what a node needs once: the configuration, and the model's files except its weights."""
    alone = config.model_copy(update={"fleet": FleetTable()})
    meta: Meta = {"config": dump_toml(alone), "cwd": str(Path.cwd()), "insitu": code_identity()}
    files = {
        file.name: np.frombuffer(file.read_bytes(), dtype=np.uint8)
        for file in sorted(model_folder(config).iterdir())
        if file.is_file() and file.suffix not in WEIGHTS
    }
    return meta, files


@asynccontextmanager
async def open_links(table: FleetTable) -> AsyncIterator[Sequence[Link]]:
    """Return a link for each node. Raises SetupError."""
    if table.kind == "ray":
        from insitu_fleet.ray_link import ray_links

        async with ray_links(table) as links:
            yield links
    else:
        yield [ProcessLink(f"p{number}", table.lease_s) for number in range(table.nodes)]


@asynccontextmanager
async def open_fleet(
    config: Config, engine: Engine, source: TaskSource, agents: tuple[str, str], say: Callable[[str], None]
) -> AsyncIterator[Fleet]:
    """Run the nodes of [fleet] inside the context; `say` gets lines for the user.

    Raises ConfigError, and SetupError if a node cannot start.
    """
    async with open_links(config.fleet) as links:
        fleet = Fleet(config, links, engine, source, agents, say)
        try:
            await fleet.start()
            yield fleet
        finally:
            await fleet.close()
