"""insitu's own formats: `jsonl`, one task per row, and `folder`, one task per folder.

A row has the files of the work folder, the prompt, one of cases, tests and checks to judge the result, and a
solution for `insitu tasks validate`. In the folder format task.toml has the same keys, and prompt.md, files/,
tests/ and gold/ beside it have the texts.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from insitu.errors import TaskError, boundary
from insitu.tasks.base import UNTESTED, Item
from insitu.tasks.dataset import LoadOptions, RowFormat
from insitu.tasks.row_files import OwnIds, OwnRow, RawRow, RowLocation, Text, Texts
from insitu.tasks.shared import LimitsRow, make_item, read_text, safe_tree, text_tree, tree_of_folder
from insitu.types import WORKDIR, Case, Check, Exchange, GradingPlan, HiddenTests, Oracle, Setup, Tree

TEXT_FILES = {"prompt.md": "prompt", "instruction.md": "prompt"}


class CaseRow(OwnRow):
    """A hidden call and the value that it must give."""

    function: Text
    args: list[Any] = Field(default_factory=list)
    expected: Any
    exact: bool = True
    """False: 1, 1.0 and true are equal, as in Python."""

    @property
    def case(self) -> Case:
        return Case(function=self.function, args=tuple(self.args), expected=self.expected, exact=self.exact)


class _ExchangeRow(OwnRow):
    """A hidden run of a program: what it reads, and what it must print."""

    input: str
    output: str


class CheckRow(OwnRow):
    """A hidden command."""

    command: Text
    name: str = ""
    markers: Texts = ()
    weight: Annotated[float, Field(gt=0)] = 1.0


def checks_of(rows: Sequence[CheckRow], name: str) -> tuple[Check, ...]:
    """Return the commands of rows, unnamed ones as `name` 1, 2, ..."""
    return tuple(
        Check(name=row.name or f"{name} {n}", command=row.command, markers=row.markers, weight=row.weight)
        for n, row in enumerate(rows, 1)
    )


class _PlainRow(OwnRow):
    """One task."""

    id: Text
    prompt: Text
    files: dict[str, str] = Field(default_factory=dict)
    image: str = ""
    workdir: str = WORKDIR
    setup: Texts = ()
    root_setup: Texts = ()
    """Run before `setup`, as root of the image's system."""
    setup_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    roots: Texts = ()
    """Folders outside of the work folder that are graded too."""
    entry: str = ""
    cases: list[CaseRow] = Field(default_factory=list)
    io: list[_ExchangeRow] = Field(default_factory=list)
    tests: dict[str, str] = Field(default_factory=dict)
    """Hidden files, put over the work folder when it is judged."""
    fail_to_pass: OwnIds = ()
    pass_to_pass: OwnIds = ()
    checks: list[CheckRow] = Field(default_factory=list)
    gold: dict[str, str] = Field(default_factory=dict)
    gold_patch: str = ""
    protected: Texts = ()
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    where: Literal["clean", "live"] = "clean"
    reward: Literal["binary", "fraction"] = "binary"
    limits: LimitsRow = LimitsRow()
    category: str = ""

    @model_validator(mode="after")
    def _gradable(self) -> Self:
        ways = [bool(self.cases), bool(self.io), bool(self.fail_to_pass), bool(self.checks)]
        if sum(ways) > 1:
            raise ValueError("needs exactly one of cases, io, fail_to_pass (with tests) and checks")
        if (self.cases or self.io) and not self.entry:
            raise ValueError("cases and io need entry, the module file that they call or run")
        if self.fail_to_pass and not self.tests:
            raise ValueError("fail_to_pass needs tests, the hidden files with these ids")
        if not self.files and not self.image and not self.setup:
            raise ValueError("needs files, an image or setup commands: otherwise there is nothing to work on")
        if self.root_setup and not self.image:
            raise ValueError("root_setup needs an image: nothing else has a system of its own")
        return self

    @property
    def runner(self) -> str:
        if self.cases:
            return "json_io"
        if self.io:
            return "stdio"
        if self.checks:
            return "command"
        return "pytest" if self.fail_to_pass else UNTESTED


def _plain_item(row: _PlainRow, options: LoadOptions, more: tuple[Tree, Tree, Tree] = ({}, {}, {})) -> Item:
    """`more`: files, tests and gold that do not stand in the row itself."""
    if row.runner == UNTESTED:
        options.allow_untested()
    files = {**text_tree(row.files, "files"), **more[0]}
    tests = HiddenTests(
        files={**text_tree(row.tests, "tests"), **more[1]},
        fail_to_pass=row.fail_to_pass,
        pass_to_pass=row.pass_to_pass,
        checks=checks_of(row.checks, "check"),
    )
    return make_item(
        id=row.id,
        prompt=row.prompt,
        files=files,
        setup=Setup(
            image=options.image(row.image, row.id),
            workdir=row.workdir,
            commands=row.setup,
            timeout_s=row.setup_timeout_s,
            root_commands=row.root_setup,
            roots=row.roots,
        ),
        grading=GradingPlan(
            runner=row.runner,
            entry=row.entry,
            protected=row.protected,
            timeout_s=row.timeout_s,
            reward=row.reward,
            where=row.where,
        ),
        limits=row.limits.over(options.limits),
        category=row.category,
        oracle=Oracle(
            task_id=row.id,
            cases=tuple(one.case for one in row.cases),
            exchanges=tuple(Exchange(stdin=one.input, expected=one.output) for one in row.io),
            checker=options.checker,
            tests=tests,
            gold={**text_tree(row.gold, "gold"), **more[2]},
            gold_patch=row.gold_patch,
        ),
    )


class PlainJsonl(RowFormat):
    """Format `jsonl`."""

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        return _plain_item(_PlainRow.model_validate(row), options)


class PlainFolder:
    """Format `folder`: `path` holds one folder per task, each with a task.toml; its name is the task's id."""

    def places(self, path: Path) -> Iterator[RowLocation]:
        return task_folders(path, "task.toml")

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        folder = place.path
        with boundary(TaskError, f"read {folder / 'task.toml'}"):
            keys: dict[str, Any] = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        for name, key in TEXT_FILES.items():
            if (folder / name).is_file():
                keys.setdefault(key, read_text(folder / name).strip())
        parts = [tree_of_folder(folder / name) for name in ("files", "tests", "gold")]
        # What lies in folders is checked with what stands in the file: the schema sees that it is there.
        seen = {key: dict.fromkeys(tree, "") for key, tree in zip(("files", "tests"), parts, strict=False)}
        for key, names in seen.items():
            if names:
                keys.setdefault(key, {}).update(names)
        parsed = _PlainRow.model_validate({"id": folder.name, **keys})
        return _plain_item(parsed, options, (safe_tree(parts[0]), safe_tree(parts[1]), safe_tree(parts[2])))


def task_folders(path: Path, mark: str) -> Iterator[RowLocation]:
    """Yield the folders below `path` that hold a file `mark`, by name; `path` itself when it is one."""
    if not path.is_dir():
        raise TaskError(f"tasks.path: {path} is not a folder")
    if (path / mark).is_file():
        yield RowLocation(path=path, number=0)
        return
    found = sorted(child for child in path.iterdir() if (child / mark).is_file())
    if not found:
        raise TaskError(f"tasks.path: {path} holds no folder with a {mark}")
    for child in found:
        yield RowLocation(path=child, number=0)
