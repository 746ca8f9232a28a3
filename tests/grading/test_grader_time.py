"""Out of time: CPU time is the candidate's own; wall time is believed only where it cannot be the host's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from watched import Watched

from insitu.grading import grader as clean
from insitu.grading import pressure
from insitu.grading.grader import GradeConfig, Grader
from insitu.grading.runners.base import RunLimits
from insitu.sandbox.local import LocalBackend
from insitu.types import Case, FileEntry, GradingPlan, Oracle, Outcome, Task, Verdict, task_hash

PLAN = GradingPlan(entry="app.py", timeout_s=1.0)
FILES = {"app.py": FileEntry(content=b"def one():\n    return 2\n")}
TASK = Task(id="t", prompt="", files=FILES, grading=PLAN, content_hash=task_hash("", FILES, PLAN))
ORACLE = Oracle(task_id="t", cases=(Case(function="one", args=(), expected=1),), gold={})
RIGHT = "def one():\n    return 1\n"


@pytest.fixture(scope="module")
def backend() -> LocalBackend:
    return LocalBackend()


async def grade(grader: Grader, code: str) -> Verdict:
    return await grader.grade(TASK, ORACLE, {"app.py": FileEntry(content=code.encode())})


@pytest.mark.slow
async def test_an_endless_loop_costs_its_cpu_time_once(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However busy the machine is: it is the CPU time that runs out.
    monkeypatch.setattr(clean, "WALL_PER_CPU", 60.0)
    watched = Watched(backend)
    grader = Grader(watched)
    verdict = await grade(grader, "while True:\n    pass\n")
    assert (verdict.outcome, verdict.reward) == (Outcome.TEST_TIMEOUT, 0.0)
    assert "CPU time" in verdict.reason
    assert (await grade(grader, "while True:\n    pass\n")).outcome is Outcome.TEST_TIMEOUT
    assert watched.made == 1


@pytest.mark.slow
async def test_a_right_solution_may_wait(backend: LocalBackend) -> None:
    watched = Watched(backend)
    verdict = await grade(Grader(watched), "import time\ntime.sleep(1.8)\n" + RIGHT)
    assert (verdict.outcome, verdict.reward) == (Outcome.RESOLVED, 1.0), verdict.reason
    assert watched.made == 1


@pytest.mark.slow
async def test_what_waits_for_ever_is_out_of_time_at_a_bounded_cost(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clean, "pressure_s", lambda: 0.0)  # others' load is not what this is about
    watched = Watched(backend)
    grader = Grader(watched, GradeConfig(parallel=2))
    verdict = await grade(grader, "import time\ntime.sleep(60)\n")
    assert (verdict.outcome, verdict.reward) == (Outcome.TEST_TIMEOUT, 0.0)
    assert verdict.duration_s >= 3.0
    assert watched.made == 2, "a run and the control"
    assert (await grade(grader, "import time\ntime.sleep(60)\n")).outcome is Outcome.TEST_TIMEOUT
    assert watched.made == 2, "an equal diff does not wait again"


@pytest.mark.slow
async def test_who_waits_keeps_nobody_else_from_being_graded(backend: LocalBackend) -> None:
    grader = Grader(backend, GradeConfig(parallel=2, remember=0))
    waiting = asyncio.create_task(grade(grader, "import time\ntime.sleep(60)\n"))
    beside, longest = 0, 0.0
    while not waiting.done():
        verdict = await grade(grader, f"# {beside}\n" + RIGHT)
        assert verdict.outcome is Outcome.RESOLVED, verdict
        beside, longest = beside + 1, max(longest, verdict.duration_s)
    assert (await waiting).outcome is Outcome.TEST_TIMEOUT
    assert beside >= 3
    assert longest < 2.5, "less than the time that the other one waits"


def test_computing_uses_up_no_wall_time_of_later_processes() -> None:
    limits = RunLimits(cpu_s=1, wall_s=3.0, max_output_bytes=1, memory_bytes=1, python="")
    for _ in range(100):
        limits.meter.add(0.9, 2.7, late=False, wall_per_cpu=3.0)  # a busy machine
        limits.meter.add(0.01, 0.4, late=False, wall_per_cpu=3.0)  # a slow start
    assert limits.left_s == 3.0
    limits.meter.add(0.0, 2.5, late=False, wall_per_cpu=3.0)
    assert limits.left_s == 1.0


@pytest.mark.slow
async def test_what_computed_and_ran_out_of_wall_time_is_run_again(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a host that is busy: the wall time is over before the CPU time is."""
    monkeypatch.setattr(clean, "WALL_PER_CPU", 0.9)
    watched = Watched(backend)
    work = "import time\nend = time.monotonic() + 0.9\nwhile time.monotonic() < end:\n    pass\n"
    verdict = await grade(Grader(watched), work + RIGHT)
    assert (verdict.outcome, verdict.reward) == (Outcome.RESOLVED, 1.0), verdict.reason
    assert watched.made == 3, "two runs, and a control between them"


@pytest.mark.slow
async def test_a_machine_that_was_busy_only_during_the_run_gets_a_second_one(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control finds it idle again: what the run lost to others is counted beside the run."""
    seen = iter((0, 9_000_000))
    monkeypatch.setattr(clean, "pressure_s", lambda: next(seen) / 1e6)
    monkeypatch.setattr(clean, "WALL_PER_CPU", 0.9)
    watched = Watched(backend)
    verdict = await grade(Grader(watched), "import time\ntime.sleep(1.2)\n" + RIGHT)
    assert (verdict.outcome, verdict.reward) == (Outcome.RESOLVED, 1.0), verdict.reason
    assert watched.made == 3, "two runs, and a control between them"


@pytest.mark.slow
async def test_a_verdict_says_how_long_it_took_where_a_run_was_repeated(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clean, "WALL_PER_CPU", 0.9)
    monkeypatch.setattr(clean, "PATIENCE", 1.0)
    seen = iter((0, 9_000_000))
    monkeypatch.setattr(clean, "pressure_s", lambda: next(seen) / 1e6)
    verdict = await grade(Grader(Watched(backend)), "import time\ntime.sleep(60)\n")
    assert (verdict.outcome, verdict.reward) == (Outcome.TEST_TIMEOUT, 0.0), verdict
    assert verdict.reason.endswith("(run twice, for 1 s and 1 s of wall time)")


def test_the_kernel_s_account_of_stalls_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pressure, "PRESSURE", tmp_path)
    assert clean.pressure_s() == 0.0
    for what in ("cpu", "io"):
        line = "avg10=0.00 avg60=0.00 avg300=0.00 total="
        (tmp_path / what).write_text(f"some {line}1500000\nfull {line}9\n")
    assert clean.pressure_s() == 3.0


@pytest.mark.full
@pytest.mark.slow
async def test_time_that_the_host_may_have_lost_gives_no_reward(backend: LocalBackend) -> None:
    verdict = await grade(Grader(Watched(backend, well=1)), "import time\ntime.sleep(60)\n")
    assert (verdict.outcome, verdict.reward) == (Outcome.INFRA, None)
    assert "control sandbox did no better" in verdict.reason
