"""pytest: hidden test files run in the sandbox, one process each, with tests among them that must fail.

Candidate and tests share a process, so what that process says is checked rather than believed: every required
id exactly once, every control as the host knows it, numbered records with a nonce, an exit code that fits.
Each file is run several times, in fresh sandboxes, with some tests turned in each run (see pytest_turns.py),
and judged when all runs are in: a test that passes as it is and turned was not run. Whoever knows what each
test must say, guesses it among its forms, or sees through a test that could be turned only openly, gets
through; only json_io and stdio, whose expected values never enter the sandbox, are beyond that.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from insitu.errors import GradeError, TaskError
from insitu.grading.canaries import Controlled, text_of, with_controls
from insitu.grading.candidate import Candidate, restored
from insitu.grading.diff import DEFAULT_POLICY, bad_path
from insitu.grading.runners.base import RunLimits, RunReport
from insitu.grading.runners.common import RunnerBase, control_task, for_memory, passing, run_in, share
from insitu.grading.runners.pytest_files import forms_key, pytest_folder
from insitu.grading.runners.pytest_mutants import MOST_RUNS, MutantResults, MutantRound, draw
from insitu.grading.runners.pytest_records import FileRun, RecordsTampered, read_run
from insitu.sandbox.base import Bind, Sandbox
from insitu.sandbox.base_tree import is_plain
from insitu.storage.temp_dirs import cache_folder
from insitu.types import (
    FileEntry,
    GradingPlan,
    HiddenTests,
    Oracle,
    Outcome,
    Task,
    Tree,
    Trust,
)

WORKER = Path(__file__).with_name("pytest_worker.py").read_text()
BUNDLE = "/opt/insitu/pytest"
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
MAX_RECORD_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one test file came to."""

    outcomes: Mapping[str, str]
    """Of the file's required tests, as far as they were run as they are."""
    controls: tuple[int, int, int] = (0, 0, 0)
    """Controls that failed as they must, passed as they must, and turned tests that failed as they must."""
    trouble: str = ""
    """Why the file cannot be solved whatever its outcomes say."""
    lost: bool = False
    """A required test failed; others may not have been run as they are."""
    weak: bool = False
    """Nothing in it could be turned so that it looks real."""
    unturned: bool = False
    """Nothing at all: an object that equals everything passes."""
    unseen: tuple[int, int] = (0, 0)
    """Tests that were turned so that they look real, of those required."""
    odd: bool = False
    """A run said what one that was not interfered with cannot say where all tests pass."""
    timed_out: bool = False
    cpu: bool = False
    """Its time was CPU time."""

    @property
    def ended(self) -> bool:
        """Whether no further run can change what came of it."""
        return bool(self.trouble) or self.timed_out or self.cpu


class PytestRunner(RunnerBase):
    """Runner `pytest`; strength standard, or weak where no assertion of a file could be turned unseen."""

    name = "pytest"
    trust: Trust = "standard"

    def check(self, task: Task, oracle: Oracle) -> None:
        tests = oracle.tests
        if not tests.fail_to_pass:
            raise TaskError(f"task {task.id}: no test that must change from failing to passing")
        required = (*tests.fail_to_pass, *tests.pass_to_pass)
        for name in required:
            path, mark, rest = name.partition("::")
            whole = not mark and name in tests.fail_to_pass
            if not (rest or whole) or not path.endswith(".py") or bad_path(path, DEFAULT_POLICY):
                raise TaskError(f"task {task.id}: {name!a} is no pytest id (file.py::test)")
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
        session = _Session(sandbox, task, oracle, candidate, limits)
        ran: list[Ran] = []
        try:
            for path in _files(oracle.tests):
                try:
                    ran.append(await session.judge(path))
                    if ran[-1].timed_out or ran[-1].cpu:
                        break
                except RecordsTampered as found:
                    reason = f"{path}: {found}"
                    return replace(
                        report(oracle.tests, ran), outcome=Outcome.TAMPERED, reason=reason, complete=False
                    )
        finally:
            await session.close()
        return report(oracle.tests, ran)


def _files(tests: HiddenTests) -> list[str]:
    """Test files in the order in which required ids name them."""
    return list(dict.fromkeys(name.partition("::")[0] for name in (*tests.fail_to_pass, *tests.pass_to_pass)))


class _Session:
    """One grading run: judges one test file after the other, each in its own processes."""

    def __init__(
        self, sandbox: Sandbox, task: Task, oracle: Oracle, candidate: Candidate, limits: RunLimits
    ) -> None:
        self._sandbox, self._candidate, self._limits = sandbox, candidate, limits
        self._tests = oracle.tests
        files = _files(oracle.tests)
        self._hidden: Tree = {**restored(candidate.base, files), **candidate.hidden(oracle.tests)}
        self._task_id, self._reward = task.id, task.grading.reward
        self._rng = random.SystemRandom()
        self._began, self._runs = time.time(), 0
        self._folders: frozenset[str] = frozenset()

    async def judge(self, path: str) -> Ran:
        """All runs of one file. Raises Tampered."""
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
        ran, found = await self._round(drawn, Ran(outcomes={}))
        if found.uneven and not ran.ended:
            drawn = draw(path, text, self._tests.fail_to_pass, required, self._rng, seed=key, rows=False)
            ran, found = await self._round(drawn, ran)
        if found.disturbed and drawn.chosen and not (ran.ended or ran.lost or found.wrong):
            drawn = drawn.few(found, self._rng)
            ran, found = await self._round(drawn, ran)
        ran = replace(ran, weak=not drawn.standard, unturned=not drawn.chosen, unseen=drawn.unseen)
        if ran.ended:
            return ran
        if ran.lost:
            return await self._scored(drawn, ran, found)
        if found.wrong:
            raise RecordsTampered("a test passes whichever way it is turned")
        if found.disturbed or found.uneven:
            return replace(ran, trouble="tests that were not turned failed in every run")
        if ran.odd:
            raise RecordsTampered("a run is not the one that was asked for")
        return ran

    async def _round(self, drawn: MutantRound, ran: Ran) -> tuple[Ran, MutantResults]:
        """Run what was drawn until nothing more can be won. Raises Tampered."""
        runs: list[Mapping[str, str]] = []
        found = drawn.judge(runs)
        before = ran.controls[2]
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
                controls=(a, b, before + found.failed),
                lost=bool(found.lost),
                odd=ran.odd or once.odd,
            )
            if ran.ended or ran.lost or found.uneven:
                break
        return ran, found

    async def _scored(self, drawn: MutantRound, ran: Ran, found: MutantResults) -> Ran:
        """Of a file that is lost, the outcomes of all tests, where the reward depends on them."""
        if self._reward != "fraction":
            return ran
        made = with_controls(drawn.text, self._rng)
        once = _checked(await self._run(drawn.path, made), drawn.path, made)
        cheats = found.wrong | found.suspects
        return replace(
            ran,
            outcomes={
                # This run holds no turned test: what failed before does not pass in it.
                name: "failed" if name in found.lost or drawn.test(name) in cheats else outcome
                for name, outcome in once.outcomes.items()
            },
            trouble=once.trouble,
            timed_out=once.timed_out,
            cpu=once.cpu,
        )

    async def close(self) -> None:
        """Of the sandboxes that were opened here; idempotent."""
        await self._sandbox.close()

    async def _empty_sandbox(self, hidden: Tree) -> None:
        """A sandbox in which no process of the candidate ever ran, or, where one takes long to set up, one
        from which everything is cleared that an earlier process left."""
        if self._limits.another is None:
            await self._candidate.clear(self._sandbox, hidden, self._began, self._folders)
            return
        await self._sandbox.close()
        self._sandbox = await self._limits.another()

    async def _run(self, path: str, controlled: Controlled) -> FileRun:
        """One process in a sandbox as it is for the first: nothing can tell it which one it is."""
        hidden = {**self._hidden, path: FileEntry(content=controlled.source)}
        if self._runs:
            await self._empty_sandbox(hidden)
        elif self._limits.another is None:
            self._folders = await self._candidate.folders(self._sandbox)
        self._runs += 1
        await self._candidate.lay(self._sandbox, hidden, owner="root")
        nonce = secrets.token_hex(8)
        known = {**self._candidate.tree, **hidden}
        job = {
            "root": self._sandbox.workdir,
            "bundle": BUNDLE,
            "target": path,
            "conftests": [name for name in known if name.split("/")[-1] == "conftest.py"],
            "nonce": nonce,
            "address_space": 4 * self._limits.memory_bytes,
            "cpu_s": self._limits.cpu_s,
        }
        argv = [self._limits.python, "-s", "-B", "-c", WORKER]
        result = await run_in(
            self._sandbox,
            argv,
            self._limits,
            cwd="/",
            env=ENVIRONMENT,
            stdin=ascii(job).encode(),
            max_output_bytes=MAX_RECORD_BYTES,
        )
        run = read_run(result, nonce, self._limits.cpu_s)
        if not run.started:
            tail = ascii(result.stderr[-200:].decode("utf-8", "replace"))
            raise GradeError(f"pytest did not start (exit {result.exit_code}): {run.unusable or tail}")
        return run


def _checked(run: FileRun, path: str, controlled: Controlled) -> Ran:
    """The controls of one run held against what the host knows. Raises Tampered."""
    said = {name: run.outcomes.get(f"{path}::{name}", "") for name in controlled.must_fail}
    if any(outcome in ("passed", "xpassed") for outcome in said.values()):
        raise RecordsTampered("a test that must fail was reported as passed")
    failed = sum(outcome in ("failed", "error") for outcome in said.values())
    good = sum(run.outcomes.get(f"{path}::{name}") == "passed" for name in controlled.must_pass)
    names = controlled.must_fail | controlled.must_pass
    real = {name: outcome for name, outcome in run.outcomes.items() if name.split("::")[-1] not in names}
    trouble = ""
    if run.uncollected:
        trouble = "the test file could not be imported"
    elif not run.ended:
        trouble = f"the process ended before its tests{for_memory(run.out_of_memory)}"
    elif good < len(controlled.must_pass) and failed == len(said):
        trouble = "a test that must pass did not"
    return Ran(
        outcomes=real,
        controls=(failed, good, 0),
        trouble=trouble,
        odd=failed < len(said) or run.exit_code != 1,
        timed_out=run.timed_out,
        cpu=run.out_of_cpu,
    )


def report(tests: HiddenTests, ran: Sequence[Ran]) -> RunReport:
    """The finding over all files. Pure."""
    outcomes = {name: outcome for one in ran for name, outcome in one.outcomes.items()}
    f2p = sum(outcomes.get(name) == "passed" for name in tests.fail_to_pass)
    p2p = sum(outcomes.get(name) == "passed" for name in tests.pass_to_pass)
    total = len(tests.fail_to_pass) + len(tests.pass_to_pass)
    trouble = next((one.trouble for one in ran if one.trouble), "")
    late = any(one.timed_out or one.cpu for one in ran)
    resolved = f2p + p2p == total and not (trouble or late or any(one.lost for one in ran))
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
        score=share(tests, f2p, p2p),
        trust="weak" if any(one.weak for one in ran) else None,
    )


def _turned(ran: Sequence[Ran], failed: int) -> str:
    unseen, tests = (sum(one.unseen[n] for one in ran) for n in range(2))
    said = f"{failed} turned tests failed, {unseen} of {tests} tests were turned unseen"
    for count, what in (
        (sum(one.unturned for one in ran), "no assertion could be turned round"),
        (sum(one.weak and not one.unturned for one in ran), "no assertion could be turned unseen"),
    ):
        if count:
            said += f": {what}" + (f", in {count} of {len(ran)} files" if len(ran) > 1 else "")
    return said
