"""Read, write and empty a sandbox's folders from the host through a directory descriptor.

The content is untrusted: every step opens one name relative to an open folder, follows no link and checks the
type of the opened file. All functions are blocking.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from insitu.errors import SandboxError
from insitu.types import FileEntry, Tree

log = logging.getLogger(__name__)

MAX_DEPTH = 256
"""Nesting limit of folders that are read."""
TOOL_FOLDERS = frozenset(
    "__pycache__ .pytest_cache .mypy_cache .ruff_cache .hypothesis .tox .nox .eggs .ipynb_checkpoints .gradle"
    " .cache .next .nuxt .parcel-cache .turbo .npm .venv venv virtualenv site-packages node_modules"
    " bower_components build dist target htmlcov CMakeFiles _build _skbuild".split()
)
"""Folders filled by tools: left out first when a work folder is over a cap."""
ROOT = 0
"""Owner of files that no process of a sandbox may change."""
KEEPER = 64999
"""The same for a sandbox whose user is root without capabilities."""
_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class TreeTooLarge(SandboxError):
    """The work folder is over a cap: caused by the agent, no infrastructure failure."""

    infra = False


def parts_of(path: str) -> tuple[str, ...]:
    """Return the parts of a relative path. Raises SandboxError for any other path."""
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\0" in path or not pure.parts:
        raise SandboxError(f"{path!r} is not a path inside the folder")
    return pure.parts


@contextlib.contextmanager
def _folder(root: int, parts: tuple[str, ...], owner: int, *, make_way: bool = False) -> Iterator[int]:
    """Yield the descriptor of a folder, made where missing; `make_way` replaces other files in its path."""
    fd = os.dup(root)
    try:
        _seal(fd, owner)
        for name in parts:
            with contextlib.suppress(FileExistsError):
                _make_folder(fd, name, owner)
            try:
                inner = os.open(name, _DIR, dir_fd=fd)
            except OSError as error:
                if not make_way or error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                os.unlink(name, dir_fd=fd)
                _make_folder(fd, name, owner)
                inner = os.open(name, _DIR, dir_fd=fd)
            os.close(fd)
            fd = inner
            _seal(fd, owner)
        yield fd
    finally:
        os.close(fd)


def _make_folder(parent: int, name: str, owner: int) -> None:
    os.mkdir(name, 0o755, dir_fd=parent)
    if owner >= 0:
        os.chown(name, owner, owner, dir_fd=parent, follow_symlinks=False)


def _seal(folder: int, owner: int) -> None:
    """Make a parent folder of root-owned files sticky (mode 1777)."""
    if owner in (ROOT, KEEPER):
        os.fchown(folder, owner, owner)
        os.fchmod(folder, 0o1777)


def write_file(root: int, path: str, entry: FileEntry, owner: int, *, make_way: bool = False) -> None:
    """Write one file atomically, as a new inode.

    Owner -1 keeps the host's; ROOT also seals parent folders.
    """
    *folders, name = parts_of(path)
    with _folder(root, tuple(folders), owner, make_way=make_way) as folder:
        fresh = f".{name[:100]}.insitu"
        if make_way:
            _remove(folder, fresh)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(fresh, flags, 0o600, dir_fd=folder)
        with open(fd, "wb") as file:
            file.write(entry.content)
            os.fchmod(fd, 0o755 if entry.executable else 0o644)
            if owner >= 0:
                os.fchown(fd, owner, owner)
        try:
            os.rename(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)
        except IsADirectoryError:
            if not make_way:
                raise
            _remove(folder, name)
            os.rename(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)


def write_tree(root: int, files: Tree, owner: int) -> None:
    empty(root)
    if owner >= 0:
        os.fchown(root, owner, owner)
    _seal(root, owner)
    for path, entry in files.items():
        write_file(root, path, entry, owner)


@contextlib.contextmanager
def _unless_read_only() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EROFS:
            raise


def give(root: int, owner: int) -> None:
    """Change the owner of a folder tree, except of what is mounted read-only; -1 is a no-op."""
    if owner < 0:
        return
    waiting = [os.dup(root)]
    while waiting:
        folder = waiting.pop()
        try:
            if os.fstat(folder).st_uid != owner:
                with _unless_read_only():
                    os.fchown(folder, owner, owner)
            for name in os.listdir(folder):  # noqa: PTH208 - a descriptor, not a path
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    waiting.append(_open(name, _DIR, folder))
                elif status.st_uid != owner:
                    with _unless_read_only():
                        os.chown(name, owner, owner, dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(folder)


def lay_tree(root: int, files: Tree, remove: Iterable[str], owner: int) -> None:
    """Remove paths, then write files over the rest; no link is followed."""
    for path in remove:
        *folders, name = parts_of(path)
        with contextlib.suppress(OSError), _existing(root, tuple(folders)) as folder:
            _remove(folder, name)
    for path, entry in files.items():
        write_file(root, path, entry, owner, make_way=True)


@contextlib.contextmanager
def _existing(root: int, parts: tuple[str, ...]) -> Iterator[int]:
    """Yield the descriptor of a folder. Raises OSError when it is missing or behind a link."""
    fd = os.dup(root)
    try:
        for name in parts:
            inner = _open(name, _DIR, fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def _remove(folder: int, name: str) -> None:
    """Remove a file or a folder tree."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        inner = _open(name, _DIR, folder)
        try:
            empty(inner)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=folder)


def read_one(root: int, path: str, max_bytes: int) -> bytes | None:
    """Return the content of a regular file, None without one. Raises TreeTooLarge over `max_bytes`."""
    *folders, name = parts_of(path)
    found: dict[str, FileEntry] = {}
    try:
        with _existing(root, tuple(folders)) as folder:
            if stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                _read_file(folder, name, "", found, [max_bytes, 1, 1])
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
    return found[name].content if name in found else None


def _open_up(name: str, folder: int) -> None:
    """Add read permission for the owner, on the inode itself and never on a link's target."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISLNK(mode):
            # A file must not become executable: that flag is part of the tree.
            add = stat.S_IRWXU if stat.S_ISDIR(mode) else stat.S_IRUSR
            Path(f"/proc/self/fd/{fd}").chmod(stat.S_IMODE(mode) | add)
    finally:
        os.close(fd)


def _open(name: str, flags: int, folder: int) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except PermissionError:
        _open_up(name, folder)
        return os.open(name, flags, dir_fd=folder)


def empty(root: int) -> None:
    """Remove all content, and reset the folder's own mode, times and extended attributes."""
    # Subfolders are moved up to `root` first, so that no nesting depth exhausts the stack.
    os.fchmod(root, 0o755)
    with contextlib.suppress(OSError):  # tmpfs of older kernels has no attributes
        for attribute in os.listxattr(root):
            os.removexattr(root, attribute)
    serial = 0
    while names := os.listdir(root):
        for name in names:
            try:
                os.unlink(name, dir_fd=root)
                continue
            except FileNotFoundError:
                continue
            except (IsADirectoryError, PermissionError):
                pass
            inner = _open(name, _DIR, root)
            try:
                os.fchmod(inner, 0o700)
                for child in os.listdir(inner):  # noqa: PTH208 - a descriptor, not a path
                    serial = _lift(child, inner, root, serial)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=root)
    os.utime(root)


def _lift(child: str, folder: int, root: int, serial: int) -> int:
    """Remove a file, or move a folder up to `root` under a free name; return the last serial."""
    try:
        os.unlink(child, dir_fd=folder)
    except (IsADirectoryError, PermissionError):
        # Moving a folder rewrites its "..", which needs write permission.
        _open_up(child, folder)
        while True:
            serial += 1
            try:
                os.rename(child, f".insitu-{serial}", src_dir_fd=folder, dst_dir_fd=root)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
                continue
            break
    return serial


def read_tree(root: int, *, max_bytes: int, max_files: int) -> Tree:
    """Return the regular files below `root`.

    Links, special files, names that are not UTF-8, files deeper than MAX_DEPTH, and TOOL_FOLDERS that do not
    fit beside the rest are left out. Raises TreeTooLarge when the rest is over `max_bytes`, `max_files`, or
    about four times as many entries.
    """
    os.fchmod(root, 0o755)
    found: dict[str, FileEntry] = {}
    budget = [max_bytes, max_files, 4 * max_files + 1000]
    tools: list[str] = []
    _read_folder(root, "", 0, found, budget, tools)
    wasted = 0
    for path in sorted(tools):
        if wasted > max_bytes:  # sparse files are cheap to make and slow to read
            break
        inside, left = dict[str, FileEntry](), budget.copy()
        try:
            with _existing(root, parts_of(path)) as folder:
                _read_folder(folder, f"{path}/", path.count("/") + 1, inside, left, None)
            budget, found = left, found | inside
        except TreeTooLarge as error:
            log.warning("left out of a work folder: %.200s: %s", ascii(path), error)
            wasted += budget[0] - left[0]
            budget[2] = left[2]
    return dict(sorted(found.items()))


def _read_folder(
    folder: int,
    prefix: str,
    depth: int,
    found: dict[str, FileEntry],
    budget: list[int],
    tools: list[str] | None,
) -> None:
    """Read a folder recursively; list TOOL_FOLDERS in `tools` instead of reading them."""
    if depth > MAX_DEPTH:
        return
    for name in os.listdir(folder):
        budget[2] -= 1
        if budget[2] < 0:
            raise TreeTooLarge("work folder has too many entries")
        try:
            name.encode()
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode) and tools is not None and name in TOOL_FOLDERS:
                tools.append(prefix + name)
            elif stat.S_ISDIR(mode):
                inner = _open(name, _DIR, folder)
                try:
                    _read_folder(inner, f"{prefix}{name}/", depth + 1, found, budget, tools)
                finally:
                    os.close(inner)
            elif stat.S_ISREG(mode):
                _read_file(folder, name, prefix, found, budget)
        except (FileNotFoundError, NotADirectoryError, UnicodeEncodeError):
            continue
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise SandboxError(f"read the work folder: {error.strerror}") from error


def _read_file(folder: int, name: str, prefix: str, found: dict[str, FileEntry], budget: list[int]) -> None:
    with open(_open(name, _FILE, folder), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return
        budget[1] -= 1
        if budget[1] < 0:
            raise TreeTooLarge("work folder has too many files")
        content = file.read(budget[0] + 1) if status.st_size <= budget[0] else b"."
        if len(content) > budget[0] or status.st_size > budget[0]:
            raise TreeTooLarge("work folder holds too many bytes")
        budget[0] -= len(content)
    found[prefix + name] = FileEntry(content=content, executable=bool(status.st_mode & 0o100))
