"""The Grader: judges what an agent left, in a fresh sandbox without network, and decides on the host.

task hash -> filtered diff -> fresh sandbox with base + diff -> runner -> Verdict

Who is to blame when a sandbox is lost? While the sandbox is still empty, the host: infra, retried. From then
on, the loss is tried again in new sandboxes; if every one is lost while a control sandbox with known good
code works, the candidate did it (unresolved, reward 0), else the host did (infra, reward None). So an agent
cannot get its sample masked by breaking the sandbox. Called by attempt.py with an oracle that the rollout
side never reads.

Whose fault is it when time runs out? CPU time is the candidate's own. Of one that ran out of wall time is
asked how much it computed, and of a control sandbox beside it how much slower than its own computing the
machine is now. Who had the time to compute several times as much has waited of itself, where time in which
anything on the machine waited for it does not count: the machine may be faster again by now. Else it is run
once more, with more time. All this happens beside the grading of others: a candidate that waits holds one
place, and no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from insitu.backoff import backoff_s
from insitu.errors import GradeError, PolicyUnsupported, SandboxError, SandboxLost, TaskError, boundary
from insitu.grading.candidate import Candidate
from insitu.grading.diff import Diff, apply, compare
from insitu.grading.protected_files import policy_of
from insitu.grading.runners.base import CpuMeter, GradingRunner, RunLimits, RunReport
from insitu.grading.runners.command import CommandRunner
from insitu.grading.runners.harbor import HarborRunner
from insitu.grading.runners.json_io import JsonIoRunner
from insitu.grading.runners.pytest import PytestRunner
from insitu.grading.runners.pytest_collect import PytestCollect, whole_files
from insitu.grading.runners.stdio import StdioRunner
from insitu.grading.runners.swebench_log import SwebenchLogRunner
from insitu.grading.verdict import make_verdict
from insitu.sandbox.base import Capability, Sandbox, SandboxBackend, SandboxSpec, control_sandbox
from insitu.sandbox.base_tree import BaseTrees, is_plain, set_up
from insitu.tasks.patch import apply_patch
from insitu.types import HiddenTests, Oracle, Outcome, Setup, Task, Tree, Verdict, task_hash

log = logging.getLogger(__name__)

RUNNERS: Mapping[str, GradingRunner] = {
    runner.name: runner
    for runner in (
        JsonIoRunner(),
        StdioRunner(),
        PytestRunner(),
        CommandRunner(),
        SwebenchLogRunner(),
        HarborRunner(),
    )
}
NEEDED: frozenset[Capability] = frozenset({"network_none", "pid_isolation"})
WALL_PER_CPU = 3.0
"""Wall time of a first run, in CPU limits: what computes all the time meets the CPU limit first."""
PATIENCE = 4.0
"""Times as much for the second run, on a machine that is busy."""
SURELY_WAITED = 6.0
"""What waits of itself could have computed as many times as much as it did, at the pace of the control."""
PRESSURE = Path("/proc/pressure")
LEAST_CPU_S = 0.01
"""A control that computes less says nothing about pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeConfig:
    """How the grader works, for all tasks."""

    timeout_s: float = 60.0
    """Upper bound of a task's own `grading.timeout_s`, which counts CPU seconds, rounded up. Waiting without
    computing ends a grade after 3 times as long; on a busy machine after a second run of 4 times that."""
    margin_s: float = 30.0
    """Seconds for moving files, on top of what a setup or a run may take. How long a sandbox may take to
    start is the backend's to say."""
    max_output_bytes: int = 1 << 20
    memory_bytes: int = 256 << 20
    """Of one process."""
    max_processes: int = 16
    """In one sandbox, of a backend that offers resource limits."""
    image_memory_bytes: int = 4 << 30
    image_processes: int = 512
    """The same for tasks with an image or a setup: what they build and run is not ours to guess."""
    attempts: int = 3
    """Sandboxes tried for one grade when sandboxes fail."""
    parallel: int = 4
    """Sandboxes open at once, so that a burst of grades does not slow itself into timeouts."""
    remember: int = 4096
    """Completed findings kept by (task, oracle, diff); an equal diff is not run again. 0 turns it off."""
    python: str = "python3"
    """Interpreter inside the sandbox; at least Python 3.10."""


class Grader:
    """Grades diffs; safe to call concurrently. Raises TaskError for unusable rows, PolicyUnsupported for a
    backend that cannot isolate; every failure of a sandbox ends in a Verdict."""

    def __init__(self, backend: SandboxBackend, config: GradeConfig | None = None) -> None:
        lacking = NEEDED - backend.capabilities
        if lacking:
            raise PolicyUnsupported(f"grading needs {', '.join(sorted(lacking))}; {backend.name} has not")
        self._backend = backend
        self._config = config or GradeConfig()
        self._permits = asyncio.Semaphore(self._config.parallel)
        self._spares: list[tuple[SandboxSpec, Sandbox]] = []
        self.bases = BaseTrees(backend)
        self._known: OrderedDict[tuple[str, str, str], RunReport] = OrderedDict()
        self._named: dict[tuple[str, str], HiddenTests] = {}
        self._naming: dict[tuple[str, str], asyncio.Lock] = {}

    async def grade(self, task: Task, oracle: Oracle, after: Tree) -> Verdict:
        """The verdict on the tree that the agent left. A tree that equals the task's earns 0 unseen."""
        started = time.monotonic()
        runner = runner_for(task, oracle)
        found = task_hash(task.prompt, task.files, task.grading, task.setup)
        diff: Diff | None = None
        image = ""
        if found != task.content_hash:
            reason = "the task is not the one that was rolled out"
            report = RunReport(outcome=Outcome.TAMPERED, passed=0, total=total_of(oracle), reason=reason)
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
                    report = await self._finding(runner, task, oracle, base.files, diff)
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

    async def prepare(self, task: Task) -> None:
        """While the agent works: find the base, and boot and set up a sandbox for what takes long to boot.
        Plain sandboxes start in no time, and a pool keeps some. Raises SandboxError."""
        runner = RUNNERS.get(task.grading.runner)
        if runner is None or is_plain(task.setup):
            return
        await self.bases.of(task)
        spec = self._spec(task, runner)
        if sum(other == spec for other, _ in self._spares) >= self._config.parallel:
            return
        self._spares.append((spec, await self._open(task, spec)))
        while len(self._spares) > self._config.parallel:
            await self._spares.pop(0)[1].close()

    async def close(self) -> None:
        """Close the sandboxes that were booted and not needed."""
        while self._spares:
            await self._spares.pop()[1].close()

    async def validate(self, task: Task, oracle: Oracle, *, repeats: int = 3) -> None:
        """The row gate: the base must fail and the gold must pass, each `repeats` times. Raises TaskError."""
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
            solved = await self._judge(runner, task, oracle, Candidate.of(task, base, apply(base, gold)))
            _raise_infra(task, solved)
            if solved.outcome is not Outcome.RESOLVED:
                raise TaskError(f"task {task.id}: the gold fails ({solved.outcome}): {solved.reason}")
            if solved.trust is not None and number == 0:
                log.warning("task=%s strength=%s: %s", task.id, solved.trust, solved.controls)

    async def named(self, task: Task, oracle: Oracle) -> Oracle:
        """`oracle` with the ids of all tests of the files that it requires whole, found by a run of the
        solution, once. Raises TaskError where the solution fails one, GradeError or SandboxError."""
        if task.grading.runner != "pytest" or not whole_files(oracle.tests):
            return oracle
        key = (task.content_hash, _digest(oracle))
        async with self._naming.setdefault(key, asyncio.Lock()):
            if key not in self._named:
                base = (await self.bases.of(task)).files
                collect = PytestCollect()
                solved = Candidate.of(task, base, solution(task, oracle, base))
                report, _ = await self._try_sandboxes(collect, task, oracle, solved)
                if report.outcome is not Outcome.RESOLVED:
                    raise GradeError(f"task {task.id}: its tests were not collected: {report.reason}")
                self._named[key] = collect.named(oracle).tests
        return replace(oracle, tests=self._named[key])

    async def _finding(
        self, runner: GradingRunner, task: Task, oracle: Oracle, base: Tree, diff: Diff
    ) -> RunReport:
        total = total_of(oracle)
        if diff.refused:
            return RunReport(outcome=Outcome.REFUSED, passed=0, total=total, reason=diff.refused)
        tree = apply(base, diff)
        why = "nothing changed" if diff.empty else runner.precheck_failure(task, tree)
        if why:
            return RunReport(outcome=Outcome.UNRESOLVED, passed=0, total=total, reason=why)
        key = (task.content_hash, _digest(oracle), diff.digest)
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        report = await self._judge(runner, task, oracle, Candidate.of(task, base, tree))
        if report.complete and self._config.remember:
            self._known[key] = report
            if len(self._known) > self._config.remember:
                self._known.popitem(last=False)
        return report

    async def _judge(
        self, runner: GradingRunner, task: Task, oracle: Oracle, candidate: Candidate
    ) -> RunReport:
        """One finding, as often tried as it takes to know whose fault a failure is."""
        before = stalled_s()
        report, used = await self._try_sandboxes(runner, task, oracle, candidate)
        if report.outcome is not Outcome.TEST_TIMEOUT or report.complete:
            return report
        free_s = used.wall_s - (stalled_s() - before)
        pace = await self._pace(runner, task.setup, None)
        if pace is not None and used.cpu_s * pace * SURELY_WAITED >= free_s:
            report, used = await self._try_sandboxes(runner, task, oracle, candidate, patience=PATIENCE)
            if report.outcome is not Outcome.TEST_TIMEOUT or report.complete:
                return report
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
        """Run in fresh sandboxes until one gives a finding; then decide whose fault the failures were."""
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
                    error = failed
                    lost.append(sandbox)
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
        """Run known good code, in a sandbox like the lost one: a backend may have no other image to offer.
        Its wall time by its CPU time, at least 1; None when it does not work."""
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
        """An empty sandbox, or one with the task's image and setup: nothing of the agent is in it yet, so
        that a failure here is the host's. Raises SandboxError."""
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
                async with asyncio.timeout(task.setup.timeout_s + self._config.margin_s):
                    await set_up(sandbox, task.setup)
            except BaseException:
                await sandbox.close()
                raise
            return sandbox

    def _spec(self, task: Task, runner: GradingRunner) -> SandboxSpec:
        limited = "resource_limits" in self._backend.capabilities
        plain = is_plain(task.setup)
        processes = self._config.max_processes if plain else self._config.image_processes
        return SandboxSpec(
            image=task.setup.image,
            workdir=task.setup.workdir,
            root_setup=bool(task.setup.root_commands),
            network="none",
            binds=runner.needs(),
            places=runner.places,
            memory_bytes=self._memory_bytes(task) if limited else None,
            max_processes=processes if limited else None,
            label=f"grade/{task.id}",
        )

    def _memory_bytes(self, task: Task) -> int:
        """Of one process of a grade."""
        given = self._config.memory_bytes if is_plain(task.setup) else self._config.image_memory_bytes
        return max(given, task.grading.memory_mb << 20)

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

        async def another() -> Sandbox:
            return await self._open(task, self._spec(task, runner))

        limits = RunLimits(
            cpu_s=cpu_s,
            wall_s=wall_s,
            max_output_bytes=self._config.max_output_bytes,
            memory_bytes=self._memory_bytes(task),
            parallel=self._config.parallel,
            python=self._config.python,
            another=None if task.setup.commands or task.setup.root_commands else another,
        )
        try:
            with boundary(SandboxLost, "grade"):
                count = runner.processes(task, oracle)
                async with asyncio.timeout(count * wall_s + self._config.margin_s):
                    return await runner.run(sandbox, task, oracle, candidate, limits), limits.meter
        finally:
            await sandbox.close()


def stalled_s() -> float:
    """Seconds so far in which something on this machine waited for CPU, memory or a disk; 0 where the kernel
    does not count them. Outside of these nothing has to wait but by its own will."""
    total = 0
    for what in ("cpu", "memory", "io"):
        with contextlib.suppress(OSError):
            found = re.search(r"^some .*total=(\d+)", (PRESSURE / what).read_text(), re.MULTILINE)
            total += int(found[1]) if found else 0
    return total / 1e6


def solution(task: Task, oracle: Oracle, base: Tree) -> Tree:
    """`base` as the oracle solves it. Raises TaskError when its patch does not apply."""
    if oracle.gold_patch:
        try:
            return apply_patch({**base, **oracle.gold}, oracle.gold_patch, reverse=oracle.gold_reversed)
        except TaskError as error:
            raise TaskError(f"task {task.id}: the gold change: {error}") from None
    return {**base, **oracle.gold}


def runner_for(task: Task, oracle: Oracle) -> GradingRunner:
    """The runner of a task, checked. Raises TaskError."""
    runner = RUNNERS.get(task.grading.runner)
    if runner is None:
        known = ", ".join(sorted(RUNNERS))
        raise TaskError(f"task {task.id}: no runner {task.grading.runner!r} (known: {known})")
    if oracle.task_id != task.id:
        raise TaskError(f"task {task.id} was given the oracle of {oracle.task_id}")
    if not task.content_hash:
        raise TaskError(f"task {task.id} has no content_hash")
    runner.check(task, oracle)
    return runner


def total_of(oracle: Oracle) -> int:
    tests = oracle.tests
    required = len(tests.fail_to_pass) + len(tests.pass_to_pass)
    return len(oracle.cases) + len(oracle.exchanges) + len(tests.checks) + (required or len(tests.expected))


def _digest(oracle: Oracle) -> str:
    """Names what a finding depends on besides task and diff."""
    tests = oracle.tests
    files = {path: (entry.executable, entry.content) for path, entry in tests.files.items()}
    strong = (oracle.cases, oracle.exchanges, oracle.checker, oracle.by_line, oracle.tolerance)
    whole = (strong, tests, sorted(files.items()), tests.patch, tests.script)
    return hashlib.sha256(ascii(whole).encode()).hexdigest()


def _raise_infra(task: Task, report: RunReport) -> None:
    if report.outcome is Outcome.INFRA:
        raise GradeError(f"task {task.id} could not be validated: {report.reason}")
