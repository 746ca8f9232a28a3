"""Runner `pytest`: hidden test files run in the sandbox, with canaries and mutated tests that must fail.

Candidate and tests share a process, so its records are checked: every required id exactly once, every canary
as expected, numbered records with a nonce, a matching exit code. Each file is run several times in fresh
sandboxes, with other tests mutated in each run (pytest_mutants.py), and judged over all runs: every required
test must pass in every run in which it is real, and fail in every run in which it is mutated. What this
promises, and against whom, is in docs/attacks.md.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import random
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from insitu.errors import GradeError, TaskError
from insitu.grading.canaries import Controlled, text_of, with_controls
from insitu.grading.candidate import Candidate, restored
from insitu.grading.diff import DEFAULT_POLICY, bad_path
from insitu.grading.runners.base import RunLimits, RunReport
from insitu.grading.runners.common import (
    RunnerBase,
    control_task,
    failing_tests,
    for_memory,
    passing,
    run_in,
    share,
)
from insitu.grading.runners.pytest_files import forms_key, pytest_folder
from insitu.grading.runners.pytest_mutants import MOST_RUNS, MutantResults, MutantRound, draw
from insitu.grading.runners.pytest_records import FileRun, RecordsTampered, read_run
from insitu.sandbox.base import Bind, Sandbox
from insitu.sandbox.base_tree import is_plain
from insitu.storage.temp_dirs import cache_folder
from insitu.types import FileEntry, GradingPlan, HiddenTests, Oracle, Outcome, Task, Tree, Trust

WORKER = Path(__file__).with_name("pytest_worker.py").read_text()
BUNDLE = "/opt/insitu/pytest"
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
MAX_RECORD_BYTES = 16 << 20
_DISTURBING = "its tests disturb each other, also with the solution"


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileResult:
    """Result of one test file."""

    outcomes: Mapping[str, str]
    """Outcomes of required tests over the runs in which they were real."""
    controls: tuple[int, int, int] = (0, 0, 0)
    """Canaries that failed and passed as they must, and mutated tests that failed."""
    trouble: str = ""
    """Why the file is not solved, whatever its outcomes."""
    lost: bool = False
    """A required test failed; others may not have been run unmutated."""
    guessed: int = 0
    """Tests that passed while mutated, for the reward `fraction`."""
    disturbed: bool = False
    """Tests failed behind a mutated one, in a file that is otherwise solved."""
    weak: str = ""
    """Why the verdict is weak; empty where it is not."""
    unseen: tuple[int, int] = (0, 0)
    """Required tests with a mutation that looks real, and all required tests."""
    odd: bool = False
    """A run had an exit code or a canary outcome that does not fit where all tests pass."""
    timed_out: bool = False
    cpu: bool = False
    """It ran out of CPU time."""

    @property
    def ended(self) -> bool:
        """Whether no further run can change the result."""
        return bool(self.trouble) or self.timed_out or self.cpu


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
        for path in _files(tests):
            if path not in hidden:
                raise TaskError(f"task {task.id}: {path} is neither hidden nor in the base")
            try:
                ast.parse(hidden[path].content)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise TaskError(f"task {task.id}: {path} is not a Python file: {error}") from None

    def needs(self) -> tuple[Bind, ...]:
        return (Bind(source=pytest_folder(cache_folder()), target=BUNDLE),)

    def processes(self, task: Task, oracle: Oracle) -> int:
        return MOST_RUNS * len(_files(oracle.tests))

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
        session = _Session(sandbox, task, oracle, candidate, limits, as_it_is=self._as_it_is)
        ran: list[_FileResult] = []
        try:
            for path in _files(oracle.tests):
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


def _files(tests: HiddenTests) -> list[str]:
    """Return the test files in the order of the required ids."""
    return list(dict.fromkeys(name.partition("::")[0] for name in (*tests.fail_to_pass, *tests.pass_to_pass)))


class _Session:
    """One grading run: judges test files one after the other."""

    def __init__(
        self,
        sandbox: Sandbox,
        task: Task,
        oracle: Oracle,
        candidate: Candidate,
        limits: RunLimits,
        *,
        as_it_is: bool,
    ) -> None:
        self._sandbox, self._candidate, self._limits, self._as_it_is = sandbox, candidate, limits, as_it_is
        self._tests = oracle.tests
        files = _files(oracle.tests)
        self._hidden: Tree = {**restored(candidate.base, files), **candidate.hidden(oracle.tests)}
        self._task_id, self._reward = task.id, task.grading.reward
        self._rng = random.SystemRandom()
        self._began, self._runs = time.time(), 0
        self._folders: frozenset[str] = frozenset()

    async def judge(self, path: str) -> _FileResult:
        """Run one file in all its forms. Raises RecordsTampered."""
        entry = self._hidden.get(path)
        if entry is None:
            raise TaskError(f"task {self._task_id}: {path} is neither hidden nor in the base")
        required = [
            name
            for name in (*self._tests.fail_to_pass, *self._tests.pass_to_pass)
            if name.startswith(path + "::")
        ]
        try:
            text = text_of(entry.content)
        except ValueError as error:
            raise TaskError(f"task {self._task_id}: {path}: {error}") from None
        key = hashlib.blake2b(f"{path}\n{text}".encode(), key=forms_key(cache_folder())).hexdigest()
        drawn = await asyncio.to_thread(
            draw, path, text, self._tests.fail_to_pass, required, self._rng, seed=key
        )
        if self._as_it_is:
            drawn = drawn.as_it_is()
        ran, found = await self._round(drawn)
        ran = replace(ran, weak=_DISTURBING if self._as_it_is else drawn.weak, unseen=drawn.unseen)
        if self._reward == "fraction":
            whole = not (ran.ended or ran.odd)
            credited = drawn.credited(found, self._tests.fail_to_pass) if whole else {}
            ran = replace(ran, outcomes=credited, guessed=len(found.guessed))
        return ran if ran.ended else _decided(ran, found)

    async def _round(self, drawn: MutantRound) -> tuple[_FileResult, MutantResults]:
        """Run the plan until the result is decided. Raises RecordsTampered."""
        runs: list[Mapping[str, str]] = []
        ran, found = _FileResult(outcomes={}), drawn.judge(runs)
        for number in range(len(drawn.plan)):
            made = with_controls(drawn.written(number), self._rng)
            run = await self._run(drawn.path, made)
            once = _checked(run, drawn.path, made)
            runs.append(once.outcomes)
            found = drawn.judge(runs)
            a, b = (x + y for x, y in zip(ran.controls[:2], once.controls[:2], strict=True))
            ran = replace(
                once,
                outcomes=found.outcomes,
                controls=(a, b, found.failed),
                lost=bool(found.lost),
                odd=ran.odd or once.odd,
            )
            # The reward `fraction` needs the proof of every other test.
            decided = ran.lost and self._reward != "fraction"
            if ran.ended or decided:
                break
        return ran, found

    async def close(self) -> None:
        """Close the current sandbox; idempotent."""
        await self._sandbox.close()

    async def _empty_sandbox(self, hidden: Tree) -> None:
        """Open a fresh sandbox, or clear the current one where a setup takes long."""
        if self._limits.another is None:
            await self._candidate.clear(self._sandbox, hidden, self._began, self._folders)
            return
        await self._sandbox.close()
        self._sandbox = await self._limits.another()

    async def _run(self, path: str, controlled: Controlled) -> FileRun:
        """Run one process; nothing in its sandbox reveals the number of the run."""
        hidden = {**self._hidden, path: FileEntry(content=controlled.source)}
        if self._runs:
            await self._empty_sandbox(hidden)
        elif self._limits.another is None:
            self._folders = await self._candidate.folders(self._sandbox)
        self._runs += 1
        await self._candidate.lay(self._sandbox, hidden, owner="root")
        known = {**self._candidate.tree, **hidden}
        return await run_file(self._sandbox, path, known, self._limits)


async def run_file(sandbox: Sandbox, path: str, known: Iterable[str], limits: RunLimits) -> FileRun:
    """Run pytest on one file. `known`: files that the host wrote. Raises RecordsTampered, GradeError."""
    nonce = secrets.token_hex(8)
    job = {
        "root": sandbox.workdir,
        "bundle": BUNDLE,
        "target": path,
        "conftests": [name for name in known if name.split("/")[-1] == "conftest.py"],
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
    run = read_run(result, nonce, limits.cpu_s)
    if not run.started:
        tail = ascii(result.stderr[-200:].decode("utf-8", "replace"))
        raise GradeError(f"pytest did not start (exit {result.exit_code}): {run.unusable or tail}")
    return run


def _decided(ran: _FileResult, found: MutantResults) -> _FileResult:
    """Return the result of a file that ran to its end in all runs. Raises RecordsTampered."""
    if found.forged and not ran.lost:
        raise RecordsTampered("a test passes as it is and mutated")
    if ran.lost:
        return ran
    if found.wrong or found.disturbed:
        trouble = "tests fail, or pass mutated, behind one that was mutated"
        return replace(ran, trouble=trouble, disturbed=not found.wrong)
    if ran.odd:
        raise RecordsTampered("a run has records that do not fit its tests")
    return ran


def _checked(run: FileRun, path: str, controlled: Controlled) -> _FileResult:
    """Check the canaries of one run. Raises RecordsTampered."""
    canaries = [run.outcomes.get(f"{path}::{name}", "") for name in controlled.must_fail]
    if any(outcome in ("passed", "xpassed") for outcome in canaries):
        raise RecordsTampered("a test that must fail was reported as passed")
    failed = sum(outcome in ("failed", "error") for outcome in canaries)
    good = sum(run.outcomes.get(f"{path}::{name}") == "passed" for name in controlled.must_pass)
    names = controlled.must_fail | controlled.must_pass
    real = {name: outcome for name, outcome in run.outcomes.items() if name.split("::")[-1] not in names}
    trouble = ""
    if run.uncollected:
        trouble = "the test file could not be imported"
    elif not run.ended:
        trouble = f"the process ended before its tests{for_memory(run.out_of_memory)}"
    elif good < len(controlled.must_pass) and failed == len(canaries):
        trouble = "a test that must pass did not"
    return _FileResult(
        outcomes=real,
        controls=(failed, good, 0),
        trouble=trouble,
        odd=failed < len(canaries) or run.exit_code != 1,
        timed_out=run.timed_out,
        cpu=run.out_of_cpu,
    )


def _report(tests: HiddenTests, ran: Sequence[_FileResult]) -> RunReport:
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


def _turned(ran: Sequence[_FileResult], failed: int) -> str:
    unseen, tests = (sum(one.unseen[n] for one in ran) for n in range(2))
    line = f"{failed} turned tests failed, {unseen} of {tests} tests were turned unseen"
    for why, count in Counter(one.weak for one in ran if one.weak).items():
        line += f": {why}" + (f", in {count} of {len(ran)} files" if len(ran) > 1 else "")
    return line
