"""stdio: a program reads standard input and prints; what it must print stays on the host.

One process per hidden input, in one sandbox. Only inputs enter the sandbox, so what a candidate finds there
says nothing about right answers; all it can send is its standard output, which the host compares, beside its
event loop. With reward `binary` the first wrong answer ends the judging.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from decimal import Decimal

from insitu.errors import ConfigError, GradeError, TaskError
from insitu.grading.candidate import Candidate
from insitu.grading.diff import DEFAULT_POLICY, bad_path
from insitu.grading.runners.base import RunLimits, RunReport
from insitu.grading.runners.common import RunnerBase, control_task, for_memory, out_of_cpu, run_in
from insitu.sandbox.base import ExecResult, Sandbox
from insitu.sandbox.base_tree import is_plain
from insitu.tasks.user_functions import UserFunction, load_function
from insitu.types import Exchange, FileEntry, GradingPlan, Oracle, Outcome, Task, Tree, Trust

LIMITED = 'ulimit -t "$1" && ulimit -v "$2" && exec "$3" -s -B "$4"'
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONINTMAXSTRDIGITS": "0"}
MORE_OUTPUT = 1 << 16
"""Bytes that a program may print beyond what is expected."""
MORE_CHARS = 64
"""By which a printed number may be longer than the expected one."""
CHECK_S = 10.0
"""Seconds for one call of the user's checker: a run of the program may take three times as long, at least."""
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,6})?")
"""Decimal() reads more than judges do: digits of other scripts, underscores."""
Check = Callable[[str, str, str], Awaitable[bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What became of one input."""

    passed: bool
    reason: str = ""
    timed_out: bool = False
    cpu: bool = False


class StdioRunner(RunnerBase):
    """Runner `stdio`; strength strong."""

    name = "stdio"
    trust: Trust = "strong"

    def __init__(self) -> None:
        self._checkers: dict[tuple[str, int], UserFunction] = {}

    def check(self, task: Task, oracle: Oracle) -> None:
        entry = task.grading.entry
        if not entry.endswith(".py") or bad_path(entry, DEFAULT_POLICY):
            raise TaskError(f"task {task.id}: stdio needs grading.entry, a .py file; got {entry!r}")
        if is_plain(task.setup) and entry not in task.files and entry not in oracle.gold:
            raise TaskError(f"task {task.id}: the entry {entry} is not among its files")
        if not oracle.exchanges:
            raise TaskError(f"task {task.id}: the oracle has no inputs with outputs")
        self._check_of(task, oracle, 1)
        if not oracle.checker and not any(one.expected.strip() for one in oracle.exchanges):
            raise TaskError(f"task {task.id}: every expected output is empty, as that of a silent program is")

    def precheck_failure(self, task: Task, tree: Tree) -> str:
        return "" if task.grading.entry in tree else f"{task.grading.entry} is gone"

    def processes(self, task: Task, oracle: Oracle) -> int:
        return len(oracle.exchanges) * (2 if oracle.checker else 1)

    def control(self) -> tuple[Task, Oracle]:
        files = {"control.py": FileEntry(content=b"print(input())\n")}
        task = control_task(files, GradingPlan(runner=self.name, entry="control.py"))
        return task, Oracle(task_id="control", exchanges=(Exchange(stdin="1\n", expected="1\n"),))

    async def run(
        self, sandbox: Sandbox, task: Task, oracle: Oracle, candidate: Candidate, limits: RunLimits
    ) -> RunReport:
        check = self._check_of(task, oracle, limits.parallel)
        await candidate.lay(sandbox)
        answered: list[Answered] = []
        total = len(oracle.exchanges)
        for exchange in oracle.exchanges:
            try:
                answered.append(await _answered(sandbox, task, exchange, limits, check))
            except CheckFailed as failed:
                return RunReport(outcome=Outcome.INFRA, passed=0, total=total, reason=str(failed))
            await sandbox.kill_all()
            if not answered[-1].passed and task.grading.reward == "binary":
                break
        return report(answered, total)

    def _check_of(self, task: Task, oracle: Oracle, parallel: int) -> Check:
        """The user's function, else `same_output`. Raises TaskError."""
        if not oracle.checker:
            return lambda _, expected, printed: asyncio.to_thread(
                same_output, expected, printed, by_line=oracle.by_line, tolerance=oracle.tolerance
            )
        key = (oracle.checker, parallel)
        if key not in self._checkers:
            try:
                function = load_function(oracle.checker)
            except ConfigError as error:
                raise TaskError(f"task {task.id}: tasks.checker: {error}") from None
            self._checkers[key] = UserFunction(
                f"tasks.checker {oracle.checker}", function, max_concurrent=parallel, timeout_s=CHECK_S
            )
        checker = self._checkers[key]

        async def check(stdin: str, expected: str, printed: str) -> bool:
            try:
                return await checker.call(lambda function: _is_right(function, stdin, expected, printed))
            except GradeError as error:
                raise CheckFailed(str(error)) from error

        return check


class CheckFailed(Exception):
    """The user's checker is broken. No loss of the sandbox, which another sandbox could mend."""


def _is_right(function: Callable[..., object], stdin: str, expected: str, printed: str) -> bool:
    """ValueError is the output's fault: what `int` and `float` say of a word that is no number."""
    try:
        return bool(function(stdin, expected, printed))
    except ValueError:
        return False


async def _answered(
    sandbox: Sandbox, task: Task, exchange: Exchange, limits: RunLimits, check: Check
) -> Answered:
    address_space = str(2 * limits.memory_bytes >> 10)
    argv = ["sh", "-c", LIMITED, "run", str(limits.cpu_s), address_space, limits.python, task.grading.entry]
    most = max(limits.max_output_bytes, len(exchange.expected.encode()) + MORE_OUTPUT)
    result = await run_in(
        sandbox, argv, limits, env=ENVIRONMENT, stdin=exchange.stdin.encode(), max_output_bytes=most
    )
    if result.timed_out or out_of_cpu(result, limits.cpu_s):
        what = "time" if result.timed_out else "CPU time"
        return Answered(passed=False, reason=f"out of {what}", timed_out=True, cpu=not result.timed_out)
    why = _wrong(result)
    if why:
        return Answered(passed=False, reason=why)
    try:
        printed = result.stdout.decode()
    except UnicodeDecodeError:
        return Answered(passed=False, reason="the output is not UTF-8")
    right = await check(exchange.stdin, exchange.expected, printed)
    return Answered(passed=right, reason="" if right else "a wrong output")


def _wrong(result: ExecResult) -> str:
    if result.exit_code != 0:
        return f"exit code {result.exit_code}{for_memory(result.out_of_memory)}"
    return "too much output" if result.truncated else ""


def report(answered: list[Answered], total: int) -> RunReport:
    """The finding over all inputs. Pure."""
    passed = sum(one.passed for one in answered)
    failed = next(((n, one) for n, one in enumerate(answered) if not one.passed), None)
    said = f"{passed} of {total} outputs are right"
    if failed is None:
        return RunReport(outcome=Outcome.RESOLVED, passed=passed, total=total, reason=said, complete=True)
    number, first = failed
    late = [one for one in answered if one.timed_out]
    return RunReport(
        outcome=Outcome.TEST_TIMEOUT if late else Outcome.UNRESOLVED,
        passed=passed,
        total=total,
        reason=f"{said}; input {number}: {first.reason}",
        complete=all(one.cpu for one in late),
        score=passed / total,
    )


def same_output(expected: str, printed: str, *, by_line: bool = False, tolerance: float = 1e-6) -> bool:
    """Whether both have the same words in the same order, however they are spaced, with `by_line` on the
    same lines. Numbers are equal as numbers; one that is expected with a fraction may differ by `tolerance`,
    absolutely or relative to it."""
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
