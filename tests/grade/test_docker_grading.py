"""A task with an image, for real in docker: its base, its hidden tests, a forger."""

from __future__ import annotations

from pathlib import Path

import pytest

from whet.grade.clean import GradeConfig, Grader
from whet.sandbox.docker import DockerBackend
from whet.types import FileEntry, GradingPlan, HiddenTests, Oracle, Outcome, Setup, Task, task_hash


def text(content: str) -> FileEntry:
    return FileEntry(content=content.encode())


LIB = "def one():\n    return 0\n"
GOLD = "--- a/pkg/lib.py\n+++ b/pkg/lib.py\n@@ -1,2 +1,2 @@\n def one():\n-    return 0\n+    return 1\n"
TEST = "from pkg.lib import one\n\n\ndef test_one():\n    assert one() == 1\n"
FORGED = "import _pytest.python as p\np.Function.runtest = lambda self: None\n"


@pytest.mark.full
async def test_an_image_is_graded_like_a_plain_box(docker_image: str, tmp_path: Path) -> None:
    grader = Grader(DockerBackend(cache=tmp_path), GradeConfig(remember=0))
    make = "mkdir pkg && printf 'def one():\\n    return 0\\n' > pkg/lib.py && touch pkg/__init__.py"
    setup = Setup(image=docker_image, workdir="/testbed", commands=(make,))
    plan = GradingPlan(runner="pytest", timeout_s=30.0)
    task = Task(
        id="t", prompt="p", files={}, setup=setup, grading=plan, content_hash=task_hash("p", {}, plan, setup)
    )
    tests = HiddenTests(files={"test_lib.py": text(TEST)}, fail_to_pass=("test_lib.py::test_one",))
    oracle = Oracle(task_id="t", tests=tests, gold_patch=GOLD)
    await grader.validate(task, oracle, repeats=1)
    base = await grader.bases.of(task)
    assert base.image.startswith(docker_image)
    assert "@sha256:" in base.image
    solved = await grader.grade(task, oracle, {**base.files, "pkg/lib.py": text(LIB.replace("0", "1"))})
    assert (solved.outcome, solved.image) == (Outcome.RESOLVED, base.image)
    forged = await grader.grade(task, oracle, {**base.files, "pkg/lib.py": text(LIB + FORGED)})
    assert (forged.outcome, forged.reward) == (Outcome.TAMPERED, 0.0)
