"""SWE-bench Pro, SWE-smith and R2E-Gym: repositories in images, each with rules of its own.

Pro: run script and parser come from the set's repository (tasks.assets) and go into the grading sandbox only.
SWE-smith: the row's patch is the bug; its reverse is the gold. R2E-Gym: the map of outcomes must be equal.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from insitu.errors import TaskError
from insitu.tasks.base import Item
from insitu.tasks.dataset import LoadOptions, RowFormat
from insitu.tasks.row_files import (
    RawRow,
    RowLocation,
    TestIds,
    Text,
    Texts,
    parse_object,
)
from insitu.tasks.shared import read_text, safe_path, text_tree
from insitu.types import FileEntry, HiddenTests, Oracle, Setup, Tree
from insitu_tasksets.swe import RowChoices, SomeTestIds, SweRow, commit, parser_name, swe_item
from insitu_tasksets.swe_script import END, EXIT, START, framed, scrubbed

MAX_TAG = 128
"""Characters of an image tag that a registry takes."""
RUN_SCRIPT, PARSER = ".insitu/run_script.sh", ".insitu/parser.py"


def pro_script(selected: tuple[str, ...]) -> str:
    """Return a script that runs the set's run script and parser; its JSON goes between the markers."""
    files = shlex.quote(",".join(selected))
    return "\n".join(
        [
            "#!/bin/bash",
            "out=$(mktemp -d)",
            f'bash {RUN_SCRIPT} {files} > "$out/stdout" 2> "$out/stderr"',
            "code=$?",
            f'python3 {PARSER} "$out/stdout" "$out/stderr" "$out/result.json"',
            f"echo '{START}'",
            'cat "$out/result.json"',
            "echo",
            f"echo '{END}'",
            f'echo "{EXIT} $code"',
            "",
        ]
    )


class _ProRow(SweRow):
    """F2P and P2P are Python literals under keys of either case."""

    before_repo_set_cmd: str = ""
    selected: Texts = Field(
        default=(), validation_alias=AliasChoices("selected_test_files_to_run", "SELECTED_TEST_FILES_TO_RUN")
    )
    dockerhub_tag: str = ""
    run_script: str = ""
    parser_script: str = ""


class ProFormat(RowFormat):
    """Format `swe_pro`. Needs tasks.assets: run_scripts/<instance_id>/{run_script.sh,parser.py}."""

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        parsed = _ProRow.model_validate(row)
        if not parsed.test_patch.strip():
            raise TaskError("test_patch is empty: there are no hidden tests")
        texts = {
            RUN_SCRIPT: parsed.run_script or _asset(options, parsed.instance_id, "run_script.sh"),
            PARSER: parsed.parser_script or _asset(options, parsed.instance_id, "parser.py"),
        }
        base = commit(parsed.base_commit, "base_commit")
        # The row's own command ends by fetching the hidden tests from the solution: that line is left out.
        reset = (f"git reset -q --hard {base}", "git clean -fdq", f"git checkout -q {base}")
        return swe_item(
            set_name="swe_pro",
            id=parsed.instance_id,
            issue=parsed.problem_statement,
            setup=Setup(
                image=options.image(_pro_image(parsed), parsed.instance_id),
                workdir=parsed.workdir or "/app",
                commands=scrubbed(*reset),
                timeout_s=parsed.setup_timeout_s,
            ),
            limits=options.limits,
            reward=parsed.reward,
            oracle=Oracle(
                task_id=parsed.instance_id,
                tests=HiddenTests(
                    files=text_tree(texts, "run scripts"),
                    patch=parsed.test_patch,
                    script=pro_script(parsed.selected),
                    parser="tests_json",
                    fail_to_pass=parsed.fail_to_pass,
                    pass_to_pass=parsed.pass_to_pass,
                ),
                gold_patch=parsed.patch,
            ),
        )


def _pro_image(row: _ProRow) -> str:
    """Return the tag of a row, else <owner>.<repo>-<id without instance_>, cut to a registry's limit."""
    tag = row.dockerhub_tag
    if not tag:
        owner, _, name = row.repo.lower().partition("/")
        tag = f"{owner}.{name}-{row.instance_id.removeprefix('instance_')}"[:MAX_TAG]
    return row.image or f"jefzda/sweap-images:{tag}"


def _asset(options: LoadOptions, instance_id: str, name: str) -> str:
    if options.assets is None:
        raise TaskError(f"no {name}: tasks.assets must name the folder run_scripts of the set's repository")
    for folder in (options.assets / instance_id, options.assets / "run_scripts" / instance_id):
        if (folder / name).is_file():
            return read_text(folder / name)
    raise TaskError(f"no {name} for this row under {options.assets}")


class _SmithRow(RowChoices):
    """`patch` is what broke the repository."""

    instance_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]+$")]
    patch: Text
    fail_to_pass: SomeTestIds = Field(validation_alias=AliasChoices("FAIL_TO_PASS", "fail_to_pass"))
    pass_to_pass: TestIds = Field(default=(), validation_alias=AliasChoices("PASS_TO_PASS", "pass_to_pass"))
    image_name: Text
    repo: Text
    problem_statement: Text
    test_cmd: Texts = ()
    log_parser: str = ""


class SmithFormat(RowFormat):
    """Format `swe_smith`. The branch of the instance must be in the image: sandboxes have no network."""

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        parsed = _SmithRow.model_validate(row)
        ids = [*parsed.fail_to_pass, *parsed.pass_to_pass]
        files = tuple(sorted({test.split("::")[0] for test in ids}))
        if parsed.test_cmd:
            if not parsed.log_parser:
                raise TaskError("the row has a test command but no log_parser")
            script, parser = framed(parsed.test_cmd), parser_name(parsed.log_parser)
        elif all("::" in test for test in ids):
            command = "pytest -rA --color=no --tb=no -p no:cacheprovider " + shlex.join(files)
            before = [
                "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate testbed; fi"
            ]
            script, parser = framed([command], before=before), "pytest"
        else:
            raise TaskError("the tests are not pytest's: the row needs test_cmd and log_parser")
        branch = shlex.quote(parsed.instance_id)
        # A tip that only removes the tests is left out: the grader needs a base that has them.
        checkout = (
            f"git checkout -q {branch} || git checkout -q origin/{branch}",
            "if git log -1 --format=%s | grep -qi 'remove.*test'; then git checkout -q HEAD~1; fi",
        )
        return swe_item(
            set_name="swe_smith",
            id=parsed.instance_id,
            issue=parsed.problem_statement,
            setup=Setup(
                image=options.image(_smith_image(parsed.image_name), parsed.instance_id),
                workdir="/testbed",
                commands=scrubbed(*checkout),
                timeout_s=parsed.setup_timeout_s,
            ),
            limits=options.limits,
            reward=parsed.reward,
            protected=[path for path in files if "::" in "".join(ids)],
            oracle=Oracle(
                task_id=parsed.instance_id,
                tests=HiddenTests(
                    script=script,
                    parser=parser,
                    fail_to_pass=parsed.fail_to_pass,
                    pass_to_pass=parsed.pass_to_pass,
                ),
                gold_patch=parsed.patch,
                gold_reversed=True,
            ),
        )


def _smith_image(name: str) -> str:
    """Names without an account are those of the first Python images."""
    return name if "/" in name else f"jyangballin/{name.replace('__', '_1776_')}"


def _object(value: object) -> object:
    return parse_object(value, "column") if isinstance(value, str) else value


def _statuses(value: object) -> object:
    try:
        return _object(value)
    except TaskError as error:
        raise ValueError(str(error)) from None


JsonObject = Annotated[dict[str, Any], BeforeValidator(_statuses)]
R2eStatus = Literal["PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS"]


class _R2eRow(RowChoices):
    """Its columns hold JSON as text."""

    docker_image: Text
    repo_name: Text
    commit_hash: str = ""
    problem_statement: Text
    expected: Annotated[dict[str, R2eStatus], BeforeValidator(_statuses)] = Field(
        validation_alias=AliasChoices("expected_output_json", "expected")
    )
    parsed_commit_content: JsonObject = Field(default_factory=dict)
    execution_result_content: JsonObject = Field(default_factory=dict)
    test_cmd: Texts = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class R2eFormat(RowFormat):
    """Format `r2e_gym`. The hidden tests are taken from the row and removed from the image's work folder."""

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        parsed = _R2eRow.model_validate(row)
        if "PASSED" not in parsed.expected.values():
            raise TaskError("expected_output_json has no test that passes: nothing could show a solution")
        tests = _r2e_tests(parsed.execution_result_content)
        name = parsed.commit_hash or parsed.docker_image.rpartition(":")[2]
        task_id = f"{parsed.repo_name}@{name}"
        command = "python -W ignore -m pytest -rA r2e_tests"
        before = [
            "if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi",
            "export PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning'",
        ]
        gone = "rm -rf r2e_tests /r2e_tests /root/r2e_tests run_tests.sh /root/run_tests.sh"
        return swe_item(
            set_name="r2e_gym",
            id=task_id,
            issue=parsed.problem_statement,
            setup=Setup(
                image=options.image(parsed.docker_image, task_id),
                workdir="/testbed",
                commands=scrubbed(gone),
                timeout_s=parsed.setup_timeout_s,
            ),
            limits=options.limits,
            reward=parsed.reward,
            protected=["r2e_tests/*"],
            oracle=Oracle(
                task_id=task_id,
                tests=HiddenTests(
                    files=tests,
                    script=framed(parsed.test_cmd or (command,), before=before),
                    parser="r2e",
                    expected=tuple(sorted(parsed.expected.items())),
                ),
                gold=_r2e_gold(parsed.parsed_commit_content),
            ),
        )


def _r2e_tests(content: Mapping[str, Any]) -> Tree:
    names, codes = content.get("test_file_names"), content.get("test_file_codes")
    if not isinstance(names, list) or not isinstance(codes, list) or not names or len(names) != len(codes):
        raise TaskError(
            "execution_result_content brings no test files: the grader would have no hidden tests"
        )
    if not all(isinstance(text, str) for text in [*names, *codes]):
        raise TaskError("execution_result_content: test files must be texts")
    return text_tree({f"r2e_tests/{n}": code for n, code in zip(names, codes, strict=True)}, "test files")


def _r2e_gold(content: Mapping[str, Any]) -> Tree:
    """Return the new content of every file that the commit changed and that is no test."""
    gold: dict[str, FileEntry] = {}
    for entry in content.get("file_diffs") or ():
        try:
            path, text = entry["header"]["file"]["path"], entry["new_file_content"]
        except (TypeError, KeyError):
            raise TaskError("parsed_commit_content: a file has no path or no new content") from None
        if not isinstance(path, str) or not isinstance(text, str):
            raise TaskError("parsed_commit_content: a file has no path or no new content")
        if text and "test" not in path:
            gold[safe_path(path)] = FileEntry(content=text.encode())
    return gold
