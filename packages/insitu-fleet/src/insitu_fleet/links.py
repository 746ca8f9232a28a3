"""How the controller reaches a node: a child process of this machine, or (ray_link.py) one on another."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Protocol

from insitu.errors import EngineError
from insitu.storage.temp_dirs import scratch_folder
from insitu_train.channel.child import Child
from insitu_train.channel.rpc import Handler, RpcClient, RpcPeer

NODE = "insitu_fleet.node"


class Link(Protocol):
    """The way to one node, which can be opened again after the node was lost."""

    @property
    def name(self) -> str: ...

    async def open(self, handlers: Mapping[str, Handler], deadline_s: float) -> RpcPeer:
        """Start the node's process and connect to it. Raises EngineError."""

    async def explain(self, error: EngineError) -> EngineError:
        """Return a better error where the link has one, such as the last output of a dead process."""

    async def close(self, *, lost: bool) -> None:
        """End the node: it closes its agents and sandboxes, or is killed if it was lost."""


END_S = 15.0
"""Time for the agents and sandboxes of a node to end."""


class ProcessLink:
    """A node in a child process."""

    def __init__(self, name: str, lease_s: float, module: str = NODE) -> None:
        """Take the node's name, its lease, and the program of the node."""
        self.name, self._lease_s, self._module = name, lease_s, module
        self._child: Child | None = None
        self._channel: RpcClient | None = None
        self._files = ExitStack()

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.process.pid

    async def open(self, handlers: Mapping[str, Handler], deadline_s: float) -> RpcPeer:
        folder = self._files.enter_context(scratch_folder())
        arguments = ["--socket", str(folder / "socket"), "--lease-s", str(self._lease_s)]
        try:
            child = await Child.start(
                self._module, arguments, os.environ, folder / "socket", folder / "log", "process"
            )
            self._child, child.max_wait_s = child, END_S
            self._channel = await child.connect(deadline_s, handlers)
            return self._channel
        except BaseException:
            await self.close(lost=True)
            raise

    async def explain(self, error: EngineError) -> EngineError:
        return error if self._child is None else await self._child.explain(error)

    async def close(self, *, lost: bool) -> None:
        # Kept until they have ended: a close that was cancelled is repeated.
        if self._child is not None and lost:
            self._child.kill()
        if self._channel is not None:
            await self._channel.close()
        if self._child is not None:
            await self._child.end()
        self._child = self._channel = None
        self._files.close()
