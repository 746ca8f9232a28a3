"""Runner `json_io`: only inputs enter the sandbox; the host compares the returned JSON values.

Expected values never leave the host, so a forged answer needs knowledge of the right value. Equality is
JSON's with types: 1, 1.0 and true differ pairwise, dict order is free, -0.0 equals 0.0, a tuple or a set
equals no list, subclasses are no values, NaN and infinities are refused on both sides. One process answers
all inputs.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from insitu.errors import GradeError, TaskError
from insitu.grading.candidate import Candidate
from insitu.grading.diff import DEFAULT_POLICY, bad_path
from insitu.grading.runners.base import RunLimits, RunReport
from insitu.grading.runners.common import (
    RunnerBase,
    control_task,
    failing_checks,
    for_memory,
    out_of_cpu,
    run_in,
)
from insitu.grading.runners.json_values import check_value, equal, parse, shown
from insitu.sandbox.base import ExecResult, Sandbox
from insitu.sandbox.base_tree import is_plain
from insitu.tasks.row_files import MAX_DIGITS
from insitu.types import Case, FailingCheck, FileEntry, GradingPlan, Oracle, Outcome, Task, Tree, Trust

WORKER = Path(__file__).with_name("json_io_worker.py").read_text()
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "PYTHONSAFEPATH": "1",
    "PYTHONINTMAXSTRDIGITS": str(MAX_DIGITS),
}
"""A fixed hash seed makes verdicts on code that iterates over sets repeatable."""
ANSWER_OVERHEAD = 128
"""Most bytes of an answer line beside its value."""


class ChannelTampered(Exception):
    """The result pipe holds data that the worker cannot have written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """The sandbox's answer to one case."""

    ok: bool
    value: object = None
    """The JSON value if ok, else the name of the error."""


class JsonIoRunner(RunnerBase):
    """Runner `json_io`; trust strong."""

    name = "json_io"
    trust: Trust = "strong"

    def check(self, task: Task, oracle: Oracle) -> None:
        entry = task.grading.entry
        if not entry.endswith(".py") or bad_path(entry, DEFAULT_POLICY):
            raise TaskError(f"task {task.id}: json_io needs grading.entry, a .py file; got {entry!r}")
        if is_plain(task.setup) and entry not in task.files and entry not in oracle.gold:
            raise TaskError(f"task {task.id}: the entry {entry} is not among its files: {_some(task.files)}")
        if not oracle.cases:
            raise TaskError(f"task {task.id}: the oracle has no cases")
        for number, case in enumerate(oracle.cases):
            for part, value in (("args", list(case.args)), ("expected", case.expected)):
                try:
                    check_value(value)
                except (TypeError, ValueError) as error:
                    raise TaskError(f"task {task.id}: {part} of case {number}: {error}") from None

    def precheck_failure(self, task: Task, tree: Tree) -> str:
        return "" if task.grading.entry in tree else f"{task.grading.entry} was deleted"

    def trust_of(self, task: Task, oracle: Oracle) -> tuple[Trust, str]:
        solved = oracle.gold or oracle.gold_patch
        if not solved and any(case.wrapped for case in _without_forms(oracle.cases)):
            return "standard", "whether its values are wrapped in lists only a solution could tell"
        return super().trust_of(task, oracle)

    def asking(self, oracle: Oracle) -> tuple[Oracle, JsonForms | None]:
        oracle = replace(oracle, cases=_without_forms(oracle.cases))
        asks = any(case.wrapped for case in oracle.cases) and (oracle.gold or oracle.gold_patch)
        return oracle, JsonForms() if asks else None

    def control(self) -> tuple[Task, Oracle]:
        files = {"control.py": FileEntry(content=b"def one():\n    return 1\n")}
        task = control_task(files, GradingPlan(entry="control.py"))
        return task, Oracle(task_id="control", cases=(Case(function="one", args=(), expected=1),), gold={})

    async def run(
        self, sandbox: Sandbox, task: Task, oracle: Oracle, candidate: Candidate, limits: RunLimits
    ) -> RunReport:
        ids, result = await self._answers(sandbox, task, oracle, candidate, limits)
        report = await asyncio.to_thread(judge, oracle.cases, ids, result, limits.cpu_s)
        return replace(report, trust="standard") if any(case.wrapped for case in oracle.cases) else report

    async def _answers(
        self, sandbox: Sandbox, task: Task, oracle: Oracle, candidate: Candidate, limits: RunLimits
    ) -> tuple[Sequence[str], ExecResult]:
        """Return the ids of the cases and the raw answers."""
        await candidate.lay(sandbox)
        nonce = secrets.token_hex(8)
        ids = [f"{nonce}-{number}" for number in range(len(oracle.cases))]
        argv = [limits.python, "-s", "-S", "-B", "-c", WORKER]
        job = await asyncio.to_thread(_job, sandbox.workdir, task, oracle, ids, nonce, limits)
        result = await run_in(sandbox, argv, limits, cwd="/", env=ENVIRONMENT, stdin=job)
        if not result.stdout.startswith(f'["{nonce}"]\n'.encode()):
            tail = ascii(result.stderr[-200:].decode("utf-8", "replace"))
            raise GradeError(f"the worker did not start (exit {result.exit_code}): {tail}")
        return ids, result


class JsonForms(JsonIoRunner):
    """A run of the solution of a task whose expected values may be wrapped. For one use."""

    _cases: tuple[Case, ...] = ()

    async def run(
        self, sandbox: Sandbox, task: Task, oracle: Oracle, candidate: Candidate, limits: RunLimits
    ) -> RunReport:
        ids, result = await self._answers(sandbox, task, oracle, candidate, limits)
        report = await asyncio.to_thread(judge, oracle.cases, ids, result, limits.cpu_s)
        self._cases = oracle.cases
        if report.outcome is Outcome.RESOLVED:
            claims = read_claims(result.stdout.split(b"\n", 1)[1], ids)
            self._cases = tuple(map(_form_of, oracle.cases, claims))
        return report

    def completed(self, task: Task, oracle: Oracle, report: RunReport) -> Oracle:
        """Return the oracle with cases that take the form of a right answer only. Raises GradeError."""
        if report.outcome is Outcome.INFRA:
            raise GradeError(f"task {task.id}: its solution was not run: {report.reason}")
        return replace(oracle, cases=self._cases or oracle.cases)


def _form_of(case: Case, claim: _Claim) -> Case:
    """Return a case that takes the form of a right answer only."""
    whole = replace(case, wrapped=False)
    if not case.wrapped or equal(claim.value, whole) or not isinstance(case.expected, list):
        return whole
    return replace(whole, expected=case.expected[0])


def _without_forms(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Return cases that take whole values only where one of them cannot be wrapped: sets wrap all or none."""
    wrapped = [case.expected for case in cases if case.wrapped]
    if all(isinstance(value, list) and len(value) == 1 for value in wrapped):
        return cases
    return tuple(replace(case, wrapped=False) for case in cases)


def _some(tree: Tree) -> str:
    return ", ".join(sorted(tree)[:5]) or "it has none"


def _job(root: str, task: Task, oracle: Oracle, ids: Sequence[str], nonce: str, limits: RunLimits) -> bytes:
    job = {
        "root": root,
        "entry": task.grading.entry,
        "ready": nonce,
        "max_bytes": limits.max_output_bytes - ANSWER_OVERHEAD * (len(ids) + 1),
        "address_space": 2 * limits.memory_bytes,
        "cpu_s": limits.cpu_s,
        "calls": [(key, case.function, list(case.args)) for key, case in zip(ids, oracle.cases, strict=True)],
    }
    return ascii(job).encode()


def judge(cases: Sequence[Case], ids: Sequence[str], result: ExecResult, cpu_s: int) -> RunReport:
    """Return the report from the raw bytes of the result pipe; the first line is the ready line."""
    total = len(cases)
    try:
        if result.truncated:
            raise ChannelTampered("more output than the worker sends")
        claims = read_claims(result.stdout.split(b"\n", 1)[1], ids)
    except ChannelTampered as found:
        return RunReport(outcome=Outcome.TAMPERED, passed=0, total=total, reason=str(found))
    right = [c.ok and equal(c.value, case) for c, case in zip(claims, cases, strict=False)]
    passed = sum(right)
    failing = failing_checks(
        _failing(number, case, claim)
        for number, (case, claim, ok) in enumerate(zip(cases, claims, right, strict=False))
        if not ok
    )
    if result.timed_out or out_of_cpu(result, cpu_s):
        what = "time" if result.timed_out else "CPU time"
        return RunReport(
            outcome=Outcome.TEST_TIMEOUT,
            passed=passed,
            total=total,
            reason=f"out of {what} after {len(claims)} of {total} cases",
            complete=not result.timed_out,
            failing=failing,
        )
    if result.exit_code != 0 or len(claims) < total:
        how = f"{result.exit_code}{for_memory(result.out_of_memory)}"
        reason = f"the process ended ({how}) after {len(claims)} of {total} cases"
        return RunReport(
            outcome=Outcome.UNRESOLVED, passed=passed, total=total, reason=reason, failing=failing
        )
    outcome = Outcome.RESOLVED if passed == total else Outcome.UNRESOLVED
    reason = f"{passed} of {total} cases pass" + _first_error(claims)
    return RunReport(
        outcome=outcome, passed=passed, total=total, reason=reason, complete=True, failing=failing
    )


def _failing(number: int, case: Case, claim: _Claim) -> FailingCheck:
    call = f"case {number}: {case.function}({shown(case.args)[1:-1]})"
    expected = shown(case.expected)
    if claim.ok:
        return FailingCheck(name=call, outcome="wrong", expected=expected, got=shown(claim.value))
    return FailingCheck(name=call, outcome=f"raised {claim.value}", expected=expected)


def _first_error(claims: Sequence[_Claim]) -> str:
    for number, claim in enumerate(claims):
        if not claim.ok:
            return f"; case {number} raised {claim.value}"
    return ""


def read_claims(data: bytes, ids: Sequence[str]) -> list[_Claim]:
    """Return claims in the order of `ids`, possibly fewer. Raises ChannelTampered.

    A last line without newline, of a killed process, is ignored.
    """
    lines = data.split(b"\n")[:-1]
    if len(lines) > len(ids):
        raise ChannelTampered(f"{len(lines)} answers to {len(ids)} cases")
    return [_read_claim(line, key) for line, key in zip(lines, ids, strict=False)]


def _read_claim(line: bytes, key: str) -> _Claim:
    try:
        answer = parse(line)
    except (ValueError, RecursionError):
        raise ChannelTampered("an answer is not JSON") from None
    if type(answer) is not list or len(answer) != 3 or type(answer[1]) is not bool:
        raise ChannelTampered("an answer has another form")
    if answer[0] != key:
        raise ChannelTampered("an answer is unknown, repeated or out of order")
    ok, value = answer[1], answer[2]
    if not ok and not (type(value) is str and value.isascii() and value.isidentifier() and len(value) <= 40):
        raise ChannelTampered("an error has no name")
    return _Claim(ok=ok, value=value)
