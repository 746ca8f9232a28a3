"""Collects the test ids of whole test files, by one run of the solution.

A row may require a test file instead of test ids: ids of classes, parameters and generated tests need pytest.
The tests that the solution passes are required; a test that it fails makes the row unusable.
"""

from __future__ import annotations

from dataclasses import replace

from insitu.errors import TaskError
from insitu.grading.candidate import Candidate
from insitu.grading.runners.base import RunLimits, RunReport
from insitu.grading.runners.pytest import PytestRunner, run_file
from insitu.grading.runners.pytest_records import FileRun, RecordsTampered
from insitu.sandbox.base import Sandbox
from insitu.types import HiddenTests, Oracle, Outcome, Task

MAX_NAMED = 3


def whole_files(tests: HiddenTests) -> tuple[str, ...]:
    """Return required test files without test ids."""
    return tuple(name for name in tests.fail_to_pass if _is_whole(name))


def _is_whole(name: str) -> bool:
    return name.endswith(".py") and "::" not in name


class PytestCollect(PytestRunner):
    """A run of whole test files on a solution; fills `collected`. For one use."""

    def __init__(self) -> None:
        self.collected: dict[str, tuple[str, ...]] = {}

    def processes(self, task: Task, oracle: Oracle) -> int:
        return len(whole_files(oracle.tests))

    async def run(
        self, sandbox: Sandbox, task: Task, oracle: Oracle, candidate: Candidate, limits: RunLimits
    ) -> RunReport:
        hidden = candidate.hidden(oracle.tests)
        await candidate.lay(sandbox, hidden, owner="root")
        known = {**candidate.tree, **hidden}
        for path in whole_files(oracle.tests):
            try:
                run = await run_file(sandbox, path, known, limits)
            except RecordsTampered as found:
                raise TaskError(f"{path}: {found}") from None
            self.collected[path] = _passed_ids(task.id, path, run)
            await sandbox.kill_all()
        if not any(self.collected.values()):
            files = ", ".join(self.collected)
            raise TaskError(f"task {task.id}: {files}, with the solution: no test passes")
        return RunReport(outcome=Outcome.RESOLVED, passed=0, total=0, reason="", complete=True)

    def named(self, oracle: Oracle) -> Oracle:
        """Return the oracle with test ids in place of whole files."""
        tests = oracle.tests
        ids = [one for name in tests.fail_to_pass for one in self.collected.get(name, (name,))]
        kept = tuple(dict.fromkeys(one for one in ids if one not in tests.pass_to_pass))
        return replace(oracle, tests=replace(tests, fail_to_pass=kept))


def _passed_ids(task_id: str, path: str, run: FileRun) -> tuple[str, ...]:
    """Return the tests of a file that the solution passes. Raises TaskError where it fails one."""
    where = f"task {task_id}: {path}, with the solution"
    if run.uncollected:
        raise TaskError(f"{where}: pytest cannot import it")
    if not run.ended:
        raise TaskError(f"{where}: it did not run to its end")
    failed = [name for name, outcome in run.outcomes.items() if outcome in ("failed", "error", "missing")]
    if failed:
        more = f" and {len(failed) - MAX_NAMED} more" if len(failed) > MAX_NAMED else ""
        raise TaskError(f"{where}: {', '.join(failed[:MAX_NAMED])}{more} failed")
    return tuple(name for name, outcome in run.outcomes.items() if outcome == "passed")
