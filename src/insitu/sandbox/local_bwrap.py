"""The bubblewrap mode: a layout as a `bwrap` command line.

As an ordinary user bwrap makes the user namespace. As root it must not: a user namespace made by root maps
the inside user to the host's root. There bwrap only builds the sandbox, and PID 1 drops to an unprivileged
user in a namespace of its own before it starts anything (see supervisor.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from insitu.sandbox.rootfs import INSIDE_ID, Step


def memory_file(content: bytes) -> int:
    """A descriptor that reads `content` from its start; the caller closes it."""
    fd = os.memfd_create("insitu")
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def command(
    bwrap: str, steps: Sequence[Step], program: Sequence[str], *, as_root: bool
) -> tuple[list[str], list[int]]:
    """(argv, descriptors the child must inherit; the caller closes them after the start)."""
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
