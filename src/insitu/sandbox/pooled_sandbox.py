"""A sandbox of the pool: returns its permit on close, and retries idempotent calls.

put, get, wipe and kill are retried after SandboxTransient; a command is not, since it may have run halfway.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Self, TypeVar

from insitu.backoff import retry
from insitu.errors import PolicyUnsupported, SandboxTransient
from insitu.sandbox.base import (
    ExecResult,
    Owner,
    Process,
    Sandbox,
    SupportsRootSetup,
    cpu_s,
    gateway_url,
    memory_kills,
    terminate,
)
from insitu.sandbox.host_faults import Fate, fate_of
from insitu.types import Tree

T = TypeVar("T")

ATTEMPTS = 3
PAUSE_S = 0.2
TERMINATE_S = 2.0


def _is_transient(error: Exception) -> bool:
    return isinstance(error, SandboxTransient)


class PooledSandbox:
    """Implements insitu.sandbox.base.Sandbox around another."""

    def __init__(
        self, inner: Sandbox, backend: str, done: Callable[[], None], failed: Callable[[str], None]
    ) -> None:
        """`done` is called once, on close; `failed` with the cause of each call that ran out of retries."""
        self._inner, self._done, self._failed = inner, done, failed
        self.backend = backend
        self._closed = False

    @property
    def workdir(self) -> str:
        return self._inner.workdir

    def memory_kills(self) -> int:
        return memory_kills(self._inner)

    @property
    def fate(self) -> Fate | None:
        return fate_of(self._inner)

    async def cpu_s(self) -> float:
        return await cpu_s(self._inner)

    @property
    def gateway_url(self) -> str:
        return gateway_url(self._inner)

    async def terminate(self) -> None:
        await terminate(self._inner, TERMINATE_S)

    async def _retry(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        try:
            return await retry(call, _is_transient, attempts=ATTEMPTS, first_s=PAUSE_S, name=what)
        except SandboxTransient as error:
            self._failed(str(error))
            raise

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        return await self._inner.exec(
            argv, timeout_s=timeout_s, env=env, cwd=cwd, stdin=stdin, max_output_bytes=max_output_bytes
        )

    async def exec_as_root(self, argv: Sequence[str], *, timeout_s: float) -> ExecResult:
        return await self._root_inner().exec_as_root(argv, timeout_s=timeout_s)

    async def end_root(self) -> None:
        await self._root_inner().end_root()

    def _root_inner(self) -> SupportsRootSetup:
        if not isinstance(self._inner, SupportsRootSetup):
            raise PolicyUnsupported("this sandbox has no root")
        return self._inner

    async def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> Process:
        return await self._inner.spawn(argv, env=env, cwd=cwd)

    async def put(self, path: str, content: bytes, *, executable: bool = False) -> None:
        await self._retry("put", lambda: self._inner.put(path, content, executable=executable))

    async def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        return await self._retry("get", lambda: self._inner.get(path, max_bytes=max_bytes))

    async def put_tree(self, files: Tree, *, owner: Owner = "sandbox") -> None:
        await self._retry("put_tree", lambda: self._inner.put_tree(files, owner=owner))

    async def lay(self, files: Tree, *, remove: Sequence[str] = (), owner: Owner = "sandbox") -> None:
        await self._retry("lay", lambda: self._inner.lay(files, remove=remove, owner=owner))

    async def get_tree(self, *, max_bytes: int = 64 << 20, max_files: int = 10_000) -> Tree:
        return await self._retry(
            "get_tree", lambda: self._inner.get_tree(max_bytes=max_bytes, max_files=max_files)
        )

    async def kill_all(self) -> None:
        await self._retry("kill_all", self._inner.kill_all)

    async def wipe(self) -> None:
        await self._retry("wipe", self._inner.wipe)

    async def close(self) -> None:
        try:
            await self._inner.close()
        finally:
            if not self._closed:
                self._closed = True
                self._done()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class LeftRunning(PooledSandbox):
    """A sandbox that another closes: its processes live on, and calls are not retried."""

    def __init__(self, inner: Sandbox) -> None:
        super().__init__(inner, "", lambda: None, lambda cause: None)

    async def kill_all(self) -> None: ...

    async def close(self) -> None: ...
