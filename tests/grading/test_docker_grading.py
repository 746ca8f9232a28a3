"""A task with an image, for real in docker: its base, its hidden tests, a forger."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from insitu.config import load_config
from insitu.errors import ImageMissing
from insitu.grading.grader import GradeConfig, Grader
from insitu.grading.runners.find import runner_for
from insitu.sandbox.docker import DockerBackend
from insitu.tasks.factory import open_rows
from insitu.types import FileEntry, GradingPlan, HiddenTests, Limits, Oracle, Outcome, Setup, Task, task_hash
from insitu_tasksets.validate import with_gold

pytestmark = pytest.mark.slow


def text(content: str) -> FileEntry:
    return FileEntry(content=content.encode())


LIB = "def one():\n    return 0\n"
GOLD = "--- a/pkg/lib.py\n+++ b/pkg/lib.py\n@@ -1,2 +1,2 @@\n def one():\n-    return 0\n+    return 1\n"
TEST = "from pkg.lib import one\n\n\ndef test_one():\n    assert one() == 1\n"
FORGED = "import _pytest.python as p\np.Function.runtest = lambda self: None\n"


@pytest.mark.full
async def test_an_image_is_graded_like_a_plain_sandbox(docker_image: str, tmp_path: Path) -> None:
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


def harbor_folder(root: Path, dockerfile: str) -> Path:
    for name, content in {
        "task.toml": 'version = "1.0"\n[verifier]\nenv = { WANT = "3" }\n',
        "instruction.md": "Write the number of words of in.txt to out.txt.\n",
        "environment/Dockerfile": dockerfile,
        "environment/in.txt": "a b c\n",
        "tests/test.sh": 'grep -q "^$WANT$" out.txt && echo 1 > /logs/verifier/reward.txt\n',
        "solution/solve.sh": "wc -w < in.txt > out.txt\n",
    }.items():
        path = root / "words" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.full
async def test_a_folders_dockerfile_is_built_once_and_judged(
    docker_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "cache"))
    dockerfile = f"FROM {docker_image}\nWORKDIR /data\nCOPY in.txt /data/in.txt\nRUN date +%N > /built\n"
    config = load_config(
        None, ["tasks.source=harbor", f"tasks.path={harbor_folder(tmp_path / 'set', dockerfile)}"]
    )
    (item,) = open_rows(config, Limits(wall_s=60), runner_for).every()
    image = item.task.setup.image
    ids = set()
    for _ in range(2):
        backend = DockerBackend(cache=tmp_path / "cache")
        grader = Grader(backend, GradeConfig(remember=0))
        await grader.validate(item.task, await with_gold(backend, item.task, item.oracle), repeats=1)
        ids.add((await grader.bases.of(item.task)).image)
        await grader.close()
    assert len(ids) == 1
    assert ids.pop().startswith(f"{image}@sha256:")
    remove = ["docker", "rmi", "--force", image]
    await asyncio.to_thread(subprocess.run, remove, capture_output=True, timeout=60, check=True)


@pytest.mark.full
async def test_a_dockerfile_that_does_not_build_is_one_line(
    docker_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "cache"))
    folder = harbor_folder(tmp_path / "set", f"FROM {docker_image}\nRUN echo broken >&2; exit 3\n")
    config = load_config(None, ["tasks.source=harbor", f"tasks.path={folder}"])
    (item,) = open_rows(config, Limits(), runner_for).every()
    with pytest.raises(ImageMissing, match="docker build: .*returned a non-zero code: 3") as caught:
        await DockerBackend(cache=tmp_path / "cache").image_digest(item.task.setup.image)
    assert len(str(caught.value).splitlines()) == 1
