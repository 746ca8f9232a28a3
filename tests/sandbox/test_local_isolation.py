"""What a sandbox must keep in and keep out, in both local modes."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
from sandbox_rig import out, python, sh

import insitu
from insitu.sandbox import limits, rootfs
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.local import LocalBackend, LocalSandbox

pytestmark = pytest.mark.slow

HOME = Path.home()
CHECKOUT = Path(__file__).parent.parent.parent


async def test_host_user_behind_the_sandbox_is_not_root(backend: LocalBackend, sandbox: LocalSandbox) -> None:
    """A file made inside belongs to an unprivileged user of the host, of the sandbox's own where insitu is
    root."""
    async with await backend.create(SandboxSpec()) as another:
        owners = []
        for each in (sandbox, another):
            await sh(each, "touch /work/mine")
            owners.append(os.stat("mine", dir_fd=each._folders["/work"]).st_uid)
    if os.geteuid() == 0:
        assert owners[0] != owners[1]
        assert min(owners) >= limits.FIRST_USER
    else:
        assert owners == [os.geteuid()] * 2


WATCH = """
import ctypes, fcntl, os
libc = ctypes.CDLL(None, use_errno=True)
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, b"/usr/bin/env", 0xFFF) > 0
shown = os.open("/usr/bin/env", os.O_RDONLY)
os.read(watch, 4096)
fcntl.flock(shown, fcntl.LOCK_EX)
print("watching", flush=True)
input()
try:
    print(os.read(watch, 4096), flush=True)
except BlockingIOError:
    print("nothing", flush=True)
"""


async def test_no_sandbox_learns_what_another_does_with_files_that_both_are_shown() -> None:
    if os.geteuid() != 0:
        pytest.skip("the namespaces mode needs root")
    backend = LocalBackend()
    assert backend.mode == "namespaces", "what root gets unless it asks otherwise"
    async with await backend.create(SandboxSpec()) as one, await backend.create(SandboxSpec()) as another:
        watcher = await one.spawn(["python3", "-c", WATCH])
        assert await watcher.readline(10) == b"watching\n", watcher.stderr_tail()
        read = "import fcntl, os\nf = os.open('/usr/bin/env', os.O_RDONLY)\nos.read(f, 9)\n"
        assert await python(another, read + "fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\nprint(1)") == "1"
        await watcher.write(b"\n")
        assert await watcher.readline(10) == b"nothing\n"


IN_FLIGHT = """
import array, os, resource, socket
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
fd, ends, sent = os.open("/dev/null", 0), [], 0
try:
    for n in range(100):
        ends.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
        for _ in range(8):
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd] * 250))
            ends[-1][0].sendmsg([b"x"], [rights])
            sent += 250
except OSError as error:
    print(sent > 1024, error.errno, flush=True)
input()
"""


async def test_descriptors_that_one_sandbox_has_under_way_keep_no_other_from_starting(
    backend: LocalBackend, sandbox: LocalSandbox
) -> None:
    """Linux counts them by user: as an ordinary user all sandboxes and this process are one."""
    hog = await sandbox.spawn(["python3", "-c", IN_FLIGHT])
    assert await hog.readline(20) == f"True {errno.ETOOMANYREFS}\n".encode(), hog.stderr_tail()
    async with await backend.create(SandboxSpec()) as another:
        assert await out(another, "echo works") == "works"
        assert await out(sandbox, "echo works") == "works"


async def test_setuid_files_are_useless(sandbox: LocalSandbox) -> None:
    mounts = [line.split() for line in (await out(sandbox, "cat /proc/mounts")).splitlines()]
    writable = [fields for fields in mounts if "rw" in fields[3].split(",") and fields[2] == "tmpfs"]
    assert {fields[1] for fields in writable} == {"/work", "/home/agent", "/tmp", "/dev/shm"}
    assert all("nosuid" in fields[3] and "nodev" in fields[3] for fields in writable)
    assert (
        await sh(sandbox, "cp /usr/bin/id /work/id && chmod 6755 /work/id && /work/id -u")
    ).stdout == b"1000\n"
    assert (await sh(sandbox, "su root -c true </dev/null")).exit_code != 0
    assert (await sh(sandbox, "mknod /work/null c 1 3")).exit_code != 0
    assert (await sh(sandbox, "mount -t tmpfs none /tmp")).exit_code != 0


async def test_sees_nothing_of_the_host(sandbox: LocalSandbox, tmp_path: Path) -> None:
    marker = tmp_path / "secret.txt"
    marker.write_text("host")
    package = Path(insitu.__file__).parent
    for path in (marker, tmp_path, HOME, package, CHECKOUT, Path("/root"), Path("/etc/shadow")):
        assert (await sh(sandbox, f"ls '{path}' 2>/dev/null | grep . ")).exit_code != 0, path
    assert (await sh(sandbox, "python3 -c 'import insitu'")).exit_code == 1
    assert await out(sandbox, "ls /home /tmp /work /dev/shm | grep -v ':$' | grep -v '^$'") == "agent"


async def test_environment_is_clean(sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "do-not-leak")
    names = {line.split("=", 1)[0] for line in (await out(sandbox, "env")).splitlines()}
    assert names == {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "TERM",
        "LANG",
        "TZ",
        "PYTHONHASHSEED",
        "PWD",
    }
    assert (await out(sandbox, "echo $PATH")).startswith("/usr/bin:")


async def test_sees_only_its_own_processes(backend: LocalBackend, sandbox: LocalSandbox) -> None:
    async with await backend.create(SandboxSpec()) as other:
        await other.spawn(["sleep", "4242"])
        listing = await out(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert "4242" not in listing
        assert "pytest" not in listing
        numbers = sorted(int(n) for n in (await out(sandbox, "ls /proc | grep '^[0-9]'")).split())
        assert numbers[0] == 1
        assert numbers[-1] < 100


async def test_system_is_read_only(sandbox: LocalSandbox) -> None:
    for path in (
        "/usr/x",
        "/etc/x",
        "/x",
        "/dev/x",
        "/opt/x",
        "/run/x",
        "/run/insitu/supervisor.pyc",
        "/home/x",
    ):
        assert (await sh(sandbox, f"echo x > {path}")).exit_code != 0, path
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/kernel/hostname"):
        assert (await sh(sandbox, f"echo x > {path}")).exit_code != 0, path


async def test_first_process_cannot_be_killed_read_or_traced(sandbox: LocalSandbox) -> None:
    await sh(sandbox, "kill -9 1; kill -TERM 1; kill -INT 1")
    assert await out(sandbox, "echo alive") == "alive"
    for name in ("mem", "environ", "fd/0", "root/", "maps"):
        assert (await sh(sandbox, f"head -c1 /proc/1/{name}")).exit_code != 0, name
    attach = "import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.ptrace(16, 1, 0, 0))"
    assert await python(sandbox, attach) == "-1"


async def test_has_no_network(sandbox: LocalSandbox) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await _connects(sandbox, "127.0.0.1", port) == "ConnectionRefusedError"
    assert "OSError" in await _connects(sandbox, "192.0.2.1", 80)
    assert "OSError" in await _connects(sandbox, "169.254.169.254", 80)
    assert (await out(sandbox, "cut -d: -f1 -s /proc/net/dev")).split() == ["lo"]


async def _connects(sandbox: LocalSandbox, host: str, port: int) -> str:
    code = f"""
import socket
try:
    socket.create_connection(({host!r}, {port}), 2); print("connected")
except OSError as error:
    print(type(error).__name__)
"""
    return await python(sandbox, code)


def test_all_packages_are_hidden_where_they_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("insitu/sandbox", "insitu_train", "insitu_tasksets", "numpy"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(rootfs, "__file__", str(tmp_path / "insitu" / "sandbox" / "rootfs.py"))
    hidden = set(rootfs.hidden_folders([]))
    assert {path.name for path in hidden if path.parent == tmp_path} == {
        "insitu",
        "insitu_train",
        "insitu_tasksets",
    }
