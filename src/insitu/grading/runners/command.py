"""Runner `command`: shell commands in the sandbox; each passes when it exits 0 and prints its markers.

Weak: the candidate's code runs in the process that is believed. Hidden files belong to another user, and no
process of one command survives into the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from insitu.errors import TaskError
from insitu.grading.candidate import Candidate
from insitu.grading.runners.base import RunLimits, RunReport
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
from insitu.sandbox.base import Sandbox
from insitu.tasks.commands import FIND, programs_of
from insitu.types import (
    Check,
    FailingCheck,
    FileEntry,
    GradingPlan,
    HiddenTests,
    Oracle,
    Outcome,
    Task,
    Trust,
)

LIMITED = f'{LIMIT_CPU} && exec sh -c "$2"'
MAX_OUTPUT_BYTES = 32 << 20
"""Limit of output, generous: a candidate may print before a marker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CheckResult:
    """Result of one check."""

    passed: bool
    timed_out: bool = False
    cpu: bool = False
    memory: bool = False
    exit_code: int | None = None
    tail: str = ""


class CommandRunner(RunnerBase):
    """Runner `command`; trust weak."""

    name = "command"
    trust: Trust = "weak"

    def check(self, task: Task, oracle: Oracle) -> None:
        checks = oracle.tests.checks
        if not checks:
            raise TaskError(f"task {task.id}: no command to check it with")
        for one in checks:
            if not one.command.strip() or "\0" in one.command:
                raise TaskError(f"task {task.id}: check {one.name!r} has no command")
            if not (math.isfinite(one.weight) and one.weight >= 0) or any(not text for text in one.markers):
                raise TaskError(f"task {task.id}: check {one.name!r} has a bad weight or an empty marker")
        if not any(one.weight > 0 for one in checks):
            raise TaskError(f"task {task.id}: no check has a weight")

    def processes(self, task: Task, oracle: Oracle) -> int:
        return len(oracle.tests.checks)

    def control(self) -> tuple[Task, Oracle]:
        task = control_task({"one": FileEntry(content=b"1\n")}, GradingPlan(runner=self.name))
        check = Check(name="one", command="cat one", markers=("1",))
        return task, Oracle(task_id="control", tests=HiddenTests(checks=(check,)))

    async def run(
        self, sandbox: Sandbox, task: Task, oracle: Oracle, candidate: Candidate, limits: RunLimits
    ) -> RunReport:
        # Before the candidate is there: it can hide no program.
        if missing := await _missing(sandbox, oracle, limits):
            return RunReport(
                outcome=Outcome.INFRA,
                passed=0,
                total=len(oracle.tests.checks),
                reason=f"the sandbox has no {missing}, which a check calls",
            )
        await candidate.lay(sandbox, candidate.hidden(oracle.tests), owner="root")
        done: list[_CheckResult] = []
        for check in oracle.tests.checks:
            done.append(await _run_check(sandbox, check, limits))
            if done[-1].timed_out:
                break
            await sandbox.kill_all()
        return _report(oracle.tests.checks, done)


async def _missing(sandbox: Sandbox, oracle: Oracle, limits: RunLimits) -> str:
    """Return the name of a program that checks call and the sandbox has not; empty if it has all."""
    names = programs_of(oracle)
    if not names:
        return ""
    found = await run_in(sandbox, ["sh", "-c", FIND, "sh", *names], limits)
    return found.stdout.decode().partition("\n")[0]


async def _run_check(sandbox: Sandbox, check: Check, limits: RunLimits) -> _CheckResult:
    argv = ["sh", "-c", LIMITED, "check", str(limits.cpu_s), check.command]
    result = await run_in(sandbox, argv, limits, max_output_bytes=MAX_OUTPUT_BYTES)
    found = all(marker.encode() in result.stdout for marker in check.markers)
    passed = result.exit_code == 0 and found and not result.timed_out
    cpu, memory = out_of_cpu(result, limits.cpu_s), result.out_of_memory
    return _CheckResult(
        passed=passed,
        timed_out=result.timed_out,
        cpu=cpu,
        memory=memory,
        exit_code=result.exit_code,
        tail="" if passed else text_tail(result.stdout, result.stderr),
    )


def _report(checks: tuple[Check, ...], done: list[_CheckResult]) -> RunReport:
    """Return the report over all checks; checks of weight 0 must pass as well."""
    passed = sum(one.passed for one in done)
    weight = sum(check.weight for check in checks)
    score = sum(check.weight for check, one in zip(checks, done, strict=False) if one.passed) / weight
    late = any(one.timed_out or (one.cpu and not one.passed) for one in done)
    outcome = Outcome.RESOLVED if passed == len(checks) else Outcome.UNRESOLVED
    if late and outcome is not Outcome.RESOLVED:
        outcome = Outcome.TEST_TIMEOUT
    failed = [(c.name, one) for c, one in zip(checks, done, strict=False) if not one.passed]
    reason = f"{passed} of {len(checks)} checks pass"
    if failed:
        reason += f"; {failed[0][0]} does not{for_memory(failed[0][1].memory)}"
    return RunReport(
        outcome=outcome,
        passed=passed,
        total=len(checks),
        reason=reason,
        complete=not any(one.timed_out for one in done),
        score=score,
        failing=failing_checks(
            FailingCheck(name=name, outcome=_how(one), tail=one.tail) for name, one in failed
        ),
    )


def _how(result: _CheckResult) -> str:
    if result.timed_out or result.cpu:
        return "out of time"
    return "a marker is missing" if result.exit_code == 0 else f"exit code {result.exit_code}"
