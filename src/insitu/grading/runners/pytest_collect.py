"""Finds the ids of whole test files: what pytest collects, and passes, with the solution in place.

A row may require a test file instead of its tests one by one: classes, parameters and generated tests have
ids that only pytest knows. The solution is run once in a grading sandbox, before a candidate is judged; what
it passes is required from then on. A test that it fails makes the row unusable. Called by the Grader.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from insitu.errors import GradeError, TaskError
from insitu.grading.candidate import Candidate
from insitu.grading.runners.base import RunLimits, RunReport
from insitu.grading.runners.common import run_in
from insitu.grading.runners.pytest import BUNDLE, ENVIRONMENT, MAX_RECORD_BYTES, WORKER, PytestRunner
from insitu.grading.runners.pytest_records import FileRun, RecordsTampered, read_run
from insitu.sandbox.base import Sandbox
from insitu.types import HiddenTests, Oracle, Outcome, Task

MAX_NAMED = 3


def whole_files(tests: HiddenTests) -> tuple[str, ...]:
    """Required test files whose tests are not named."""
    return tuple(name for name in tests.fail_to_pass if is_whole(name))


def is_whole(name: str) -> bool:
    return name.endswith(".py") and "::" not in name


class PytestCollect(PytestRunner):
    """Runs whole test files on a solution; `collected` is what it passed. One object for one collection."""

    def __init__(self) -> None:
        self.collected: dict[str, tuple[str, ...]] = {}

    def processes(self, task: Task, oracle: Oracle) -> int:
        return len(whole_files(oracle.tests))

    async def run(
        self, sandbox: Sandbox, task: Task, oracle: Oracle, candidate: Candidate, limits: RunLimits
    ) -> RunReport:
        hidden = candidate.hidden(oracle.tests)
        await candidate.lay(sandbox, hidden, owner="root")
        conftests = [name for name in {**candidate.tree, **hidden} if name.split("/")[-1] == "conftest.py"]
        for path in whole_files(oracle.tests):
            run = await _run(sandbox, path, conftests, limits)
            self.collected[path] = passed_ids(task.id, path, run)
            await sandbox.kill_all()
        if not any(self.collected.values()):
            files = ", ".join(self.collected)
            raise TaskError(f"task {task.id}: {files}, with the solution: no test passes")
        return RunReport(outcome=Outcome.RESOLVED, passed=0, total=0, reason="", complete=True)

    def named(self, oracle: Oracle) -> Oracle:
        """`oracle` with the ids in the place of the files."""
        tests = oracle.tests
        ids = [one for name in tests.fail_to_pass for one in self.collected.get(name, (name,))]
        kept = tuple(dict.fromkeys(one for one in ids if one not in tests.pass_to_pass))
        return replace(oracle, tests=replace(tests, fail_to_pass=kept))


async def _run(sandbox: Sandbox, path: str, conftests: Sequence[str], limits: RunLimits) -> FileRun:
    nonce = secrets.token_hex(8)
    job = {
        "root": sandbox.workdir,
        "bundle": BUNDLE,
        "target": path,
        "conftests": conftests,
        "nonce": nonce,
        "address_space": 4 * limits.memory_bytes,
        "cpu_s": limits.cpu_s,
    }
    result = await run_in(
        sandbox,
        [limits.python, "-s", "-B", "-c", WORKER],
        limits,
        cwd="/",
        env=ENVIRONMENT,
        stdin=ascii(job).encode(),
        max_output_bytes=MAX_RECORD_BYTES,
    )
    try:
        run = read_run(result, nonce, limits.cpu_s)
    except RecordsTampered as found:
        raise TaskError(f"{path}: {found}") from None
    if not run.started:
        tail = ascii(result.stderr[-200:].decode("utf-8", "replace"))
        raise GradeError(f"pytest did not start (exit {result.exit_code}): {run.unusable or tail}")
    return run


def passed_ids(task_id: str, path: str, run: FileRun) -> tuple[str, ...]:
    """What the solution passes of a file; nothing of one that is no test file but is named like one. Raises
    TaskError where the solution fails a test."""
    where = f"task {task_id}: {path}, with the solution"
    if run.uncollected:
        raise TaskError(f"{where}: pytest cannot import it")
    if not run.ended:
        raise TaskError(f"{where}: it did not come to its end")
    failed = [name for name, outcome in run.outcomes.items() if outcome in ("failed", "error", "missing")]
    if failed:
        more = f" and {len(failed) - MAX_NAMED} more" if len(failed) > MAX_NAMED else ""
        raise TaskError(f"{where}: {', '.join(failed[:MAX_NAMED])}{more} failed")
    return tuple(name for name, outcome in run.outcomes.items() if outcome == "passed")
