"""The tree that a runner judges, and how it is written into a grading sandbox."""

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
    """A tree to judge. Over an image only the difference is written: the image holds the rest."""

    base: Tree = field(repr=False)
    """The host's copy of the agent's base tree."""
    tree: Tree = field(repr=False)
    """`base` with the filtered diff."""
    task_id: str = ""
    over_image: bool = False

    @classmethod
    def of(cls, task: Task, base: Tree, tree: Tree) -> Candidate:
        return cls(base=base, tree=tree, task_id=task.id, over_image=not is_plain(task.setup))

    def hidden(self, tests: HiddenTests) -> Tree:
        """Return the hidden files, with those that a patch makes of the base. Raises TaskError."""
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
        listed = await sandbox.exec(
            ["sh", "-c", FOLDERS, "folders", sandbox.workdir],
            timeout_s=60.0,
            max_output_bytes=MOST_NAMES_BYTES,
        )
        return frozenset(_inside(listed.stdout, sandbox.workdir))

    async def clear(self, sandbox: Sandbox, hidden: Tree, since: float, folders: frozenset[str]) -> None:
        """Kill all processes and remove their files, so that the next run looks like the first.

        Over an image: the sandbox user's files changed after `since` that are neither the candidate's nor
        hidden, and folders that are neither theirs nor in `folders`. Files changed in place stay.
        """
        await sandbox.kill_all()
        if not self.over_image:
            await sandbox.wipe()
            return
        places = ["/tmp", "/var/tmp", "/dev/shm", sandbox.workdir]
        listed = await sandbox.exec(
            ["sh", "-c", LEFT, "left", f"@{since:.3f}", *places],
            timeout_s=60.0,
            max_output_bytes=MOST_NAMES_BYTES,
        )
        files = {*self.tree, *hidden}
        kept = {*folders, *_parents(files)}
        left = _inside(listed.stdout, sandbox.workdir)
        removed = [path for path in left if not path.endswith("/") and path not in files]
        removed += [path for path in left if path.endswith("/") and path.rstrip("/") not in kept]
        await sandbox.lay({}, remove=removed)

    async def lay(self, sandbox: Sandbox, hidden: Tree | None = None, *, owner: Owner = "sandbox") -> None:
        """Write the candidate and hidden files over it into the work folder."""
        files = _overlay(self.tree, hidden or {})
        if not self.over_image:
            await sandbox.put_tree(files, owner=owner)
            return
        changed = {path: entry for path, entry in files.items() if self.base.get(path) != entry}
        await sandbox.lay(changed, remove=[path for path in self.base if path not in files], owner=owner)


def _overlay(tree: Tree, hidden: Tree) -> Tree:
    """Return `tree` with the hidden files, which replace files in place of their folders or below them."""
    if not hidden:
        return tree
    parents = _parents(hidden)
    kept = {path: tree[path] for path in tree if path not in parents and not _below(path, hidden)}
    return {**kept, **hidden}


def _parents(paths: Iterable[str]) -> set[str]:
    """Return all parent folders."""
    split = [path.split("/") for path in paths]
    return {"/".join(parts[:n]) for parts in split for n in range(1, len(parts))}


def _inside(names: bytes, folder: str) -> list[str]:
    """Return the NUL-terminated names below `folder`, relative to it."""
    paths = names.decode("utf-8", "surrogateescape").split("\0")[:-1]
    return [path.removeprefix(f"{folder}/") for path in paths if path.startswith(f"{folder}/")]


def _below(path: str, hidden: Tree) -> bool:
    parts = path.split("/")
    return any("/".join(parts[:n]) in hidden for n in range(1, len(parts)))


def restored(base: Tree, paths: Sequence[str]) -> Tree:
    """Return the base's version of `paths` where it has one."""
    return {path: base[path] for path in paths if path in base}
