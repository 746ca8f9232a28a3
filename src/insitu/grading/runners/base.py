"""The protocol of grading runners: judge one tree in a fresh sandbox, decide on the host."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from insitu.grading.candidate import Candidate
from insitu.sandbox.base import Bind, Sandbox
from insitu.types import FailingCheck, Oracle, Outcome, Task, Tree, Trust

START_S = 0.5
"""Wall time per process that does not count as waiting: its start beside load."""


@dataclass(slots=True, kw_only=True)
class CpuMeter:
    """CPU and wall time of a run: of the process that ran out of wall time, else of all together."""

    cpu_s: float = 0.0
    """Infinite where the sandbox does not report it."""
    wall_s: float = 0.0
    late: bool = False
    waited_s: float = 0.0
    """Wall time of all processes that their CPU time does not explain."""

    def add(self, cpu_s: float, wall_s: float, *, late: bool, wall_per_cpu: float) -> None:
        if self.late:
            return
        self.waited_s += max(0.0, wall_s - wall_per_cpu * cpu_s - START_S)
        keep = not late
        self.cpu_s, self.wall_s = keep * self.cpu_s + cpu_s, keep * self.wall_s + wall_s
        self.late = late


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Limits of one run in a sandbox."""

    cpu_s: int
    """CPU seconds of one process; independent of the host's load."""
    wall_s: float
    """Seconds that all processes of a run together may wait without computing."""
    max_output_bytes: int
    memory_bytes: int
    """Private memory of one process."""
    python: str
    """Python interpreter, inside path."""
    parallel: int = 1
    """Concurrent runs of the grader."""
    meter: CpuMeter = field(default_factory=CpuMeter)
    another: Callable[..., Awaitable[Sandbox]] | None = None
    """Opens another sandbox like the given one, for a process that must not see files of an earlier one, with
    changed fields of its spec. The caller closes it, after closing the previous one. None where the setup
    takes long."""

    @property
    def left_s(self) -> float:
        """Wall time of the next process; START_S at least, since a process that reaches it ends the run."""
        return self.wall_s - self.meter.waited_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Result of a run; only `failing` has expected values and text of the candidate."""

    outcome: Outcome
    passed: int
    total: int
    reason: str
    complete: bool = False
    """Whether the report is independent of the host's load: the process ended by itself or used up its CPU
    time."""
    fail_to_pass: tuple[int, int] = (0, 0)
    pass_to_pass: tuple[int, int] = (0, 0)
    controls: str = ""
    score: float | None = None
    """Reward 0..1 of an unresolved task with reward `fraction`; None = passed / total."""
    trust: Trust | None = None
    """Trust of this report where it is lower than the runner's."""
    disturbed: bool = False
    """Unsolved only since tests failed behind a mutated one: the solution decides whether that is the tests'
    fault."""
    failing: tuple[FailingCheck, ...] = ()
    """First checks that did not pass, see `common.failing_checks`."""


class GradingRunner(Protocol):
    """A way of judging a tree."""

    @property
    def name(self) -> str: ...

    @property
    def trust(self) -> Trust: ...

    @property
    def places(self) -> tuple[str, ...]:
        """More writable folders that its sandboxes need."""

    def check(self, task: Task, oracle: Oracle) -> None:
        """Raise TaskError for a task that this runner cannot judge."""

    def precheck_failure(self, task: Task, tree: Tree) -> str:
        """Return why `tree` fails without a run (a missing file), or ""."""

    def trust_of(self, task: Task, oracle: Oracle) -> tuple[Trust, str]:
        """Return the trust of a task's verdicts, as known before grading, and its reason."""

    def asking(self, oracle: Oracle) -> tuple[Oracle, OracleRun | None]:
        """Return the oracle, and a run of the solution that tells what it lacks; None = it lacks nothing."""

    def as_it_is(self) -> GradingRunner:
        """Return the runner for tests that disturb each other (`RunReport.disturbed`)."""

    def control(self) -> tuple[Task, Oracle]:
        """Return a solved task: if it fails in a sandbox, the host is at fault."""

    def needs(self) -> tuple[Bind, ...]:
        """Return the binds of a grading sandbox. Raises SetupError."""

    def processes(self, task: Task, oracle: Oracle) -> int:
        """Return the number of processes and checks of `run`, each with its own CPU limit."""

    def close(self) -> None:
        """End idle processes of this runner on the host."""

    async def run(
        self, sandbox: Sandbox, task: Task, oracle: Oracle, candidate: Candidate, limits: RunLimits
    ) -> RunReport:
        """Write the candidate into `sandbox` and judge it. Raises SandboxError, GradeError."""


class OracleRun(GradingRunner, Protocol):
    """A run of the solution of a task, for what only it can tell. For one use."""

    def completed(self, task: Task, oracle: Oracle, report: RunReport) -> Oracle:
        """Return the oracle with what the run found; it ended with `report`. Raises GradeError."""
