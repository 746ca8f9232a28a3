"""The namespaces mode, for root: builds a sandbox with plain system calls.

Run as a script by the host's Python, standard library only: unshares namespaces, builds the tree, pivots root
and executes PID 1, which drops all privileges. The parent only waits: it ends with the last process of the
sandbox.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import sys
from _socket import AF_INET, SOCK_DGRAM, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = (
    0x20000, 0x2000000, 0x4000000, 0x8000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18,
)  # fmt: skip
MNT_DETACH, SIGKILL = 2, 9
PR_SET_PDEATHSIG = 1
ROOT = "/new"
NOTHING = "/nothing"
"""An empty folder."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
COVERED = ("sys", "sysrq-trigger", "irq", "bus")

libc = ctypes.CDLL(None, use_errno=True)


def system(result: int, doing: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{doing}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode())
    system(libc.mount(*arguments, ctypes.c_ulong(flags), data.encode() or None), f"mount {target}")


def pivot(new: str, old: str) -> None:
    number = 155 if os.uname().machine == "x86_64" else 41
    system(libc.syscall(number, new.encode(), old.encode()), "pivot_root")


def _read_only(path: str, flags: int = MS_NOSUID | MS_NODEV) -> None:
    mount("", path, "", MS_REMOUNT | MS_BIND | MS_RDONLY | flags)


def bind(source: str, target: str) -> None:
    # Not recursive: mounts below the source could not be made read-only in one step. An overlay gives a
    # folder inodes of its own, so that file locks and inotify events stay in the sandbox.
    if os.path.isdir(source):  # noqa: PTH112 - pathlib would double the start-up time of every sandbox
        os.makedirs(target, exist_ok=True)  # noqa: PTH103
        if _overlaid(source, target):
            return
    else:
        write(target, "")
    mount(source, target, "", MS_BIND)


def _overlaid(source: str, target: str) -> bool:
    if set(source) & set(":,\\"):
        return False
    try:
        # The kernel makes no overlay of a single layer.
        mount("overlay", target, "overlay", MS_RDONLY | MS_NOSUID | MS_NODEV, f"lowerdir={source}:{NOTHING}")
    except OSError:
        return False
    return True


def write(path: str, content: str | bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    with open(path, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def devices(path: str, old: str) -> None:
    mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=0755,size=64k")
    for name in DEVICES:
        bind(f"{old}/dev/{name}", f"{path}/{name}")
    for name, target in LINKS.items():
        os.symlink(target, f"{path}/{name}")  # noqa: PTH211
    os.mkdir(f"{path}/pts")  # noqa: PTH102
    mount("devpts", f"{path}/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")


def build(steps: Sequence[Sequence[str]], old: str) -> None:
    """Carry out the steps of rootfs.plan below ROOT; the host's tree is at `old`."""
    for kind, argument, path in steps:
        target = ROOT + path
        if kind == "bind":
            bind(old + argument, target)
            _read_only(target)
        elif kind == "file":
            write(target, argument)
        elif kind == "code":
            write(target, bytes.fromhex(argument))
        elif kind == "link":
            os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120
            os.symlink(argument, target)  # noqa: PTH211
        elif kind == "ro":
            _read_only(target, MS_NOSUID | (MS_NOEXEC if path == "/dev" else MS_NODEV))
        else:
            os.makedirs(target, exist_ok=True)  # noqa: PTH103
            special(kind, argument, target, old)


def special(kind: str, argument: str, target: str, old: str) -> None:
    if kind == "tmpfs":
        mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=0755,size={argument}")
    elif kind == "dev":
        devices(target, old)
    elif kind == "proc":
        mount("proc", target, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        for name in COVERED:
            if os.path.exists(f"{target}/{name}"):  # noqa: PTH110
                mount(f"{target}/{name}", f"{target}/{name}", "", MS_BIND)
                _read_only(f"{target}/{name}", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def _change_root(steps: Sequence[Sequence[str]]) -> None:
    """Pivot to the new tree and unmount the host's."""
    mount("", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
    os.mkdir("/tmp/old")  # noqa: PTH102
    pivot("/tmp", "/tmp/old")
    os.chdir("/")
    os.mkdir(ROOT)  # noqa: PTH102
    os.mkdir(NOTHING)  # noqa: PTH102
    mount("tmpfs", ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
    build(steps, "/old")
    os.chdir(ROOT)
    pivot(".", ".")
    system(libc.umount2(b".", MNT_DETACH), "umount the host")
    os.chdir("/")


def _loopback_up() -> None:
    probe = socket(AF_INET, SOCK_DGRAM)
    request = struct.pack("16sH14x", b"lo", 1 | 64)  # IFF_UP | IFF_RUNNING
    fcntl.ioctl(probe.fileno(), 0x8914, request)
    probe.close()


def main(plan_fd: int, program: list[str]) -> None:
    fields = os.read(plan_fd, 1 << 20).decode().split("\0")
    os.close(plan_fd)
    os.umask(0o022)
    steps = [fields[n : n + 3] for n in range(0, len(fields), 3)]
    spaces = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWCGROUP
    system(libc.unshare(spaces), "unshare")
    child = os.fork()
    if child:
        # Only PID 1 may hold the control socket: the connection must end with it.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.waitpid(child, 0)
        return
    system(libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "prctl")
    _loopback_up()
    system(libc.sethostname(b"sandbox", 7), "sethostname")
    _change_root(steps)
    os.execve(program[0], program, {})


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
