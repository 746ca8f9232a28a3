"""Out of time: CPU time is the candidate's own; wall time is believed only where it cannot be the host's."""

from __future__ import annotations

import asyncio

import pytest
from watched import Watched

from whet.grade import clean
from whet.grade.clean import GradeConfig, Grader
from whet.grade.permits import Permits
from whet.sandbox.local import LocalBackend
from whet.types import Case, FileEntry, GradingPlan, Oracle, Outcome, Task, Verdict, task_hash

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


async def test_a_right_solution_that_had_to_wait_is_not_out_of_time(backend: LocalBackend) -> None:
    """As on a host that stalls: more wall time than the limit, next to no CPU time."""
    watched = Watched(backend)
    verdict = await grade(Grader(watched), "import time\ntime.sleep(1.8)\n" + RIGHT)
    assert (verdict.outcome, verdict.reward) == (Outcome.RESOLVED, 1.0), verdict.reason
    assert watched.made == 2


async def test_what_waits_for_ever_is_out_of_time_at_a_bounded_cost(backend: LocalBackend) -> None:
    watched = Watched(backend)
    grader = Grader(watched, GradeConfig(parallel=2))
    verdict = await grade(grader, "import time\ntime.sleep(60)\n")
    assert (verdict.outcome, verdict.reward) == (Outcome.TEST_TIMEOUT, 0.0)
    assert verdict.duration_s >= 4.5
    assert watched.made == 3, "two runs and the control"
    assert (await grade(grader, "import time\ntime.sleep(60)\n")).outcome is Outcome.TEST_TIMEOUT
    assert watched.made == 3, "an equal diff does not wait again"


async def test_time_that_the_host_may_have_lost_gives_no_reward(backend: LocalBackend) -> None:
    verdict = await grade(Grader(Watched(backend, well=2)), "import time\ntime.sleep(60)\n")
    assert (verdict.outcome, verdict.reward) == (Outcome.INFRA, None)
    assert "control box did no better" in verdict.reason


async def test_one_alone_waits_for_the_others_and_keeps_the_next_out() -> None:
    permits, busy, alone, seen = Permits(2), 0, 0, set[tuple[int, int]]()

    async def run(everything: bool) -> None:
        nonlocal busy, alone
        async with permits.all() if everything else permits.one():
            busy, alone = busy + 1, alone + everything
            for _ in range(3):
                await asyncio.sleep(0)
                seen.add((busy, alone))
            busy, alone = busy - 1, alone - everything

    async with asyncio.timeout(5):
        await asyncio.gather(*(run(n % 3 == 0) for n in range(12)))
    assert seen == {(1, 0), (2, 0), (1, 1)} or seen == {(2, 0), (1, 1)}


async def test_a_cancelled_wait_for_all_permits_gives_back_what_it_had() -> None:
    permits = Permits(2)
    async with permits.one():
        waiting = asyncio.create_task(permits.all().__aenter__())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    async with asyncio.timeout(1), permits.all():
        pass
