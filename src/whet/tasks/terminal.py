"""Terminal tasks: Terminus rows, and the task folders of Harbor and Terminal-Bench 2.

Terminus: setup commands, verify commands, limits per row; the reward is the share of commands that pass.
Harbor: task.toml, instruction.md, environment/, tests/test.sh, solution/solve.sh; whet builds no image, so
one must be named. Tests and solution go to the oracle.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field

from whet.errors import TaskError, boundary
from whet.tasks.base import Item
from whet.tasks.dataset import LoadOptions
from whet.tasks.plain import task_folders
from whet.tasks.rows import Place, RawRow, Row, Text, Texts, parse_texts, read_places
from whet.tasks.shared import LimitsRow, Positive, make_item, safe_tree, text_tree, tree_of_folder
from whet.types import WORKDIR, Check, GradingPlan, HiddenTests, Oracle, Setup

Seconds = Annotated[float, Field(gt=0)]
VERIFY_TIMEOUT_S = 60.0
HARBOR_WORKDIR = "/app"


class VerifyRow(Row):
    """One verify command."""

    command: Text
    name: str = ""
    markers: Texts = ()
    weight: Annotated[float, Field(gt=0)] = 1.0


def _commands(value: object) -> object:
    """Texts, or objects with a command."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [{"command": item} if isinstance(item, str) else item for item in value]
    return [{"command": item} for item in parse_texts(value)]


class TerminusRow(Row):
    """Columns of the terminal environment, with its own limits."""

    id: str = Field(default="", validation_alias=AliasChoices("id", "task_id", "name"))
    prompt: Text
    setup: Texts = Field(default=(), validation_alias=AliasChoices("setup", "setup_scripts"))
    verify: Annotated[list[VerifyRow], BeforeValidator(_commands)] = Field(
        validation_alias=AliasChoices("verify", "verify_scripts")
    )
    files: dict[str, str] = Field(default_factory=dict)
    sandbox_image: str = ""
    sandbox_timeout: Seconds | None = None
    verify_timeout: Seconds = VERIFY_TIMEOUT_S
    workdir: str = WORKDIR
    max_steps: Positive | None = None
    max_turns: Positive | None = None
    max_completion_length: Positive | None = None
    solution: Texts = ()
    """Shell commands that solve the task."""


class TerminusFormat:
    """Format `terminus`. A row without an id is named by its line."""

    def places(self, path: Path) -> Iterator[Place]:
        return read_places(path)

    def build(self, row: RawRow, place: Place, options: LoadOptions) -> Item:
        parsed = TerminusRow.model_validate(row)
        if not parsed.verify:
            raise TaskError("verify is empty: nothing can be graded")
        name = parsed.id or f"{place.path.name.partition('.')[0]}-{place.number}"
        turns = [n for n in (parsed.max_steps, parsed.max_turns) if n is not None]
        limits = LimitsRow(
            wall_s=parsed.sandbox_timeout,
            max_calls=min(turns) if turns else None,
            max_call_tokens=parsed.max_completion_length,
        )
        checks = tuple(
            Check(name=c.name or f"verify {n}", command=c.command, markers=c.markers, weight=c.weight)
            for n, c in enumerate(parsed.verify, 1)
        )
        solve = {"solve.sh": "set -e\n" + "\n".join(parsed.solution) + "\n"} if parsed.solution else {}
        return make_item(
            id=name,
            prompt=parsed.prompt,
            files=text_tree(parsed.files, "files"),
            setup=Setup(
                image=options.image(parsed.sandbox_image, name),
                workdir=parsed.workdir,
                commands=parsed.setup,
            ),
            grading=GradingPlan(
                runner="command", timeout_s=parsed.verify_timeout * len(checks), reward="fraction"
            ),
            limits=limits.over(options.limits),
            family="terminus",
            oracle=Oracle(task_id=name, tests=HiddenTests(checks=checks), solve=text_tree(solve, "solution")),
        )


class HarborEnvironment(Row):
    """[environment] of task.toml."""

    docker_image: str = ""
    workdir: str = ""
    mcp_servers: list[Any] = Field(default_factory=list)


class HarborPhase(Row):
    """[agent] and [verifier]."""

    timeout_sec: Seconds | None = None
    env: dict[str, str] = Field(default_factory=dict)


class HarborFile(Row):
    """task.toml."""

    environment: HarborEnvironment = HarborEnvironment()
    agent: HarborPhase = HarborPhase()
    verifier: HarborPhase = HarborPhase()
    steps: list[Any] = Field(default_factory=list)


class HarborFormat:
    """Format `harbor`."""

    def places(self, path: Path) -> Iterator[Place]:
        return task_folders(path, "task.toml")

    def build(self, row: RawRow, place: Place, options: LoadOptions) -> Item:
        folder = place.path
        with boundary(TaskError, f"read {folder}"):
            keys = tomllib.loads((folder / "task.toml").read_text("utf-8"))
            if not (folder / "instruction.md").is_file():
                raise TaskError("instruction.md is missing")
            prompt = (folder / "instruction.md").read_text("utf-8").strip()
        parsed = HarborFile.model_validate(keys)
        tests, solve = tree_of_folder(folder / "tests"), tree_of_folder(folder / "solution")
        if "test.sh" not in tests:
            raise TaskError("tests/test.sh is missing: nothing can be graded")
        _only_one_box(folder, parsed)
        image = options.image(parsed.environment.docker_image, folder.name)
        if not image:
            raise TaskError(
                "the task has a Dockerfile and no docker_image: build it and name it in tasks.images"
            )
        exports = [f"export {key}={shlex.quote(value)}" for key, value in parsed.verifier.env.items()]
        limits = LimitsRow(wall_s=parsed.agent.timeout_sec)
        return make_item(
            id=folder.name,
            prompt=prompt,
            files={},
            setup=Setup(image=image, workdir=parsed.environment.workdir or _workdir(folder)),
            grading=GradingPlan(runner="harbor", timeout_s=parsed.verifier.timeout_sec or 600.0),
            limits=limits.over(options.limits),
            family="harbor",
            oracle=Oracle(
                task_id=folder.name,
                tests=HiddenTests(
                    files=safe_tree(tests), script="\n".join([*exports, "bash /tests/test.sh", ""])
                ),
                solve=safe_tree(solve) if "solve.sh" in solve else {},
            ),
        )


def _only_one_box(folder: Path, parsed: HarborFile) -> None:
    if parsed.steps:
        raise TaskError("tasks of several steps are not supported")
    if parsed.environment.mcp_servers:
        raise TaskError("tasks with MCP servers are not supported")
    composed = [p.name for p in (folder / "environment").glob("*compose*.y*ml")]
    if composed:
        raise TaskError(f"environment/{composed[0]}: tasks of several services are not supported")


_WORKDIR = re.compile(r"^\s*WORKDIR\s+(/[^\s$]*)\s*$", re.IGNORECASE | re.MULTILINE)


def _workdir(folder: Path) -> str:
    """The last absolute WORKDIR of the Dockerfile, else Harbor's usual one."""
    dockerfile = folder / "environment" / "Dockerfile"
    if not dockerfile.is_file():
        return HARBOR_WORKDIR
    with boundary(TaskError, f"read {dockerfile}"):
        found = _WORKDIR.findall(dockerfile.read_text("utf-8"))
    return str(found[-1]) if found else HARBOR_WORKDIR
