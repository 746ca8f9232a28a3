"""Applies a unified diff to a tree on the host, forwards or backwards, exactly or not at all.

No git and no `patch` program: the diff is data of a data set, and the tree may be an image's. A hunk must
stand where it says that it stands; nothing is searched for and no fuzz is allowed, so that "applies" has one
meaning. unidiff reads the format. Used by the loaders and by the grader.
"""

from __future__ import annotations

from dataclasses import dataclass

from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk, PatchedFile, PatchSet

from insitu.errors import TaskError
from insitu.types import FileEntry, Tree

NOWHERE = "/dev/null"
NO_NEWLINE = "\\"


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileChange:
    """One file of a diff, in the direction in which it is applied."""

    old: str
    """Path before; empty = a new file."""
    new: str
    """Path after; empty = deleted."""
    executable: bool | None
    """What the diff says of the new file's mode; None = as it was."""
    hunks: tuple[tuple[int, tuple[bytes, ...], tuple[bytes, ...]], ...]
    """(index of the first line, lines before, lines after)."""


def _read_patch(text: str, *, reverse: bool = False) -> list[_FileChange]:
    """Return the changes of a diff; raise TaskError unless it is a diff of text files inside the folder."""
    if not text.strip():
        raise TaskError("the patch is empty")
    try:
        files = PatchSet(text if text.endswith("\n") else text + "\n")
    except UnidiffParseError as error:
        raise TaskError(f"the patch is not a unified diff: {' '.join(str(error).split())[:120]}") from None
    changes = [_change(file, reverse) for file in files]
    if not changes:
        raise TaskError("the patch is not a unified diff: it names no file")
    return changes


def patched_paths(text: str) -> tuple[str, ...]:
    """Every path that a diff touches, sorted. Raises TaskError."""
    return tuple(sorted({path for change in _read_patch(text) for path in (change.old, change.new) if path}))


def apply_patch(tree: Tree, text: str, *, reverse: bool = False) -> dict[str, FileEntry]:
    """`tree` with the diff applied. Raises TaskError in one line, naming the file, when it does not apply."""
    result = dict(tree)
    for change in _read_patch(text, reverse=reverse):
        _apply(result, change)
    return result


def _change(file: PatchedFile, reverse: bool) -> _FileChange:
    old, new = _path(file.source_file), _path(file.target_file)
    shown = new or old or "(no name)"
    info = [] if file.patch_info is None else [str(line) for line in file.patch_info]
    if file.is_binary_file or any(line.startswith("GIT binary patch") for line in info):
        raise TaskError(f"the patch changes a binary file: {shown}")
    if file.is_symlink or file.is_submodule:
        raise TaskError(f"the patch has a link or a submodule: {shown}")
    if any(line.startswith("copy from ") for line in info):
        raise TaskError(f"the patch copies a file: {shown}")
    if not old and not new:
        raise TaskError("the patch has a file without a name")
    modes = (file.source_mode, file.target_mode)
    if reverse:
        old, new, modes = new, old, (modes[1], modes[0])
    mode = modes[1]
    return _FileChange(
        old=old,
        new=new,
        executable=None if mode is None else mode.endswith("755"),
        hunks=tuple(_hunk(hunk, reverse) for hunk in file),
    )


def _path(name: str | None) -> str:
    """Return the path of a header line, without prefix and quotes; empty for /dev/null; raise TaskError."""
    if name is None or name == NOWHERE:
        return ""
    if len(name) > 1 and name.startswith('"') and name.endswith('"'):
        try:
            name = name[1:-1].encode("latin-1").decode("unicode_escape").encode("latin-1").decode()
        except UnicodeError:
            raise TaskError(f"the patch names a file that is not UTF-8: {ascii(name)[:80]}") from None
    head, slash, rest = name.partition("/")
    path = rest if slash and len(head) == 1 and head in "abciow12" else name
    parts = path.split("/")
    if any(part in ("", ".", "..", ".git") for part in parts) or not path.isprintable():
        raise TaskError(f"the patch leaves the folder: {ascii(name)[:80]}")
    return path


def _hunk(hunk: Hunk, reverse: bool) -> tuple[int, tuple[bytes, ...], tuple[bytes, ...]]:
    before: list[bytes] = []
    after: list[bytes] = []
    last: list[list[bytes]] = []
    for line in hunk:
        if line.line_type == NO_NEWLINE:
            for side in last:
                side[-1] = side[-1].removesuffix(b"\n")
            continue
        last = [side for side, gone in ((before, "+"), (after, "-")) if line.line_type != gone]
        value = line.value.encode("utf-8", "surrogateescape")
        for side in last:
            side.append(value if value.endswith(b"\n") else value + b"\n")
    start, length = hunk.source_start, hunk.source_length
    if reverse:
        before, after = after, before
        start, length = hunk.target_start, hunk.target_length
    return (start - 1 if length else start), tuple(before), tuple(after)


def _apply(tree: dict[str, FileEntry], change: _FileChange) -> None:
    if change.old and change.old not in tree:
        raise TaskError(f"the patch does not apply: {change.old} does not exist")
    if change.new and change.new != change.old and change.new in tree:
        raise TaskError(f"the patch does not apply: {change.new} already exists")
    entry = tree.pop(change.old) if change.old else FileEntry(content=b"")
    content = _edited(entry.content, change)
    if not change.new:
        if content:
            raise TaskError(f"the patch does not apply: it deletes {change.old} but not all of its lines")
        return
    executable = entry.executable if change.executable is None else change.executable
    tree[change.new] = FileEntry(content=content, executable=executable)


def _edited(content: bytes, change: _FileChange) -> bytes:
    lines = _split(content)
    out: list[bytes] = []
    at = 0
    for number, (start, before, after) in enumerate(change.hunks, 1):
        if start < at or tuple(lines[start : start + len(before)]) != before:
            name = change.old or change.new
            raise TaskError(f"the patch does not apply: {name}, hunk {number} at line {start + 1}")
        out += [*lines[at:start], *after]
        at = start + len(before)
    return b"".join([*out, *lines[at:]])


def _split(content: bytes) -> list[bytes]:
    """Lines by LF alone: a carriage return belongs to its line."""
    parts = content.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
