"""Nodes on the machines of a Ray cluster: one actor each, which starts the node and passes its bytes on.

    controller --NodeRelay.put--> actor --unix socket--> node
               <--NodeRelay.take- actor <--------------- node

Ray finds the machines, starts processes on them and notices their death; everything else is as with child
processes. Nothing here outlives its use by more than the lease: a node whose actor is gone ends by itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from insitu.config.fleet import FleetTable
from insitu.errors import EngineError, SetupError
from insitu.install_hints import install_extra
from insitu_fleet.links import END_S, NODE, Link
from insitu_train.channel.rpc import Handler, RpcPeer

try:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    ray = None

from insitu_fleet import ray_relay

T = TypeVar("T")
REACH_S = 10.0
HEAD_S = 5.0
"""Most time for an answer of the cluster's head; after 60 s without one Ray ends this process."""
TOKEN_HINT = "a head with ~/.ray/auth_token asks for it: set RAY_AUTH_MODE=token here, with the same file"
CLOSE_S, LOST_S = END_S + 5.0, 3.0
"""Most time to wait for the actor of a node that ends, and of one that is lost."""


class RayMachines:
    """The machines of a cluster that are alive, and which of them have a node."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._home = ray.get_runtime_context().get_node_id()
        """The controller's own machine, without which Ray starts nothing."""

    async def alive(self) -> list[tuple[str, str]]:
        """Return id and name of every machine, in a stable order. Raises EngineError."""
        found = [
            (str(node["NodeID"]), f"{node['NodeManagerHostname']}-{str(node['NodeID'])[:6]}")
            for node in await _ask(ray.nodes)
            if node["Alive"]
        ]
        return sorted(found, key=lambda pair: pair[1])

    async def take(self) -> tuple[str, str]:
        """Return a machine without a node. Raises EngineError if there is none."""
        alive = await self.alive()
        if self._home not in dict(alive):
            raise EngineError("the Ray of the controller's machine is dead")
        for machine, name in alive:
            if machine not in self._taken:
                self._taken.add(machine)
                return machine, name
        raise EngineError("no machine of the Ray cluster is free for it")

    def give_back(self, machine: str) -> None:
        self._taken.discard(machine)


class RayLink:
    """A node on a machine of the cluster; on another one after that was lost."""

    def __init__(self, machines: RayMachines, number: int, table: FleetTable, module: str) -> None:
        self.name = f"r{number}"
        self._machines, self._table, self._module = machines, table, module
        self._machine = ""
        self._actor: Any = None
        self._pump: asyncio.Task[None] | None = None
        self._peer: RpcPeer | None = None

    async def open(self, handlers: Mapping[str, Handler], deadline_s: float) -> RpcPeer:
        self._machine, where = await self._machines.take()
        self.name = f"{self.name.partition(' ')[0]} at {where}"
        strategy = NodeAffinitySchedulingStrategy(node_id=self._machine, soft=False)
        # No CPUs: an actor must not wait for what a trainer on the same cluster holds.
        options = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": 16}
        kind = ray.remote(ray_relay.NodeRelay).options(**options, scheduling_strategy=strategy)
        self._actor = kind.remote()
        arguments = ["-m", self._module, "--lease-s", str(self._table.lease_s)]
        try:
            async with asyncio.timeout(deadline_s):
                trouble = await self._actor.open.remote(arguments, deadline_s)
        except TimeoutError as error:
            await self.close(lost=True)
            raise EngineError(f"Ray did not start it within {deadline_s:g} s") from error
        except RayError as error:
            await self.close(lost=True)
            raise EngineError(f"Ray cannot start it: {one_line(error)}") from error
        if trouble:
            await self.close(lost=True)
            raise EngineError(trouble)
        peer = RpcPeer("process", handlers)
        numbers, actor = itertools.count(), self._actor
        peer.attach(lambda data: actor.put.remote(next(numbers), data))
        self._peer, self._pump = peer, asyncio.create_task(_pump(actor, peer))
        return peer

    async def explain(self, error: EngineError) -> EngineError:
        return error

    async def close(self, *, lost: bool) -> None:
        actor, self._actor = self._actor, None
        pump, self._pump = self._pump, None
        if pump is not None:
            pump.cancel()
        if self._peer is not None:  # a call after the end would connect to Ray again
            self._peer.end("the connection was closed")
        if actor is not None:
            # Of a lost node too: where only its process has stopped, the actor can still kill it.
            with contextlib.suppress(RayError, TimeoutError):
                async with asyncio.timeout(LOST_S if lost else CLOSE_S):
                    await actor.close.remote(0.0 if lost else END_S)
            with contextlib.suppress(EngineError):
                await _ask(lambda: ray.kill(actor, no_restart=True))
        self._machines.give_back(self._machine)


async def _ask(call: Callable[[], T], deadline_s: float = HEAD_S) -> T:
    """Return the result of a call that blocks while Ray's head does not answer. Raises EngineError."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(call())
        except (RayError, RuntimeError, OSError) as error:
            done.set_exception(EngineError(one_line(error)))

    # A daemon: with asyncio.to_thread a blocked call would keep this process from its end.
    threading.Thread(target=run, daemon=True).start()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(done), deadline_s)
    except TimeoutError as error:
        raise EngineError("the head of the Ray cluster does not answer") from error


async def _pump(actor: Any, peer: RpcPeer) -> None:
    """Feed the peer with what the actor passes on, until the node or its machine is gone."""
    try:
        while True:
            data, trouble = await actor.take.remote()
            if trouble:
                peer.end(trouble)
                return
            peer.feed(data)
    except RayError as error:
        # Unavailable counts as lost: its answer may never come.
        peer.end(f"Ray lost it: {one_line(error)}")
    except EngineError as error:
        peer.end(str(error))


def one_line(error: Exception) -> str:
    """Return the beginning of an error's words, which Ray writes over many lines."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:200]}"


def connect_error(error: Exception) -> str:
    """Return in one line why Ray does not connect, which its error does not say of a missing token."""
    refused = isinstance(error, ConnectionError) and "Could not find" not in str(error)
    return f"{one_line(error)}; {TOKEN_HINT}" if refused else one_line(error)


async def _check_reachable(address: str) -> None:
    """Raise SetupError if nothing listens at host:port; Ray itself would try for a minute."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(REACH_S):
            _, writer = await asyncio.open_connection(host, int(port))
        writer.close()
    except (OSError, TimeoutError) as error:
        raise SetupError(f"fleet.address {address}: no Ray cluster answers: {one_line(error)}") from error


@asynccontextmanager
async def ray_links(table: FleetTable, module: str = NODE) -> AsyncIterator[Sequence[Link]]:
    """Connect to the cluster and return a link for each node, which runs `module`. Raises SetupError."""
    if ray is None:
        raise SetupError(f"fleet.kind ray: ray is not installed: {install_extra('ray')}")
    ray.cloudpickle.register_pickle_by_value(ray_relay)
    logging.getLogger("ray").setLevel(logging.ERROR)
    await _check_reachable(table.address)
    # In a thread: in the main one it would replace the handler of SIGTERM.
    try:
        await asyncio.to_thread(
            ray.init,
            address=table.address,
            namespace="insitu",
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.ERROR,
        )
    except (RayError, RuntimeError, ValueError, OSError) as error:
        if table.address == "auto" and "Could not find" in str(error):
            hint = "no Ray cluster runs on this machine: start one with `ray start --head`"
            raise SetupError(f"fleet.address auto: {hint}") from error
        raise SetupError(f"fleet.address {table.address}: {connect_error(error)}") from error
    try:
        machines = RayMachines()
        found = await machines.alive()
        count = table.nodes or len(found)
        if count > len(found):
            names = ", ".join(name for _, name in found)
            raise SetupError(
                f"fleet.nodes = {count}, but the Ray cluster at {table.address} has {len(found)} machines:"
                f" {names}"
            )
        yield [RayLink(machines, number, table, module) for number in range(count)]
    finally:
        with contextlib.suppress(EngineError):
            await _ask(ray.shutdown, REACH_S)
