"""Task folders of Harbor (Terminal-Bench 2 and later) and of Terminal-Bench 1.

Harbor: task.toml, instruction.md, environment/Dockerfile, tests/test.sh, solution/solve.sh; of a task of
several steps the same in steps/NAME, over the tests of the whole task. Terminal-Bench 1:
task.yaml, Dockerfile, run-tests.sh, tests/, solution.sh or solution.yaml. Runner `harbor` judges both:
test.sh writes a reward file, and of run-tests.sh the exit code becomes one. An image that the task does not
name is built from its Dockerfile (storage/image_builds.py). Tests and solution go to the oracle.
"""

from __future__ import annotations

import itertools
import logging
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from insitu.errors import TaskError, boundary
from insitu.grading.reward import EARNED
from insitu.tasks.base import Item
from insitu.tasks.dataset import LoadOptions
from insitu.tasks.own_formats import task_folders
from insitu.tasks.row_files import RawRow, RowLocation, TaskRow, Texts
from insitu.tasks.shared import (
    LimitsRow,
    Seconds,
    make_item,
    safe_tree,
    tree_of_folder,
    yaml_mapping,
    yaml_value,
)
from insitu.types import FileEntry, GradingPlan, HiddenTests, Limits, Oracle, Setup, Task, TaskStep, Tree
from insitu_tasksets.compose import Compose, compose_file, read_compose
from insitu_tasksets.container_plan import ContainerPlan
from insitu_tasksets.harbor_file import (
    HarborFile,
    check_supported,
    least_reward,
    outermost,
    step_file,
)
from insitu_tasksets.harbor_folder import (
    TEST_TIMEOUT_S,
    FolderPart,
    below_tests,
    folder_item,
    ground_of,
    image_of,
    workdir_of,
)
from insitu_tasksets.harbor_registry import harbor_folders
from insitu_tasksets.runners.harbor import HarborRunner

log = logging.getLogger(__name__)


class _FolderRow(TaskRow):
    """What `tasks.transform` may say of a folder."""

    where: Literal["clean", "live"] = "clean"
    roots: Texts = ()

    @property
    def all_roots(self) -> tuple[str, ...]:
        """The roots of its sandboxes; the agent's own has the folders of the tests where it is judged."""
        return self.roots + (HarborRunner.places if self.where == "live" else ())


class HarborFormat:
    """Format `harbor`."""

    def places(self, path: Path) -> Iterator[RowLocation]:
        return harbor_folders(path)

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        folder = place.path
        with boundary(TaskError, f"read {folder}"):
            keys = tomllib.loads((folder / "task.toml").read_text("utf-8"))
        parsed, asked = HarborFile.model_validate(keys), _FolderRow.model_validate(row)
        check_supported(parsed)
        if asked.where == "live" and (parsed.separate or parsed.steps):
            raise TaskError(
                "tests in the agent's sandbox would be there for the next step"
                if parsed.steps
                else "a separate verifier sees artifacts alone: it cannot ask the agent's sandbox"
            )
        if parsed.steps:
            return _several(folder, parsed, asked, options)
        part = FolderPart.read(folder, folder, parsed, options)
        return part.item(part.setup(asked.all_roots), options, where=asked.where)


def _several(folder: Path, parsed: HarborFile, asked: _FolderRow, options: LoadOptions) -> Item:
    """Return the item of a task of several steps. Raises TaskError."""
    names = [step.name for step in parsed.steps]
    if EARNED in names:
        raise TaskError(f"steps: {EARNED} is the name of another part of the reward")
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise TaskError(f"steps: {twice} is there twice")
    ground = ground_of(folder, parsed, options)
    parts = [
        FolderPart.read(folder, folder / "steps" / step.name, step_file(parsed, step), options, ground)
        for step in parsed.steps
    ]
    roots = [root for part in parts for root in part.roots]
    setup = replace(ground, roots=outermost([*asked.all_roots, *roots]))
    files = list(itertools.accumulate((part.files for part in parts), _over))
    items = [replace(part, files=laid).item(setup, options) for part, laid in zip(parts, files, strict=True)]
    tasks, oracles = [item.task for item in items], [item.oracle for item in items]
    steps = tuple(
        TaskStep(
            name=step.name,
            task=task,
            files=part.files,
            command="bash setup.sh" if "setup.sh" in part.files else "",
            min_reward=least_reward(step),
        )
        for step, task, part in zip(parsed.steps, tasks, parts, strict=True)
    )
    return make_item(
        id=folder.name,
        prompt="\n\n".join(f"Step {step.name}: {step.task.prompt}" for step in steps),
        files=tasks[0].files,
        setup=setup,
        grading=replace(
            tasks[0].grading,
            timeout_s=sum(task.grading.timeout_s for task in tasks),
            steps=parsed.multi_step_reward_strategy,
        ),
        limits=_limits(parts, tasks, options),
        category="harbor",
        oracle=Oracle(
            task_id=folder.name,
            tests=oracles[-1].tests,
            solve=oracles[-1].solve if all(oracle.solve for oracle in oracles) else {},
            solve_env=oracles[-1].solve_env,
            steps=tuple(oracles),
        ),
        steps=steps,
    )


def _over(below: Tree, own: Tree) -> Tree:
    return safe_tree({**below, **own})


def _limits(parts: Sequence[FolderPart], tasks: Sequence[Task], options: LoadOptions) -> Limits:
    """Return the limits of all steps together; the wall time is theirs if task.toml has any."""
    if not any(part.parsed.agent.timeout_sec for part in parts):
        return options.limits
    return options.limits.changed(wall_s=sum(task.limits.wall_s for task in tasks))


# --------------------------------------------------------------------------- Terminal-Bench 1


class _TerminalBenchFile(TaskRow):
    """task.yaml of Terminal-Bench 1."""

    instruction: str
    max_agent_timeout_sec: Seconds | None = None
    max_test_timeout_sec: Seconds | None = None


CLIENT = "client"
"""The agent's service in its compose files."""
RUN_TESTS = """\
export TEST_DIR=/tests T_BENCH_TEST_DIR=/tests T_BENCH_CONTAINER_LOGS_PATH=/logs
bash /tests/run-tests.sh
if [ $? = 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""


class TerminalBenchFormat:
    """Format `terminal_bench`."""

    def places(self, path: Path) -> Iterator[RowLocation]:
        inner = path / "tasks"
        return task_folders(inner if inner.is_dir() else path, "task.yaml")

    def build(self, row: RawRow, place: RowLocation, options: LoadOptions) -> Item:
        folder = place.path
        parsed = _TerminalBenchFile.model_validate(yaml_mapping(folder / "task.yaml"))
        asked = _FolderRow.model_validate(row)
        file = compose_file(folder)
        compose = read_compose(file, CLIENT) if file is not None else Compose()
        plan = ContainerPlan(
            names=(CLIENT,),
            env=compose.env,
            volumes=compose.volumes,
            services=compose.services,
            after=compose.after,
        )
        run, solution = folder / "run-tests.sh", folder / "solution.sh"
        if not run.is_file():
            raise TaskError("run-tests.sh is missing: nothing can be graded")
        with boundary(TaskError, f"read {folder}"):
            script = FileEntry(content=run.read_bytes())
            solve = {"solve.sh": FileEntry(content=solution.read_bytes())} if solution.is_file() else {}
        if not solve and (folder / "solution.yaml").is_file():
            solve = _typed_solution(folder / "solution.yaml")
        tests = tree_of_folder(folder / "tests") | {
            "run-tests.sh": script,
            "test.sh": FileEntry(content=RUN_TESTS.encode()),
        }
        timeout = parsed.max_test_timeout_sec or TEST_TIMEOUT_S
        return folder_item(
            folder.name,
            parsed.instruction,
            files={},
            setup=Setup(
                image=image_of(folder, compose.image, folder, options),
                workdir=workdir_of(folder / "Dockerfile"),
                roots=asked.all_roots,
                container=plan.text if compose != Compose(image=compose.image) else "",
            ),
            grading=GradingPlan(runner="harbor", timeout_s=timeout, where=asked.where),
            limits=LimitsRow.model_validate({"wall_s": parsed.max_agent_timeout_sec}),
            tests=HiddenTests(files=below_tests(tests)),
            solve=solve,
            solve_env={},
            options=options,
            category="terminal_bench",
        )


def _typed_solution(path: Path) -> dict[str, FileEntry]:
    """Return a script of the commands that solution.yaml types into a terminal; empty if it presses keys."""
    steps = yaml_value(path)
    lines = ["#!/bin/bash"]
    for step in steps if isinstance(steps, list) else [None]:
        if not isinstance(step, dict) or not isinstance(step.get("command"), str):
            raise TaskError(f"{path.name} is not a list of commands")
        if step.get("append_enter", True) is not True:
            log.warning("%s: presses keys, which no script can: the task has no solution to validate", path)
            return {}
        lines.append(step["command"])
    return {"solve.sh": FileEntry(content="\n".join([*lines, ""]).encode())}
