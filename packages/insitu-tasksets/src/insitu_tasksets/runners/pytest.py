"""Runner `pytest`: hidden test files run in the sandbox, with canaries and mutated tests that must fail.

Each file is run several times in fresh sandboxes, with other tests mutated in each run (pytest_mutants.py),
and judged over all runs: every required test must pass in every run in which it is real, and fail in every
run in which it is mutated. What this promises, and against whom, is in docs/attacks.md.

A row may require a test file instead of test ids: ids of classes, parameters and generated tests need pytest.
The tests that the solution passes are required; a test that it fails makes the row unusable.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from insitu.errors import GradeError, TaskError
from insitu.grading.candidate import Candidate
from insitu.grading.diff import DEFAULT_POLICY, bad_path
from insitu.grading.runners.base import RunLimits, RunReport
from insitu.grading.runners.common import RunnerBase, control_task
from insitu.sandbox.base import Bind, Sandbox
from insitu.sandbox.base_tree import is_plain
from insitu.storage.temp_dirs import cache_folder
from insitu.types import FileEntry, GradingPlan, HiddenTests, Oracle, Outcome, Task, Trust
from insitu_tasksets.runners.pytest_files import pytest_folder
from insitu_tasksets.runners.pytest_mutants import MOST_RUNS
from insitu_tasksets.runners.pytest_records import FileRun, RecordsTampered
from insitu_tasksets.runners.pytest_session import BUNDLE, FileResult, PytestSession, files_of, run_file
from insitu_tasksets.runners.pytest_trust import weak_files
from insitu_tasksets.runners.required_tests import failing_tests, passing, share

MAX_NAMED = 3


class PytestRunner(RunnerBase):
    """Runner `pytest`; trust standard, or weak for a file without a mutation that looks real."""

    name = "pytest"
    trust: Trust = "standard"

    def __init__(self, *, as_it_is: bool = False) -> None:
        self._as_it_is = as_it_is
        """Run each file once, unmutated; what is resolved so is weak."""

    def check(self, task: Task, oracle: Oracle) -> None:
        tests = oracle.tests
        if not tests.fail_to_pass:
            raise TaskError(f"task {task.id}: no test that must change from failing to passing")
        required = (*tests.fail_to_pass, *tests.pass_to_pass)
        for name in required:
            path, mark, rest = name.partition("::")
            whole = not mark and name in tests.fail_to_pass
            if not (rest or whole) or not path.endswith(".py") or bad_path(path, DEFAULT_POLICY):
                raise TaskError(f"task {task.id}: {name!a} is not a pytest id (file.py::test)")
            if whole and not (oracle.gold or oracle.gold_patch):
                raise TaskError(
                    f"task {task.id}: to find the tests of {path} takes a solution; without one, name them"
                )
        if len(set(required)) != len(required):
            raise TaskError(f"task {task.id}: a test id is required twice")
        if not is_plain(task.setup):
            return
        hidden = {**task.files, **Candidate.of(task, task.files, task.files).hidden(tests)}
        for path in files_of(tests):
            if path not in hidden:
                raise TaskError(f"task {task.id}: {path} is neither hidden nor in the base")
            try:
                ast.parse(hidden[path].content)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise TaskError(f"task {task.id}: {path} is not a Python file: {error}") from None

    def trust_of(self, task: Task, oracle: Oracle) -> tuple[Trust, str]:
        path, why = next(weak_files(task, oracle), ("", ""))
        return ("weak", f"{path}: {why}") if path else super().trust_of(task, oracle)

    def asking(self, oracle: Oracle) -> tuple[Oracle, PytestCollect | None]:
        return oracle, PytestCollect() if whole_files(oracle.tests) else None

    def as_it_is(self) -> PytestRunner:
        return PytestRunner(as_it_is=True)

    def needs(self) -> tuple[Bind, ...]:
        return (Bind(source=pytest_folder(cache_folder()), target=BUNDLE),)

    def processes(self, task: Task, oracle: Oracle) -> int:
        return MOST_RUNS * len(files_of(oracle.tests))

    def control(self) -> tuple[Task, Oracle]:
        files = {"control.py": FileEntry(content=b"def one():\n    return 1\n")}
        source = b"from control import one\n\n\ndef test_one():\n    assert one() == 1\n"
        tests = HiddenTests(
            files={"test_control.py": FileEntry(content=source)}, fail_to_pass=("test_control.py::test_one",)
        )
        task = control_task(files, GradingPlan(runner=self.name))
        return task, Oracle(task_id="control", tests=tests)

    async def run(
        self, sandbox: Sandbox, task: Task, oracle: Oracle, candidate: Candidate, limits: RunLimits
    ) -> RunReport:
        session = PytestSession(sandbox, task, oracle, candidate, limits, as_it_is=self._as_it_is)
        ran: list[FileResult] = []
        try:
            for path in files_of(oracle.tests):
                try:
                    ran.append(await session.judge(path))
                    if ran[-1].timed_out or ran[-1].cpu:
                        break
                except RecordsTampered as found:
                    reason = f"{path}: {found}"
                    return replace(
                        _report(oracle.tests, ran), outcome=Outcome.TAMPERED, reason=reason, complete=False
                    )
        finally:
            await session.close()
        report = _report(oracle.tests, ran)
        # A failure needs no better proof: `grade.min_trust` must not leave out those that blame a test.
        failed = self._as_it_is and report.outcome is not Outcome.RESOLVED
        return replace(report, trust=None) if failed else report


class PytestCollect(PytestRunner):
    """A run of whole test files on a solution, which collects their test ids. For one use."""

    def __init__(self) -> None:
        super().__init__()
        self._collected: dict[str, tuple[str, ...]] = {}

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
            self._collected[path] = _passed_ids(task.id, path, run)
            await sandbox.kill_all()
        if not any(self._collected.values()):
            files = ", ".join(self._collected)
            raise TaskError(f"task {task.id}: {files}, with the solution: no test passes")
        return RunReport(outcome=Outcome.RESOLVED, passed=0, total=0, reason="", complete=True)

    def completed(self, task: Task, oracle: Oracle, report: RunReport) -> Oracle:
        """Return the oracle with test ids in place of whole files. Raises GradeError."""
        if report.outcome is not Outcome.RESOLVED:
            raise GradeError(f"task {task.id}: its tests were not collected: {report.reason}")
        tests = oracle.tests
        ids = [one for name in tests.fail_to_pass for one in self._collected.get(name, (name,))]
        kept = tuple(dict.fromkeys(one for one in ids if one not in tests.pass_to_pass))
        return replace(oracle, tests=replace(tests, fail_to_pass=kept))


def whole_files(tests: HiddenTests) -> tuple[str, ...]:
    """Return required test files without test ids."""
    return tuple(name for name in tests.fail_to_pass if _is_whole(name))


def _is_whole(name: str) -> bool:
    return name.endswith(".py") and "::" not in name


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


def _report(tests: HiddenTests, ran: Sequence[FileResult]) -> RunReport:
    """Return the report over all files."""
    outcomes = {name: outcome for one in ran for name, outcome in one.outcomes.items()}
    f2p = sum(outcomes.get(name) == "passed" for name in tests.fail_to_pass)
    p2p = sum(outcomes.get(name) == "passed" for name in tests.pass_to_pass)
    total = len(tests.fail_to_pass) + len(tests.pass_to_pass)
    trouble = next((one.trouble for one in ran if one.trouble), "")
    late = any(one.timed_out or one.cpu for one in ran)
    resolved = f2p + p2p == total and not (trouble or late or any(one.lost for one in ran))
    # Who forges guesses one of several forms: a wrong guess costs as much as a right one earns.
    sure = max(0, f2p - sum(one.guessed for one in ran))
    outcome = Outcome.RESOLVED if resolved else Outcome.UNRESOLVED
    if late:
        outcome, trouble = Outcome.TEST_TIMEOUT, "out of time"
    if any(one.lost for one in ran):
        reason = f"a required test fails, {f2p + p2p} of {total} were seen to pass"
    else:
        reason = passing(tests, f2p + p2p, outcomes)
    failed, good, turned = (sum(one.controls[n] for one in ran) for n in range(3))
    return RunReport(
        outcome=outcome,
        passed=f2p + p2p,
        total=total,
        reason=reason + (f"; {trouble}" if trouble else ""),
        complete=not any(one.timed_out for one in ran) and (not trouble or late),
        fail_to_pass=(f2p, len(tests.fail_to_pass)),
        pass_to_pass=(p2p, len(tests.pass_to_pass)),
        controls=f"{failed} failed as they must, {good} passed as they must, {_turned(ran, turned)}",
        score=share(tests, sure, p2p),
        disturbed=any(one.disturbed for one in ran) and not (late or any(one.lost for one in ran)),
        trust="weak" if any(one.weak for one in ran) else None,
        failing=() if resolved else failing_tests(tests, outcomes, ("passed",), ("passed",)),
    )


def _turned(ran: Sequence[FileResult], failed: int) -> str:
    unseen, tests = (sum(one.unseen[n] for one in ran) for n in range(2))
    line = f"{failed} turned tests failed, {unseen} of {tests} tests were turned unseen"
    for why, count in Counter(one.weak for one in ran if one.weak).items():
        line += f": {why}" + (f", in {count} of {len(ran)} files" if len(ran) > 1 else "")
    return line
