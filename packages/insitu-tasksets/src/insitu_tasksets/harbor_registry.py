"""Data sets of a Harbor registry by name: `NAME@VERSION` of a registry.json in a folder of this machine.

An entry lists its tasks as a path, for some in a git repository at a commit. Nothing is downloaded: the
folders lie beside registry.json, below the path itself or below the repository's name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from insitu.errors import TaskError, boundary, describe_invalid
from insitu.tasks.own_formats import task_folders
from insitu.tasks.row_files import RowLocation, TaskRow, Text

FOLDER = "INSITU_HARBOR_REGISTRY"
"""Variable with the folder of registry.json, where `tasks.path` does not lie in it."""
FILE = "registry.json"


class _RegistryTask(TaskRow):
    name: str = ""
    path: Text
    git_url: str | None = None
    git_commit_id: str | None = None


class _RegistrySet(TaskRow):
    name: str
    version: str = ""
    tasks: list[_RegistryTask]


def harbor_folders(path: Path) -> Iterator[RowLocation]:
    """Yield the task folders of a folder, or of a data set of a registry. Raises TaskError."""
    if path.exists() or "@" not in path.name:
        yield from task_folders(path, "task.toml")
        return
    folder = path.parent
    if not (folder / FILE).is_file() and (named := os.environ.get(FOLDER)):
        folder = Path(named)
    if not (folder / FILE).is_file():
        raise TaskError(
            f"tasks.path: {path} is no folder; for a data set of a Harbor registry set {FOLDER} to the"
            f" folder of its {FILE}, or begin the path with that folder"
        )
    found = _dataset(folder / FILE, path)
    places = [_folder(folder, task) for task in found.tasks]
    missing = [task for task, place in zip(found.tasks, places, strict=True) if place is None]
    if missing:
        first = missing[0]
        where = f" of {first.git_url} at {first.git_commit_id or 'its head'}" if first.git_url else ""
        raise TaskError(
            f"tasks.path: {len(missing)} of {len(places)} task folders of {path.name} are not in {folder};"
            f" the first is {first.path}{where}"
        )
    for place in places:
        if place is not None:
            yield RowLocation(path=place, number=0)


def _dataset(file: Path, path: Path) -> _RegistrySet:
    """Return the data set that ends a path: NAME@VERSION, or ORG/NAME@VERSION. Raises TaskError."""
    with boundary(TaskError, f"read {file}"):
        rows = json.loads(file.read_text("utf-8"))
    if not isinstance(rows, list):
        raise TaskError(f"{file} is no list of data sets")
    # Only the one that is asked for must be as it should.
    sets = [(str(row.get("name")), str(row.get("version", "")), row) for row in rows if isinstance(row, dict)]
    for asked in ("/".join(path.parts[-2:]), path.name):
        for found, version, row in sets:
            if f"{found}@{version}" == asked:
                try:
                    return _RegistrySet.model_validate(row)
                except ValidationError as error:
                    raise TaskError(f"{file}: {describe_invalid(error)}") from None
    name = path.name
    versions = sorted(f"{one}@{version}" for one, version, _ in sets if one == name.partition("@")[0])
    known = versions or sorted({one for one, *_ in sets})
    raise TaskError(f"{file} has no {name}; it has {', '.join(known[:20]) or 'nothing'}")


def _folder(root: Path, task: _RegistryTask) -> Path | None:
    inside = PurePosixPath(task.path)
    if inside.is_absolute() or ".." in inside.parts:
        raise TaskError(f"{root / FILE}: {ascii(task.path)[:80]} is no path below it")
    repository = (task.git_url or "").rstrip("/").rpartition("/")[2].removesuffix(".git")
    if repository in (".", ".."):
        raise TaskError(f"{root / FILE}: {ascii(task.git_url)[:80]} names no repository")
    for folder in (root / repository / inside, root / inside):
        if (folder / "task.toml").is_file():
            return folder
    return None
