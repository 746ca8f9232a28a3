"""What a runner judges: the tree an agent left, after the filter, and how it is laid into a grading
sandbox."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from insitu.errors import TaskError
from insitu.sandbox.base import Owner, Sandbox
from insitu.sandbox.base_tree import is_plain
from insitu.tasks.patch import apply_patch
from insitu.types import HiddenTests, Task, Tree

LEFT = """
since=$1; work=$5; me=$(id -u)
find "$2" "$3" "$4" "$HOME" -mindepth 1 -user "$me" -newerct "$since" -delete
find "$work" -xdev -mindepth 1 ! -type d -user "$me" -newerct "$since" -print0
find "$work" -xdev -mindepth 1 -type d -user "$me" -newerct "$since" -exec sh -c 'printf "%s/\\0" "$@"' - {} +
"""
FOLDERS = 'find "$1" -xdev -mindepth 1 -type d -print0'
MOST_NAMES_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A tree to judge. Over an image only the difference is moved: the rest is in the sandbox already."""

    base: Tree = field(repr=False)
    """The host's own copy of what the agent was given."""
    tree: Tree = field(repr=False)
    """`base` with the filtered diff."""
    task_id: str = ""
    over_image: bool = False

    @classmethod
    def of(cls, task: Task, base: Tree, tree: Tree) -> Candidate:
        return cls(base=base, tree=tree, task_id=task.id, over_image=not is_plain(task.setup))

    def hidden(self, tests: HiddenTests) -> Tree:
        """The hidden files: those given, and those a patch makes of the base's own. Raises TaskError."""
        if not tests.patch:
            return tests.files
        try:
            patched = apply_patch(self.base, tests.patch)
        except TaskError as error:
            raise TaskError(f"task {self.task_id}: the hidden tests: {error}") from None
        changed = {path: entry for path, entry in patched.items() if self.base.get(path) != entry}
        return {**changed, **tests.files}

    async def folders(self, sandbox: Sandbox) -> frozenset[str]:
        """Return the folders of image and setup in the work folder, for `clear`. Raises SandboxError."""
        if not self.over_image:
            return frozenset()
        said = await sandbox.exec(
            ["sh", "-c", FOLDERS, "folders", sandbox.workdir],
            timeout_s=60.0,
            max_output_bytes=MOST_NAMES_BYTES,
        )
        return frozenset(_inside(said.stdout, sandbox.workdir))

    async def clear(self, sandbox: Sandbox, hidden: Tree, since: float, folders: frozenset[str]) -> None:
        """Kill what runs in `sandbox` and take away what its processes left, so that the next cannot tell
        that it is not the first. Over an image, those are the sandbox user's files that changed `since` then
        and are neither the candidate's nor hidden, and folders that are neither theirs nor among `folders`;
        what was changed in place stays as it is."""
        await sandbox.kill_all()
        if not self.over_image:
            await sandbox.wipe()
            return
        places = ["/tmp", "/var/tmp", "/dev/shm", sandbox.workdir]
        said = await sandbox.exec(
            ["sh", "-c", LEFT, "left", f"@{since:.3f}", *places],
            timeout_s=60.0,
            max_output_bytes=MOST_NAMES_BYTES,
        )
        files = {*self.tree, *hidden}
        kept = {*folders, *_ways(files)}
        left = _inside(said.stdout, sandbox.workdir)
        gone = [path for path in left if not path.endswith("/") and path not in files]
        gone += [path for path in left if path.endswith("/") and path.rstrip("/") not in kept]
        await sandbox.lay({}, remove=gone)

    async def lay(self, sandbox: Sandbox, hidden: Tree | None = None, *, owner: Owner = "sandbox") -> None:
        """Put the candidate into the work folder of `sandbox`, and hidden files over it."""
        files = overlay(self.tree, hidden or {})
        if not self.over_image:
            await sandbox.put_tree(files, owner=owner)
            return
        changed = {path: entry for path, entry in files.items() if self.base.get(path) != entry}
        await sandbox.lay(changed, remove=[path for path in self.base if path not in files], owner=owner)


def overlay(tree: Tree, hidden: Tree) -> Tree:
    """`tree` with the hidden files. They win: what would be a folder on their way, or below them, goes."""
    if not hidden:
        return tree
    ways = _ways(hidden)
    kept = {path: tree[path] for path in tree if path not in ways and not _below(path, hidden)}
    return {**kept, **hidden}


def _ways(paths: Iterable[str]) -> set[str]:
    """The folders that files lie in."""
    split = [path.split("/") for path in paths]
    return {"/".join(parts[:n]) for parts in split for n in range(1, len(parts))}


def _inside(names: bytes, folder: str) -> list[str]:
    """Of names that each end in a NUL, those in `folder`, relative to it."""
    paths = names.decode("utf-8", "surrogateescape").split("\0")[:-1]
    return [path.removeprefix(f"{folder}/") for path in paths if path.startswith(f"{folder}/")]


def _below(path: str, hidden: Tree) -> bool:
    parts = path.split("/")
    return any("/".join(parts[:n]) in hidden for n in range(1, len(parts)))


def restored(base: Tree, paths: Sequence[str]) -> Tree:
    """The base's own version of `paths`, where it has one."""
    return {path: base[path] for path in paths if path in base}
