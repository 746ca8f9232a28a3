"""Who made a sandbox: a mark that later processes can tell the living from the dead by.

Backends whose sandboxes outlive a killed owner put OWNER on everything they make; their `reap` removes what
belongs to an owner that is gone. A process id alone would not do: ids are used again, other containers have
ids of their own, and a daemon may serve several machines.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

LABEL = "insitu.owner"
"""Name of the label (or environment variable, or tag) that holds the mark."""


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Start time of a process in clock ticks since boot; empty when there is none, or only its remains."""
    state, *fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split() or ("Z",)
    return "" if state in ("Z", "X") else fields[18]


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _place() -> list[str]:
    """Machine, boot and PID namespace: where a process id means something."""
    told = (
        _read("/etc/machine-id") + platform.node(),
        _read("/proc/sys/kernel/random/boot_id"),
        _namespace(),
    )
    return [hashlib.sha256(text.encode()).hexdigest()[:10] for text in told]


def owner(pid: int | None = None) -> str:
    """The mark of a process of this machine, by default of this one."""
    number = os.getpid() if pid is None else pid
    return "-".join([*_place(), str(number), _started(number)])


def gone(mark: str) -> bool:
    """True only when the process is surely dead: of an earlier boot of this machine, or no longer there. What
    another machine or another container made, nobody here can judge."""
    parts, here = mark.split("-"), _place()
    if len(parts) != 5 or parts[0] != here[0] or not parts[3].isdigit():
        return False
    if parts[1] != here[1]:
        return True
    return parts[2] == here[2] and (not parts[4] or _started(int(parts[3])) != parts[4])
