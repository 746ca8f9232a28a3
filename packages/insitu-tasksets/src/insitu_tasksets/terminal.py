"""Terminus rows: setup and verify commands, limits per row; the reward is the share of commands that pass."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from insitu.errors import TaskError
from insitu.tasks.base import Item
from insitu.tasks.dataset import LoadOptions, RowFormat
from insitu.tasks.own_formats import CheckRow, checks_of
from insitu.tasks.row_files import RawRow, RowLocation, TaskRow, Text, Texts, parse_texts
from insitu.tasks.shared import LimitsRow, Positive, Seconds, home_root, make_item, text_tree
from insitu.types import WORKDIR, GradingPlan, HiddenTests, Oracle, Setup

VERIFY_TIMEOUT_S = 60.0


def _commands(value: object) -> object:
    """Texts, or objects with a command."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [{"command": item} if isinstance(item, str) else item for item in value]
    return [{"command": item} for item in parse_texts(value)]


class _TerminusRow(TaskRow):
    """Columns of the terminal environment, with its own limits."""

    id: str = Field(default="", validation_alias=AliasChoices("id", "task_id", "name"))
    prompt: Text
    setup: Texts = Field(default=(), validation_alias=AliasChoices("setup", "setup_scripts"))
    verify: Annotated[list[CheckRow], BeforeValidator(_commands)] = Field(
        validation_alias=AliasChoices("verify", "verify_scripts")
    )
    files: dict[str, str] = Field(default_factory=dict)
    sandbox_image: str = ""
    sandbox_timeout: Seconds | None = None
    verify_timeout: Seconds = VERIFY_TIMEOUT_S
    workdir: str = WORKDIR
    roots: Texts = ()
    where: Literal["clean", "live"] = "clean"
    max_steps: Positive | None = None
    max_turns: Positive | None = None
    max_completion_length: Positive | None = None
    solution: Texts = ()
    """Shell commands that solve the task."""


class TerminusFormat(RowFormat):
    """Format `terminus`. A row without an id is named by its line."""

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        parsed = _TerminusRow.model_validate(row)
        if not parsed.verify:
            raise TaskError("verify is empty: nothing can be graded")
        name = parsed.id or f"{place.path.name.partition('.')[0]}-{place.number}"
        turns = [n for n in (parsed.max_steps, parsed.max_turns) if n is not None]
        limits = LimitsRow.model_validate(
            {
                "wall_s": parsed.sandbox_timeout,
                "max_calls": min(turns) if turns else None,
                "max_call_tokens": parsed.max_completion_length,
            }
        )
        checks = checks_of(parsed.verify, "verify")
        texts = (parsed.prompt, *parsed.setup, *(check.command for check in checks))
        solve = {"solve.sh": "set -e\n" + "\n".join(parsed.solution) + "\n"} if parsed.solution else {}
        return make_item(
            id=name,
            prompt=parsed.prompt,
            files=text_tree(parsed.files, "files"),
            setup=Setup(
                image=options.image(parsed.sandbox_image, name),
                workdir=parsed.workdir,
                commands=parsed.setup,
                roots=parsed.roots or home_root(texts, parsed.workdir),
            ),
            grading=GradingPlan(
                runner="command",
                timeout_s=parsed.verify_timeout * len(checks),
                reward="fraction",
                where=parsed.where,
            ),
            limits=limits.over(options.limits),
            category="terminus",
            oracle=Oracle(task_id=name, tests=HiddenTests(checks=checks), solve=text_tree(solve, "solution")),
        )
