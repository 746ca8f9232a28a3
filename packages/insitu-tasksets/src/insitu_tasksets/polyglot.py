"""Aider's polyglot benchmark, and any track of Exercism: folders of practice exercises.

An exercise is a folder with .meta/config.json, which names its solution files, tests and example, and
.docs/instructions.md. The stubs are the work folder, the tests are hidden, the example is the gold. Python
only: the tests of other languages need their tools in an image.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from insitu.errors import TaskError, boundary
from insitu.tasks.base import Item
from insitu.tasks.dataset import LoadOptions
from insitu.tasks.row_files import RawRow, RowLocation, TaskRow, parse_object
from insitu.tasks.shared import make_item, read_text, safe_path, safe_tree
from insitu.types import FileEntry, GradingPlan, HiddenTests, Oracle

MARK = ".meta/config.json"
DOCS = ("introduction.md", "instructions.md", "instructions.append.md")
PROMPT = "Write {files} in Python 3. Keep the names that are there; hidden tests will be run.\n\n{text}\n"
TIMEOUT_S = 60.0


class _PolyglotFiles(TaskRow):
    """Paths below the exercise; `exemplar` in concept exercises."""

    solution: list[str]
    test: list[str]
    example: list[str] = Field(default_factory=list)
    exemplar: list[str] = Field(default_factory=list)
    editor: list[str] = Field(default_factory=list)
    """Shown to whoever solves it, and not to be changed."""


class _PolyglotConfig(TaskRow):
    """.meta/config.json."""

    files: _PolyglotFiles


class PolyglotFormat:
    """Format `polyglot`. `path`: the benchmark, a track, its folder of exercises, or one exercise."""

    def places(self, path: Path) -> Iterator[RowLocation]:
        if not path.is_dir():
            raise TaskError(f"tasks.path: {path} is not a folder")
        found = sorted(mark.parent.parent for mark in path.rglob(MARK))
        if not found:
            raise TaskError(f"tasks.path: {path} holds no exercise with {MARK}")
        for folder in found:
            yield RowLocation(path=folder, number=0)

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        folder = place.path
        config = _PolyglotConfig.model_validate(parse_object(read_text(folder / MARK), str(folder / MARK)))
        named = config.files
        examples = named.example or named.exemplar
        if not named.solution or not named.test:
            raise TaskError(f"{MARK} names no solution or no test")
        if not all(path.endswith(".py") for path in (*named.solution, *named.test)):
            raise TaskError(f"{named.solution[0]}: only exercises in Python are supported")
        if len(examples) > 1 and len(examples) != len(named.solution):
            raise TaskError(f"{len(examples)} examples for {len(named.solution)} solution files")
        gold = {
            target: _file(folder, source) for target, source in zip(named.solution, examples, strict=False)
        }
        texts = [read_text(folder / ".docs" / name) for name in DOCS if (folder / ".docs" / name).is_file()]
        return make_item(
            id=folder.name,
            prompt=PROMPT.format(files=", ".join(named.solution), text="\n".join(texts).strip()),
            files=safe_tree({path: _file(folder, path) for path in (*named.solution, *named.editor)}),
            grading=GradingPlan(runner="pytest", protected=tuple(named.editor), timeout_s=TIMEOUT_S),
            limits=options.limits,
            category="polyglot",
            oracle=Oracle(
                task_id=folder.name,
                tests=HiddenTests(
                    files=safe_tree({path: _file(folder, path) for path in _hidden(folder, named)}),
                    fail_to_pass=tuple(named.test),
                ),
                gold=safe_tree(gold),
            ),
        )


def _hidden(folder: Path, named: _PolyglotFiles) -> list[str]:
    """Return the tests and the files beside them: the configuration of some exercises omits helpers."""
    shown = {*named.solution, *named.editor, *named.test}
    beside = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    return [*named.test, *(name for name in beside if name not in shown and not name.startswith("."))]


def _file(folder: Path, path: str) -> FileEntry:
    with boundary(TaskError, f"read {folder / path}"):
        source = folder / safe_path(path)
        if source.is_symlink():
            raise TaskError(f"{source} is a link")
        return FileEntry(content=source.read_bytes())
