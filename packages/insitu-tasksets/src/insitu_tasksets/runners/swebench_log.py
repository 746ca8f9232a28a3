"""Runner `swebench_log`: the task's script runs tests in the grading sandbox; the host parses their log.

Weak: the candidate's code writes to the same log. Only the text between two lines with a nonce is read, which
only the outer shell has. An id with two outcomes has failed, and the exit code is ignored. Ids must match
exactly, except for what the runner adds to them and for ids that a set cut (TestLog.outcome).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import replace

from insitu.errors import GradeError, TaskError
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
from insitu.sandbox.base import ExecResult, Sandbox
from insitu.types import FailingCheck, FileEntry, GradingPlan, HiddenTests, Oracle, Outcome, Task, Trust
from insitu_tasksets.runners.log_parsers import PARSERS, TestLog, parse_log
from insitu_tasksets.runners.pytest_logs import SKIPPED, XFAIL, is_cut, r2e_names
from insitu_tasksets.runners.required_tests import failing_tests, passing, share

FRAMED = f"""
IFS= read -r nonce || exit 97
script=$(cat)
printf '%s start\\n' "$nonce"
( {LIMIT_CPU}; unset nonce; eval "$script" ) </dev/null 2>&1
code=$?
printf '\\n%s end %s\\n' "$nonce" "$code"
"""
BEGIN, END = b">>>>> Start Test Output", b">>>>> End Test Output"
"""Markers by which scripts of the SWE-bench family frame the output of the tests."""
MAX_LOG_BYTES = 32 << 20


class SwebenchLogRunner(RunnerBase):
    """Runner `swebench_log`; trust weak."""

    name = "swebench_log"
    trust: Trust = "weak"

    def check(self, task: Task, oracle: Oracle) -> None:
        tests = oracle.tests
        if tests.parser not in PARSERS:
            known = ", ".join(sorted(PARSERS))
            raise TaskError(f"task {task.id}: no log parser {tests.parser!r} (known: {known})")
        if not tests.script.strip() or "\0" in tests.script:
            raise TaskError(f"task {task.id}: no script that runs its tests")
        if not tests.fail_to_pass and not tests.expected:
            raise TaskError(f"task {task.id}: no test that must change from failing to passing")
        # Two tests may have been cut to one id.
        required = [name for name in (*tests.fail_to_pass, *tests.pass_to_pass) if not is_cut(name)]
        if len(set(required)) != len(required) or len(dict(tests.expected)) != len(tests.expected):
            raise TaskError(f"task {task.id}: a test id is required twice")

    def control(self) -> tuple[Task, Oracle]:
        files = {"one": FileEntry(content=b"PASSED one\n")}
        task = control_task(files, GradingPlan(runner=self.name))
        tests = HiddenTests(script="cat one", parser="pytest", fail_to_pass=("one",))
        return task, Oracle(task_id="control", tests=tests)

    async def run(
        self, sandbox: Sandbox, task: Task, oracle: Oracle, candidate: Candidate, limits: RunLimits
    ) -> RunReport:
        tests = oracle.tests
        own = lays_tests(tests.script)
        await candidate.lay(sandbox, candidate.hidden(tests), owner="sandbox" if own else "root")
        nonce = secrets.token_hex(16)
        argv = ["bash", "-c", FRAMED, "tests", str(limits.cpu_s)]
        stdin = f"{nonce}\n{tests.script}".encode()
        result = await run_in(sandbox, argv, limits, stdin=stdin, max_output_bytes=MAX_LOG_BYTES)
        return await asyncio.to_thread(_judge, tests, result, nonce.encode(), limits.cpu_s)


def lays_tests(script: str) -> bool:
    """Return whether a script checks out test files itself, with git, and so must be able to write them."""
    code = [line for line in script.splitlines() if not line.lstrip().startswith("#")]
    return any(word in line for line in code for word in ("git apply", "git checkout", "git reset"))


def _judge(tests: HiddenTests, result: ExecResult, nonce: bytes, cpu_s: int) -> RunReport:
    """Return the report from the raw log."""
    total = len(tests.fail_to_pass) + len(tests.pass_to_pass) or len(tests.expected)
    if not result.stdout.startswith(nonce + b" start\n"):
        if result.timed_out:
            return _failed(Outcome.TEST_TIMEOUT, total, "out of time before the first test")
        raise GradeError(f"the test script did not start (exit {result.exit_code}): bash may be missing")
    output = result.stdout[len(nonce) + len(b" start\n") :]
    if result.timed_out:
        return _failed(Outcome.TEST_TIMEOUT, total, "out of time")
    if result.truncated:
        return _failed(Outcome.UNRESOLVED, total, f"the log has more than {MAX_LOG_BYTES} bytes")
    body, mark, tail = output.partition(b"\n" + nonce + b" end ")
    if nonce in body or nonce in tail:
        return _failed(Outcome.TAMPERED, total, "the log holds the nonce of the host")
    if not mark:
        how = for_memory(result.out_of_memory)
        return _failed(Outcome.UNRESOLVED, total, f"the test script was killed before its end{how}")
    code = tail.strip()  # that of the script; `result` has that of the shell around it
    late = out_of_cpu(replace(result, exit_code=int(code) if code.isdigit() else None), cpu_s)
    log = parse_log(tests.parser, _tests_part(tests.script, body).decode("utf-8", "replace"))
    if not log.outcomes:  # a runner may print before or behind the markers
        log = parse_log(tests.parser, body.decode("utf-8", "replace"))
    found = _equal(tests, log.outcomes) if tests.expected else _required(tests, log)
    if found.failing:
        last = FailingCheck(name="log", outcome="end of the output", tail=text_tail(body))
        found = replace(found, failing=failing_checks((last, *found.failing)))
    if late and found.outcome is not Outcome.RESOLVED:
        return _failed(Outcome.TEST_TIMEOUT, total, "out of CPU time", complete=True)
    return found


def _tests_part(script: str, log: bytes) -> bytes:
    """Return the framed output of the tests: from the first start marker to the last end marker."""
    if BEGIN.decode() not in script or END.decode() not in script:
        return log
    _, begun, rest = log.partition(BEGIN)
    body, ended, _ = rest.rpartition(END)
    return body if begun and ended else b""


def _failed(outcome: Outcome, total: int, reason: str, *, complete: bool = False) -> RunReport:
    return RunReport(outcome=outcome, passed=0, total=total, reason=reason, complete=complete, score=0.0)


def _required(tests: HiddenTests, log: TestLog) -> RunReport:
    """Judge by required ids; a pass_to_pass test may also be skipped or fail as expected, as upstream."""
    found = {name: log.outcome(name) for name in (*tests.fail_to_pass, *tests.pass_to_pass)}
    outcomes = {name: outcome for name, outcome in found.items() if outcome is not None}
    still = ("PASSED", SKIPPED, XFAIL)
    f2p = sum(outcomes.get(name) == "PASSED" for name in tests.fail_to_pass)
    p2p = sum(outcomes.get(name) in still for name in tests.pass_to_pass)
    total = len(tests.fail_to_pass) + len(tests.pass_to_pass)
    return RunReport(
        outcome=Outcome.RESOLVED if f2p + p2p == total else Outcome.UNRESOLVED,
        passed=f2p + p2p,
        total=total,
        reason=passing(tests, f2p + p2p, outcomes),
        complete=True,
        fail_to_pass=(f2p, len(tests.fail_to_pass)),
        pass_to_pass=(p2p, len(tests.pass_to_pass)),
        score=share(tests, f2p, p2p),
        failing=failing_tests(tests, outcomes, ("PASSED",), still),
    )


def _equal(tests: HiddenTests, outcomes: Mapping[str, str]) -> RunReport:
    """Judge by equality: the same ids with the same outcomes, no more and no less."""
    expected = dict(tests.expected)
    if tests.parser == "r2e":
        expected = r2e_names(expected)
    right = sum(outcomes.get(name) == outcome for name, outcome in expected.items())
    more = len(outcomes.keys() - expected.keys())
    return RunReport(
        outcome=Outcome.RESOLVED if right == len(expected) and not more else Outcome.UNRESOLVED,
        passed=right,
        total=len(expected),
        reason=f"{right} of {len(expected)} outcomes are as expected" + (f", {more} more" if more else ""),
        complete=True,
        score=right / len(expected),
        failing=failing_checks(
            FailingCheck(name=name, outcome=outcomes.get(name, "missing"), expected=outcome)
            for name, outcome in expected.items()
            if outcomes.get(name) != outcome
        ),
    )
