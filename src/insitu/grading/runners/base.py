"""A Runner judges one tree in one fresh sandbox: it moves inputs in and claims out, and decides on the
host."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from insitu.grading.candidate import Candidate
from insitu.sandbox.base import Bind, Sandbox
from insitu.types import Oracle, Outcome, Task, Tree, Trust

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
    """What one run in a sandbox may use."""

    cpu_s: int
    """CPU seconds of one process: the limit that counts, since no load of the host can use it up."""
    wall_s: float
    """Seconds that all processes of a run together may wait without computing."""
    max_output_bytes: int
    memory_bytes: int
    """Private memory of one process."""
    python: str
    """Inside path of the interpreter."""
    parallel: int = 1
    """Runs that the grader may have open at once."""
    meter: CpuMeter = field(default_factory=CpuMeter)
    another: Callable[[], Awaitable[Sandbox]] | None = None
    """Opens one more sandbox like the one given, for a process that must not find what an earlier one left.
    The caller closes it, and the one before first: a grade holds one. None where a sandbox takes long to set
    up."""

    @property
    def left_s(self) -> float:
        """Wall time of the next process; START_S at least, since a process that reaches it ends the run."""
        return self.wall_s - self.meter.waited_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A runner's finding. Carries no expected value and no free text of the candidate."""

    outcome: Outcome
    passed: int
    total: int
    reason: str
    complete: bool = False
    """True when the finding does not depend on the load of the host: every case was answered and the process
    ended by itself, or it used up its CPU time."""
    fail_to_pass: tuple[int, int] = (0, 0)
    pass_to_pass: tuple[int, int] = (0, 0)
    controls: str = ""
    score: float | None = None
    """What a task with reward `fraction` earns when it is not resolved, 0..1; None = passed / total."""
    trust: Trust | None = None
    """How much this finding is worth, where that is less than the runner's own strength."""


class GradingRunner(Protocol):
    """One way of judging."""

    @property
    def name(self) -> str: ...

    @property
    def trust(self) -> Trust: ...

    @property
    def places(self) -> tuple[str, ...]:
        """More writable folders of its sandboxes."""

    def check(self, task: Task, oracle: Oracle) -> None:
        """Raises TaskError when this task cannot be judged this way."""

    def precheck_failure(self, task: Task, tree: Tree) -> str:
        """Why `tree` fails without a run (the file under test is gone, ...), or empty."""

    def control(self) -> tuple[Task, Oracle]:
        """A task that is solved as it stands: if it fails in a sandbox, the host is at fault."""

    def needs(self) -> tuple[Bind, ...]:
        """What a grading sandbox must show. Raises SetupError when this machine lacks it."""

    def processes(self, task: Task, oracle: Oracle) -> int:
        """Processes and checks that `run` makes one after the other, each with its own time."""

    async def run(
        self, sandbox: Sandbox, task: Task, oracle: Oracle, candidate: Candidate, limits: RunLimits
    ) -> RunReport:
        """Lay the candidate into `sandbox` and judge it there. Raises SandboxError when the sandbox failed
        and GradeError when the runner's own first line never came."""
