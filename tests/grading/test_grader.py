from __future__ import annotations

import asyncio
import dataclasses
import itertools

import pytest
from watched import Watched

import insitu.grading.grader as grader_module
from insitu.errors import PolicyUnsupported, SandboxLost, TaskError
from insitu.grading.grader import GradeConfig, Grader
from insitu.sandbox.base import Sandbox, SandboxSpec
from insitu.sandbox.host_faults import fate_of
from insitu.sandbox.local import LocalBackend
from insitu.sandbox.pool import Pool, PoolOptions
from insitu.types import (
    Case,
    Check,
    Exchange,
    FileEntry,
    GradingPlan,
    HiddenTests,
    Oracle,
    Outcome,
    Task,
    Tree,
    task_hash,
)

pytestmark = pytest.mark.slow

BASE = (
    b"def total(items):\n    result = 0\n    for item in items:\n        result -= item\n    return result\n"
)
GOLD = BASE.replace(b"-=", b"+=")


def make_task(**plan: object) -> Task:
    files = {"app.py": FileEntry(content=BASE), "README": FileEntry(content=b"adds numbers\n")}
    grading = GradingPlan(entry="app.py", **plan)  # type: ignore[arg-type]
    content_hash = task_hash("fix", files, grading)
    return Task(id="t1", prompt="fix", files=files, grading=grading, content_hash=content_hash)


@pytest.fixture(scope="module")
def backend() -> LocalBackend:
    return LocalBackend()


@pytest.fixture
def task() -> Task:
    return make_task()


@pytest.fixture
def oracle() -> Oracle:
    inputs = ([], [1], [1, 2], [5, -7, 9], [10**20, 1])
    cases = tuple(Case(function="total", args=(list(items),), expected=sum(items)) for items in inputs)
    return Oracle(task_id="t1", cases=cases, gold={"app.py": FileEntry(content=GOLD)})


def tree(task: Task, **files: bytes) -> Tree:
    return {
        **task.files,
        **{name.replace("_py", ".py"): FileEntry(content=text) for name, text in files.items()},
    }


async def test_a_fix_resolves_and_leaves_evidence(backend: LocalBackend, task: Task, oracle: Oracle) -> None:
    verdict = await Grader(backend).grade(task, oracle, tree(task, app_py=GOLD))
    assert (verdict.outcome, verdict.reward, verdict.trust) == (Outcome.RESOLVED, 1.0, "strong")
    assert (verdict.passed, verdict.total) == (5, 5)
    assert verdict.task_hash == task.content_hash
    assert len(verdict.diff_hash) == 64
    assert verdict.duration_s > 0


async def test_partly_right_earns_nothing(backend: LocalBackend, task: Task, oracle: Oracle) -> None:
    partly = b"def total(items):\n    return items[0] if items else 0\n"
    verdict = await Grader(backend).grade(task, oracle, tree(task, app_py=partly))
    assert (verdict.outcome, verdict.reward, verdict.passed) == (Outcome.UNRESOLVED, 0.0, 2)
    assert verdict.reason == "2 of 5 cases pass"


@pytest.mark.parametrize(
    ("files", "outcome", "reason"),
    [
        ({}, Outcome.UNRESOLVED, "nothing changed"),
        ({"conftest_py": b"x"}, Outcome.UNRESOLVED, "nothing changed"),
        ({"app_py": b"\0"}, Outcome.REFUSED, "binary"),
    ],
)
async def test_what_needs_no_sandbox_gets_none(
    backend: LocalBackend, task: Task, oracle: Oracle, files: dict[str, bytes], outcome: Outcome, reason: str
) -> None:
    watched = Watched(backend)
    verdict = await Grader(watched).grade(task, oracle, tree(task, **files))
    assert (verdict.outcome, verdict.reward) == (outcome, 0.0)
    assert reason in verdict.reason
    gone = await Grader(watched).grade(task, oracle, {"README": task.files["README"]})
    assert (gone.outcome, gone.reason) == (Outcome.UNRESOLVED, "app.py was deleted")
    assert watched.made == 0


@pytest.mark.parametrize("runner", ["json_io", "stdio", "command"])
async def test_a_share_is_not_paid_for_a_useless_file(backend: LocalBackend, runner: str) -> None:
    entry = "" if runner == "command" else "app.py"
    plan = GradingPlan(runner=runner, entry=entry, reward="fraction")
    files = {"app.py": FileEntry(content=b"def twice(n):\n    return 0\n\n\nprint(0)\n")}
    task = Task(id="t", prompt="p", files=files, grading=plan, content_hash=task_hash("p", files, plan))
    oracle = Oracle(
        task_id="t",
        cases=tuple(Case(function="twice", args=(n,), expected=2 * n) for n in (0, 1, 0, 0))
        if runner == "json_io"
        else (),
        exchanges=tuple(Exchange(stdin="", expected=text) for text in "0100") if runner == "stdio" else (),
        tests=HiddenTests(
            checks=tuple(Check(name=str(n), command="false" if n == 1 else "true") for n in range(4))
            if runner == "command"
            else ()
        ),
    )
    grader = Grader(backend)
    idle = await grader.grade(task, oracle, files)
    touched = await grader.grade(task, oracle, {**files, "junk": FileEntry(content=b"x")})
    dropped = await grader.grade(task, oracle, {**files, "conftest.py": FileEntry(content=b"x")})
    assert (idle.reward, touched.reward, dropped.reward) == (0.75, 0.75, 0.75), (idle, touched)
    assert idle.reason == f"nothing changed: {touched.reason}"
    assert (idle.passed, idle.total) == (3, 4)


async def test_an_equal_diff_is_run_once(backend: LocalBackend, task: Task, oracle: Oracle) -> None:
    watched = Watched(backend)
    grader = Grader(watched)
    first = await grader.grade(task, oracle, tree(task, app_py=GOLD))
    again = await grader.grade(task, oracle, tree(task, app_py=GOLD, conftest_py=b"dropped"))
    assert watched.made == 1
    assert again.reward == first.reward == 1.0
    assert again.dropped_paths == ("conftest.py",)
    harder = dataclasses.replace(oracle, cases=(*oracle.cases, Case(function="none", args=(), expected=1)))
    assert (await grader.grade(task, harder, tree(task, app_py=GOLD))).reward == 0.0
    assert watched.made == 2


async def test_a_host_failure_is_retried(backend: LocalBackend, task: Task, oracle: Oracle) -> None:
    for watched in (Watched(backend, unstartable=1), Watched(backend, dying=2)):
        verdict = await Grader(watched).grade(task, oracle, tree(task, app_py=GOLD))
        assert verdict.reward == 1.0


class Slow(Watched):
    async def create(self, spec: SandboxSpec) -> Sandbox:
        await asyncio.sleep(2.0)
        return await super().create(spec)


async def test_how_long_a_sandbox_may_take_to_start_is_the_backends_to_say(
    backend: LocalBackend, oracle: Oracle
) -> None:
    quick = make_task(timeout_s=1.0)
    grader = Grader(Slow(backend), GradeConfig(margin_s=0.1))
    assert (await grader.grade(quick, oracle, tree(quick, app_py=GOLD))).reward == 1.0


async def test_a_grade_waits_for_a_permit(backend: LocalBackend, task: Task, oracle: Oracle) -> None:
    async with Pool([backend], PoolOptions(max_sandboxes=1, warm=0)) as pool:
        grader = Grader(pool, GradeConfig(margin_s=5.0))
        async with await pool.create(SandboxSpec()):
            grading = asyncio.ensure_future(grader.grade(task, oracle, tree(task, app_py=GOLD)))
            await asyncio.sleep(0.1)
            assert not grading.done()
        assert (await grading).reward == 1.0


async def test_a_host_that_cannot_start_sandboxes_gives_no_reward(
    backend: LocalBackend, task: Task, oracle: Oracle
) -> None:
    watched = Watched(backend, unstartable=99)
    verdict = await Grader(watched, GradeConfig(attempts=2)).grade(task, oracle, tree(task, app_py=GOLD))
    assert (verdict.outcome, verdict.reward) == (Outcome.INFRA, None)
    assert "no memory left" in verdict.reason
    assert watched.made == 2


async def test_lost_sandboxes_are_the_hosts_fault_when_the_control_is_lost_too(
    backend: LocalBackend, task: Task, oracle: Oracle
) -> None:
    verdict = await Grader(Watched(backend, dying=99)).grade(task, oracle, tree(task, app_py=GOLD))
    assert (verdict.outcome, verdict.reward) == (Outcome.INFRA, None)


async def test_lost_sandboxes_are_the_candidates_fault_when_the_control_lives(
    backend: LocalBackend, task: Task, oracle: Oracle
) -> None:
    watched = Watched(backend, dying=3)
    verdict = await Grader(watched, GradeConfig(attempts=3)).grade(task, oracle, tree(task, app_py=GOLD))
    assert (verdict.outcome, verdict.reward) == (Outcome.UNRESOLVED, 0.0)
    assert "control" in verdict.reason
    assert watched.made == 4


async def test_sandboxes_that_the_host_lost_are_not_the_candidates_fault(
    backend: LocalBackend, task: Task, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fault(sandbox: object, *, lost: bool = True) -> str:
        return "the host is out of memory"

    monkeypatch.setattr(grader_module, "host_fault", fault)
    watched = Watched(backend, dying=3)
    verdict = await Grader(watched, GradeConfig(attempts=3)).grade(task, oracle, tree(task, app_py=GOLD))
    assert (verdict.outcome, verdict.reward) == (Outcome.INFRA, None)
    assert "the host is out of memory" in verdict.reason


class WithService(Watched):
    """Sandboxes with a service, which has ended by the end of the first grades."""

    ended = 0

    async def create(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await super().create(spec)
        why = "service db ended with 137" if self.made <= self.ended else ""

        async def fault() -> str:
            return why

        fate_of(sandbox).beside = fault  # type: ignore[union-attr]
        return sandbox


@pytest.mark.parametrize(
    ("solution", "ended", "made", "reason"),
    [
        (BASE + b"#", 1, 2, "cases"),
        (BASE + b"#", 3, 4, "a control sandbox was not: service db ended with 137"),
        (GOLD, 1, 1, ""),
    ],
)
async def test_a_service_that_ended_is_no_verdict_unless_the_change_ends_each(
    backend: LocalBackend, task: Task, oracle: Oracle, solution: bytes, ended: int, made: int, reason: str
) -> None:
    watched = WithService(backend)
    watched.ended = ended
    verdict = await Grader(watched, GradeConfig(attempts=3)).grade(task, oracle, tree(task, app_py=solution))
    assert verdict.reward == float(solution == GOLD)
    assert watched.made == made
    assert reason in verdict.reason


@pytest.mark.parametrize("modest", [True, False])
async def test_a_test_process_killed_for_the_memory_of_others_is_run_again(
    backend: LocalBackend, task: Task, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, modest: bool
) -> None:
    class Killing(Watched):
        """Counts a kill in every sandbox whenever it is asked."""

        async def create(self, spec: SandboxSpec) -> Sandbox:
            sandbox = await super().create(spec)
            reads = itertools.count()
            monkeypatch.setattr(sandbox.fate.kills, "count", lambda: next(reads))
            monkeypatch.setattr(sandbox.fate.kills, "modest", lambda: modest)
            return sandbox

    verdict = await Grader(Killing(backend)).grade(task, oracle, tree(task, app_py=b"1 / 0"))
    assert verdict.reward == (None if modest else 0.0)


async def test_a_missing_interpreter_is_infra(backend: LocalBackend, task: Task, oracle: Oracle) -> None:
    grader = Grader(backend, GradeConfig(python="/usr/bin/no-python", attempts=2))
    verdict = await grader.grade(task, oracle, tree(task, app_py=GOLD))
    assert verdict.outcome is Outcome.INFRA
    assert "no-python" in verdict.reason


def test_a_backend_that_cannot_isolate_is_refused(backend: LocalBackend) -> None:
    class Weak(Watched):
        capabilities = frozenset({"network_none"})  # type: ignore[assignment]

    with pytest.raises(PolicyUnsupported, match="pid_isolation"):
        Grader(Weak(backend))


async def test_unusable_rows_raise(backend: LocalBackend, task: Task, oracle: Oracle) -> None:
    grader = Grader(backend)
    rows: list[tuple[Task, Oracle, str]] = [
        (make_task(runner="nope"), oracle, "no runner"),
        (task, dataclasses.replace(oracle, task_id="t2"), "oracle of t2"),
        (task, dataclasses.replace(oracle, cases=()), "no cases"),
        (dataclasses.replace(task, content_hash=""), oracle, "content_hash"),
        (dataclasses.replace(task, grading=GradingPlan(entry="../app.py")), oracle, "grading.entry"),
        (task, dataclasses.replace(oracle, cases=(Case(function="f", args=(), expected=b"1"),)), "case 0"),
        (task, dataclasses.replace(oracle, cases=(Case(function="f", args=(1j,), expected=1),)), "case 0"),
    ]
    for row_task, row_oracle, why in rows:
        with pytest.raises(TaskError, match=why):
            await grader.grade(row_task, row_oracle, tree(task, app_py=GOLD))


async def test_the_row_gate(backend: LocalBackend, task: Task, oracle: Oracle) -> None:
    grader = Grader(backend)
    await grader.validate(task, oracle)
    bad: list[tuple[Task, Oracle, str]] = [
        (task, dataclasses.replace(oracle, cases=oracle.cases[:1]), "already passes"),
        (task, dataclasses.replace(oracle, gold={"app.py": FileEntry(content=BASE + b"#\n")}), "gold fails"),
        (task, dataclasses.replace(oracle, gold={}), "changes nothing"),
        (task, dataclasses.replace(oracle, gold={"tox.ini": FileEntry(content=b"")}), "tox.ini"),
        (dataclasses.replace(task, prompt="other"), oracle, "content_hash"),
    ]
    for row_task, row_oracle, why in bad:
        with pytest.raises(TaskError, match=why):
            await grader.validate(row_task, row_oracle, repeats=1)


async def test_modules_of_the_work_folder_and_data_files_are_found(backend: LocalBackend) -> None:
    files = {
        "pkg/__init__.py": FileEntry(content=b""),
        "pkg/core.py": FileEntry(content=b"from .helper import twice\nimport side\nimport json\n"),
        "pkg/helper.py": FileEntry(content=b"def twice(x):\n    return 2 * x\n"),
        "side.py": FileEntry(content=b"WORD = open('word.txt').read().strip()\n"),
        "word.txt": FileEntry(content="naïve\n".encode()),
    }
    plan = GradingPlan(entry="pkg/core.py")
    task = Task(id="m", prompt="", files=files, grading=plan, content_hash=task_hash("", files, plan))
    gold = b"\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(x):\n"
    gold += b"    return [twice(P(x).x), side.WORD, json.loads('1'), __name__]\n"
    oracle = Oracle(
        task_id="m",
        cases=(Case(function="f", args=(4,), expected=[8, "naïve", 1, "pkg.core"]),),
        gold={"pkg/core.py": FileEntry(content=files["pkg/core.py"].content + gold)},
    )
    await Grader(backend).validate(task, oracle, repeats=1)


async def test_hashes_are_the_same_in_every_run(backend: LocalBackend, task: Task) -> None:
    """Else the verdict on code that iterates over a set of strings would be a coin toss."""
    code = b"def odd(word):\n    return hash(word) % 2\n"
    cases = tuple(Case(function="odd", args=(f"w{n}",), expected=1) for n in range(64))
    grader = Grader(backend, GradeConfig(remember=0))
    oracle = Oracle(task_id="t1", cases=cases, gold={})
    assert len({(await grader.grade(task, oracle, tree(task, app_py=code))).passed for _ in range(4)}) == 1


async def test_many_grades_at_once_do_not_disturb_each_other(
    backend: LocalBackend, task: Task, oracle: Oracle
) -> None:
    grader = Grader(backend, GradeConfig(remember=0, parallel=3))
    trees = [tree(task, app_py=GOLD if n % 2 else BASE + b"#\n") for n in range(10)]
    verdicts = await asyncio.gather(*(grader.grade(task, oracle, after) for after in trees))
    assert [v.reward for v in verdicts] == [float(n % 2) for n in range(10)]


async def test_a_cancelled_grade_leaves_no_sandbox(backend: LocalBackend, oracle: Oracle) -> None:
    class Closing(Watched):
        async def create(self, spec: SandboxSpec) -> Sandbox:
            sandbox = await super().create(spec)
            sandboxes.put_nowait(sandbox)
            return sandbox

    sandboxes: asyncio.Queue[Sandbox] = asyncio.Queue()
    watched = Closing(backend)
    task = make_task(timeout_s=30.0)
    job = asyncio.create_task(
        Grader(watched).grade(task, oracle, tree(task, app_py=b"import time\ntime.sleep(60)\n"))
    )
    sandbox = await sandboxes.get()
    await asyncio.sleep(0.2)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    with pytest.raises(SandboxLost, match="has ended"):
        await sandbox.get_tree()
