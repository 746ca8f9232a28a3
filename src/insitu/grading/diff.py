"""Diff of an agent's final tree against the base, computed on the host, and its filter.

The agent's git, file times and ignore files are not used. Protected paths are dropped and recorded. Compiled
caches are ignored. Added binaries and large files are left out and recorded; over a cap also added files in
folders of tools or matched by the base's .gitignore, then other added files that are no source. Refused:
paths outside of the folder, base files that became binary or too large, and more source than the caps allow.
A base file in another encoding than UTF-8 may be changed as long as it is text.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from insitu.sandbox.tree import TOOL_FOLDERS
from insitu.types import FileEntry, Tree

ALWAYS_PROTECTED = (
    "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg",
    "pyproject.toml", "*.pth", "sitecustomize.py", "usercustomize.py",
    "jest.config.*", "vitest.config.*", "vitest.workspace.*", ".mocharc", ".mocharc.*", "karma.conf.*",
    "ava.config.*", "jasmine.json", "playwright.config.*", "cypress.config.*",
    ".npmrc", ".yarnrc", ".yarnrc.yml", "go.work", "nextest.toml", "rust-toolchain", "rust-toolchain.toml",
    ".gitattributes", ".gitmodules",
)  # fmt: skip
"""Names protected in every folder: configuration of a test runner, an interpreter or git. Manifests
(package.json, go.mod, Cargo.toml), which solutions change too, are up to the task."""

PROTECTED_FOLDERS = frozenset({".git", ".cargo", "sitecustomize", "usercustomize"})
CACHE_FOLDERS = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"})
CACHE_SUFFIXES = (".pyc", ".pyo")
SOURCE_SUFFIXES = frozenset(
    ".py .pyi .pyx .ipynb .js .jsx .mjs .cjs .ts .tsx .mts .vue .svelte .c .h .cc .cpp .cxx .hh .hpp .hxx .cs"
    " .go .rs .java .kt .kts .scala .swift .m .mm .rb .php .pl .pm .lua .r .jl .hs .ml .mli .ex .exs .erl"
    " .clj .dart .zig .nim .f .f90 .s .asm .sql .sh .bash .cmake .mk .proto .html .css .scss .toml".split()
)
"""Suffixes of source: such added files may be the solution, so over the caps they refuse the diff."""
MAX_COMPONENT_BYTES = 200
NOT_UTF8 = "not UTF-8"
_CONTROLS = bytes(n for n in range(32) if chr(n) not in "\t\n\v\f\r\x1b")
"""Bytes that no text has, in any encoding of single bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffPolicy:
    """Protected paths and caps of a diff."""

    protected: tuple[str, ...] = ()
    """More fnmatch patterns over the whole path; `*` also crosses `/`."""
    restored_paths: frozenset[str] = frozenset()
    """More protected files, by path."""
    shadows: frozenset[str] = frozenset()
    """Files and folders that are dropped: they would shadow a protected module."""
    roots: tuple[str, ...] = ()
    """`Setup.roots`: absolute paths below one are judged too."""
    max_files: int = 200
    max_file_bytes: int = 1 << 20
    max_total_bytes: int = 4 << 20
    max_path_bytes: int = 512


DEFAULT_POLICY = DiffPolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """Changes of the agent after the filter. With `refused` nothing is run."""

    changed: Tree = field(default_factory=dict, repr=False)
    """Added and changed files, to apply."""
    added: tuple[str, ...] = ()
    """Paths of `changed` that the base does not have."""
    deleted: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    """Protected paths whose change is reverted."""
    left_out: tuple[str, ...] = ()
    """Added files that are not judged (binary, too large, too many, bad name), and changed binary files of
    the base, which are reverted."""
    ignored: tuple[str, ...] = ()
    """Compiled caches."""
    suspicious: tuple[str, ...] = ()
    """New files that may shadow the standard library."""
    refused: str = ""

    @property
    def empty(self) -> bool:
        return not self.changed and not self.deleted

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the applied changes."""
        h = hashlib.sha256()
        for path in sorted(self.changed):
            entry = self.changed[path]
            for part in (b"+x" if entry.executable else b"+-", path.encode(), entry.content):
                h.update(len(part).to_bytes(8, "big"))
                h.update(part)
        for path in sorted(self.deleted):
            h.update(b"-" + len(path).to_bytes(8, "big") + path.encode())
        return h.hexdigest()


def changes(base: Tree, after: Tree) -> tuple[dict[str, FileEntry], tuple[str, ...]]:
    """Return files added or changed, and paths deleted, unfiltered and sorted."""
    changed = {path: after[path] for path in sorted(after) if base.get(path) != after[path]}
    return changed, tuple(sorted(path for path in base if path not in after))


def compare(base: Tree, after: Tree, policy: DiffPolicy = DEFAULT_POLICY) -> Diff:
    """Return the filtered diff."""
    changed, gone = changes(base, after)
    kept: dict[str, FileEntry] = {}
    dropped: list[str] = []
    ignored: list[str] = []
    left_out: list[str] = []
    refused = ""
    for path, entry in changed.items():
        refused = refused or _leads_away(path, policy)
        if _may_not_change(path, policy) or _hides_protected(path, gone, policy):
            dropped.append(path)
        elif _is_cache(path):
            ignored.append(path)
        elif not (bad := _unfit(path, policy) or _bad_content(path, entry, base.get(path), policy)):
            kept[path] = entry
        elif path not in base or _binary(base[path].content):
            left_out.append(path)
        else:
            refused = refused or bad
    kept, over = _within_caps(base, kept, policy)
    left_out += over
    # A folder of a tool without any file may have been too large to read: not deleted.
    seen = {"", *(_tool_folder(path) for path in after)}
    restored = [
        path
        for path in gone
        if _may_not_change(path, policy) or not (_is_cache(path) or _tool_folder(path) in seen)
    ]
    ignored += [path for path in gone if _is_cache(path) and path not in restored]
    deleted = tuple(path for path in gone if path not in restored and path not in ignored)
    refused = refused or _over_caps(kept, policy) or _conflict(base, kept, deleted)
    return Diff(
        changed={} if refused else kept,
        added=() if refused else tuple(path for path in kept if path not in base),
        deleted=() if refused else deleted,
        dropped=tuple(sorted(_printable(path) for path in dropped + restored)),
        ignored=tuple(sorted(_printable(path) for path in ignored)),
        left_out=tuple(sorted(_printable(path) for path in left_out)),
        suspicious=tuple(_printable(path) for path in kept if path not in base and _shadows_stdlib(path)),
        refused=refused,
    )


def apply(base: Tree, diff: Diff) -> dict[str, FileEntry]:
    """Return the base with the filtered diff."""
    tree = {path: entry for path, entry in base.items() if path not in diff.deleted}
    tree.update(diff.changed)
    return tree


def is_protected(path: str, patterns: tuple[str, ...] = ()) -> bool:
    parts = path.split("/")
    if any(part in PROTECTED_FOLDERS for part in parts):
        return True
    if any(fnmatch.fnmatchcase(parts[-1], pattern) for pattern in ALWAYS_PROTECTED):
        return True
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _may_not_change(path: str, policy: DiffPolicy) -> bool:
    if path in policy.restored_paths or is_protected(path, policy.protected):
        return True
    parts = path.split("/") if policy.shadows else ()
    return any("/".join(parts[: depth + 1]) in policy.shadows for depth in range(len(parts)))


def _is_cache(path: str) -> bool:
    return path.endswith(CACHE_SUFFIXES) or any(part in CACHE_FOLDERS for part in path.split("/")[:-1])


def _shadows_stdlib(path: str) -> bool:
    head = path.split("/")[0].partition(".")[0]
    return path.endswith(".py") and head in sys.stdlib_module_names


def bad_path(path: str, policy: DiffPolicy) -> str:
    """Return why a path is refused, or "" for a relative path in normal form."""
    return _leads_away(path, policy) or _unfit(path, policy)


def _leads_away(path: str, policy: DiffPolicy) -> str:
    """Return why a path is outside of the folder and the roots, or ""."""
    path = next((path[len(root) + 1 :] for root in policy.roots if path.startswith(f"{root}/")), path)
    if not path or path.startswith("/"):
        return f"path is not relative: {_printable(path)}"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return f"path is not in normal form: {_printable(path)}"
    return ""


def _unfit(path: str, policy: DiffPolicy) -> str:
    """Return why a path inside of the folder is left out, or ""."""
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        return f"path is not UTF-8: {_printable(path)}"
    parts = path.split("/")
    if any(ord(char) < 32 or ord(char) == 127 for char in path):
        return f"path has control characters: {_printable(path)}"
    if len(raw) > policy.max_path_bytes or any(len(part.encode()) > MAX_COMPONENT_BYTES for part in parts):
        return f"path is too long ({len(raw)} bytes): {_printable(path)[:60]}"
    return ""


def _bad_content(path: str, entry: FileEntry, before: FileEntry | None, policy: DiffPolicy) -> str:
    if len(entry.content) > policy.max_file_bytes:
        return f"{path} has {len(entry.content)} bytes, more than {policy.max_file_bytes}"
    how = _binary(entry.content)
    if how == NOT_UTF8 and before is not None and _binary(before.content) == NOT_UTF8:
        return ""  # e.g. a source in Latin-1, which stays one
    return f"{path} is binary ({how})" if how else ""


def _binary(content: bytes) -> str:
    """Return why content is not text in UTF-8, or ""."""
    if b"\0" in content:
        return "NUL byte"
    try:
        content.decode()
    except UnicodeDecodeError:
        few = len(content.translate(None, delete=_CONTROLS)) == len(content)
        return NOT_UTF8 if few else "control characters"
    return ""


def _within_caps(
    base: Tree, kept: dict[str, FileEntry], policy: DiffPolicy
) -> tuple[dict[str, FileEntry], list[str]]:
    """Return `kept` without added files over the caps, and their paths.

    Files of tools are left out first, then files that are no source, largest folders first. Source and files
    of the base are never left out.
    """
    if not _over_caps(kept, policy):
        return kept, []
    ignores = _ignores(base)
    gone = {path for path in kept if path not in base and _is_leftover(path, ignores)}
    groups = _new_folders(base, [path for path in kept if path not in gone])
    sizes = {path: len(entry.content) for path, entry in kept.items()}
    for weights, most in ((dict.fromkeys(kept, 1), policy.max_files), (sizes, policy.max_total_bytes)):
        total = sum(weight for path, weight in weights.items() if path not in gone)
        heavy = {name: sum(weights[path] for path in paths) for name, paths in groups.items()}
        for name in sorted(groups, key=lambda name: (-heavy[name], name)):
            if total <= most:
                break
            if gone.isdisjoint(groups[name]):
                total -= heavy[name]
                gone.update(groups[name])
    return {path: entry for path, entry in kept.items() if path not in gone}, sorted(gone)


def _new_folders(base: Tree, paths: Sequence[str]) -> dict[str, list[str]]:
    """Group added files that are no source by their outermost added folder."""
    folders = {
        "/".join(parts[:n]) for path in base for parts in (path.split("/"),) for n in range(1, len(parts))
    }
    groups: dict[str, list[str]] = {}
    for path in paths:
        parts = path.split("/")
        new = (head for n in range(1, len(parts)) if (head := "/".join(parts[:n])) not in folders)
        if path not in base and PurePosixPath(path).suffix.lower() not in SOURCE_SUFFIXES:
            groups.setdefault(next(new, path), []).append(path)
    return groups


def _tool_folder(path: str) -> str:
    """Return the outermost parent folder that belongs to a tool, or ""."""
    parts = path.split("/")
    return next(("/".join(parts[:n]) for n in range(1, len(parts)) if parts[n - 1] in TOOL_FOLDERS), "")


def _ignores(base: Tree) -> list[tuple[str, str]]:
    """Return (folder with a slash, pattern) of each .gitignore line of the base, outer files first."""
    files = sorted((path, entry) for path, entry in base.items() if path.split("/")[-1] == ".gitignore")
    return [
        (path.removesuffix(".gitignore"), line.strip())
        for path, entry in files
        for line in entry.content.decode("utf-8", "replace").splitlines()
        if line.strip() and not line.startswith("#")
    ]


def _is_leftover(path: str, ignores: Sequence[tuple[str, str]]) -> bool:
    """Return whether a tool made the file, or .gitignore matches it or a parent folder.

    The last matching line decides; unlike in git, `*` also matches `/`.
    """
    parts = path.split("/")
    if not TOOL_FOLDERS.isdisjoint(parts[:-1]):
        return True
    for n in range(1, len(parts) + 1):
        at, ignored = "/".join(parts[:n]), False
        for folder, pattern in ignores:
            name = pattern.removeprefix("!")
            if not at.startswith(folder) or (name.endswith("/") and n == len(parts)):
                continue
            name = name.rstrip("/").removeprefix("**/")
            asked = at.removeprefix(folder) if "/" in name else parts[n - 1]
            if fnmatch.fnmatchcase(asked, name.removeprefix("/")):
                ignored = not pattern.startswith("!")
        if ignored:
            return True
    return False


def _over_caps(kept: Tree, policy: DiffPolicy) -> str:
    if len(kept) > policy.max_files:
        return f"{len(kept)} files were changed, more than {policy.max_files} can be judged"
    total = sum(len(entry.content) for entry in kept.values())
    if total > policy.max_total_bytes:
        return f"{total} bytes were changed, more than {policy.max_total_bytes} can be judged"
    return ""


def _hides_protected(path: str, gone: tuple[str, ...], policy: DiffPolicy) -> bool:
    """Return whether a file replaces a folder with protected files, which are restored."""
    return any(lost.startswith(path + "/") and _may_not_change(lost, policy) for lost in gone)


def _conflict(base: Tree, kept: Tree, deleted: tuple[str, ...]) -> str:
    """Return a path that would be both file and folder, or ""."""
    paths = (set(base) - set(deleted)) | set(kept)
    for path in kept:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in paths:
                return f"{path} lies under a file"
        if path not in base and any(other.startswith(path + "/") for other in paths):
            return f"{path} is both a file and a folder"
    return ""


def _printable(text: str, keep: str = "") -> str:
    """Escape non-printable characters except `keep`."""
    clean = text.encode("utf-8", "backslashreplace").decode()
    return "".join([c if c.isprintable() or c in keep else _escape(c) for c in clean])


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()


def unified(base: Tree, after: Tree, *, max_chars: int = 20_000) -> str:
    """Return a bounded text diff for people; binary content is only named."""
    changed, deleted = changes(base, after)
    out: list[str] = []
    size = 0
    for path in sorted([*changed, *deleted]):
        for line in _file_diff(_printable(path), base.get(path), changed.get(path)):
            size += len(line) + 1
            if size > max_chars:
                return "\n".join([*out, "... (cut)"]) + "\n"
            out.append(line)
    return "\n".join(out) + "\n" if out else ""


def _file_diff(name: str, old: FileEntry | None, new: FileEntry | None) -> list[str]:
    contents = [b"" if entry is None else entry.content for entry in (old, new)]
    for content in contents:
        if len(content) > 1 << 18 or b"\0" in content:
            return [f"{name}: binary or large ({len(content)} bytes)"]
    before, after = map(_line_ends, contents)
    if before and after and (before != after or before == "CRLF"):
        contents = [content.replace(b"\r\n", b"\n") for content in contents]
    texts = [_printable(content.decode("utf-8", "replace"), "\t\n").split("\n") for content in contents]
    head = "/dev/null" if old is None else f"a/{name}", "/dev/null" if new is None else f"b/{name}"
    lines = list(difflib.unified_diff(texts[0], texts[1], head[0], head[1], lineterm=""))
    if not (before and after) or before == after:
        return lines
    return [f"--- {head[0]}", f"+++ {head[1]}", f"\\ line ends changed: {before}, now {after}", *lines[2:]]


def _line_ends(content: bytes) -> str:
    """Return CRLF, LF, both, or empty of a text of one line."""
    both = content.count(b"\n")
    carried = content.count(b"\r\n")
    return "CRLF and LF" if 0 < carried < both else "CRLF" if carried else "LF" if both else ""
