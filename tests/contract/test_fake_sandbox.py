"""The part of the contract that needs no shell: the fake in memory and real sandboxes give the same answers.

The whole contract (test_sandbox_contract.py) is written in shell, which the fake does not have.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from insitu.errors import PolicyUnsupported, SandboxError, SandboxLost
from insitu.sandbox.base import Sandbox, SandboxBackend, SandboxSpec
from insitu.sandbox.local import LocalBackend
from insitu.sandbox.pool import Pool
from insitu.sandbox.tree import TreeTooLarge
from insitu.types import FileEntry
from tests.fakes.sandbox import FakeBackend

pytestmark = pytest.mark.slow

FILES = {
    "a.py": FileEntry(content=b"print(1)\n"),
    "pkg/run.sh": FileEntry(content=b"#!/bin/sh\n", executable=True),
    "b\xe9 with space": FileEntry(content=bytes(range(256))),
}


@pytest.fixture(params=["fake", "local", "pool of fakes"])
def backend(request: pytest.FixtureRequest) -> SandboxBackend:
    if request.param == "local":
        return LocalBackend()
    return FakeBackend() if request.param == "fake" else Pool([FakeBackend(), FakeBackend()])


@pytest.fixture
async def sandbox(backend: SandboxBackend) -> AsyncIterator[Sandbox]:
    async with await backend.create(SandboxSpec(files=FILES)) as sandbox:
        yield sandbox


async def test_exit_codes_input_and_output(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(["true"], timeout_s=20)).exit_code == 0
    assert (await sandbox.exec(["false"], timeout_s=20)).exit_code == 1
    assert (await sandbox.exec(["echo", "a", "b c"], timeout_s=20)).stdout == b"a b c\n"
    data = os.urandom(1 << 20)
    assert (await sandbox.exec(["cat"], timeout_s=20, stdin=data)).stdout == data
    assert (await sandbox.exec(["cat", "a.py"], timeout_s=20)).stdout == b"print(1)\n"


async def test_missing_programs_and_bad_commands(sandbox: Sandbox) -> None:
    missing = await sandbox.exec(["no-such-command"], timeout_s=20)
    assert (missing.exit_code, b"no-such-command" in missing.stderr) == (127, True)
    with pytest.raises(SandboxError):
        await sandbox.exec([], timeout_s=20)
    with pytest.raises(SandboxError, match="NUL"):
        await sandbox.exec(["echo", "a\0b"], timeout_s=20)


async def test_output_is_bounded_and_says_so(sandbox: Sandbox) -> None:
    done = await sandbox.exec(["cat"], timeout_s=20, stdin=b"x" * 5000, max_output_bytes=1000)
    assert (len(done.stdout), done.truncated, done.exit_code) == (1000, True, 0)


async def test_a_timeout_is_a_kill_and_never_exit_0(sandbox: Sandbox) -> None:
    late = await sandbox.exec(["sleep", "60"], timeout_s=0.1)
    assert late.timed_out
    assert late.exit_code in (-9, 137)
    assert (await sandbox.exec(["true"], timeout_s=20)).exit_code == 0


async def test_a_cancelled_exec_ends(sandbox: Sandbox) -> None:
    task = asyncio.ensure_future(sandbox.exec(["sleep", "60"], timeout_s=60))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_spawned_process_talks_and_dies_on_demand(sandbox: Sandbox) -> None:
    process = await sandbox.spawn(["cat"])
    await process.write(b"one\ntwo\n")
    assert [await process.readline(20), await process.readline(20)] == [b"one\n", b"two\n"]
    with pytest.raises(TimeoutError):
        await process.readline(0.05)
    with pytest.raises(TimeoutError):
        await process.wait(0.05)
    await sandbox.kill_all()
    assert process.poll() is None, "kill_all spares what spawn returned"
    await process.kill()
    await process.kill()
    assert await process.wait(20) in (-9, 137)
    assert await process.readline(20) == b""
    with pytest.raises(SandboxLost):
        await process.write(b"x")


async def test_trees_go_in_and_come_out(sandbox: Sandbox) -> None:
    assert await sandbox.get_tree() == FILES
    await sandbox.put_tree({"only": FileEntry(content=b"x"), "d/e": FileEntry(content=b"y")})
    await sandbox.lay({"d/f": FileEntry(content=b"z")}, remove=["only"])
    assert sorted(await sandbox.get_tree()) == ["d/e", "d/f"]
    await sandbox.wipe()
    assert await sandbox.get_tree() == {}


async def test_caps_are_the_agents_doing(sandbox: Sandbox) -> None:
    for caps in ({"max_files": 2}, {"max_bytes": 100}):
        with pytest.raises(TreeTooLarge) as caught:
            await sandbox.get_tree(**caps)
        assert not caught.value.infra


async def test_one_file_and_its_limits(sandbox: Sandbox) -> None:
    await sandbox.put("/home/agent/.config/key", bytes(range(256)))
    assert await sandbox.get("/home/agent/.config/key") == bytes(range(256))
    assert await sandbox.get("/tmp/none") is None
    with pytest.raises(SandboxError):
        await sandbox.get("/home/agent/.config/key", max_bytes=255)
    for path in ("/usr/x", "/work/../usr/x", "/work", "relative", "/home/agent/a/../../x"):
        with pytest.raises(SandboxError):
            await sandbox.put(path, b"x")
    for path in ("../x", "/etc/x", "a/../../x", ""):
        with pytest.raises(SandboxError):
            await sandbox.put_tree({path: FileEntry(content=b"x")})


async def test_what_is_not_offered_is_refused(backend: SandboxBackend) -> None:
    for spec in (
        SandboxSpec(network="public"),
        SandboxSpec(network="allowlist"),
        SandboxSpec(network="gateway_only"),
    ):
        with pytest.raises(PolicyUnsupported) as caught:
            await backend.create(spec)
        assert not caught.value.infra


async def test_the_end(backend: SandboxBackend) -> None:
    sandbox = await backend.create(SandboxSpec())
    process = await sandbox.spawn(["sleep", "60"])
    running = asyncio.ensure_future(sandbox.exec(["sleep", "60"], timeout_s=60))
    await asyncio.sleep(0.05)
    await sandbox.close()
    await sandbox.close()
    assert (await running).exit_code is None
    assert await process.wait(20) != 0
    for refused in (
        sandbox.exec(["true"], timeout_s=1),
        sandbox.get_tree(),
        sandbox.kill_all(),
        sandbox.spawn(["true"]),
    ):
        with pytest.raises(SandboxLost):
            await refused
