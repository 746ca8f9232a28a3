"""One program of a fake sandbox, while it runs and after."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from insitu.types import FileEntry

if TYPE_CHECKING:
    from tests.fakes.sandbox import FakeSandbox

KILLED = -9


class FakeRun:
    """What a program is given: its arguments, its input and output, and the files of its sandbox."""

    def __init__(
        self,
        *,
        sandbox: FakeSandbox,
        pid: int,
        argv: tuple[str, ...],
        env: Mapping[str, str],
        cwd: str,
        program: Program | None,
    ) -> None:
        self.sandbox, self.pid, self.argv, self.env, self.cwd = sandbox, pid, argv, env, cwd
        self.stdout, self.stderr = bytearray(), bytearray()
        self.children: list[FakeRun] = []
        self.kept = False
        """`kill_all` spares it: a handle of `spawn` holds it."""
        self.code: int | None = None
        self._program = program
        self._input = asyncio.StreamReader()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[int] | None = None
        self._done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def begin(self, gone: Callable[[], object]) -> None:
        task = asyncio.get_running_loop().create_task(self._body())

        def finish(ended: asyncio.Task[int]) -> None:
            error = None if ended.cancelled() else ended.exception()
            self.code = KILLED if ended.cancelled() or error else ended.result()
            gone()
            self._tell()
            if error is None:
                self._done.set_result(self.code)
            else:
                self._done.set_exception(error)

        self._task = task
        task.add_done_callback(finish)

    async def _body(self) -> int:
        if self._program is None:
            self.err(f"{self.argv[0]}: No such file or directory\n".encode())
            return 127
        return await self._program(self)

    def out(self, data: bytes) -> None:
        self.stdout += data
        self._tell()

    def err(self, data: bytes) -> None:
        self.stderr += data
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def news(self) -> None:
        """Until there is more output, or the program has ended."""
        await self._changed.wait()

    def feed(self, data: bytes) -> None:
        if data:
            self._input.feed_data(data)

    def end_input(self) -> None:
        self._input.feed_eof()

    async def read(self) -> bytes:
        """All input."""
        return await self._input.read()

    async def readline(self) -> bytes:
        return await self._input.readline()

    def write(self, path: str, content: bytes) -> None:
        """Write a file of the sandbox as a program would. Raises PermissionError for root's."""
        if path in self.sandbox.roots:
            raise PermissionError(path)
        self.sandbox.files[path] = FileEntry(content=content)

    def start(self, *argv: str, daemon: bool = False) -> FakeRun:
        """A child; a daemon is nobody's, and only the end of the sandbox or `kill_all` takes it along."""
        return self.sandbox.start(argv, self.env, self.cwd, parent=None if daemon else self)

    async def ended(self) -> int:
        return await asyncio.shield(self._done)

    async def kill(self) -> None:
        for child in self.children:
            await child.kill()
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await self.ended()


Program = Callable[[FakeRun], Awaitable[int]]
"""Returns the exit code; what it raises, `exec` raises."""
