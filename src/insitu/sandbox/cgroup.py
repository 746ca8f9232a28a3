"""Control groups: one for each local sandbox, below the group of this process, so that every limit of ours
holds.

A sandbox's first process enters before it does anything else, so all that the sandbox ever runs is in it.
Both versions are served: v2, where this process's part of the tree is ours to arrange, and v1, where the
memory and the pids hierarchy can be written. Where neither is so, sandboxes are made without, and
`Found.why` says why. Callers: local, doctor, benchmarks.
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

from insitu.sandbox.process_owner import gone, owner

log = logging.getLogger(__name__)

NEEDED = ("memory", "pids")
PREFIX = "insitu-"
LEAF = "insitu.host"
"""v2: where this process and its relatives go, since a group with processes of its own can have no parts."""
REMOVE_S = 5.0
PAUSE_S = 0.002
OUTSIDE = 2
"""Processes of a sandbox that are not the sandbox's own: its PID 1 and the one that waits for it."""
PROCESSES = 4096
"""Processes and threads of a sandbox that names no limit."""
DELEGATE = "systemd-run --user --scope -p Delegate=yes"
_numbers = itertools.count(1)

ENTER = (
    "/bin/sh",
    "-c",
    'while [ "$1" != -- ]; do echo 0 >"$1" || exit 1; shift; done; shift; exec "$@"',
    "sh",
)
"""A command's first words: enter the groups whose files come next, then after `--` become what follows."""


class OomCounter:
    """How many processes of a group the kernel has killed for want of memory."""

    def __init__(self, events: Path | None = None) -> None:
        """`events` is memory.events or, of v1, memory.oom_control; without, none are told. Raises OSError."""
        self._fd = -1 if events is None else os.open(events, os.O_RDONLY | os.O_CLOEXEC)
        self._count = 0

    def count(self) -> int:
        """Once closed, what it was last."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # the group is gone
                for line in os.pread(self._fd, 4096, 0).splitlines():
                    if line.startswith(b"oom_kill "):  # not told before Linux 4.13
                        self._count = int(line.split()[1])
        return self._count

    def close(self) -> None:
        if self._fd >= 0:
            self.count()
            os.close(self._fd)
            self._fd = -1


class Cgroup:
    """The control group of one sandbox; `folders` is one folder, or with v1 one for each controller."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self.kills = OomCounter()

    @property
    def name(self) -> str:
        return self._folders[0].name

    def limit(self, memory_bytes: int, processes: int) -> None:
        """Raises OSError."""
        memory, pids = self._folders[0], self._folders[-1]
        if len(self._folders) == 1:
            _set(memory / "memory.max", memory_bytes)
            swap, most, events = memory / "memory.swap.max", 0, "memory.events"
        else:
            _set(memory / "memory.limit_in_bytes", memory_bytes)
            swap, most, events = memory / "memory.memsw.limit_in_bytes", memory_bytes, "memory.oom_control"
        if swap.exists():
            _set(swap, most)
        _set(pids / "pids.max", processes + OUTSIDE)
        self.kills = OomCounter(memory / events)

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv` as a command that enters the group before it starts."""
        # Of v1 the file for one thread, which is all that the command has yet: a thread that moves itself
        # takes no lock, where a process waits for every CPU (some 15 ms).
        file = "tasks" if len(self._folders) > 1 else "cgroup.procs"
        return [*ENTER, *(str(folder / file) for folder in self._folders), "--", *argv]

    def kill(self) -> None:
        """End everything in it; idempotent. One that forks meanwhile takes several calls."""
        for folder in self._folders:
            with contextlib.suppress(OSError):
                _set(folder / "cgroup.kill", 1)
                continue
            for pid in filter(None, _pids(folder)):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def try_remove(self) -> bool:
        """Whether it is gone."""
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
        """End what is left in it, and it. Never raises: what cannot be removed is left to the reaper."""
        if not self.try_remove():
            await asyncio.to_thread(self.end)

    def end(self) -> None:
        """As `remove`, and blocks for as long as something in it is alive, REMOVE_S at most."""
        deadline = time.monotonic() + REMOVE_S
        while not self.try_remove():
            if time.monotonic() > deadline:
                log.warning("a control group is left to the reaper name=%s", self.name)
                return
            self.kill()
            time.sleep(PAUSE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroups:
    """Makes control groups. `parents` are the folders they go in: of v2 one, of v1 that of memory and that of
    pids; `roots` the mounts these lie in."""

    version: int
    parents: tuple[Path, ...]
    roots: tuple[Path, ...]

    def make(self, memory_bytes: int, processes: int | None) -> Cgroup:
        """Raises OSError."""
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
        """Names of the groups that there are, by default those of this process."""
        start = f"{PREFIX}{mark or owner()}-"
        return {folder.name for folder in self._all() if folder.name.startswith(start)}

    def reap(self) -> int:
        """Remove the groups of processes that are gone, with what runs in them; how many there were."""
        dead: dict[str, list[Path]] = {}
        for folder in self._all():
            if gone(folder.name.removeprefix(PREFIX).rpartition("-")[0]):
                dead.setdefault(folder.name, []).append(folder)
        for folders in dead.values():
            Cgroup(folders).end()
        return len(dead)

    def _all(self) -> Iterator[Path]:
        """Groups of sandboxes, of any process: where an owner was started, its groups are."""
        for root in self.roots:
            yield from _below(root)


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupSupport:
    """What this machine has: `cgroups`, or the reason `why` there are none."""

    cgroups: Cgroups | None
    why: str = ""


@functools.cache
def find() -> CgroupSupport:
    """Looks once. With v2 it moves this process and its relatives into a part of their own group."""
    try:
        mounts = _mounts(Path("/proc/self/mountinfo").read_text())
        paths = _paths(Path("/proc/self/cgroup").read_text())
    except OSError as error:
        return CgroupSupport(cgroups=None, why=f"no control groups: {error.strerror}")
    return look(mounts, paths)


def kills_of(pid: int) -> OomCounter:
    """Those of the group that a process of another sandbox maker is in; none are told where it cannot be
    seen."""
    with contextlib.suppress(OSError):
        paths = _paths(Path(f"/proc/{pid}/cgroup").read_text())
        for mount in _mounts(Path("/proc/self/mountinfo").read_text()):
            name = {"": "memory.events", "memory": "memory.oom_control"}.get(mount[0])
            if name and mount[0] in paths and (events := _own(mount, paths[mount[0]]) / name).exists():
                return OomCounter(events)
    return OomCounter()


def look(mounts: Sequence[tuple[str, Path, str]], paths: dict[str, str]) -> CgroupSupport:
    """`mounts` are (controller, mount point, root of the mount), of v2 with the controller ""; `paths` are
    this process's groups by controller. Tries what it finds with a group that nothing enters."""
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
            reasons.append(f"v{2 if names == ('',) else 1}: {_told(error)}")
        else:
            return CgroupSupport(cgroups=found)
    return CgroupSupport(cgroups=None, why="; ".join(reasons) or "no control groups with memory and pids")


def _told(error: OSError) -> str:
    return f"{error.strerror} ({error.filename})" if error.filename else str(error)


def _own(mount: tuple[str, Path, str], path: str) -> Path:
    """The folder of our group. Raises OSError when it is not below the mount."""
    _, point, root = mount
    if ".." in PurePosixPath(path).parts or not PurePosixPath(path).is_relative_to(root):
        raise OSError("our own group is outside of what is mounted")
    return point / PurePosixPath(path).relative_to(root)


def _arrange(own: Path) -> Path:
    """v2: the group below which sandboxes get theirs, prepared for it. Raises OSError."""
    place = own.parent if own.name == LEAF else own
    lacking = set(NEEDED) - set((place / "cgroup.controllers").read_text().split())
    if lacking:
        raise OSError(
            f"our group has no {' and no '.join(sorted(lacking))} controller; start with `{DELEGATE}`"
        )
    switch = place / "cgroup.subtree_control"
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        raise OSError("mounted read-only")
    if not os.access(switch, os.W_OK):
        raise OSError(f"our group is not ours to arrange; start with `{DELEGATE}`")
    if set(NEEDED) <= set(switch.read_text().split()):
        return place
    wanted = " ".join(f"+{name}" for name in NEEDED)
    try:
        _set(switch, wanted)
    except OSError:
        _make_way(place)
        _set(switch, wanted)
    return place


def _make_way(place: Path) -> None:
    """Move all processes of our group into a part of it, if all are our relatives. Raises OSError."""
    leaf = place / LEAF
    for _ in range(3):
        there = _pids(place)
        if not there:
            return
        if not set(there) <= _relatives():
            raise OSError(f"our group holds processes of others; start with `{DELEGATE}`")
        leaf.mkdir(exist_ok=True)
        for pid in there:
            with contextlib.suppress(ProcessLookupError):
                _set(leaf / "cgroup.procs", pid)


def _relatives() -> set[int]:
    """This process, what it comes from and what it started."""
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
    """0 stands for a process that this PID namespace cannot name."""
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
    """Controller -> path of this process's group; v2 has the controller ""."""
    rows = (line.split(":", 2) for line in text.splitlines())
    return {name: path for _, names, path in rows for name in names.split(",")}
