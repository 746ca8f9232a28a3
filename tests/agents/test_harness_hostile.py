"""What an agent does to its agent program and to its sandbox is its own failure, and never the next
rollout's."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from pathlib import Path

import pytest
from scripted_server import ScriptedServer, Step, play

import insitu.agents.harness as harness_module
from insitu.agents.base import AgentResult, ModelAccess, Worker
from insitu.agents.harness import RecipeHarness
from insitu.agents.install import Installed
from insitu.agents.pi import RECIPE
from insitu.agents.pool import Sockets, WorkerPool
from insitu.errors import SandboxError, SandboxStartError
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.local import LocalBackend, LocalSandbox
from insitu.types import Limits, Task
from tests.fakes.agents import command_harness

pytestmark = pytest.mark.slow

FAKE = Path(__file__).with_name("fake_pi.py")


def access(number: int = 0) -> ModelAccess:
    return ModelAccess(public_id=f"p{number}", secret=f"secret-of-rollout-{number}")


def reported(task: Task, prompt: str, wall_s: float = 10.0) -> Task:
    return dataclasses.replace(task, prompt=prompt, limits=Limits(wall_s=wall_s))


class Fickle(LocalBackend):
    """Makes sandboxes, and can be stopped."""

    refuses = False

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        if self.refuses:
            raise SandboxStartError("no more sandboxes")
        return await super().create(spec)


@pytest.fixture
def fickle() -> Fickle:
    return Fickle("auto")


@pytest.fixture
def fake(fickle: Fickle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecipeHarness:
    """A warm harness whose Pi is fake_pi.py; a script cannot run sealed."""
    program = tmp_path / "node"
    program.write_bytes(FAKE.read_bytes())
    program.chmod(0o755)
    monkeypatch.setattr(harness_module, "sealed_node", lambda node: program)
    installed = Installed(folder=None, program=("{node}",))
    return RecipeHarness(dataclasses.replace(RECIPE, npm=()), fickle, installed=installed, uses=64)


def pid(result: AgentResult) -> bytes:
    return result.tree["pid"].content


async def test_an_honest_agent_keeps_its_process(fake: RecipeHarness, tmp_path: Path, task: Task) -> None:
    async with fake.worker(tmp_path / "g") as worker:
        one = await worker.run(reported(task, "well"), access(1))
        two = await worker.run(reported(task, "well"), access(2))
        assert (one.exit, two.exit, pid(one)) == ("finished", "finished", pid(two))
        assert worker.healthy


@pytest.mark.parametrize("word", ["cut", "list", "deep", "error"])
async def test_a_forged_message_fails_its_own_rollout(
    fake: RecipeHarness, tmp_path: Path, task: Task, word: str
) -> None:
    async with fake.worker(tmp_path / "g") as worker:
        result = await worker.run(reported(task, f"now {word}"), access())
        assert (result.exit, worker.healthy) == ("failed", False)
        assert pid(result)
        assert "\n" not in result.detail
        assert len(result.detail) < 400


@pytest.mark.parametrize("word", ["bytes", "word", "number"])
async def test_lines_that_are_not_pis_retire_the_worker(
    fake: RecipeHarness, tmp_path: Path, task: Task, word: str
) -> None:
    async with fake.worker(tmp_path / "g") as worker:
        result = await worker.run(reported(task, f"now {word}"), access())
        assert (result.exit, worker.healthy) == ("finished", False)


@pytest.mark.parametrize("when", ["late", "next"])
@pytest.mark.parametrize("word", ["cut", "word", "answer", "bad answer"])
async def test_what_was_left_in_the_pipe_is_not_laid_on_the_next(
    fake: RecipeHarness, tmp_path: Path, task: Task, when: str, word: str
) -> None:
    async with fake.worker(tmp_path / "g") as worker:
        first = await worker.run(reported(task, f"{when} {word}"), access(1))
        assert first.exit == "finished"
        second = await worker.run(reported(task, "well"), access(2))
        third = await worker.run(reported(task, "well"), access(3))
        assert (second.exit, third.exit, worker.healthy) == ("finished", "finished", True)


def first_process(worker: Worker) -> int:
    """Host pid of the PID 1 of a worker's sandbox."""
    outer = worker._sandbox._process.pid
    return int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])


async def lose_sandbox(worker: Worker, task: Task) -> AgentResult:
    """Kill a worker's sandbox while its agent works, as an out-of-memory kill does."""
    running = asyncio.create_task(worker.run(task, access()))
    await asyncio.sleep(0.7)
    os.kill(first_process(worker), signal.SIGKILL)
    return await asyncio.wait_for(running, 10)


def sleeper(backend: LocalBackend, *, warm: bool = False) -> RecipeHarness:
    return command_harness(["sh", "-c", "cat > said; sleep 5"], backend, warm=warm)


async def test_a_sandbox_lost_under_the_agent_is_the_agents_failure(
    fake: RecipeHarness, fickle: Fickle, tmp_path: Path, task: Task
) -> None:
    for harness in (fake, sleeper(fickle)):
        async with harness.worker(tmp_path / "g") as worker:
            result = await lose_sandbox(worker, reported(task, "hang"))
            assert (result.exit, dict(result.tree), worker.healthy) == ("failed", {}, False)
            assert "was lost while the agent ran" in result.detail


async def test_sandboxes_lost_together_are_no_agents_failure(
    fickle: Fickle, tmp_path: Path, task: Task
) -> None:
    sockets = Sockets([tmp_path / f"g{number}" for number in range(3)])
    async with WorkerPool(sleeper(fickle), 3, sockets) as pool, contextlib.AsyncExitStack() as leases:
        workers = [await leases.enter_async_context(pool.lease()) for _ in range(3)]
        running = [lose_sandbox(worker, reported(task, "hang")) for worker in workers]
        for found in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(found, SandboxError)
            assert found.infra
            assert "sandboxes were lost within" in str(found)


async def test_an_agent_killed_by_a_machine_without_memory_is_not_graded(
    fickle: Fickle, tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel counts is set here; tests of the sandbox have it counted."""
    for modest in (True, False):
        harness = command_harness(["sh", "-c", "cat > said; sleep 1; exit 137"], fickle)
        async with harness.worker(tmp_path / "g") as worker:
            running = asyncio.create_task(worker.run(reported(task, "hang"), access()))
            await asyncio.sleep(0.5)
            kills = worker._sandbox.fate.kills
            monkeypatch.setattr(kills, "count", lambda: 1)
            monkeypatch.setattr(kills, "modest", lambda modest=modest: modest)
            if modest:
                with pytest.raises(SandboxError, match="memory that others had taken"):
                    await running
            else:
                result = await running
                assert (result.exit, "said" in result.tree) == ("failed", True)
                assert result.detail.startswith("out of memory: ")


async def test_an_agent_that_uses_up_its_sandboxs_memory_is_graded(tmp_path: Path, task: Task) -> None:
    small = LocalBackend(memory_bytes=96 << 20)
    if small.cgroups is None:
        pytest.skip(f"no control groups here: {small.why_no_cgroups}")
    hog = "import os\nwhile True:\n    os.fork() or bytearray(64 << 20)\n"
    for command in (["python3", "-c", hog], ["python3", "-c", "x = bytearray(300 << 20)"]):
        async with command_harness(command, small).worker(tmp_path / "g") as worker:
            result = await worker.run(reported(task, "x", 3.0), access())
            assert result.exit in ("failed", "timeout")


async def test_a_lost_sandbox_is_the_hosts_failure_when_no_sandbox_works(
    fake: RecipeHarness, fickle: Fickle, tmp_path: Path, task: Task
) -> None:
    for harness in (fake, sleeper(fickle)):
        fickle.refuses = False
        async with harness.worker(tmp_path / "g") as worker:
            fickle.refuses = True
            with pytest.raises(SandboxError) as caught:
                await lose_sandbox(worker, reported(task, "hang"))
            assert caught.value.infra
            assert not worker.healthy


async def test_a_used_sandbox_that_is_lost_in_between_is_replaced(
    fake: RecipeHarness, fickle: Fickle, tmp_path: Path, task: Task
) -> None:
    quick = command_harness(["sh", "-c", "cat > said"], fickle, warm=True)
    for harness in (fake, quick):
        async with WorkerPool(harness, 1, Sockets([tmp_path / "g"])) as pool:
            for number in range(3):
                async with pool.lease() as worker:
                    assert (await worker.run(reported(task, "well"), access(number))).exit == "finished"
                os.kill(first_process(worker), signal.SIGKILL)


async def test_every_live_sandbox_has_a_socket_of_its_own(backend: LocalBackend, tmp_path: Path) -> None:
    harness = command_harness(["true"], backend)
    sockets = Sockets([tmp_path / "g0", tmp_path / "g1"])
    async with WorkerPool(harness, 2, sockets, strict=True) as pool, pool.lease() as slow:
        for _ in range(3):
            async with pool.lease() as quick:
                assert quick.gateway_socket != slow.gateway_socket


async def test_a_worker_that_does_not_start_gives_its_socket_back(fickle: Fickle, tmp_path: Path) -> None:
    async with WorkerPool(command_harness(["true"], fickle), 1, Sockets([tmp_path / "g"])) as pool:
        fickle.refuses = True
        for _ in range(2):
            with pytest.raises(SandboxStartError):
                async with pool.lease():
                    pass
        fickle.refuses = False
        async with pool.lease() as worker:
            assert worker.healthy


BOMB = "bomb() { bomb | bomb & }; bomb; sleep 1"
HOG = "python3 -c 'x = bytearray(3 << 30); print(len(x))' 2>&1 | tail -n 1"


async def test_bombs_of_a_script_stay_in_its_sandbox(
    backend: LocalBackend, tmp_path: Path, task: Task
) -> None:
    for text, exit_ in (
        (f"ulimit -u > limit; {BOMB}", ("finished", "failed", "timeout")),
        (HOG, ("finished",)),
    ):
        harness = command_harness(["bash", "-c", text], backend, warm=True)
        async with harness.worker(tmp_path / "g") as worker:
            result = await worker.run(reported(task, "x", 3.0), access())
        assert result.exit in exit_
        if text == HOG:
            assert b"MemoryError" in result.log
        else:
            assert result.tree["limit"].content == b"256\n"


def bash(command: str) -> Step:
    return ("bash", {"command": command})


def said(server: ScriptedServer) -> str:
    return "\n".join(m["content"] for m in server.requests[-1]["messages"] if m["role"] == "tool")


async def test_the_agent_cannot_get_into_a_warm_pi(
    pi: Installed, backend: LocalBackend, server: ScriptedServer, task: Task
) -> None:
    attack = (
        "for f in mem environ maps fd/1 fd/0; do head -c1 /proc/$PPID/$f 2>&1 | head -c 300; done; "
        "ls /proc/$PPID/fd 2>&1 | head -n 1; echo x > /proc/$PPID/fd/1"
    )
    async with RecipeHarness(RECIPE, backend, installed=pi, uses=64).worker(server.path) as worker:
        server.script = play((bash(attack), "done"))
        await worker.run(task, access(1))
        assert said(server).count("ermission denied") >= 7, said(server)
        server.script = play((bash("kill -USR1 $PPID; sleep 0.5"), "done"))
        await worker.run(task, access(2))
        knock = "import socket; socket.create_connection(('127.0.0.1', 9229), 2)"
        result = await worker._sandbox.exec(["python3", "-c", knock], timeout_s=10)
        assert b"ConnectionRefusedError" in result.stderr


async def test_bombs_of_pis_commands_stay_in_its_sandbox(
    pi: Installed, backend: LocalBackend, server: ScriptedServer, task: Task
) -> None:
    async with RecipeHarness(RECIPE, backend, installed=pi, uses=64).worker(server.path) as worker:
        server.script = play((bash(HOG), "done"))
        result = await worker.run(task, access(1))
        assert result.exit == "finished"
        assert "MemoryError" in said(server)
        server.script = play((bash(BOMB), "done"))
        result = await worker.run(reported(task, "x", 4.0), access(2))
        assert result.exit in ("finished", "failed", "timeout")
        assert dict(result.tree) == task.files
