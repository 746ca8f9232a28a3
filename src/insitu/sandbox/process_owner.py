"""Owner mark of sandboxes, by which a later process finds out whether the owner is dead.

Backends whose sandboxes outlive a killed owner label them with it, for `reap`. A PID is not enough: PIDs are
reused, containers have their own, and a daemon may serve several machines.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

LABEL = "insitu.owner"
"""Label that holds the mark."""


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; "" for a zombie or none."""
    state, *fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split() or ("Z",)
    return "" if state in ("Z", "X") else fields[18]


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _place() -> list[str]:
    """Return hashes of machine, boot and PID namespace."""
    parts = (
        _read("/etc/machine-id") + platform.node(),
        _read("/proc/sys/kernel/random/boot_id"),
        _namespace(),
    )
    return [hashlib.sha256(text.encode()).hexdigest()[:10] for text in parts]


def owner(pid: int | None = None) -> str:
    """Return the mark of a process of this machine, by default of this one."""
    number = os.getpid() if pid is None else pid
    return "-".join([*_place(), str(number), _started(number)])


def is_dead(mark: str) -> bool:
    """Return whether the process is certainly dead; False for other machines and other PID namespaces."""
    parts, here = mark.split("-"), _place()
    if len(parts) != 5 or parts[0] != here[0] or not parts[3].isdigit():
        return False
    if parts[1] != here[1]:
        return True
    return parts[2] == here[2] and (not parts[4] or _started(int(parts[3])) != parts[4])
