"""scripts/exercises.py: what it makes of a small track and of a small package loads and can be judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from insitu.grading.grader import GradeConfig, Grader
from insitu.grading.runners.find import runner_for
from insitu.sandbox.local import LocalBackend
from insitu.tasks.dataset import RowSource
from insitu.tasks.factory import format_of

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "exercises.py"
TEST = (
    "import unittest\nfrom {module} import double\n\nclass DoubleTest(unittest.TestCase):\n"
    "    def test_two(self):\n        self.assertEqual(double(2), 4)\n"
)


def lay(folder: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def track(folder: Path) -> list[str]:
    files = {"solution": ["double.py"], "test": ["double_test.py"], "example": [".meta/example.py"]}
    lay(
        folder / "exercises/practice/double",
        {
            ".meta/config.json": json.dumps({"files": files}),
            ".meta/example.py": "def double(x):\n    return 2 * x\n",
            ".docs/instructions.md": "Double it.\n",
            "double.py": "def double(x):\n    pass\n",
            "double_test.py": TEST.format(module="double"),
        },
    )
    return []


def package(folder: Path) -> list[str]:
    lay(
        folder,
        {
            "kit/__init__.py": "",
            "kit/maths/__init__.py": "",
            "kit/maths/double.py": 'def double(x):\n    """Twice x."""\n    return 2 * x\n',
            "tests/test_math.py": TEST.format(module="kit.maths").replace("double(2)", "double.double(2)"),
        },
    )
    return ["--package", "kit"]


@pytest.mark.full
@pytest.mark.parametrize(("make", "name"), [(track, "double"), (package, "math-double")])
async def test_a_collection_becomes_tasks_in_three_formats(
    make: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "cache"))
    more = make(tmp_path / "source")  # type: ignore[operator]
    out = tmp_path / "out"
    argv = [sys.executable, str(SCRIPT), str(tmp_path / "source"), str(out), *more]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)  # noqa: ASYNC221
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 of 1 exercises")
    places = {"unit_tests": "unit_tests.jsonl", "jsonl": "rows.jsonl", "harbor": "harbor"}
    grader = Grader(LocalBackend(), GradeConfig(remember=0, timeout_s=20))
    for form, place in places.items():
        (item,) = RowSource(form, format_of(form), out / place, check=runner_for).every()
        assert item.task.id == name
        if form != "harbor":  # that takes docker, see tests/grading/test_docker_grading.py
            await grader.validate(item.task, item.oracle, repeats=1)
