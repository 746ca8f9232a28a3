"""What a sandbox refuses to do for anybody, in both local modes; and the filter's program on both
machines."""

from __future__ import annotations

import errno
import os
import platform
import struct

import pytest
from sandbox_rig import out, python, sh

from insitu.sandbox import seccomp as syscalls
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.local import LocalBackend, LocalSandbox

pytestmark = pytest.mark.slow

ALLOW = 0x7FFF0000
needs_filter = pytest.mark.skipif(
    not syscalls.program(platform.machine()), reason="no filter for this machine"
)


def verdict(program: bytes, number: int, arguments: tuple[int, ...] = (), audit: int = 0xC000003E) -> int:
    """The error number of a refused call, 0 for an allowed one."""
    value = _returned(program, number, audit, arguments)
    return 0 if value == ALLOW else value & 0xFFFF


def _returned(program: bytes, number: int, audit: int, arguments: tuple[int, ...] = ()) -> int:
    """Run a filter as the kernel does."""
    data = struct.pack("<iIQ6Q", number, audit, 0, *(*arguments, *[0] * 6)[:6])
    code = [struct.unpack_from("<HBBI", program, place) for place in range(0, len(program), 8)]
    accumulator = place = 0
    while True:
        kind, yes, no, value = code[place]
        place += 1
        if kind == 0x06:
            return value
        if kind == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
            continue
        holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[
            kind
        ]
        place += yes if holds else no


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_program_decides_each_call(machine: str) -> None:
    program, numbers = syscalls.program(machine), syscalls.call_numbers(machine)

    def decide(name: str, *arguments: int) -> int:
        return verdict(program, numbers[name], arguments, syscalls._AUDIT[machine])

    for name in syscalls._NEVER:
        assert decide(name) == errno.EPERM, name
    for name in syscalls._UNKNOWN:
        assert decide(name) == errno.ENOSYS, name
    for name in ("preadv2", "pwritev2"):
        assert decide(name, 3, 1, 1, 0, 0, 0) == 0
        for flag in (8, 0x80):  # RWF_NOWAIT, RWF_DONTCACHE
            assert decide(name, 3, 1, 1, 0, 0, flag) == errno.EOPNOTSUPP
    assert [decide("madvise", 0, 1, advice) for advice in (4, 8, 20, 21)] == [0, 0, *[errno.EINVAL] * 2]
    returned = _returned(program, numbers["fadvise64"], syscalls._AUDIT[machine])
    assert returned == 0x50000, "a success that does nothing"
    for name in ("clone", "unshare"):
        assert (decide(name, 0x10000011), decide(name, 0x20011)) == (errno.EPERM, 0)
    for name, place in syscalls.OTHERS_ARGUMENT.items():
        assert decide(name, 0, 0) == 0
        assert decide(name, *(7 if at == place else 0 for at in range(3))) == errno.EPERM, name
    for name in ("socket", "socketpair"):
        allowed = [renderer for renderer in range(64) if decide(name, renderer, 1, 0) == 0]
        assert allowed == [1, 2, 10, 16]
        assert decide(name, 16, 3, 9) == errno.EAFNOSUPPORT
    others = set(range(600)) - set(numbers.values())
    assert all(verdict(program, number, (1, 2, 3), syscalls._AUDIT[machine]) == 0 for number in others)
    assert verdict(program, 0, audit=0x40000003) == errno.EPERM
    assert len(program) // 8 < 256


def test_an_unknown_machine_has_no_filter_and_says_so(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert syscalls.program("riscv64") == b""
    assert "syscall_filter" not in LocalBackend(backend.mode).capabilities


@needs_filter
async def test_calls_are_refused_and_nobody_is_killed(backend: LocalBackend, sandbox: LocalSandbox) -> None:
    assert "syscall_filter" in backend.capabilities
    numbers = syscalls.call_numbers(platform.machine())
    wanted = {name: numbers[name] for name in (*syscalls._NEVER, *syscalls._UNKNOWN)}
    code = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {wanted!r}.items():
    result = libc.syscall(number, 0, 0, 0, 0, 0)
    print(name, result, ctypes.get_errno())
"""
    said = dict(line.split(" ", 1) for line in (await python(sandbox, code)).splitlines())
    assert {said.pop(name) for name in syscalls._UNKNOWN} == {f"-1 {errno.ENOSYS}"}
    assert said == dict.fromkeys(syscalls._NEVER, f"-1 {errno.EPERM}")


@needs_filter
async def test_a_neighbour_cannot_be_read_steered_or_lowered(sandbox: LocalSandbox) -> None:
    process = await sandbox.spawn(["python3", "-c", "import os; print(os.getpid(), flush=True); input()"])
    pid = int(await process.readline(5))
    code = f"""
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    ctypes.set_errno(0)
    result = getattr(libc, name)(*arguments)
    print(name, result, ctypes.get_errno())
call("ptrace", 16, {pid}, 0, 0)
buffer = ctypes.create_string_buffer(8)
vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
call("process_vm_readv", {pid}, vector, 1, vector, 1, 0)
call("process_vm_writev", {pid}, vector, 1, vector, 1, 0)
try:
    resource.prlimit({pid}, resource.RLIMIT_NOFILE, (8, 8)); print("lowered")
except PermissionError:
    print("refused")
try:
    os.setpriority(os.PRIO_PROCESS, {pid}, 19); print("lowered")
except PermissionError:
    print("refused")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); os.nice(1); os.setpriority(os.PRIO_PROCESS, 0, 19)
"""
    assert (await python(sandbox, code)).splitlines() == [
        f"ptrace -1 {errno.EPERM}",
        f"process_vm_readv -1 {errno.EPERM}",
        f"process_vm_writev -1 {errno.EPERM}",
        "refused",
        "refused",
    ]


@needs_filter
async def test_a_sandbox_cannot_ask_or_change_what_the_machine_holds_in_memory(sandbox: LocalSandbox) -> None:
    """All sandboxes show the same files: a page that one reads, or empties, another could ask for."""
    shown = os.open("/usr/bin/env", os.O_RDONLY)
    try:
        assert os.pread(shown, 1, 0)
        code = """
import mmap, os
fd = os.open("/usr/bin/env", os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
try:
    print(os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT))
except OSError as error:
    print(error.errno)
shown = mmap.mmap(fd, 4096, prot=mmap.PROT_READ)
shown[0]
try:
    shown.madvise(21)  # MADV_PAGEOUT
except OSError as error:
    print(error.errno)
print(os.preadv(fd, [bytearray(1)], 0))
"""
        assert (await python(sandbox, code)).split() == [str(errno.EOPNOTSUPP), str(errno.EINVAL), "1"]
        assert os.preadv(shown, [bytearray(1)], 0, os.RWF_NOWAIT) == 1, "still in memory"
    finally:
        os.close(shown)


@needs_filter
async def test_keys_cannot_be_hidden_from_a_wipe(sandbox: LocalSandbox) -> None:
    add, find = {"x86_64": (248, 250), "aarch64": (217, 219)}[platform.machine()]
    code = "import ctypes; l = ctypes.CDLL(None)\nfor ring in (-3, -4, -5): print({})"
    added = await python(sandbox, code.format(f"l.syscall({add}, b'user', b'stash', b'kept', 4, ring)"))
    await sandbox.kill_all()
    await sandbox.wipe()
    found = await python(sandbox, code.format(f"l.syscall({find}, 10, ring, b'user', b'stash', 0)"))
    assert (added.split(), found.split()) == (["-1"] * 3, ["-1"] * 3)


async def test_attributes_of_a_folder_do_not_outlive_a_wipe(sandbox: LocalSandbox) -> None:
    plant = """
import os
for place in ("/work", "/tmp", "/home/agent", "/dev/shm"):
    os.utime(place, (1, 1))
    try:
        os.setxattr(place, "user.stash", b"kept")
    except OSError:
        pass
"""
    await python(sandbox, plant)
    await sandbox.wipe()
    look = "import os\nfor p in ('/work', '/tmp', '/home/agent', '/dev/shm'):\n"
    look += "    s = os.stat(p); print(os.listxattr(p), s.st_mtime > 9, s.st_atime > 9)"
    assert (await python(sandbox, look)).splitlines() == ["[] True True"] * 4


@needs_filter
async def test_sockets_lead_nowhere_but_the_sandbox(sandbox: LocalSandbox) -> None:
    code = """
import socket
for family in (1, 2, 10, 16, 17, 38, 40, 15, 29, 30, 44):
    for kind in (1, 2, 3, 5):
        try:
            socket.socket(family, kind, 0).close(); print(family, "open"); break
        except OSError as error:
            last = error
    else:
        print(family, last.errno)
try:
    socket.socket(16, 3, 9); print("audit")
except OSError as error:
    print(error.errno)
socket.socketpair()
"""
    said = (await python(sandbox, code)).splitlines()
    assert said[:4] == ["1 open", "2 open", "10 open", "16 open"]
    refused = str(errno.EAFNOSUPPORT)
    assert {line.split()[-1] for line in said[4:]} == {refused}


@needs_filter
async def test_no_new_user_namespace_but_threads_and_children(sandbox: LocalSandbox) -> None:
    result = await sh(sandbox, "unshare -U true")
    assert result.exit_code == 1, result
    assert b"not permitted" in result.stderr
    code = """
import os, subprocess, threading
t = threading.Thread(target=print, args=("thread",)); t.start(); t.join()
print(subprocess.run(["echo", "child"], capture_output=True, text=True).stdout, end="")
pid = os.fork()
if pid == 0: os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert (await python(sandbox, code)).split() == ["thread", "child", "3"]


async def test_calls_of_the_older_architecture_are_no_way_around(sandbox: LocalSandbox) -> None:
    if platform.machine() != "x86_64":
        return  # only there can one program make calls of both kinds
    code = r"""
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # getpid by int 0x80
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
"""
    result = await sandbox.exec(["python3", "-c", code], timeout_s=10)
    assert result.exit_code != 0 or int(result.stdout) < 0, result


async def test_output_of_programs_repeats(backend: LocalBackend) -> None:
    code = "print({'a', 'b', 'c', 'd', 'e'}, lambda: 0, object())"
    seen = set()
    for _ in range(2):
        async with await backend.create(SandboxSpec()) as sandbox:
            seen |= {await python(sandbox, code), await python(sandbox, code)}
            assert await out(sandbox, "date +%Z; ulimit -n; ulimit -Hn") == "UTC\n1024\n4096"
    assert len(seen) == 1


async def test_the_kernel_looks_for_memory_in_sandboxes_first(sandbox: LocalSandbox) -> None:
    assert await out(sandbox, "cat /proc/self/oom_score_adj") == "1000"
