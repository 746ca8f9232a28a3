"""One task folder, or a step of it: its image, setup, tests and solution, as an item of a data set."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from insitu.errors import RecordError, TaskError, boundary
from insitu.storage.image_builds import register_build
from insitu.tasks.base import Item
from insitu.tasks.dataset import LoadOptions
from insitu.tasks.shared import LimitsRow, make_item, read_text, safe_tree, tree_of_folder
from insitu.types import GradingPlan, HiddenTests, Oracle, Setup, Tree
from insitu_tasksets.harbor_file import (
    HarborFile,
    carried,
    checked_resources,
    container_plan,
    resolved,
    verifier_environment,
)

TEST_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderPart:
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
    ) -> FolderPart:
        """Read the folder `own`, the task's or that of a step, whose tests lie over the task's.

        Raises TaskError.
        """
        if not (own / "instruction.md").is_file():
            raise TaskError(f"{_inside(own, folder)}instruction.md is missing")
        tests = tree_of_folder(folder / "tests") | (tree_of_folder(own / "tests") if own != folder else {})
        if "test.sh" not in tests:
            raise TaskError(f"{_inside(own, folder)}tests/test.sh is missing: nothing can be graded")
        ground = ground or ground_of(folder, parsed, options)
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
        return folder_item(
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


def ground_of(folder: Path, parsed: HarborFile, options: LoadOptions) -> Setup:
    """Return the setup of a task without its roots. Raises TaskError."""
    environment = folder / "environment"
    memory_mb = checked_resources(parsed.environment, options)
    plan, image = container_plan(environment, parsed.environment)
    return Setup(
        image=image_of(folder, parsed.environment.docker_image or image, environment, options),
        workdir=parsed.environment.workdir or workdir_of(environment / "Dockerfile"),
        memory_mb=memory_mb,
        cpus=parsed.environment.cpus,
        container=plan.text,
    )


def _hidden_tests(
    folder: Path, parsed: HarborFile, tests: Tree, workdir: str, options: LoadOptions
) -> tuple[HiddenTests, tuple[str, ...]]:
    """Return the tests, and the roots that separate ones need of the agent's sandbox."""
    env = resolved(parsed.verifier.env, "verifier")
    files = below_tests(tests)
    if not parsed.separate:
        return HiddenTests(files=files, env=env), ()
    paths, roots = carried(parsed, workdir)
    own, image = verifier_environment(folder, parsed), ""
    if own is not None:
        checked_resources(own, options)
        env = resolved(own.env, "verifier.environment") | env
        named = options.image(own.docker_image) if own.docker_image else ""
        image = named or image_of(folder, "", folder / "tests", replace(options, images={}))
    return HiddenTests(files=files, env=env, image=image, carried=paths), roots


def below_tests(tests: Tree) -> Tree:
    return {f"tests/{path}": entry for path, entry in safe_tree(tests).items()}


def folder_item(
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


def image_of(folder: Path, named: str, context: Path, options: LoadOptions) -> str:
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


def workdir_of(dockerfile: Path) -> str:
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
