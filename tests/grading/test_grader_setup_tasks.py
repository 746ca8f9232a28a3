"""Tasks whose base is what setup commands leave in a sandbox: found by the host, judged over a fresh one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from watched import Watched

from insitu.errors import PolicyUnsupported, SandboxError, TaskError
from insitu.grading.grader import GradeConfig, Grader
from insitu.sandbox.base import Sandbox, SandboxSpec
from insitu.sandbox.base_tree import BaseTrees
from insitu.sandbox.local import LocalBackend
from insitu.types import (
    Check,
    FileEntry,
    GradingPlan,
    HiddenTests,
    Oracle,
    Outcome,
    Setup,
    Task,
    TaskStep,
    task_hash,
)

pytestmark = pytest.mark.slow


def text(content: str) -> FileEntry:
    return FileEntry(content=content.encode())


LIB = "def one():\n    return 0\n"
SETUP = Setup(
    commands=(
        "mkdir -p pkg && printf 'def one():\\n    return 0\\n' > pkg/lib.py && touch pkg/__init__.py",
        "printf 'import nothing\\n' > pkg/test_lib.py; ln -s pkg/lib.py link",
        "mkdir -p .git empty; echo x > .git/HEAD",
    )
)
FILES = {"extra.txt": text("laid over\n")}
GOLD = "--- a/pkg/lib.py\n+++ b/pkg/lib.py\n@@ -1,2 +1,2 @@\n def one():\n-    return 0\n+    return 1\n"
TESTS = HiddenTests(
    files={"pkg/test_lib.py": text("from pkg.lib import one\n\n\ndef test_one():\n    assert one() == 1\n")},
    fail_to_pass=("pkg/test_lib.py::test_one",),
)


def make(setup: Setup = SETUP, gold: str = GOLD, *, reverse: bool = False) -> tuple[Task, Oracle]:
    plan = GradingPlan(runner="pytest", timeout_s=20.0)
    name = task_hash("p", FILES, plan, setup)
    task = Task(id="t", prompt="p", files=FILES, setup=setup, grading=plan, content_hash=name)
    return task, Oracle(task_id="t", tests=TESTS, gold_patch=gold, gold_reversed=reverse)


@pytest.fixture
def watched() -> Watched:
    return Watched(LocalBackend())


async def test_a_base_is_found_once_and_is_what_the_setup_leaves(watched: Watched) -> None:
    task, _ = make()
    bases = BaseTrees(watched)
    found = await bases.of(task)
    assert found.files["pkg/lib.py"].content == LIB.encode()
    assert set(found.files) == {
        "pkg/lib.py", "pkg/__init__.py", "pkg/test_lib.py", ".git/HEAD", "extra.txt",
    }  # fmt: skip
    assert await bases.of(task) is found
    assert watched.made == 1
    assert (await bases.of(Task(id="plain", prompt="", files=FILES))).files == FILES
    assert watched.made == 1


async def test_a_result_outside_of_the_work_folder_is_captured_and_graded(watched: Watched) -> None:
    commands = ("mkdir /srv/app; printf 'port 80' > /srv/app/conf; echo 10.0.0.1 db >> /etc/hosts",)
    setup = Setup(commands=commands, roots=("/srv", "/etc"))
    plan = GradingPlan(runner="command", reward="fraction", protected=("/srv/app/lock",))
    name = task_hash("p", {}, plan, setup)
    task = Task(id="t", prompt="p", files={}, setup=setup, grading=plan, content_hash=name)
    wanted = (
        "grep -qx 'port 8080' /srv/app/conf",
        "grep -q '10.0.0.2 db' /etc/hosts",
        "test ! -e /srv/app/lock",
    )
    checks = tuple(Check(name=command, command=command) for command in wanted)
    oracle = Oracle(task_id="t", tests=HiddenTests(checks=checks))
    grader = Grader(watched, GradeConfig(remember=0))
    base = (await grader.bases.of(task)).files
    assert base["/srv/app/conf"].content == b"port 80"
    hosts = text(base["/etc/hosts"].content.decode().replace("10.0.0.1", "10.0.0.2"))
    solved = {**base, "/srv/app/conf": text("port 8080\n"), "/etc/hosts": hosts, "/srv/app/lock": text("")}
    verdict = await grader.grade(task, oracle, solved)
    assert (verdict.outcome, verdict.reward) == (Outcome.RESOLVED, 1.0)
    assert verdict.dropped_paths == ("/srv/app/lock",)
    half = await grader.grade(task, oracle, {**solved, "/etc/hosts": base["/etc/hosts"]})
    assert half.reward == pytest.approx(2 / 3)
    outside = await grader.grade(task, oracle, {**solved, "/opt/x": text("x")})
    assert (outside.outcome, outside.reason) == (Outcome.REFUSED, "path is not relative: /opt/x")


async def test_a_budget_lets_the_oldest_base_go(watched: Watched) -> None:
    bases = BaseTrees(watched, cache_bytes=1)
    first, _ = make()
    other, _ = make(Setup(commands=("echo other > o",)))
    await bases.of(first)
    await bases.of(other)
    await bases.of(other)
    assert watched.made == 2
    await bases.of(first)
    assert watched.made == 3


@pytest.mark.full
async def test_the_diff_is_against_the_setups_tree_and_so_is_the_gold_patch(watched: Watched) -> None:
    grader = Grader(watched, GradeConfig(remember=0))
    task, oracle = make()
    await grader.validate(task, oracle, repeats=1)
    base = dict((await grader.bases.of(task)).files)
    solved = {**base, "pkg/lib.py": text(LIB.replace("0", "1")), ".git/index": text("agent's own")}
    verdict = await grader.grade(task, oracle, solved)
    assert (verdict.outcome, verdict.reward) == (Outcome.RESOLVED, 1.0), verdict
    assert verdict.dropped_paths == (".git/index",)
    assert (await grader.grade(task, oracle, base)).reason == "nothing changed"
    broken = {**solved, "pkg/lib.py": text(LIB)}
    assert (await grader.grade(task, oracle, {**broken, "new.py": text("")})).outcome is Outcome.UNRESOLVED


async def test_a_reversed_patch_is_what_broke_the_base(watched: Watched) -> None:
    swapped = GOLD.replace("-    return 0\n+    return 1", "-    return 1\n+    return 0")
    task, oracle = make(gold=swapped, reverse=True)
    await Grader(watched).validate(task, oracle, repeats=1)


async def test_bad_rows_say_so_in_one_line(watched: Watched) -> None:
    grader = Grader(watched)
    task, oracle = make(gold=GOLD.replace("return 0", "return 7"))
    with pytest.raises(
        TaskError, match=r"task t: the gold change: the patch does not apply: pkg/lib.py"
    ) as caught:
        await grader.validate(task, oracle, repeats=1)
    assert "\n" not in str(caught.value)
    task, oracle = make(Setup(commands=("true", "echo broken >&2; exit 3")))
    with pytest.raises(SandboxError, match="setup command 2 ended with 3: broken"):
        await grader.validate(task, oracle, repeats=1)
    verdict = await grader.grade(task, oracle, {"a": text("b")})
    assert (verdict.outcome, verdict.reward) == (Outcome.INFRA, None)
    assert "setup command 2" in verdict.reason


async def test_a_sandbox_is_booted_before_it_is_needed(watched: Watched) -> None:
    grader = Grader(watched, GradeConfig(remember=0, parallel=2))
    task, oracle = make()
    await grader.prepare(task)
    assert watched.made == 2
    base = (await grader.bases.of(task)).files
    await grader.grade(task, oracle, {**base, "new.py": text("")})
    assert watched.made == 2
    for _ in range(4):
        await grader.prepare(task)
    assert watched.made == 4
    await grader.close()


async def test_of_a_task_of_steps_the_sandbox_of_the_first_is_booted(watched: Watched) -> None:
    grader = Grader(watched, GradeConfig(remember=0, parallel=2))
    task, oracle = make()
    first = replace(task, id="t/one")
    await grader.prepare(replace(task, steps=(TaskStep(name="one", task=first),)))
    base = (await grader.bases.of(first)).files
    own = replace(oracle, task_id=first.id)
    await grader.grade(first, own, {**base, "new.py": text("")})
    assert watched.made == 2
    await grader.close()


async def test_over_a_setup_too_a_process_does_not_see_what_another_left(watched: Watched) -> None:
    task, oracle = make()
    grader = Grader(watched, GradeConfig(remember=0))
    base = dict((await grader.bases.of(task)).files)
    leave = """
import os
places = ("/tmp/seen", "seen", "pkg/seen", "/dev/shm/seen", os.path.expanduser("~/seen"))
folders = ("made", "made/below", "pkg/made", "/tmp/made", "/dev/shm/made")
if any(os.path.exists(path) for path in places + folders) or not os.path.isdir("empty"):
    one = None
for path in places:
    open(path, "w").write("x")
    os.utime(path, (1, 1))
for path in folders:
    os.mkdir(path)
open("empty/new", "w").write("x")
os.unlink("empty/new")
"""
    solved = {**base, "pkg/lib.py": text(LIB.replace("0", "1") + leave)}
    verdict = await grader.grade(task, oracle, solved)
    assert verdict.outcome is Outcome.RESOLVED, verdict
    assert verdict.controls.endswith("5 turned tests failed, 1 of 1 tests were turned unseen")
    many = {**solved, **{f".git/objects/{n}": text("x") for n in range(30)}}
    assert (await grader.grade(task, oracle, many)).dropped_paths == (".git/ (30 files)",)


class ImagesOnly(Watched):
    """Boots no sandbox without an image, as docker where none is configured. Every image is an empty
    folder."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        if not spec.image:
            raise PolicyUnsupported("a sandbox needs an image")
        return await super().create(replace(spec, image=""))


@pytest.mark.parametrize(
    "change",
    [pytest.param("import time\ntime.sleep(600)\n", marks=pytest.mark.full), "import os\nos.kill(-1, 9)\n"],
)
async def test_a_control_sandbox_has_the_tasks_own_image(change: str) -> None:
    files = {"app.py": text("def one():\n    return 0\n")}
    plan = GradingPlan(runner="pytest", timeout_s=1.0)
    setup = Setup(image="some:1")
    task = Task(
        id="t",
        prompt="",
        files=files,
        setup=setup,
        grading=plan,
        content_hash=task_hash("", files, plan, setup),
    )
    source = "from app import one\n\n\ndef test_one():\n    assert one() == 1\n"
    tests = HiddenTests(files={"test_app.py": text(source)}, fail_to_pass=("test_app.py::test_one",))
    grader = Grader(ImagesOnly(LocalBackend()), GradeConfig(remember=0))
    verdict = await grader.grade(task, Oracle(task_id="t", tests=tests), {"app.py": text(change)})
    assert verdict.outcome in (Outcome.TEST_TIMEOUT, Outcome.UNRESOLVED), verdict
    assert verdict.reward == 0.0
