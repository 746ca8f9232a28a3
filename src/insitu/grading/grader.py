"""The Grader: judges a tree in a fresh sandbox without network; the verdict is computed on the host.

    task hash -> filtered diff -> fresh sandbox with base + diff -> runner -> Verdict

A lost sandbox: while it is empty, the host is at fault (infra). Afterwards the run is retried in new
sandboxes. If all are lost and a control sandbox with known good code works, the candidate did it
(unresolved, reward 0), else the host (infra, reward None). So an agent cannot mask a sample by breaking its
sandbox.

Out of wall time (docs/internals/grading.md): a control run measures how slow the machine is. A candidate
that had the time to compute several times as much as it did has waited: out of time. Otherwise it is run once
more, with more time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from insitu.backoff import backoff_s
from insitu.errors import GradeError, PolicyUnsupported, SandboxError, SandboxLost, TaskError, boundary
from insitu.grading.candidate import Candidate
from insitu.grading.diff import Diff, apply, compare
from insitu.grading.oracles import oracle_digest, solution, total_of
from insitu.grading.pressure import pressure_s
from insitu.grading.protected_files import policy_of
from insitu.grading.runners.base import CpuMeter, GradingRunner, RunLimits, RunReport
from insitu.grading.runners.find import opened_runners, runner_for, runner_named
from insitu.grading.verdict import NOTHING_CHANGED, gold_fails, make_verdict
from insitu.sandbox.base import GRADING, Sandbox, SandboxBackend, SandboxSpec, control_sandbox
from insitu.sandbox.base_tree import BaseTrees, is_plain, set_up
from insitu.sandbox.host_faults import fate_of, host_fault
from insitu.sandbox.pooled_sandbox import LeftRunning
from insitu.stalls import awake_timeout
from insitu.types import Oracle, Outcome, Setup, Task, Tree, Verdict, task_hash

log = logging.getLogger(__name__)

WALL_PER_CPU = 3.0
"""Wall time limit of a first run, in CPU limits: a process that computes hits the CPU limit first."""
PATIENCE = 4.0
"""Factor of the wall time limit of the second run."""
SURELY_WAITED = 6.0
"""A candidate that could have computed this many times as much, at the pace of the control, has waited."""
MAX_OUTPUT_BYTES = 1 << 20
MEMORY_BYTES, MAX_PROCESSES = 256 << 20, 16
"""Limits of one process and of one sandbox, on backends with resource limits."""
IMAGE_MEMORY_BYTES, IMAGE_PROCESSES = 4 << 30, 512
"""The same for tasks with an image or a setup, which may build and run anything."""
LEAST_CPU_S = 0.01
"""Least CPU time of a control for the computation of the pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeConfig:
    """Options of the grader."""

    timeout_s: float = 60.0
    """Upper bound of a task's `grading.timeout_s`, in CPU seconds, rounded up. Waiting ends a grade after
    three times as long; on a busy machine after a second run of four times that."""
    margin_s: float = 30.0
    """Seconds for moving files, on top of the timeouts of setup and runs."""
    attempts: int = 3
    """Attempts of one grade when sandboxes fail."""
    parallel: int = 4
    """Concurrent sandboxes: a burst of grades must not slow itself into timeouts."""
    remember: int = 4096
    """Size of the cache of complete reports by (task, oracle, diff); 0 = off."""
    python: str = "python3"
    """Interpreter inside the sandbox; at least Python 3.10."""


class Grader:
    """Grades trees; safe to call concurrently.

    Raises PolicyUnsupported for a backend that cannot isolate, TaskError for unusable rows. Every failure of
    a sandbox ends in a Verdict.
    """

    def __init__(self, backend: SandboxBackend, config: GradeConfig | None = None) -> None:
        lacking = GRADING - backend.capabilities
        if lacking:
            raise PolicyUnsupported(
                f"grading needs {', '.join(sorted(lacking))}; {backend.name} has not (sandbox.fallback may)"
            )
        self._backend = backend
        self._config = config or GradeConfig()
        self._permits = asyncio.Semaphore(self._config.parallel)
        self._spares: list[tuple[SandboxSpec, Sandbox]] = []
        self.bases = BaseTrees(backend)
        self._reports: OrderedDict[tuple[str, str, str], RunReport] = OrderedDict()
        self._named: dict[tuple[str, str], Oracle] = {}
        self._disturbing: dict[tuple[str, str], bool] = {}
        self._collecting: dict[tuple[str, str], asyncio.Lock] = {}

    async def grade(self, task: Task, oracle: Oracle, after: Tree) -> Verdict:
        """Return the verdict on a final tree.

        With a binary reward an unchanged tree earns 0 without a run, since the base fails. With `fraction` it
        is judged and earns what the base does, as it would with a file added.
        """
        started = time.monotonic()
        runner = runner_for(task, oracle)
        found = task_hash(task.prompt, task.files, task.grading, task.setup, task.steps)
        diff: Diff | None = None
        image = ""
        if found != task.content_hash:
            reason = "the task is not the one that was rolled out"
            report = RunReport(outcome=Outcome.TAMPERED, passed=0, total=total_of(oracle), reason=reason)
        elif task.steps or task.grading.where == "live":
            what = "after each step, whose files are" if task.steps else "in the agent's sandbox, which is"
            reason = f"it is graded {what} gone"
            report = RunReport(outcome=Outcome.INFRA, passed=0, total=total_of(oracle), reason=reason)
        else:
            try:
                base = await self.bases.of(task)
            except SandboxError as error:
                report = RunReport(
                    outcome=Outcome.INFRA, passed=0, total=total_of(oracle), reason=f"no base: {error}"
                )
            else:
                image = base.image
                diff = compare(base.files, after, policy_of(task, oracle, base.files))
                try:
                    oracle = await self.named(task, oracle)
                    report = await self._cached_report(runner, task, oracle, base.files, diff)
                except (SandboxError, GradeError) as error:
                    reason = f"no test ids: {error}"
                    report = RunReport(outcome=Outcome.INFRA, passed=0, total=0, reason=reason)
        if report.outcome in (Outcome.INFRA, Outcome.TAMPERED):
            log.warning("graded task=%s outcome=%s reason=%s", task.id, report.outcome, report.reason)
        return make_verdict(
            report,
            trust=report.trust or runner.trust,
            task_hash=found,
            diff=diff,
            duration_s=time.monotonic() - started,
            kind=task.grading.reward,
            image=image,
        )

    async def grade_live(self, task: Task, oracle: Oracle, sandbox: Sandbox) -> Verdict:
        """Return the verdict of the task's checks in the agent's own sandbox, as the agent left it.

        A check that its sandbox ends or refuses is the agent's doing, unless a control sandbox fails too.
        """
        started = time.monotonic()
        runner = runner_for(task, oracle)
        outcome, reason = Outcome.INFRA, ""
        try:
            only_hidden = Candidate(base={}, tree={}, task_id=task.id, over_image=True)
            report, _ = await self._run(LeftRunning(sandbox), runner, task, oracle, only_hidden)
            if report.outcome is Outcome.TEST_TIMEOUT and not report.complete:
                outcome, reason = Outcome.TEST_TIMEOUT, report.reason
        except (SandboxError, GradeError) as error:
            fault = await host_fault(sandbox) if isinstance(error, SandboxLost) else ""
            outcome, reason = Outcome.INFRA if fault else Outcome.UNRESOLVED, fault or str(error)
        if reason:
            if outcome is not Outcome.INFRA and await self._pace(runner, task.setup, sandbox) is None:
                outcome, reason = Outcome.INFRA, f"{reason}, and a control sandbox did no better"
            report = RunReport(outcome=outcome, passed=0, total=total_of(oracle), reason=reason)
        return make_verdict(
            replace(report, reason=f"in the agent's own sandbox: {report.reason}"),
            trust="weak",
            task_hash=task.content_hash,
            diff=None,
            duration_s=time.monotonic() - started,
            kind=task.grading.reward,
            image=task.setup.image,
        )

    async def prepare(self, task: Task) -> None:
        """Find the base and boot a spare sandbox, while the agent works. Raises SandboxError."""
        task = task.steps[0].task if task.steps else task
        runner = runner_named(task.grading.runner)
        if runner is None or is_plain(task.setup) or task.grading.where == "live":
            return
        await self.bases.of(task)
        spec = self._spec(task, runner)
        if sum(other == spec for other, _ in self._spares) >= self._config.parallel:
            return
        self._spares.append((spec, await self._open(task, spec)))
        while len(self._spares) > self._config.parallel:
            await self._spares.pop(0)[1].close()

    async def close(self) -> None:
        """Close the spare sandboxes and the idle processes of checkers."""
        for runner in opened_runners():
            runner.close()
        while self._spares:
            await self._spares.pop()[1].close()

    async def validate(self, task: Task, oracle: Oracle, *, repeats: int = 3) -> None:
        """Check that the base fails and the gold passes, each `repeats` times. Raises TaskError."""
        runner = runner_for(task, oracle)
        if task_hash(task.prompt, task.files, task.grading, task.setup) != task.content_hash:
            raise TaskError(f"task {task.id}: content_hash does not name its content")
        oracle = await self.named(task, oracle)
        base = (await self.bases.of(task)).files
        gold = compare(base, solution(task, oracle, base), policy_of(task, oracle, base))
        if gold.refused or gold.dropped or gold.left_out or gold.empty:
            why = gold.refused or ", ".join(gold.dropped + gold.left_out) or "it changes nothing"
            raise TaskError(f"task {task.id}: the gold change would not be graded: {why}")
        for number in range(repeats):
            before = await self._judge(runner, task, oracle, Candidate.of(task, base, base))
            _raise_infra(task, before)
            if before.outcome is Outcome.RESOLVED:
                raise TaskError(f"task {task.id}: the base already passes")
            fixed = Candidate.of(task, base, apply(base, gold))
            solved = await self._judge(runner, task, oracle, fixed)
            if solved.disturbed:
                solved = await self._judge(runner.as_it_is(), task, oracle, fixed)
            _raise_infra(task, solved)
            if solved.outcome is not Outcome.RESOLVED:
                raise TaskError(
                    f"task {task.id}: {gold_fails(solved.outcome, solved.reason, solved.failing)}"
                )
            if solved.trust is not None and number == 0:
                log.warning("task=%s trust=%s: %s", task.id, solved.trust, solved.controls)

    async def named(self, task: Task, oracle: Oracle) -> Oracle:
        """Return the oracle with what only its solution can tell, by a cached run of it.

        These are test ids in place of whole test files, and the form of values that a set may have wrapped.
        Raises TaskError where the solution fails a test, GradeError, SandboxError.
        """
        oracle, asks = runner_for(task, oracle).asking(oracle)
        if asks is None:
            return oracle
        key = (task.content_hash, oracle_digest(oracle))
        async with self._collecting.setdefault(key, asyncio.Lock()):
            if key not in self._named:
                base = (await self.bases.of(task)).files
                solved = Candidate.of(task, base, solution(task, oracle, base))
                report, _ = await self._try_sandboxes(asks, task, oracle, solved)
                self._named[key] = asks.completed(task, oracle, report)
        return self._named[key]

    async def _disturbs(self, task: Task, oracle: Oracle, base: Tree) -> bool:
        """Return whether the tests of a task disturb each other with its solution too; one run a task.

        Asked of the solution, not of the candidate: who could choose would choose the weaker proof.
        """
        if not (oracle.gold or oracle.gold_patch):
            return False
        key = (task.content_hash, oracle_digest(oracle))
        async with self._collecting.setdefault(key, asyncio.Lock()):
            if key not in self._disturbing:
                solved = Candidate.of(task, base, solution(task, oracle, base))
                self._disturbing[key] = (
                    await self._judge(runner_for(task, oracle), task, oracle, solved)
                ).disturbed
        return self._disturbing[key]

    async def _cached_report(
        self, runner: GradingRunner, task: Task, oracle: Oracle, base: Tree, diff: Diff
    ) -> RunReport:
        total = total_of(oracle)
        if diff.refused:
            return RunReport(outcome=Outcome.REFUSED, passed=0, total=total, reason=diff.refused)
        tree = apply(base, diff)
        idle = diff.empty and task.grading.reward == "binary"
        why = NOTHING_CHANGED if idle else runner.precheck_failure(task, tree)
        if why:
            return RunReport(outcome=Outcome.UNRESOLVED, passed=0, total=total, reason=why)
        key = (task.content_hash, oracle_digest(oracle), diff.digest)
        cached = self._reports.get(key)
        if cached is not None:
            self._reports.move_to_end(key)
            return cached
        report = await self._judge(runner, task, oracle, Candidate.of(task, base, tree))
        if report.disturbed and await self._disturbs(task, oracle, base):
            report = await self._judge(runner.as_it_is(), task, oracle, Candidate.of(task, base, tree))
        if report.complete and self._config.remember:
            self._reports[key] = report
            if len(self._reports) > self._config.remember:
                self._reports.popitem(last=False)
        return report

    async def _judge(
        self, runner: GradingRunner, task: Task, oracle: Oracle, candidate: Candidate
    ) -> RunReport:
        """Return the report, after a second run or a control run where a timeout needs one."""
        before = pressure_s()
        report, used = await self._try_sandboxes(runner, task, oracle, candidate)
        if report.outcome is not Outcome.TEST_TIMEOUT or report.complete:
            return report
        free_s = used.wall_s - (pressure_s() - before)
        pace = await self._pace(runner, task.setup, None)
        if pace is not None and used.cpu_s * pace * SURELY_WAITED >= free_s:
            first_s = used.wall_s
            report, used = await self._try_sandboxes(runner, task, oracle, candidate, patience=PATIENCE)
            if report.outcome is not Outcome.TEST_TIMEOUT or report.complete:
                return report
            took = f"run twice, for {first_s:.0f} s and {used.wall_s:.0f} s of wall time"
            report = replace(report, reason=f"{report.reason} ({took})")
            pace = await self._pace(runner, task.setup, None)
        if pace is not None:
            return replace(report, complete=True)
        reason = f"{report.reason}, and a control sandbox did no better"
        return replace(report, outcome=Outcome.INFRA, passed=0, reason=reason)

    async def _try_sandboxes(
        self,
        runner: GradingRunner,
        task: Task,
        oracle: Oracle,
        candidate: Candidate,
        *,
        patience: float = 1.0,
    ) -> tuple[RunReport, CpuMeter]:
        """Run in fresh sandboxes until one gives a report; when all are lost, decide by a control run."""
        lost: list[Sandbox] = []
        error: SandboxError | GradeError | None = None
        for attempt in range(self._config.attempts):
            if attempt:
                await asyncio.sleep(backoff_s(attempt, 0.2))
            async with self._permits:
                try:
                    sandbox = await self._boot(task, runner)
                except SandboxError as failed:
                    error = failed
                    continue
                try:
                    return await self._run(sandbox, runner, task, oracle, candidate, patience=patience)
                except (SandboxError, GradeError) as failed:
                    fault = await host_fault(sandbox) if isinstance(failed, SandboxLost) else ""
                    error = SandboxLost(f"{failed}: {fault}") if fault else failed
                    lost += [] if fault else [sandbox]
        total = total_of(oracle)
        all_lost = len(lost) == self._config.attempts
        if all_lost and await self._pace(runner, task.setup, lost[-1]) is not None:
            reason = (
                f"every sandbox ({len(lost)}) was lost under this change, a control sandbox was not: {error}"
            )
            return RunReport(outcome=Outcome.UNRESOLVED, passed=0, total=total, reason=reason), CpuMeter()
        return RunReport(
            outcome=Outcome.INFRA, passed=0, total=total, reason=f"sandbox failed: {error}"
        ), CpuMeter()

    async def _pace(self, runner: GradingRunner, setup: Setup, lost: Sandbox | None) -> float | None:
        """Run known good code on the image of the task; return wall time / CPU time, None on failure."""
        control, oracle = runner.control()
        control = replace(control, setup=Setup(image=setup.image, workdir=setup.workdir))
        async with self._permits:
            try:
                sandbox = await self._open(control, self._spec(control, runner), control=True, lost=lost)
                report, used = await self._run(
                    sandbox, runner, control, oracle, Candidate.of(control, {}, control.files)
                )
            except (SandboxError, GradeError):
                return None
        if report.outcome is not Outcome.RESOLVED:
            return None
        return max(1.0, used.wall_s / max(used.cpu_s, LEAST_CPU_S))

    async def _boot(self, task: Task, runner: GradingRunner) -> Sandbox:
        """Return a spare or new sandbox, without anything of the agent. Raises SandboxError."""
        spec = self._spec(task, runner)
        for spare in self._spares:
            if spare[0] == spec:
                self._spares.remove(spare)
                return spare[1]
        return await self._open(task, spec)

    async def _open(
        self, task: Task, spec: SandboxSpec, *, control: bool = False, lost: Sandbox | None = None
    ) -> Sandbox:
        with boundary(SandboxError, "open a grading sandbox"):
            sandbox = await (
                control_sandbox(self._backend, spec, lost) if control else self._backend.create(spec)
            )
            try:
                async with awake_timeout(task.setup.timeout_s + self._config.margin_s):
                    await set_up(sandbox, task.setup)
            except BaseException:
                await sandbox.close()
                raise
            return sandbox

    def _spec(self, task: Task, runner: GradingRunner) -> SandboxSpec:
        limited = "resource_limits" in self._backend.capabilities
        plain = is_plain(task.setup)
        processes = MAX_PROCESSES if plain else IMAGE_PROCESSES
        return SandboxSpec.of(
            task.setup,
            network="none",
            binds=runner.needs(),
            places=runner.places,
            memory_bytes=self._memory_bytes(task) if limited else None,
            max_processes=processes if limited else None,
            label=f"grade/{task.id}",
        )

    def _memory_bytes(self, task: Task) -> int:
        given = MEMORY_BYTES if is_plain(task.setup) else IMAGE_MEMORY_BYTES
        return max(given, max(task.grading.memory_mb, task.setup.memory_mb) << 20)

    async def _run(
        self,
        sandbox: Sandbox,
        runner: GradingRunner,
        task: Task,
        oracle: Oracle,
        candidate: Candidate,
        *,
        patience: float = 1.0,
    ) -> tuple[RunReport, CpuMeter]:
        cpu_s = math.ceil(min(task.grading.timeout_s, self._config.timeout_s))
        wall_s = WALL_PER_CPU * patience * cpu_s

        async def another(**changes: Any) -> Sandbox:
            return await self._open(task, replace(self._spec(task, runner), **changes))

        limits = RunLimits(
            cpu_s=cpu_s,
            wall_s=wall_s,
            max_output_bytes=MAX_OUTPUT_BYTES,
            memory_bytes=self._memory_bytes(task),
            parallel=self._config.parallel,
            python=self._config.python,
            another=None if task.setup.commands or task.setup.root_commands else another,
        )
        try:
            with boundary(SandboxLost, "grade"):
                count = runner.processes(task, oracle)
                async with awake_timeout(count * wall_s + self._config.margin_s):
                    report = await runner.run(sandbox, task, oracle, candidate, limits)
                    fate = None if isinstance(sandbox, LeftRunning) else fate_of(sandbox)
                    asks = fate.beside if fate and report.outcome is not Outcome.RESOLVED else None
                    if asks and (ended := await asks()):
                        raise SandboxLost(ended)
                    return report, limits.meter
        finally:
            await sandbox.close()


def _raise_infra(task: Task, report: RunReport) -> None:
    if report.outcome is Outcome.INFRA:
        raise GradeError(f"task {task.id} could not be validated: {report.reason}")
