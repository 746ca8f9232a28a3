"""A child process that answers on a socket: start, connect, explain its death, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from insitu.errors import EngineError, boundary
from insitu.registry import SATELLITES
from insitu.storage.files import last_lines
from insitu_train.channel.parent_watch import DUMP
from insitu_train.channel.rpc import Handler, RpcClient

log = logging.getLogger(__name__)

_DUMP_EVERY_S = 60.0
"""Many calls are late at once."""


def python_path() -> str:
    """Return where a child finds insitu's packages, whatever its working directory is."""
    specs = map(find_spec, ("insitu", *(f"insitu_{name}" for name in SATELLITES)))
    own = [str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin]
    return os.pathsep.join(dict.fromkeys([*own, *filter(None, [os.environ.get("PYTHONPATH")])]))


class Child:
    """A child process that answers on a socket, a learner if not said otherwise, and its standard error."""

    def __init__(
        self, process: asyncio.subprocess.Process, socket: Path, log: Path, name: str = "learner"
    ) -> None:
        self.process, self._socket, self._log, self._name = process, socket, log, name
        self.connected: Callable[[], bool] = lambda: False
        self.max_wait_s = 5.0
        """Time for a clean exit."""
        self._started = log.stat().st_size
        self._dumped, self._dumped_s = "", -math.inf
        """What to add to an error after the stacks were written."""

    @classmethod
    async def start(
        cls,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        socket: Path,
        log: Path,
        name: str = "learner",
    ) -> Child:
        """Run a module of insitu, which listens at `socket`; `name` stands in error messages."""
        with boundary(EngineError, f"start the {name}"):
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    # -P: do not import from the working directory
                    *(sys.executable, "-P", "-m", module, *arguments),
                    env={**environment, "PYTHONPATH": python_path()},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            return cls(process, socket, log, name)

    @property
    def killed(self) -> bool:
        """Whether it ended by a signal."""
        return (self.process.returncode or 0) < 0

    async def connect(self, deadline_s: float, handlers: Mapping[str, Handler] | None = None) -> RpcClient:
        """Return the channel, which answers the child's calls by `handlers`.

        Raises EngineError as soon as the child has died.
        """
        dead = asyncio.ensure_future(self.process.wait())
        opened = asyncio.ensure_future(
            RpcClient.connect(self._socket, deadline_s=deadline_s, peer=self._name, handlers=handlers)
        )
        try:
            await asyncio.wait({dead, opened}, return_when=asyncio.FIRST_COMPLETED)
            if not opened.done():
                raise await self.explain(EngineError(f"the {self._name} did not start"))
            if late := opened.exception():
                raise EngineError(f"{late} (train.step_timeout_s)") from late
            channel = opened.result()
            self.connected = lambda: channel.alive
            channel.overdue = self._dump
            return channel
        finally:
            dead.cancel()
            opened.cancel()
            await asyncio.gather(dead, opened, return_exceptions=True)

    async def explain(self, error: EngineError) -> EngineError:
        """Return the error itself, or, if the child is dead, its exit and last output."""
        if not self.connected():
            # the socket closes shortly before the process can be reaped
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), 2.0)
        code = self.process.returncode
        if code is None:
            return EngineError(f"{error}{self._dumped}") if self._dumped else error
        words = last_lines(self._log, self._started)
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return EngineError(f"the {self._name} died ({how}){': ' + words if words else ''}")

    def _dump(self, op: str, silent_s: float) -> None:
        """Let it write where its threads are into its log, and say so."""
        if self.process.returncode is None and time.monotonic() - self._dumped_s > _DUMP_EVERY_S:
            self._dumped_s = time.monotonic()
            self._dumped = f"; the stacks of its threads are in {self._log}"
            self.process.send_signal(DUMP)
            line = "the %s has not answered %s and was last heard %.0f s ago%s"
            log.warning(line, self._name, op, silent_s, self._dumped)

    def kill_if_cancelled(self) -> None:
        """Kill it when the current task is cancelled: do not wait for its step or start."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def end(self) -> None:
        """Wait for the exit, then kill."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), self.max_wait_s)
            return
        self.kill()
        await self.process.wait()
