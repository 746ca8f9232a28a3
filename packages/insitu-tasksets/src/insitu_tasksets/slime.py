"""slime's coding rows: `{prompt, label, metadata}`, flat or with metadata.remote_env_info.

A row is judged by the first it has of swepro (run script and parser, named or in the row), eval_cmd and
f2p_script. A gold patch that travels in the metadata goes to the oracle; nothing else of it goes on.
"""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, Field

from insitu.errors import TaskError
from insitu.tasks.base import Item
from insitu.tasks.dataset import LoadOptions, RowFormat
from insitu.tasks.row_files import RawRow, RowLocation, TaskRow, TestIds, Texts
from insitu.tasks.shared import make_item, read_text, text_tree
from insitu.types import Check, GradingPlan, HiddenTests, Oracle, Setup
from insitu_tasksets.swe import PROMPT, TEST_TIMEOUT_S
from insitu_tasksets.swe_more import PARSER, RUN_SCRIPT, pro_script
from insitu_tasksets.swe_script import scrubbed

MAX_LABEL_CHARS = 256
F2P_SCRIPT = ".insitu/f2p_test.py"


class _SweproRow(TaskRow):
    """Run script and parser as paths below tasks.assets, or as texts."""

    run_script_path: str = ""
    parser_script_path: str = ""
    run_script: str = ""
    parser_script: str = ""
    before_repo_set_cmd: str = ""
    selected_test_files: Texts = Field(
        default=(), validation_alias=AliasChoices("selected_test_files", "selected_test_files_to_run")
    )
    fail_to_pass: TestIds = Field(validation_alias=AliasChoices("fail_to_pass", "FAIL_TO_PASS"))
    pass_to_pass: TestIds = Field(default=(), validation_alias=AliasChoices("pass_to_pass", "PASS_TO_PASS"))


class _RemoteRow(TaskRow):
    """The nested spelling."""

    instance_id: str = ""
    image_url: str = ""
    workdir: str = ""
    pre_commands: Texts = ()
    f2p_script: str = ""


class _MetadataRow(TaskRow):
    """What the row says of its task."""

    instance_id: str = ""
    image: str = ""
    workdir: str = ""
    problem_statement: str = ""
    pre_commands: Texts = ()
    swepro: _SweproRow | None = None
    eval_cmd: str | None = None
    gold_patch: str = Field(default="", validation_alias=AliasChoices("golden_patch", "gold_patch", "patch"))
    remote_env_info: _RemoteRow | None = None


class _SlimeRow(TaskRow):
    """One row."""

    prompt: Any = ""
    label: Any = None
    metadata: _MetadataRow


class SlimeFormat(RowFormat):
    """Format `slime`."""

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        parsed = _SlimeRow.model_validate(row)
        meta, remote = parsed.metadata, parsed.metadata.remote_env_info or _RemoteRow()
        label = parsed.label if isinstance(parsed.label, str) and len(parsed.label) < MAX_LABEL_CHARS else ""
        name = meta.instance_id or remote.instance_id or label
        if not name:
            raise TaskError("the row has no instance_id")
        workdir = meta.workdir or remote.workdir
        image = options.image(meta.image or remote.image_url, name)
        if not image or not workdir:
            raise TaskError("the row names no image or no workdir")
        grading, tests = _judged_by(meta, remote, options)
        return make_item(
            id=name,
            prompt=PROMPT.format(workdir=workdir, issue=meta.problem_statement or _said(parsed.prompt)),
            files={},
            setup=Setup(
                image=image, workdir=workdir, commands=scrubbed(*_before(meta, remote)), timeout_s=600.0
            ),
            grading=grading,
            limits=options.limits,
            category="slime",
            oracle=Oracle(task_id=name, tests=tests, gold_patch=meta.gold_patch),
        )


def _before(meta: _MetadataRow, remote: _RemoteRow) -> list[str]:
    """Return the commands before the agent; a text may separate its lines by backslash-n.

    The last line of before_repo_set_cmd writes the hidden tests, so it is left out.
    """
    before = [text.replace("\\n", "\n") for text in meta.pre_commands or remote.pre_commands]
    if meta.swepro is None:
        return before
    lines = [line for line in meta.swepro.before_repo_set_cmd.splitlines() if line.strip()]
    return [*lines[:-1], *before]


def _judged_by(
    meta: _MetadataRow, remote: _RemoteRow, options: LoadOptions
) -> tuple[GradingPlan, HiddenTests]:
    if meta.swepro is not None:
        row = meta.swepro
        if not row.fail_to_pass:
            raise TaskError("swepro.fail_to_pass is empty: nothing could show that the task is solved")
        texts = {
            RUN_SCRIPT: row.run_script or _asset(options, row.run_script_path, "run_script_path"),
            PARSER: row.parser_script or _asset(options, row.parser_script_path, "parser_script_path"),
        }
        tests = HiddenTests(
            files=text_tree(texts, "run scripts"),
            script=pro_script(row.selected_test_files),
            parser="tests_json",
            fail_to_pass=row.fail_to_pass,
            pass_to_pass=row.pass_to_pass,
        )
        return GradingPlan(runner="swebench_log", timeout_s=TEST_TIMEOUT_S), tests
    plan = GradingPlan(runner="command", timeout_s=TEST_TIMEOUT_S)
    if meta.eval_cmd:
        return plan, HiddenTests(checks=(Check(name="eval_cmd", command=meta.eval_cmd),))
    if not remote.f2p_script:
        raise TaskError("the row has none of swepro, eval_cmd and f2p_script: nothing can be graded")
    # pytest's last line must be there too: an exit code alone can be had by leaving early.
    check = Check(name="f2p_script", command=f"python {F2P_SCRIPT}", markers=(" passed",))
    return plan, HiddenTests(files=text_tree({F2P_SCRIPT: remote.f2p_script}, "f2p_script"), checks=(check,))


def _asset(options: LoadOptions, name: str, key: str) -> str:
    """Return a script below tasks.assets; a row may name no other file of this machine."""
    if not name:
        raise TaskError(f"swepro.{key} is missing")
    if options.assets is None:
        raise TaskError(f"swepro.{key}: tasks.assets must name the folder with the set's scripts")
    root = options.assets.resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise TaskError(f"swepro.{key}: {ascii(name)[:80]} is not below {options.assets}")
    if not path.is_file():
        raise TaskError(f"swepro.{key}: {ascii(name)[:80]} does not exist")
    return read_text(path)


def _said(prompt: object) -> str:
    """Return the first user message of a prompt that is a text or a list of messages."""
    if isinstance(prompt, str):
        return prompt
    for message in prompt if isinstance(prompt, list) else ():
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content")
            if isinstance(content, str):
                return content
            parts = [part.get("text", "") for part in content or () if isinstance(part, dict)]
            return "\n".join(part for part in parts if isinstance(part, str))
    return ""
