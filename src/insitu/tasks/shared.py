"""What the loaders share: trees of text, limits of a row, and the last checks before a task exists."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, model_validator

from insitu.errors import TaskError, boundary
from insitu.tasks.base import Item
from insitu.tasks.row_files import OwnRow
from insitu.types import FileEntry, GradingPlan, Limits, Oracle, Setup, Task, TaskStep, Tree, task_hash
from insitu.types.limits import LimitKeys

MAX_TREE_FILES = 10_000
MAX_TREE_BYTES = 64 << 20
PLAIN_SANDBOX = Setup()
_USER_HOME = re.compile(r"/home/user\b(?!-)")
_ROOT = re.compile(r"(/[^/:,\s\x00-\x1f\x7f]+)+")
"""Docker takes a colon for two folders, the first of them this machine's."""
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class LimitsRow(OwnRow, LimitKeys):
    """Limits that a row sets for itself; the others are those of [limits]."""

    @model_validator(mode="before")
    @classmethod
    def _is_set(cls, value: object) -> object:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def safe_path(path: str) -> str:
    """Return a relative path in normal form, without .git; raise TaskError."""
    parts = path.split("/")
    if any(part in ("", ".", "..", ".git") for part in parts) or not path.isprintable():
        raise TaskError(f"{ascii(path)[:100]} is not a path inside the work folder")
    return path


def safe_tree(tree: Tree) -> Tree:
    for path in tree:
        safe_path(path)
        folders = path.split("/")[:-1]
        for depth in range(1, len(folders) + 1):
            if "/".join(folders[:depth]) in tree:
                raise TaskError(f"{path} lies under a file")
    return tree


def home_root(texts: Iterable[str], workdir: str) -> tuple[str, ...]:
    """Return /home/user as a root if a task's texts name it and it does not hold the work folder.

    E2B's sandboxes have it as their home.
    """
    return ("/home/user",) if any(map(_USER_HOME.search, texts)) and not _USER_HOME.match(workdir) else ()


def text_tree(texts: Mapping[str, str], what: str) -> dict[str, FileEntry]:
    """Return a tree of text files; raise TaskError."""
    try:
        return dict(safe_tree({path: FileEntry(content=text.encode()) for path, text in texts.items()}))
    except (UnicodeEncodeError, TaskError) as error:
        raise TaskError(f"{what}: {error}") from None


def tree_of_folder(folder: Path) -> dict[str, FileEntry]:
    """Return the regular files of a data set folder, which links may not leave; empty if it is missing."""
    tree: dict[str, FileEntry] = {}
    left = MAX_TREE_BYTES
    if not folder.is_dir():
        return tree
    with boundary(TaskError, f"read {folder}"):
        for path in sorted(folder.rglob("*")):
            if path.is_symlink():
                raise TaskError(f"{path} is a link")
            if not path.is_file():
                continue
            status = path.stat()
            left -= status.st_size
            if left < 0 or len(tree) >= MAX_TREE_FILES:
                raise TaskError(f"{folder} is too large for a task")
            name = path.relative_to(folder).as_posix()
            tree[name] = FileEntry(content=path.read_bytes(), executable=bool(status.st_mode & 0o100))
    return tree


def read_text(path: Path) -> str:
    """Read a text file of a data set; raise TaskError."""
    with boundary(TaskError, f"read {path}"):
        return path.read_text(encoding="utf-8")


def yaml_value(path: Path) -> Any:
    """Read a YAML file; raise TaskError."""
    try:
        return yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise TaskError(f"{path} is not YAML: {' '.join(str(error).split())[:120]}") from None


def yaml_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping; raise TaskError."""
    value = yaml_value(path)
    if not isinstance(value, dict):
        raise TaskError(f"{path} is not a YAML mapping")
    return {str(key): item for key, item in value.items()}


def make_item(
    *,
    id: str,
    prompt: str,
    files: Tree,
    grading: GradingPlan,
    limits: Limits,
    oracle: Oracle,
    setup: Setup = PLAIN_SANDBOX,
    category: str = "",
    steps: tuple[TaskStep, ...] = (),
) -> Item:
    """Task and oracle, checked for what no set may get wrong. Raises TaskError."""
    tests = oracle.tests
    both = set(tests.fail_to_pass) & set(tests.pass_to_pass)
    if both:
        raise TaskError(f"test {ascii(min(both))[:100]} is in both FAIL_TO_PASS and PASS_TO_PASS")
    if not prompt.strip():
        raise TaskError("the prompt is empty")
    named = setup.workdir or not setup.image
    if (named and not setup.workdir.startswith("/")) or ".." in setup.workdir.split("/"):
        raise TaskError(f"workdir {ascii(setup.workdir)[:100]} is not an absolute path")
    for root in setup.roots:
        if posixpath.normpath(root) != root or not _ROOT.fullmatch(root):
            raise TaskError(f"root {ascii(root)[:100]} is not an absolute folder in normal form")
        if any(root.startswith(f"{other}/") for other in setup.roots) or setup.roots.count(root) > 1:
            raise TaskError(f"root {root} lies in another one")
    if any(char.isspace() for char in setup.image):
        raise TaskError(f"image {ascii(setup.image)[:100]} is not an image reference")
    if oracle.gold and all(files.get(path) == entry for path, entry in oracle.gold.items()):
        raise TaskError("the gold solution changes nothing")
    task = Task(
        id=id,
        prompt=prompt,
        files=files,
        setup=setup,
        grading=grading,
        limits=limits,
        category=category,
        content_hash=task_hash(prompt, files, grading, setup, steps),
        steps=steps,
    )
    return Item(task=task, oracle=oracle)
