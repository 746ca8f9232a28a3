"""Compares the tree an agent left with the tree it was given, on the host, and filters what may be judged.

The base is held by the host; the agent's own git, file times and ignore files are never asked. Nothing
here does I/O. Of what differs, protected paths are dropped and recorded, compiled caches are ignored, and
what work leaves behind and no grading sandbox needs is left out and recorded: added binaries and added large
files, and where a diff is over a cap, added files in folders of tools or ignored by the base's own
.gitignore, then other added files that are no source. Paths that lead elsewhere, files of the base that
became binary or too large, and more changed files or source than the caps allow refuse the whole diff.
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
"""Names protected in every folder: they steer a test runner, an interpreter or git, and little else.
Manifests (package.json, go.mod, Cargo.toml), which solutions change too, are the task's to protect."""

PROTECTED_FOLDERS = frozenset({".git", ".cargo", "sitecustomize", "usercustomize"})
CACHE_FOLDERS = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"})
CACHE_SUFFIXES = (".pyc", ".pyo")
SOURCE_SUFFIXES = frozenset(
    ".py .pyi .pyx .ipynb .js .jsx .mjs .cjs .ts .tsx .mts .vue .svelte .c .h .cc .cpp .cxx .hh .hpp .hxx .cs"
    " .go .rs .java .kt .kts .scala .swift .m .mm .rb .php .pl .pm .lua .r .jl .hs .ml .mli .ex .exs .erl"
    " .clj .dart .zig .nim .f .f90 .s .asm .sql .sh .bash .cmake .mk .proto .html .css .scss .toml".split()
)
"""Added files with such a name may be the solution: over the caps they refuse the diff."""
MAX_COMPONENT_BYTES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffPolicy:
    """What a diff may contain. The caps bound what a grading sandbox is asked to hold."""

    protected: tuple[str, ...] = ()
    """More fnmatch patterns over the whole path; `*` also crosses `/`."""
    put_back: frozenset[str] = frozenset()
    """More files that are protected, by their path."""
    shadows: frozenset[str] = frozenset()
    """Files and folders that may not be there: they would be imported in the place of one put back."""
    max_files: int = 200
    max_file_bytes: int = 1 << 20
    max_total_bytes: int = 4 << 20
    max_path_bytes: int = 512


DEFAULT_POLICY = DiffPolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """What the agent did to the tree, after the filter. `refused` non-empty means: do not run it."""

    changed: Tree = field(default_factory=dict, repr=False)
    """Added or changed files that are applied."""
    added: tuple[str, ...] = ()
    """Which of `changed` the base does not have."""
    deleted: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    """Protected paths whose change was undone."""
    left_out: tuple[str, ...] = ()
    """Added files that are not judged: binary, too large, too many, or of a name that no sandbox is given.
    And binary files of the base, whose change was undone."""
    ignored: tuple[str, ...] = ()
    """Compiled caches."""
    suspicious: tuple[str, ...] = ()
    """New files that would shadow the standard library in a runner that is not isolated."""
    refused: str = ""

    @property
    def empty(self) -> bool:
        return not self.changed and not self.deleted

    @property
    def digest(self) -> str:
        """Hex SHA-256 over what is applied."""
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
    """Unfiltered: files added or changed, and paths deleted, in path order."""
    changed = {path: after[path] for path in sorted(after) if base.get(path) != after[path]}
    return changed, tuple(sorted(path for path in base if path not in after))


def compare(base: Tree, after: Tree, policy: DiffPolicy = DEFAULT_POLICY) -> Diff:
    """The filtered diff. Never raises: what cannot be judged is named in `refused`."""
    changed, gone = changes(base, after)
    kept: dict[str, FileEntry] = {}
    dropped: list[str] = []
    ignored: list[str] = []
    left_out: list[str] = []
    refused = ""
    for path, entry in changed.items():
        refused = refused or _leads_away(path)
        if _may_not_change(path, policy) or _hides_protected(path, gone, policy):
            dropped.append(path)
        elif is_cache(path):
            ignored.append(path)
        elif not (bad := _unfit(path, policy) or _bad_content(path, entry, policy)):
            kept[path] = entry
        elif path not in base or _binary(base[path].content):
            left_out.append(path)
        else:
            refused = refused or bad
    kept, over = _within_caps(base, kept, policy)
    left_out += over
    # A tool's folder of which nothing is there may have been too large to be read.
    seen = {"", *(_tool_folder(path) for path in after)}
    restored = [
        path
        for path in gone
        if _may_not_change(path, policy) or not (is_cache(path) or _tool_folder(path) in seen)
    ]
    ignored += [path for path in gone if is_cache(path) and path not in restored]
    deleted = tuple(path for path in gone if path not in restored and path not in ignored)
    refused = refused or _over_caps(kept, policy) or _conflict(base, kept, deleted)
    return Diff(
        changed={} if refused else kept,
        added=() if refused else tuple(path for path in kept if path not in base),
        deleted=() if refused else deleted,
        dropped=tuple(sorted(_printable(path) for path in dropped + restored)),
        ignored=tuple(sorted(_printable(path) for path in ignored)),
        left_out=tuple(sorted(_printable(path) for path in left_out)),
        suspicious=tuple(_printable(path) for path in kept if path not in base and shadows_stdlib(path)),
        refused=refused,
    )


def apply(base: Tree, diff: Diff) -> dict[str, FileEntry]:
    """The tree to judge: the host's base with the filtered diff."""
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
    if path in policy.put_back or is_protected(path, policy.protected):
        return True
    parts = path.split("/") if policy.shadows else ()
    return any("/".join(parts[: depth + 1]) in policy.shadows for depth in range(len(parts)))


def is_cache(path: str) -> bool:
    return path.endswith(CACHE_SUFFIXES) or any(part in CACHE_FOLDERS for part in path.split("/")[:-1])


def shadows_stdlib(path: str) -> bool:
    head = path.split("/")[0].partition(".")[0]
    return path.endswith(".py") and head in sys.stdlib_module_names


def bad_path(path: str, policy: DiffPolicy) -> str:
    """Why a path is none of a file to judge, or empty. Only plain relative paths in normal form pass."""
    return _leads_away(path) or _unfit(path, policy)


def _leads_away(path: str) -> str:
    """Why a path is none inside of the folder, or empty: no agent's folder holds such a file."""
    if not path or path.startswith("/"):
        return f"path is not relative: {_printable(path)}"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return f"path is not in normal form: {_printable(path)}"
    return ""


def _unfit(path: str, policy: DiffPolicy) -> str:
    """Why a path inside of the folder is given to no sandbox, or empty."""
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


def _bad_content(path: str, entry: FileEntry, policy: DiffPolicy) -> str:
    if len(entry.content) > policy.max_file_bytes:
        return f"{path} has {len(entry.content)} bytes, more than {policy.max_file_bytes}"
    return f"{path} is binary ({how})" if (how := _binary(entry.content)) else ""


def _binary(content: bytes) -> str:
    """Why content is no text, or empty."""
    if b"\0" in content:
        return "NUL byte"
    try:
        content.decode()
    except UnicodeDecodeError:
        return "not UTF-8"
    return ""


def _within_caps(
    base: Tree, kept: dict[str, FileEntry], policy: DiffPolicy
) -> tuple[dict[str, FileEntry], list[str]]:
    """`kept` without added files that must go to fit the caps, and those: first all that tools leave, then
    what is no source, the largest folders first. What the base has, and source, is never left out."""
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
    """Added files that are no source, by the outermost added folder; those in none by themselves."""
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
    """The outermost folder of a tool that a file lies in, or empty."""
    parts = path.split("/")
    return next(("/".join(parts[:n]) for n in range(1, len(parts)) if parts[n - 1] in TOOL_FOLDERS), "")


def _ignores(base: Tree) -> list[tuple[str, str]]:
    """(folder with a slash, pattern) of each .gitignore of the base, outer ones first."""
    files = sorted((path, entry) for path, entry in base.items() if path.split("/")[-1] == ".gitignore")
    return [
        (path.removesuffix(".gitignore"), line.strip())
        for path, entry in files
        for line in entry.content.decode("utf-8", "replace").splitlines()
        if line.strip() and not line.startswith("#")
    ]


def _is_leftover(path: str, ignores: Sequence[tuple[str, str]]) -> bool:
    """Whether a tool made it, or git would ignore it: a folder on its way or the file by the last line that
    fits. `*` also crosses `/`."""
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
    """True for a file put where a folder with protected files was: these come back, it cannot stay."""
    return any(lost.startswith(path + "/") and _may_not_change(lost, policy) for lost in gone)


def _conflict(base: Tree, kept: Tree, deleted: tuple[str, ...]) -> str:
    """A path that would be file and folder at once cannot be laid out in any sandbox."""
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
    """Without anything a terminal or a log could take for more than text; `keep` passes as it is."""
    clean = text.encode("utf-8", "backslashreplace").decode()
    return "".join([c if c.isprintable() or c in keep else _escape(c) for c in clean])


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()


def unified(base: Tree, after: Tree, *, max_chars: int = 20_000) -> str:
    """A text diff for people, bounded. Binary content is named, not shown."""
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
    texts: list[list[str]] = []
    for entry in (old, new):
        content = b"" if entry is None else entry.content
        if len(content) > 1 << 18 or b"\0" in content:
            return [f"{name}: binary or large ({len(content)} bytes)"]
        texts.append(_printable(content.decode("utf-8", "replace"), "\t\n").split("\n"))
    head = "/dev/null" if old is None else f"a/{name}", "/dev/null" if new is None else f"b/{name}"
    return list(difflib.unified_diff(texts[0], texts[1], head[0], head[1], lineterm=""))
