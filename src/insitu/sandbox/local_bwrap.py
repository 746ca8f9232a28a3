"""The bubblewrap mode: a root filesystem as a `bwrap` command line.

For an unprivileged user bwrap makes the user namespace. For root it must not: that namespace would map the
inside user to the host's root. There PID 1 drops to an unprivileged user (supervisor.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from insitu.sandbox.rootfs import INSIDE_ID, Step


def memory_file(content: bytes) -> int:
    """Return a descriptor that reads `content`; the caller closes it."""
    fd = os.memfd_create("insitu")
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def command(
    bwrap: str, steps: Sequence[Step], program: Sequence[str], *, as_root: bool
) -> tuple[list[str], list[int]]:
    """Return argv and the descriptors to inherit, which the caller closes after the start."""
    argv = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if not as_root:
        argv += ["--unshare-user", "--uid", str(INSIDE_ID), "--gid", str(INSIDE_ID)]
    argv += ["--die-with-parent", "--as-pid-1", "--hostname", "sandbox", "--clearenv"]
    fds: list[int] = []
    for kind, argument, path in steps:
        if kind == "bind":
            argv += ["--ro-bind", argument, path]
        elif kind == "link":
            argv += ["--symlink", argument, path]
        elif kind == "tmpfs":
            argv += ["--size", argument, "--tmpfs", path]
        elif kind in ("file", "code"):
            fds.append(memory_file(argument.encode() if kind == "file" else bytes.fromhex(argument)))
            argv += ["--perms", "0644", "--file", str(fds[-1]), path]
        elif kind == "ro":
            argv += ["--remount-ro", path]
        else:
            argv += [f"--{kind}", path]
    return [*argv, "--chdir", "/", "--", *program], fds
