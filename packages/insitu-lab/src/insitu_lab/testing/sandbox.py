"""Contract of a sandbox backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import pytest_asyncio

from insitu.errors import SandboxLost
from insitu.sandbox.base import Sandbox, SandboxBackend, SandboxSpec
from insitu_lab.testing.sandbox_commands import CommandContract
from insitu_lab.testing.sandbox_files import FILES, FileContract
from insitu_lab.testing.sandbox_isolation import IsolationContract
from insitu_lab.testing.shell import run, shell


@pytest.mark.asyncio
class SandboxContract(CommandContract, FileContract, IsolationContract):
    """Subclass it and define the fixture `backend`, a `SandboxBackend`.

    The fixtures `image` and `small_backend` are optional; they enable the tests of images and memory limits.
    """

    exceptions: Mapping[str, str] = {}
    """Test name -> reason why the backend does not offer this; the test is skipped."""

    @pytest.fixture
    def image(self) -> str:
        """Return an image with a shell and Python; empty = the backend takes no images."""
        return ""

    @pytest.fixture
    def small_backend(self) -> Callable[[int], SandboxBackend] | None:
        """Return a function from bytes of memory per sandbox to such a backend, or None."""
        return None

    @pytest.fixture(autouse=True)
    def _skip_exceptions(self, request: pytest.FixtureRequest) -> None:
        if reason := self.exceptions.get(request.node.originalname):
            pytest.skip(reason)

    @pytest_asyncio.fixture
    async def sandbox(self, backend: SandboxBackend) -> AsyncIterator[Sandbox]:
        """Yield a sandbox with FILES in its work folder."""
        async with await backend.create(SandboxSpec(files=FILES)) as sandbox:
            yield sandbox

    async def test_close_ends_everything_and_may_be_called_again(self, backend: SandboxBackend) -> None:
        sandbox = await backend.create(SandboxSpec())
        process = await sandbox.spawn(["sleep", "919293"])
        await sandbox.close()
        await sandbox.close()
        assert await process.wait(20) != 0
        for refused in (
            sandbox.exec(["true"], timeout_s=1),
            sandbox.get_tree(),
            sandbox.kill_all(),
            sandbox.spawn(["true"]),
        ):
            with pytest.raises(SandboxLost):
                await refused

    async def test_a_cancelled_close_finishes(self, backend: SandboxBackend) -> None:
        sandbox = await backend.create(SandboxSpec())
        closing = asyncio.create_task(sandbox.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await sandbox.close()
        with pytest.raises(SandboxLost):
            await sandbox.exec(["true"], timeout_s=1)

    async def test_closing_while_a_command_runs_is_no_exit_code(self, backend: SandboxBackend) -> None:
        sandbox = await backend.create(SandboxSpec())
        running = asyncio.create_task(shell(sandbox, "touch started; sleep 60"))
        for _ in range(1000):
            if await sandbox.get(f"{sandbox.workdir}/started") is not None:
                break
            await asyncio.sleep(0.02)
        await sandbox.close()
        assert (await running).exit_code is None

    async def test_many_sandboxes_at_once(self, backend: SandboxBackend) -> None:
        sandboxes = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(6)))
        try:
            results = await asyncio.gather(
                *(run(sandbox, f"echo {n} > m; cat m") for n, sandbox in enumerate(sandboxes))
            )
            assert results == [str(n) for n in range(6)]
        finally:
            await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
