"""Runner `stdio`: a program reads stdin and prints; expected outputs stay on the host.

One process per hidden input, in one sandbox that is emptied before the next. The host compares the standard
output in a thread, or calls the user's checker. With reward `binary` the first wrong output ends the run.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from insitu.errors import ConfigError, TaskError
from insitu.grading.candidate import Candidate
from insitu.grading.diff import DEFAULT_POLICY, bad_path
from insitu.grading.oracles import oracle_digest, solution
from insitu.grading.runners.base import CpuMeter, RunLimits, RunReport
from insitu.grading.runners.common import (
    LIMIT_CPU,
    RunnerBase,
    control_task,
    failing_checks,
    for_memory,
    out_of_cpu,
    run_in,
    text_tail,
)
from insitu.sandbox.base import ExecResult, Sandbox
from insitu.sandbox.base_tree import is_plain
from insitu.tasks.user_functions import CHECKER_FAILED, load_function
from insitu.types import Exchange, FailingCheck, FileEntry, GradingPlan, Oracle, Outcome, Task, Tree, Trust
from insitu_tasksets.runners.checker import Checker, CheckerFailed

LIMITED = f'{LIMIT_CPU} && ulimit -v "$2" && exec "$3" -s -B "$4"'
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONINTMAXSTRDIGITS": "0"}
MORE_OUTPUT = 1 << 16
"""Bytes that a program may print beyond the expected output."""
MORE_CHARS = 64
"""Characters by which a printed number may be longer than the expected one."""
CALLS = 4
"""Most calls of the user's checker for one output, beside the solution's run."""
MAX_LATE = 3
"""Inputs out of time that end a run, also with the reward `fraction`: a program may loop on all of them."""
MAX_SOLVED = 256
"""Outputs of solutions that are kept."""
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,6})?")
"""Stricter than Decimal(), which accepts digits of other scripts and underscores."""
Judge = Callable[[str], Awaitable[tuple[bool, str]]]
"""Returns whether an output is right, and how the checker failed if that is why it is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _InputResult:
    """Result of one input."""

    passed: bool
    reason: str = ""
    timed_out: bool = False
    cpu: bool = False
    got: str = ""
    """End of the printed output."""
    unchecked: bool = False
    """The user's checker failed on the output."""


class StdioRunner(RunnerBase):
    """Runner `stdio`; trust strong."""

    name = "stdio"
    trust: Trust = "strong"

    def __init__(self) -> None:
        self._checkers: dict[str, Checker] = {}
        self._solved: dict[tuple[str, str, str], str] = {}

    def check(self, task: Task, oracle: Oracle) -> None:
        entry = task.grading.entry
        if not entry.endswith(".py") or bad_path(entry, DEFAULT_POLICY):
            raise TaskError(f"task {task.id}: stdio needs grading.entry, a .py file; got {entry!r}")
        if is_plain(task.setup) and entry not in task.files and entry not in oracle.gold:
            raise TaskError(f"task {task.id}: the entry {entry} is not among its files")
        if not oracle.exchanges:
            raise TaskError(f"task {task.id}: the oracle has no inputs with outputs")
        if oracle.checker:
            try:
                load_function(oracle.checker)
            except ConfigError as error:
                raise TaskError(f"task {task.id}: tasks.checker: {error}") from None
        if not oracle.checker and not any(one.expected.strip() for one in oracle.exchanges):
            raise TaskError(f"task {task.id}: every expected output is empty, as that of a silent program is")

    def precheck_failure(self, task: Task, tree: Tree) -> str:
        return "" if task.grading.entry in tree else f"{task.grading.entry} was deleted"

    def processes(self, task: Task, oracle: Oracle) -> int:
        return len(oracle.exchanges) * (2 + CALLS if oracle.checker else 1)

    def control(self) -> tuple[Task, Oracle]:
        files = {"control.py": FileEntry(content=b"print(input())\n")}
        task = control_task(files, GradingPlan(runner=self.name, entry="control.py"))
        return task, Oracle(task_id="control", exchanges=(Exchange(stdin="1\n", expected="1\n"),))

    async def run(
        self, sandbox: Sandbox, task: Task, oracle: Oracle, candidate: Candidate, limits: RunLimits
    ) -> RunReport:
        began, folders = time.time(), await candidate.folders(sandbox)
        answered: list[_InputResult] = []
        total = len(oracle.exchanges)
        for exchange in oracle.exchanges:
            if answered:  # no process finds what an earlier one left
                await candidate.clear(sandbox, {}, began, folders)
            await candidate.lay(sandbox)
            judge = self._judge(task, oracle, exchange, candidate, limits)
            try:
                answered.append(await _run_input(sandbox, task, exchange, limits, judge))
            except CheckerFailed as failed:
                return RunReport(outcome=Outcome.INFRA, passed=0, total=total, reason=str(failed))
            late = sum(one.timed_out for one in answered)
            if late == MAX_LATE or (not answered[-1].passed and task.grading.reward == "binary"):
                break
        return _report(answered, oracle.exchanges)

    def close(self) -> None:
        """End the idle processes of checkers."""
        for checker in self._checkers.values():
            checker.close()

    def _judge(
        self, task: Task, oracle: Oracle, exchange: Exchange, candidate: Candidate, limits: RunLimits
    ) -> Judge:
        """Return how an output of one input is judged: by the user's checker, else by `same_output`."""

        async def compare(printed: str) -> tuple[bool, str]:
            same = await asyncio.to_thread(
                same_output, exchange.expected, printed, by_line=oracle.by_line, tolerance=oracle.tolerance
            )
            return same, ""

        async def solved() -> str | None:
            key = (task.content_hash, oracle_digest(oracle), exchange.stdin)
            if key not in self._solved:
                printed = await _solution_output(task, oracle, exchange, candidate, limits)
                if printed is None:
                    return None
                if len(self._solved) >= MAX_SOLVED:
                    self._solved.clear()
                self._solved[key] = printed
            return self._solved[key]

        async def ask(printed: str) -> tuple[bool, str]:
            checker = self._checkers.setdefault(oracle.checker, Checker(oracle.checker))
            return await checker.judge(exchange.stdin, exchange.expected, printed, solved)

        return ask if oracle.checker else compare


async def _solution_output(
    task: Task, oracle: Oracle, exchange: Exchange, candidate: Candidate, limits: RunLimits
) -> str | None:
    """Return what the solution prints in a sandbox of its own; None where it cannot be run."""
    if limits.another is None or not (oracle.gold or oracle.gold_patch):
        return None
    solved = replace(candidate, tree=solution(task, oracle, candidate.base))
    # The meter of the candidate must not pay for it.
    apart = replace(limits, meter=CpuMeter())
    async with await limits.another() as sandbox:
        await solved.lay(sandbox)
        result = await _start(sandbox, task, exchange, apart)
    return None if result.timed_out or _wrong(result) else result.stdout.decode("utf-8", "replace")


async def _start(sandbox: Sandbox, task: Task, exchange: Exchange, limits: RunLimits) -> ExecResult:
    address_space = str(2 * limits.memory_bytes >> 10)
    argv = ["sh", "-c", LIMITED, "run", str(limits.cpu_s), address_space, limits.python, task.grading.entry]
    most = max(limits.max_output_bytes, len(exchange.expected.encode()) + MORE_OUTPUT)
    return await run_in(
        sandbox, argv, limits, env=ENVIRONMENT, stdin=exchange.stdin.encode(), max_output_bytes=most
    )


async def _run_input(
    sandbox: Sandbox, task: Task, exchange: Exchange, limits: RunLimits, judge: Judge
) -> _InputResult:
    result = await _start(sandbox, task, exchange, limits)
    if result.timed_out or out_of_cpu(result, limits.cpu_s):
        what = "time" if result.timed_out else "CPU time"
        return _InputResult(passed=False, reason=f"out of {what}", timed_out=True, cpu=not result.timed_out)
    why = _wrong(result)
    if why:
        return _InputResult(passed=False, reason=why, got=text_tail(result.stdout, result.stderr))
    try:
        printed = result.stdout.decode()
    except UnicodeDecodeError:
        return _InputResult(passed=False, reason="the output is not UTF-8")
    right, problem = await judge(printed)
    if right:
        return _InputResult(passed=True)
    reason = f"the checker {problem}" if problem else "a wrong output"
    return _InputResult(passed=False, reason=reason, got=text_tail(result.stdout), unchecked=bool(problem))


def _wrong(result: ExecResult) -> str:
    if result.exit_code != 0:
        return f"exit code {result.exit_code}{for_memory(result.out_of_memory)}"
    return "too much output" if result.truncated else ""


def _report(answered: list[_InputResult], exchanges: Sequence[Exchange]) -> RunReport:
    """Return the report over all inputs."""
    total = len(exchanges)
    passed = sum(one.passed for one in answered)
    failed = next(((n, one) for n, one in enumerate(answered) if not one.passed), None)
    reason = f"{passed} of {total} outputs are right"
    if failed is None:
        return RunReport(outcome=Outcome.RESOLVED, passed=passed, total=total, reason=reason, complete=True)
    number, first = failed
    late = [one for one in answered if one.timed_out]
    unchecked = sum(one.unchecked for one in answered)
    unrun = (
        f"; not run after {MAX_LATE} out of time: {total - len(answered)}" if len(late) == MAX_LATE else ""
    )
    return RunReport(
        outcome=Outcome.TEST_TIMEOUT if late else Outcome.UNRESOLVED,
        passed=passed,
        total=total,
        reason=f"{reason}; input {number}: {first.reason}" + unrun,
        complete=all(one.cpu for one in late),
        score=passed / total,
        controls=f"{CHECKER_FAILED} on {unchecked} outputs and works on right ones" if unchecked else "",
        failing=failing_checks(
            FailingCheck(name=f"input {number}", outcome=one.reason, expected=exchange.expected, got=one.got)
            for number, (exchange, one) in enumerate(zip(exchanges, answered, strict=False))
            if not one.passed
        ),
    )


def same_output(expected: str, printed: str, *, by_line: bool = False, tolerance: float = 1e-6) -> bool:
    """Return whether both have the same words in the same order, with `by_line` on the same lines.

    Numbers are compared as numbers; one that is expected with a fraction may differ by `tolerance`, absolute
    or relative.
    """
    if by_line:
        wanted, given = (text.strip().split("\n") for text in (expected, printed))
    else:
        wanted, given = [expected], [printed]
    allowed = Decimal(str(tolerance))
    return len(wanted) == len(given) and all(
        _same_words(a.split(), b.split(), allowed) for a, b in zip(wanted, given, strict=True)
    )


def _same_words(wanted: list[str], given: list[str], tolerance: Decimal) -> bool:
    pairs = zip(wanted, given, strict=False)
    return len(wanted) == len(given) and all(_same_word(a, b, tolerance) for a, b in pairs)


def _same_word(wanted: str, given: str, tolerance: Decimal) -> bool:
    if wanted == given:
        return True
    if len(given) > len(wanted) + MORE_CHARS or not (NUMBER.fullmatch(wanted) and NUMBER.fullmatch(given)):
        return False
    a, b = Decimal(wanted), Decimal(given)
    if a == b or "." not in wanted:
        return a == b
    try:
        return abs(a - b) <= tolerance * max(Decimal(1), abs(a))
    except ArithmeticError:  # out of range
        return False
