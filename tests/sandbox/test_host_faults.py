"""What the host does to a sandbox is no doing of what runs in it: stalls, kills by the kernel, losses of
several."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from weakref import WeakSet

import pytest
from sandbox_rig import sh

from insitu.errors import SandboxLost
from insitu.sandbox import control_channel, host_faults
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.cgroup import Cgroup, Cgroups, CgroupSupport, OomCounter, find
from insitu.sandbox.host_faults import SEVERAL, TOGETHER_S, Fate, host_fault
from insitu.sandbox.local import LocalBackend, LocalSandbox

SetCounters = Callable[[str], object]


class Kills(OomCounter):
    """A group whose numbers a test sets."""

    def __init__(self, *, counts: bool = True) -> None:
        super().__init__()
        self.counts, self.number, self.little = counts, 0, True

    def count(self) -> int:
        return self.number

    def modest(self) -> bool:
        return self.little


class Struck:
    """A sandbox of which only the fate is known."""

    def __init__(self, *, counts: bool = True) -> None:
        self.kills = Kills(counts=counts)
        self.fate = Fate(self.kills)


@pytest.fixture
def vmstat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetCounters:
    """Sets the machine's counters; there is no other sandbox, and no wait."""
    file = tmp_path / "vmstat"
    file.write_text("pgfault 7\noom_kill 3\n")
    monkeypatch.setattr(host_faults, "VMSTAT", file)
    monkeypatch.setattr(host_faults, "SETTLE_S", 0.0)
    monkeypatch.setattr(host_faults, "_live", WeakSet())
    monkeypatch.setattr(host_faults, "_losses", type(host_faults._losses)(maxlen=256))
    monkeypatch.setattr(host_faults, "kills_in_groups", lambda: 0)
    return file.write_text


async def test_a_kill_for_own_memory_is_no_fault_of_the_host(vmstat: SetCounters) -> None:
    box = Struck()
    assert await host_fault(box) == ""
    box.kills.number, box.kills.little = 1, False
    vmstat("oom_kill 4\n")
    assert [await host_fault(box, lost=lost) for lost in (True, False)] == ["", ""]
    box.kills.little = True
    for lost in (True, False):
        assert "memory that others had taken" in await host_fault(box, lost=lost)
    box.fate.mark()
    vmstat("oom_kill 4\n")
    assert await host_fault(box) == ""


async def test_a_kill_elsewhere_explains_a_loss_but_no_failure(vmstat: SetCounters) -> None:
    box = Struck()
    vmstat("oom_kill 9\n")
    assert "none of them for this sandbox's own" in await host_fault(box)
    assert await host_fault(box, lost=False) == ""


async def test_kills_of_other_sandboxes_for_their_own_memory_are_not_elsewhere(
    vmstat: SetCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Struck()
    vmstat("oom_kill 9\n")
    monkeypatch.setattr(host_faults, "kills_in_groups", lambda: 6)
    assert await host_fault(box) == ""


async def test_without_a_group_a_single_loss_is_never_explained_by_the_kernels_count(
    vmstat: SetCounters,
) -> None:
    box = Struck(counts=False)
    vmstat("oom_kill 9\n")
    box.fate.lose()
    assert [await host_fault(box, lost=lost) for lost in (True, False)] == ["", ""]
    others = [Struck(counts=False), box]
    vmstat("oom_kill 12\n")
    found = await asyncio.gather(*(host_fault(other, lost=False) for other in others))
    assert all("2 sandboxes were lost" in why for why in found)


async def test_sandboxes_that_are_lost_together_were_lost_by_the_host(
    vmstat: SetCounters,
) -> None:
    many, alive = [Struck() for _ in range(SEVERAL)], Struck()
    for count, box in enumerate(many, start=1):
        box.fate.lose()
        assert bool(await host_fault(box)) is (count == SEVERAL)
    assert all([await host_fault(box) for box in many])
    assert await host_fault(alive) == ""
    many[0].fate.lost_at -= 2 * TOGETHER_S
    assert [bool(await host_fault(box)) for box in many] == [False] * SEVERAL


async def test_two_of_two_are_several_and_one_after_the_other_are_not(
    vmstat: SetCounters,
) -> None:
    first, second = Struck(), Struck()
    first.fate.lose()
    assert await host_fault(first) == ""
    second.fate.lose()
    assert await host_fault(first)
    for box in (first, second):
        box.fate.end()
    late = Struck()
    late.fate.lose()
    assert await host_fault(late) == ""


async def test_sandboxes_that_used_up_their_own_memory_do_not_count_as_lost_together(
    vmstat: SetCounters,
) -> None:
    many = [Struck() for _ in range(SEVERAL + 1)]
    for box in many:
        box.kills.number, box.kills.little = 1, False
        box.fate.lose()
    assert [await host_fault(box) for box in many] == [""] * len(many)


async def test_a_sandbox_that_its_owner_closes_is_not_lost(vmstat: SetCounters) -> None:
    many = [Struck() for _ in range(SEVERAL)]
    for box in many:
        box.fate.end()
        box.fate.lose()
    assert [await host_fault(box) for box in many] == [""] * SEVERAL


@pytest.fixture
def crowded() -> Iterator[Cgroups]:
    """Groups below one of 160 MB, which stands for the machine."""
    found = find()
    if found.cgroups is None:
        pytest.skip(f"no control groups here: {found.why}")
    folders = [parent / f"insitu-test-{os.getpid()}" for parent in found.cgroups.parents]
    with contextlib.ExitStack() as undo:
        for folder in folders:
            folder.mkdir()
            undo.callback(folder.rmdir)
        if found.cgroups.version == 2:
            (folders[0] / "cgroup.subtree_control").write_text("+memory +pids")
        Cgroup(folders).limit(160 << 20, 512)
        yield Cgroups(version=found.cgroups.version, parents=tuple(folders), roots=found.cgroups.roots)


def fill_memory(groups: Cgroups, megabytes: int) -> None:
    """Use memory beside the sandboxes, as the last to be killed, until another process is."""
    code = (
        "import sys, time\nopen('/proc/self/oom_score_adj', 'w').write('-1000')\n"
        "held = [bytearray(1 << 20) for _ in range(int(sys.argv[1]))]\nprint('full', flush=True)\n"
    )
    inside = groups.make(1 << 30, 64)
    try:
        argv = inside.command([sys.executable, "-S", "-c", code, str(megabytes)])
        subprocess.run(argv, timeout=60, check=False, capture_output=True)
    finally:
        inside.end()


@pytest.mark.slow
async def test_a_machine_without_memory_is_not_a_sandbox_that_used_up_its_own(
    backend: LocalBackend, crowded: Cgroups
) -> None:
    support = CgroupSupport(cgroups=crowded)
    roomy = LocalBackend(backend.mode, memory_bytes=1 << 30, cgroups=lambda: support)
    async with await roomy.create(SandboxSpec()) as sandbox:
        job = "x = bytearray(60 << 20); print('here', flush=True); import time; time.sleep(30)"
        process = await sandbox.spawn(["python3", "-c", job])
        assert await process.readline(20) == b"here\n"
        await asyncio.to_thread(fill_memory, crowded, 130)
        await process.wait(10)
        assert "memory that others had taken" in await host_fault(sandbox, lost=False)
    small = LocalBackend(backend.mode, memory_bytes=80 << 20, cgroups=lambda: support)
    async with await small.create(SandboxSpec()) as sandbox:
        done = await sandbox.exec(["python3", "-c", "x = bytearray(120 << 20)"], timeout_s=20)
        assert (done.exit_code, done.out_of_memory) == (-signal.SIGKILL, True)
        assert [await host_fault(sandbox, lost=lost) for lost in (True, False)] == ["", ""]


def first_process(sandbox: LocalSandbox) -> int:
    outer = sandbox._process.pid
    return int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])


STALLED = """
import asyncio, sys
from insitu.sandbox import control_channel
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.local import LocalBackend

async def main():
    control_channel.ANSWER_S = 1.5
    async with await LocalBackend(sys.argv[1]).create(SandboxSpec()) as sandbox:
        running = asyncio.ensure_future(sandbox.exec(["sh", "-c", "sleep 1; echo done"], timeout_s=3.0))
        await asyncio.sleep(0.5)
        print("ready", flush=True)
        done = await running
        print(done.exit_code, done.timed_out, done.duration_s < 3.0, flush=True)
        sys.stdin.readline()
        print("ready", flush=True)
        await sandbox.kill_all()
        print("answered", flush=True)

asyncio.run(main())
"""


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    return found


def stall(pid: int, seconds: float) -> None:
    pids = family(pid)
    for number, pause in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0.0)):
        for each in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, number)
        time.sleep(pause)


@pytest.mark.slow
def test_a_machine_that_stood_still_ends_no_command_and_loses_no_sandbox(backend: LocalBackend) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STALLED, backend.mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin
        assert child.stdout
        try:
            assert child.stdout.readline() == "ready\n"
            stall(child.pid, 5.0)
            assert child.stdout.readline() == "0 False True\n"
            child.stdin.write("on\n")
            child.stdin.flush()
            assert child.stdout.readline() == "ready\n"
            stall(child.pid, 4.0)
            assert child.stdout.readline() == "answered\n"
        finally:
            stall(child.pid, 0.0)
            child.kill()


@pytest.mark.slow
async def test_a_stopped_sandbox_is_waited_for(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = first_process(sandbox)
    os.kill(pid, signal.SIGSTOP)
    try:
        asyncio.get_running_loop().call_later(0.5, os.kill, pid, signal.SIGCONT)
        await sandbox.kill_all()
        monkeypatch.setattr(control_channel, "ANSWER_S", 0.3)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(SandboxLost, match="did not answer `sweep`"):
            await sandbox.kill_all()
        # That is no loss of the sandbox: no other loss makes it the host's doing.
        assert await host_fault(sandbox) == ""
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
async def test_nothing_inside_a_sandbox_stops_or_ends_its_first_process(sandbox: LocalSandbox) -> None:
    tried = (
        "kill -STOP 1; kill -TSTP 1; kill -KILL 1; kill -SEGV 1; kill -STOP -1; "
        "python3 -c 'import resource as r; r.prlimit(1, r.RLIMIT_CPU, (1, 1))'; "
        "python3 -c 'import os; os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))'; "
        "python3 -c 'import os; os.setpriority(os.PRIO_PROCESS, 1, 19)'; true"
    )
    await sh(sandbox, tried, timeout_s=2.0)
    await sandbox.kill_all()
    assert (await sh(sandbox, "echo alive")).stdout == b"alive\n"
    assert await host_fault(sandbox) == ""
