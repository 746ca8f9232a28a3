"""One grading run of the runner `pytest`: test files, each in several runs with other tests mutated.

Candidate and tests share a process, so its records are checked: every required id exactly once, every canary
as expected, numbered records with a nonce, a matching exit code.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from insitu.errors import GradeError, TaskError
from insitu.grading.candidate import Candidate, restored
from insitu.grading.runners.base import RunLimits
from insitu.grading.runners.common import for_memory, run_in
from insitu.sandbox.base import Sandbox
from insitu.storage.temp_dirs import cache_folder
from insitu.types import FileEntry, HiddenTests, Oracle, Task, Tree
from insitu_tasksets.runners.canaries import Controlled, text_of, with_controls
from insitu_tasksets.runners.pytest_files import forms_key
from insitu_tasksets.runners.pytest_mutants import MutantResults, MutantRound, draw
from insitu_tasksets.runners.pytest_records import FileRun, RecordsTampered, read_run

WORKER = Path(__file__).with_name("pytest_worker.py").read_text()
BUNDLE = "/opt/insitu/pytest"
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
MAX_RECORD_BYTES = 16 << 20
_DISTURBING = "its tests disturb each other, also with the solution"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileResult:
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


def files_of(tests: HiddenTests) -> list[str]:
    """Return the test files in the order of the required ids."""
    return list(dict.fromkeys(name.partition("::")[0] for name in (*tests.fail_to_pass, *tests.pass_to_pass)))


class PytestSession:
    """Judges test files one after the other."""

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
        files = files_of(oracle.tests)
        self._hidden: Tree = {**restored(candidate.base, files), **candidate.hidden(oracle.tests)}
        self._task_id, self._reward = task.id, task.grading.reward
        self._rng = random.SystemRandom()
        self._began, self._runs = time.time(), 0
        self._folders: frozenset[str] = frozenset()

    async def judge(self, path: str) -> FileResult:
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

    async def _round(self, drawn: MutantRound) -> tuple[FileResult, MutantResults]:
        """Run the plan until the result is decided. Raises RecordsTampered."""
        runs: list[Mapping[str, str]] = []
        ran, found = FileResult(outcomes={}), drawn.judge(runs)
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


def _decided(ran: FileResult, found: MutantResults) -> FileResult:
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


def _checked(run: FileRun, path: str, controlled: Controlled) -> FileResult:
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
    return FileResult(
        outcomes=real,
        controls=(failed, good, 0),
        trouble=trouble,
        odd=failed < len(canaries) or run.exit_code != 1,
        timed_out=run.timed_out,
        cpu=run.out_of_cpu,
    )
