"""Control groups (cgroup v1 and v2): one per local sandbox, below the group of this process.

The first process of a sandbox enters its group before it does anything else. v2 needs a delegated group, v1
write access to the memory and pids hierarchies. Without either, sandboxes have no group, and
`CgroupSupport.why` gives the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from weakref import WeakSet

from insitu.sandbox.process_owner import is_dead, owner

log = logging.getLogger(__name__)

NEEDED = ("memory", "pids")
PREFIX = "insitu-"
LEAF = "insitu.host"
"""v2: the group of this process and its relatives: a group with processes can have no child groups."""
REMOVE_S = 5.0
PAUSE_S = 0.002
OUTSIDE = 2
"""Processes beside the sandbox's own: PID 1 and the parent that waits for it."""
PROCESSES = 4096
"""Default limit of processes and threads."""
DELEGATE = "systemd-run --user --scope -p Delegate=yes"
_numbers = itertools.count(1)

ENTER = (
    "/bin/sh",
    "-c",
    'while [ "$1" != -- ]; do echo 0 >"$1" || exit 1; shift; done; shift; exec "$@"',
    "sh",
)
"""Command prefix: enter the groups whose files follow, then exec what comes after `--`."""


MEMORY_FILES = {
    1: ("memory.oom_control", "memory.max_usage_in_bytes", "memory.limit_in_bytes"),
    2: ("memory.events", "memory.peak", "memory.max"),
}
"""By version: files with the OOM kills, the largest memory use and its limit."""
MODEST = 0.25
"""Share of its memory limit below which a group is not what used up the machine's memory."""


class OomCounter:
    """Number of OOM kills in a group."""

    def __init__(self, folder: Path | None = None, version: int = 2) -> None:
        """`folder`: of the group's memory controller; None counts nothing. Raises OSError."""
        self._files = [folder / name for name in MEMORY_FILES[version]] if folder else []
        self._fd = os.open(self._files[0], os.O_RDONLY | os.O_CLOEXEC) if folder else -1
        self._count, self._share = 0, 1.0
        self.counts = folder is not None
        """Whether there is a group."""
        _open_counters.add(self)

    def count(self) -> int:
        """Return the number of OOM kills; after `close` the last one."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # the group was removed
                for line in os.pread(self._fd, 4096, 0).splitlines():
                    if line.startswith(b"oom_kill "):  # missing before Linux 4.13
                        self._count = int(line.split()[1])
        return self._count

    def modest(self) -> bool:
        """Return whether the group never used MODEST of its limit; False where the kernel does not say."""
        if self._fd >= 0:
            with contextlib.suppress(OSError, ValueError):  # `max`: no limit; no peak before Linux 5.19
                most, limit = (int(file.read_text()) for file in self._files[1:])
                self._share = most / max(1, limit)
        return self._share < MODEST

    def close(self) -> None:
        """Keep the last numbers; idempotent."""
        global _closed_kills
        if self._fd >= 0:
            _closed_kills += self.count()
            self.modest()
            _open_counters.discard(self)
            os.close(self._fd)
            self._fd = -1


_open_counters: WeakSet[OomCounter] = WeakSet()
_closed_kills = 0


def kills_in_groups() -> int:
    """Return the OOM kills so far in all groups that this process counted."""
    return _closed_kills + sum(counter.count() for counter in list(_open_counters))


class Cgroup:
    """The control group of one sandbox; v1 has one folder per controller."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self.kills = OomCounter()

    @property
    def name(self) -> str:
        return self._folders[0].name

    def limit(self, memory_bytes: int, processes: int) -> None:
        """Set the limits. Raises OSError."""
        memory, pids = self._folders[0], self._folders[-1]
        if len(self._folders) == 1:
            _set(memory / "memory.max", memory_bytes)
            swap, most = memory / "memory.swap.max", 0
        else:
            _set(memory / "memory.limit_in_bytes", memory_bytes)
            swap, most = memory / "memory.memsw.limit_in_bytes", memory_bytes
        if swap.exists():
            _set(swap, most)
        _set(pids / "pids.max", processes + OUTSIDE)
        self.kills = OomCounter(memory, 2 if len(self._folders) == 1 else 1)

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return `argv` with the prefix that enters the group."""
        # v1: `tasks` moves the one thread without a lock; `cgroup.procs` waits for every CPU (some 15 ms).
        file = "tasks" if len(self._folders) > 1 else "cgroup.procs"
        return [*ENTER, *(str(folder / file) for folder in self._folders), "--", *argv]

    def kill(self) -> None:
        """Kill all processes; idempotent. Fork bombs take several calls."""
        for folder in self._folders:
            with contextlib.suppress(OSError):
                _set(folder / "cgroup.kill", 1)
                continue
            for pid in filter(None, _pids(folder)):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def try_remove(self) -> bool:
        """Remove the group if it is empty; return whether it is removed."""
        self.kills.close()
        left = False
        for folder in self._folders:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                left = True
        return not left

    async def remove(self) -> None:
        """Kill and remove in a thread. Never raises: the reaper takes what cannot be removed."""
        if not self.try_remove():
            await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Kill and remove; blocks until the group is empty, REMOVE_S at most."""
        deadline = time.monotonic() + REMOVE_S
        while not self.try_remove():
            if time.monotonic() > deadline:
                log.warning("leaked control group name=%s", self.name)
                return
            self.kill()
            time.sleep(PAUSE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroups:
    """A factory of control groups. `parents`: their folders, one for v2, memory and pids for v1."""

    version: int
    parents: tuple[Path, ...]
    roots: tuple[Path, ...]
    """Mount points of the hierarchies."""

    def make(self, memory_bytes: int, processes: int | None) -> Cgroup:
        """Make a group with limits. Raises OSError."""
        name = f"{PREFIX}{owner()}-{next(_numbers)}"
        made = Cgroup([parent / name for parent in self.parents])
        try:
            for parent in self.parents:
                (parent / name).mkdir()
            made.limit(memory_bytes, processes or PROCESSES)
        except OSError:
            made.try_remove()
            raise
        return made

    def names(self, mark: str = "") -> set[str]:
        """Return the names of the groups of an owner, by default of this process."""
        start = f"{PREFIX}{mark or owner()}-"
        return {folder.name for folder in self._all() if folder.name.startswith(start)}

    def reap(self) -> int:
        """Remove the groups of dead owners with their processes; return how many."""
        dead: dict[str, list[Path]] = {}
        for folder in self._all():
            if is_dead(folder.name.removeprefix(PREFIX).rpartition("-")[0]):
                dead.setdefault(folder.name, []).append(folder)
        for folders in dead.values():
            Cgroup(folders).end()
        return len(dead)

    def _all(self) -> Iterator[Path]:
        # Below the whole mount: an owner's groups lie below the group that it was started in.
        for root in self.roots:
            yield from _below(root)


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupSupport:
    """What this machine offers: `cgroups`, or the reason `why` there are none."""

    cgroups: Cgroups | None
    why: str = ""


@functools.cache
def find() -> CgroupSupport:
    """Probe once. On v2 this may move this process and its relatives into a child group."""
    try:
        mounts = _mounts(Path("/proc/self/mountinfo").read_text())
        paths = _paths(Path("/proc/self/cgroup").read_text())
    except OSError as error:
        return CgroupSupport(cgroups=None, why=f"no control groups: {error.strerror}")
    return look(mounts, paths)


def kills_of(pid: int) -> OomCounter:
    """Return the OOM counter of the group of a process; one that stays 0 where the group is not visible."""
    with contextlib.suppress(OSError):
        paths = _paths(Path(f"/proc/{pid}/cgroup").read_text())
        for mount in _mounts(Path("/proc/self/mountinfo").read_text()):
            version = {"": 2, "memory": 1}.get(mount[0])
            if version and mount[0] in paths:
                folder = _own(mount, paths[mount[0]])
                if (folder / MEMORY_FILES[version][0]).exists():
                    return OomCounter(folder, version)
    return OomCounter()


def look(mounts: Sequence[tuple[str, Path, str]], paths: dict[str, str]) -> CgroupSupport:
    """Return the first version whose groups can be made.

    `mounts`: (controller, mount point, root of the mount), controller "" for v2; `paths`: this process's
    groups by controller.
    """
    reasons = []
    for names in (("",), NEEDED):
        here = [next((m for m in mounts if m[0] == name), None) for name in names]
        if None in here or not all(name in paths for name in names):
            continue
        known = [mount for mount in here if mount is not None]
        try:
            parents = tuple(_own(mount, paths[mount[0]]) for mount in known)
            if names == ("",):
                parents = (_arrange(parents[0]),)
            roots = tuple(mount[1] for mount in known)
            found = Cgroups(version=2 if names == ("",) else 1, parents=parents, roots=roots)
            found.make(1 << 30, 64).try_remove()
        except OSError as error:
            reasons.append(f"v{2 if names == ('',) else 1}: {_reason(error)}")
        else:
            return CgroupSupport(cgroups=found)
    return CgroupSupport(cgroups=None, why="; ".join(reasons) or "no control groups with memory and pids")


def _reason(error: OSError) -> str:
    return f"{error.strerror} ({error.filename})" if error.filename else str(error)


def _own(mount: tuple[str, Path, str], path: str) -> Path:
    """Return the folder of this process's group. Raises OSError when it is not below the mount."""
    _, point, root = mount
    if ".." in PurePosixPath(path).parts or not PurePosixPath(path).is_relative_to(root):
        raise OSError("the group of this process is outside of the mount")
    return point / PurePosixPath(path).relative_to(root)


def _arrange(own: Path) -> Path:
    """Enable the controllers for child groups (v2); return the parent group. Raises OSError."""
    place = own.parent if own.name == LEAF else own
    lacking = set(NEEDED) - set((place / "cgroup.controllers").read_text().split())
    if lacking:
        names = " and no ".join(sorted(lacking))
        raise OSError(f"the group of this process has no {names} controller; start with `{DELEGATE}`")
    switch = place / "cgroup.subtree_control"
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        raise OSError("mounted read-only")
    if not os.access(switch, os.W_OK):
        raise OSError(f"no write access to the group of this process; start with `{DELEGATE}`")
    if set(NEEDED) <= set(switch.read_text().split()):
        return place
    wanted = " ".join(f"+{name}" for name in NEEDED)
    try:
        _set(switch, wanted)
    except OSError:
        _move_to_leaf(place)
        _set(switch, wanted)
    return place


def _move_to_leaf(place: Path) -> None:
    """Move all processes of the group into LEAF, if all are relatives of this one. Raises OSError."""
    leaf = place / LEAF
    for _ in range(3):
        there = _pids(place)
        if not there:
            return
        if not set(there) <= _relatives():
            raise OSError(f"the group holds unrelated processes; start with `{DELEGATE}`")
        leaf.mkdir(exist_ok=True)
        for pid in there:
            with contextlib.suppress(ProcessLookupError):
                _set(leaf / "cgroup.procs", pid)


def _relatives() -> set[int]:
    """Return this process, its ancestors and its descendants."""
    parents = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found, pid = set[int](), os.getpid()
    while pid:
        found.add(pid)
        pid = parents.get(pid, 0)
    fresh = {os.getpid()}
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


def _below(root: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name.startswith(PREFIX):
                    yield Path(entry.path)
                yield from _below(Path(entry.path))


def _set(file: Path, value: object) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def _pids(folder: Path) -> list[int]:
    """Return the processes of a group; 0 for one outside of this PID namespace."""
    try:
        return [int(line) for line in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _mounts(mountinfo: str) -> list[tuple[str, Path, str]]:
    found = []
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        root, point = fields.split(" ")[3:5]
        if kind == "cgroup2":
            found.append(("", Path(point), root))
        elif kind == "cgroup":
            found += [(name, Path(point), root) for name in NEEDED if name in options.split(",")]
    return found


def _paths(text: str) -> dict[str, str]:
    """Return controller -> path of a process's group; controller "" for v2."""
    rows = (line.split(":", 2) for line in text.splitlines())
    return {name: path for _, names, path in rows for name in names.split(",")}
