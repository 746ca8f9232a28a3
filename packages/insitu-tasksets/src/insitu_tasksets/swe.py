"""The SWE-bench family: rows of SWE-bench (also Lite and Verified), Live, SWE-Gym and SWE-rebench.

They share the columns; they differ in how an image is named, where the work folder is and where the test
command comes from. Sets of another make have files of their own: swe_more (Pro, SWE-smith, R2E-Gym), slime.
Not tested with images of these sets: names and commands follow the sets' documentation.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, field_validator

from insitu.errors import TaskError
from insitu.tasks.base import Item
from insitu.tasks.dataset import LoadOptions, RowFormat
from insitu.tasks.own_formats import task_folders
from insitu.tasks.patch import patched_paths
from insitu.tasks.row_files import (
    RawRow,
    RowLocation,
    TaskRow,
    TestIds,
    Text,
    Texts,
    parse_literal,
    parse_object,
)
from insitu.tasks.shared import Seconds, make_item, read_text, safe_tree, tree_of_folder, yaml_mapping
from insitu.types import GradingPlan, HiddenTests, Limits, Oracle, RewardKind, Setup
from insitu_tasksets.swe_script import (
    ACTIVATE,
    REPOSITORIES,
    framed,
    repository_script,
    scrubbed,
    test_files,
    without_patching,
)

TESTBED = "/testbed"
PROMPT = (
    "The repository in {workdir} has the issue below. Resolve it by changing the code there. Hidden tests "
    "will be run; changes to tests do not count.\n\n{issue}\n"
)
TEST_TIMEOUT_S = 1800.0
IMAGES = {
    "swe_bench": ("swebench/sweb.eval.x86_64.", "_1776_"),
    "swe_gym": ("xingyaoww/sweb.eval.x86_64.", "_s_"),
    "swe_bench_live": ("starryzhang/sweb.eval.x86_64.", "_1776_"),
    "swe_rebench": ("swerebench/sweb.eval.x86_64.", "_1776_"),
}
"""Set -> (prefix, what stands for `__`). The one of Live is unverified; of SWE-rebench, that of version 1."""

Number = Annotated[
    str, BeforeValidator(lambda value: str(value) if isinstance(value, int | float) else value)
]


def _some(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value:
        raise ValueError("is empty: nothing could show that the task is solved")
    return value


SomeTestIds = Annotated[TestIds, AfterValidator(_some)]
OrEmpty = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]


class _InstallConfig(TaskRow):
    """What SWE-rebench says of running the tests."""

    test_cmd: Texts = ()
    log_parser: OrEmpty = ""
    docker_specs: Any = None
    """Of version 2 only: its test command is whole, and that of version 1 lacks the test files."""
    base_image_name: Any = None

    @property
    def whole(self) -> bool:
        return self.docker_specs is not None or self.base_image_name is not None


class RowChoices(TaskRow):
    """What `tasks.transform` may say of a row of these sets."""

    reward: Literal["binary", "fraction"] = "binary"
    """fraction: the share of fail_to_pass that passes, times that of pass_to_pass."""
    setup_timeout_s: Seconds = 600.0
    """Of the commands that check the repository out."""


class SweRow(RowChoices):
    """The columns that insitu uses. Agents do not get the hints."""

    instance_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]+$")]
    repo: Annotated[str, Field(pattern=r"^[\w.\-]+/[\w.\-]+$")]
    base_commit: str = ""
    problem_statement: Text
    patch: Text
    test_patch: str = ""
    version: Number | None = None
    fail_to_pass: SomeTestIds = Field(validation_alias=AliasChoices("FAIL_TO_PASS", "fail_to_pass"))
    pass_to_pass: TestIds = Field(default=(), validation_alias=AliasChoices("PASS_TO_PASS", "pass_to_pass"))
    image: OrEmpty = Field(default="", validation_alias=AliasChoices("image", "image_name", "docker_image"))
    eval_script: OrEmpty = ""
    test_cmd: Texts = Field(
        default=(), validation_alias=AliasChoices("test_cmds", "test_cmd", "test_command")
    )
    log_parser: OrEmpty = ""
    install_config: _InstallConfig = _InstallConfig()
    workdir: OrEmpty = ""

    @field_validator("install_config", mode="before")
    @classmethod
    def _maybe(cls, value: object) -> object:
        """Parse a mapping, which some copies of the set hold as text."""
        return parse_literal(value) if isinstance(value, str) and value else value or {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _SweFormat(RowFormat):
    """One set of the family."""

    name: str
    needs_command: bool = False
    """Every row brings its test command and its parser."""

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        return self.item(SweRow.model_validate(row), options)

    def item(self, row: SweRow, options: LoadOptions) -> Item:
        first = self.name == "swe_rebench" and not row.install_config.whole
        second = self.name == "swe_rebench" and row.install_config.whole
        workdir = row.workdir or (f"/{row.repo.partition('/')[2]}" if second else TESTBED)
        if not row.test_patch.strip():
            raise TaskError("test_patch is empty: there are no hidden tests")
        if first and row.install_config.test_cmd and not (row.eval_script or row.test_cmd):
            script, parser = _first_rebench(row)
        else:
            script, parser = _script(row, needs_command=self.needs_command)
        return swe_item(
            set_name=self.name,
            id=row.instance_id,
            issue=row.problem_statement,
            setup=Setup(
                image=options.image(self._image(row), row.instance_id),
                workdir=workdir,
                commands=scrubbed(),
                timeout_s=row.setup_timeout_s,
            ),
            limits=options.limits,
            reward=row.reward,
            oracle=Oracle(
                task_id=row.instance_id,
                tests=HiddenTests(
                    patch=row.test_patch,
                    script=script,
                    parser=parser,
                    fail_to_pass=row.fail_to_pass,
                    pass_to_pass=row.pass_to_pass,
                ),
                gold_patch=row.patch,
            ),
        )

    def _image(self, row: SweRow) -> str:
        if row.image:
            return row.image
        if self.name not in IMAGES or row.install_config.whole:
            return ""
        prefix, between = IMAGES[self.name]
        return f"{prefix}{row.instance_id.lower().replace('__', between)}:latest"


def swe_item(
    *,
    set_name: str,
    id: str,
    issue: str,
    setup: Setup,
    limits: Limits,
    oracle: Oracle,
    protected: Sequence[str] = (),
    reward: RewardKind = "binary",
) -> Item:
    """Return the task of a set whose base is a repository in an image; raise TaskError."""
    if not setup.image:
        raise TaskError("the row names no image")
    paths = patched_paths(oracle.tests.patch) if oracle.tests.patch else ()
    if oracle.gold_patch:
        patched_paths(oracle.gold_patch)
    return make_item(
        id=id,
        prompt=PROMPT.format(workdir=setup.workdir, issue=issue.strip()),
        files={},
        setup=setup,
        grading=GradingPlan(
            runner="swebench_log",
            protected=tuple(dict.fromkeys([*paths, *protected])),
            timeout_s=TEST_TIMEOUT_S,
            reward=reward,
        ),
        limits=limits,
        category=set_name,
        oracle=oracle,
    )


def _script(row: SweRow, *, needs_command: bool) -> tuple[str, str]:
    """(script, parser) of a row: its own, else that of its repository. Raises TaskError."""
    parser = parser_name(row.log_parser or row.install_config.log_parser)
    if row.eval_script.strip():
        if not parser:
            raise TaskError("the row has an eval_script but no log_parser")
        return without_patching(row.eval_script), parser
    commands = row.test_cmd or row.install_config.test_cmd
    if commands:
        if not parser:
            raise TaskError("the row has a test command but no log_parser")
        return framed(commands), parser
    known = REPOSITORIES.get(row.repo.lower()) or REPOSITORIES.get(row.repo)
    if known is None or needs_command:
        raise TaskError(
            f"no test command for {row.repo}: the row needs test_cmd or eval_script, and log_parser"
        )
    ids = [*row.fail_to_pass, *row.pass_to_pass]
    return repository_script(known, patched_paths(row.test_patch), ids), known.parser


def _first_rebench(row: SweRow) -> tuple[str, str]:
    """Return the command of install_config on the files of the test patch, and the log parser.

    For version 1 of SWE-rebench; pytest's parser where the row names none.
    """
    files = [shlex.quote(path) for path in test_files(patched_paths(row.test_patch))]
    commands = [*row.install_config.test_cmd[:-1], " ".join([row.install_config.test_cmd[-1], *files])]
    parser = parser_name(row.log_parser or row.install_config.log_parser) or "pytest"
    return framed(commands, before=[ACTIVATE]), parser


def parser_name(name: str) -> str:
    """Return the parser of `parse_log_pytest` or `pytest`: the sets write both."""
    return name.strip().removeprefix("parse_log_").replace("-", "_")


class SweFolders:
    """Format `swe_bench_folders`: a task repository of SWE-bench 5, or one task folder of it.

    tasks/<id>/ has task.yaml, tests.json, problem_statement.md, gold.patch, test.patch, eval.sh and, for what
    no patch can carry, test_assets/. sweb.yaml names the data sets and the splits that are published; `path`
    may end in @DATASET.
    """

    beside: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "problem_statement": ("problem_statement.md",),
        "patch": ("gold.patch", "patch.diff", "patch"),
        "test_patch": ("test.patch", "test_patch.diff", "test_patch"),
        "eval_script": ("eval.sh", "eval_script.sh"),
    }

    def places(self, path: Path) -> Iterator[RowLocation]:
        folder, at, dataset = (path, "", "") if path.exists() else _parted(path)
        inner = folder / "tasks"
        found = task_folders(inner if inner.is_dir() else folder, "task.yaml")
        if not (folder / "sweb.yaml").is_file():
            if at:
                raise TaskError(f"tasks.path: {folder} has no sweb.yaml that names data sets")
            return found
        config = yaml_mapping(folder / "sweb.yaml")
        named = [str(name) for name in config.get("datasets") or ()]
        if at and dataset not in named:
            raise TaskError(f"tasks.path: {folder} has no {dataset}; it has {', '.join(named)}")
        splits = config.get("splits") or ["test"]
        return (place for place in found if _published(place.path, splits, dataset))

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        folder = place.path
        keys: dict[str, Any] = {"instance_id": folder.name, **yaml_mapping(folder / "task.yaml")}
        if keys.get("eval_type", PASS_AND_FAIL) != PASS_AND_FAIL:
            raise TaskError(
                f"eval_type {ascii(keys['eval_type'])[:40]} counts tests that did not run as passed"
            )
        for key, names in self.beside.items():
            found = next((folder / name for name in names if (folder / name).is_file()), None)
            if found is not None:
                keys.setdefault(key, read_text(found))
        if (folder / "tests.json").is_file():
            keys |= parse_object(read_text(folder / "tests.json"), str(folder / "tests.json"))
        item = _SweFormat(name="swe_bench").item(SweRow.model_validate(keys), options)
        if not (folder / "test_assets").is_dir():
            return item
        tests = replace(item.oracle.tests, files=safe_tree(tree_of_folder(folder / "test_assets")))
        return replace(item, oracle=replace(item.oracle, tests=tests))


PASS_AND_FAIL = "pass_and_fail"


def _parted(path: Path) -> tuple[Path, str, str]:
    """Return folder, "@" and data set of FOLDER@DATASET."""
    name, at, dataset = path.name.partition("@")
    return path.with_name(name) if name else path.parent, at, dataset


def _published(folder: Path, splits: Sequence[object], dataset: str) -> bool:
    keys = yaml_mapping(folder / "task.yaml")
    of = keys.get("datasets")
    return keys.get("split") in splits and (not dataset or (isinstance(of, list) and dataset in of))


HEX = re.compile(r"^[0-9a-f]{7,40}$")


def commit(value: str, what: str) -> str:
    """Return a commit id that is safe in a command; raise TaskError."""
    if not HEX.match(value):
        raise TaskError(f"{what} is not a commit id: {ascii(value)[:60]}")
    return value


SWE_BENCH = _SweFormat(name="swe_bench")
SWE_BENCH_LIVE = _SweFormat(name="swe_bench_live", needs_command=True)
SWE_GYM = _SweFormat(name="swe_gym")
SWE_REBENCH = _SweFormat(name="swe_rebench", needs_command=True)
