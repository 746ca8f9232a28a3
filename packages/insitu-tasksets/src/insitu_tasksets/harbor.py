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
import posixpath
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from insitu.errors import RecordError, TaskError, boundary
from insitu.grading.reward import EARNED
from insitu.storage.image_builds import register_build
from insitu.tasks.base import Item
from insitu.tasks.dataset import LoadOptions
from insitu.tasks.own_formats import task_folders
from insitu.tasks.row_files import RawRow, RowLocation, TaskRow, Texts
from insitu.tasks.shared import (
    LimitsRow,
    Seconds,
    make_item,
    read_text,
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
    carried,
    check_supported,
    checked_resources,
    container_plan,
    least_reward,
    outermost,
    resolved,
    step_file,
    verifier_environment,
)
from insitu_tasksets.harbor_registry import harbor_folders
from insitu_tasksets.runners.harbor import HarborRunner

log = logging.getLogger(__name__)

TEST_TIMEOUT_S = 600.0


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
        part = _FolderPart.read(folder, folder, parsed, options)
        return part.item(part.setup(asked.all_roots), options, where=asked.where)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FolderPart:
    """What a task folder, or a step of it, asks and how it is graded."""

    id: str
    prompt: str
    parsed: HarborFile
    ground: Setup
    """Without roots."""
    hidden: HiddenTests
    roots: tuple[str, ...]
    """What separate tests need of the agent's sandbox."""
    solve: Tree
    files: Tree
    """Of a step: its workdir/."""

    @classmethod
    def read(
        cls, folder: Path, own: Path, parsed: HarborFile, options: LoadOptions, ground: Setup | None = None
    ) -> _FolderPart:
        """Read the folder `own`, the task's or that of a step, whose tests lie over the task's.

        Raises TaskError.
        """
        if not (own / "instruction.md").is_file():
            raise TaskError(f"{_inside(own, folder)}instruction.md is missing")
        tests = tree_of_folder(folder / "tests") | (tree_of_folder(own / "tests") if own != folder else {})
        if "test.sh" not in tests:
            raise TaskError(f"{_inside(own, folder)}tests/test.sh is missing: nothing can be graded")
        ground = ground or _ground(folder, parsed, options)
        hidden, roots = _hidden_tests(folder, parsed, tests, ground.workdir, options)
        return cls(
            id=folder.name if own == folder else f"{folder.name}/{own.name}",
            prompt=read_text(own / "instruction.md").strip(),
            parsed=parsed,
            ground=ground,
            hidden=hidden,
            roots=roots,
            solve=tree_of_folder(own / "solution"),
            files=safe_tree(tree_of_folder(own / "workdir")) if own != folder else {},
        )

    def setup(self, roots: tuple[str, ...]) -> Setup:
        return replace(self.ground, roots=tuple(dict.fromkeys((*roots, *self.roots))))

    def item(self, setup: Setup, options: LoadOptions, where: Literal["clean", "live"] = "clean") -> Item:
        return _item(
            self.id,
            self.prompt,
            files=self.files,
            setup=setup,
            grading=GradingPlan(
                runner="harbor",
                timeout_s=self.parsed.verifier.timeout_sec or TEST_TIMEOUT_S,
                reward="fraction",
                where=where,
            ),
            limits=LimitsRow.model_validate({"wall_s": self.parsed.agent.timeout_sec}),
            tests=self.hidden,
            solve=self.solve,
            solve_env=resolved(self.parsed.solution.env, "solution"),
            options=options,
            category="harbor",
        )


def _inside(own: Path, folder: Path) -> str:
    return "" if own == folder else f"steps/{own.name}/"


def _ground(folder: Path, parsed: HarborFile, options: LoadOptions) -> Setup:
    """Return the setup of a task without its roots. Raises TaskError."""
    environment = folder / "environment"
    memory_mb = checked_resources(parsed.environment, options)
    plan, image = container_plan(environment, parsed.environment)
    return Setup(
        image=_image(folder, parsed.environment.docker_image or image, environment, options),
        workdir=parsed.environment.workdir or _workdir(environment / "Dockerfile"),
        memory_mb=memory_mb,
        cpus=parsed.environment.cpus,
        container=plan.text,
    )


def _several(folder: Path, parsed: HarborFile, asked: _FolderRow, options: LoadOptions) -> Item:
    """Return the item of a task of several steps. Raises TaskError."""
    names = [step.name for step in parsed.steps]
    if EARNED in names:
        raise TaskError(f"steps: {EARNED} is the name of another part of the reward")
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise TaskError(f"steps: {twice} is there twice")
    ground = _ground(folder, parsed, options)
    parts = [
        _FolderPart.read(folder, folder / "steps" / step.name, step_file(parsed, step), options, ground)
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


def _limits(parts: Sequence[_FolderPart], tasks: Sequence[Task], options: LoadOptions) -> Limits:
    """Return the limits of all steps together; the wall time is theirs if task.toml has any."""
    if not any(part.parsed.agent.timeout_sec for part in parts):
        return options.limits
    return options.limits.changed(wall_s=sum(task.limits.wall_s for task in tasks))


def _hidden_tests(
    folder: Path, parsed: HarborFile, tests: Tree, workdir: str, options: LoadOptions
) -> tuple[HiddenTests, tuple[str, ...]]:
    """Return the tests, and the roots that separate ones need of the agent's sandbox."""
    env = resolved(parsed.verifier.env, "verifier")
    files = _below_tests(tests)
    if not parsed.separate:
        return HiddenTests(files=files, env=env), ()
    paths, roots = carried(parsed, workdir)
    own, image = verifier_environment(folder, parsed), ""
    if own is not None:
        checked_resources(own, options)
        env = resolved(own.env, "verifier.environment") | env
        named = options.image(own.docker_image) if own.docker_image else ""
        image = named or _image(folder, "", folder / "tests", replace(options, images={}))
    return HiddenTests(files=files, env=env, image=image, carried=paths), roots


def _below_tests(tests: Tree) -> Tree:
    return {f"tests/{path}": entry for path, entry in safe_tree(tests).items()}


def _item(
    id: str,
    prompt: str,
    *,
    files: Tree,
    setup: Setup,
    grading: GradingPlan,
    limits: LimitsRow,
    tests: HiddenTests,
    solve: Tree,
    solve_env: Mapping[str, str],
    options: LoadOptions,
    category: str,
) -> Item:
    """Return the item of a task folder; `solve` is by path below `solution`."""
    return make_item(
        id=id,
        prompt=prompt,
        files=files,
        setup=setup,
        grading=grading,
        limits=limits.over(options.limits),
        category=category,
        oracle=Oracle(
            task_id=id,
            tests=tests,
            solve=safe_tree(solve) if "solve.sh" in solve else {},
            solve_env=solve_env,
        ),
    )


def _image(folder: Path, named: str, context: Path, options: LoadOptions) -> str:
    """Return the image that tasks.images or the task names, else that of its Dockerfile."""
    image = options.image(named, folder.name)
    if image:
        return image
    if not (context / "Dockerfile").is_file():
        raise TaskError("the task names no docker_image and has no Dockerfile")
    try:
        return register_build(context)
    except RecordError as error:
        raise TaskError(str(error)) from None


_INSTRUCTION = re.compile(r"^[ \t]*(FROM|WORKDIR)[ \t]+(.*?)[ \t\r]*$", re.IGNORECASE | re.MULTILINE)


def _workdir(dockerfile: Path) -> str:
    """Return the work folder of the last stage of a Dockerfile.

    Empty = that of the image: the stage names no folder, or one by a variable or relative to its base's.
    """
    if not dockerfile.is_file():
        return ""
    with boundary(TaskError, f"read {dockerfile}"):
        found = _INSTRUCTION.findall(dockerfile.read_text("utf-8"))
    place = ""
    for word, value in found:
        folder = value.strip("\"'")
        if word.upper() == "FROM":
            place = ""
        elif folder.startswith("/") or place:
            place = posixpath.normpath(posixpath.join(place, folder))
    return "" if "$" in place or place == "/" else place


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
        return _item(
            folder.name,
            parsed.instruction,
            files={},
            setup=Setup(
                image=_image(folder, compose.image, folder, options),
                workdir=_workdir(folder / "Dockerfile"),
                roots=asked.all_roots,
                container=plan.text if compose != Compose(image=compose.image) else "",
            ),
            grading=GradingPlan(runner="harbor", timeout_s=timeout, where=asked.where),
            limits=LimitsRow.model_validate({"wall_s": parsed.max_agent_timeout_sec}),
            tests=HiddenTests(files=_below_tests(tests)),
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
