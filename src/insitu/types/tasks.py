"""Files, tasks, and the oracle that only the grader has access to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from insitu.types.limits import Limits
from insitu.types.values import Value

WORKDIR = "/work"
"""Inside path of the work folder of a sandbox whose task names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry(Value):
    """One regular file of a tree; links, devices and directories are not entries."""

    content: bytes
    executable: bool = False


Tree = Mapping[str, FileEntry]
"""POSIX path -> file: relative to the work folder, absolute below `Setup.roots`. Without empty folders."""


RewardKind = Literal["binary", "fraction"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup(Value):
    """Initial state of every sandbox of a task, the agent's and the grader's alike."""

    image: str = ""
    """Image reference, pinned by digest where possible; empty = the backend's plain sandbox."""
    workdir: str = WORKDIR
    """Inside path of the work folder; empty = where the image starts its processes. With an image and no
    files, what the image has there is the base."""
    commands: tuple[str, ...] = ()
    """Shell commands run in the work folder before the agent starts or the candidate is copied in."""
    timeout_s: float = 120.0
    """Seconds for all commands together."""
    root_commands: tuple[str, ...] = ()
    """Shell commands run before `commands` as root, without network; Docker sandboxes only."""
    memory_mb: int = 0
    """Memory that a process may need, where that is more than it is given anyway."""
    roots: tuple[str, ...] = ()
    """Folders outside of the work folder that are writable and graded too, inside paths."""
    cpus: float = 0.0
    """CPUs that its processes may use together, Docker sandboxes only; 0 = all."""
    container: str = ""
    """What its container needs beside the image (services, variables), as the part `open_container` reads
    it; Docker sandboxes only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingPlan(Value):
    """How a diff is graded; contains no expected value (those are in the Oracle)."""

    runner: str = "json_io"
    """Name of the runner in grading/runners."""
    entry: str = ""
    """For json_io: the module file under test, relative to the work folder."""
    protected: tuple[str, ...] = ()
    """Paths (fnmatch patterns) whose changes are dropped from the diff and recorded."""
    timeout_s: float = 10.0
    memory_mb: int = 0
    """Memory of one process, where that is more than the grader gives anyway."""
    where: Literal["clean", "live"] = "clean"
    """clean = in a fresh sandbox with the diff; live = in the agent's own one as it left it (trust weak)."""
    reward: RewardKind = "binary"
    """binary = 1 when all required checks pass, else 0; fraction = the weighted share that passes."""
    steps: Literal["mean", "final"] = "mean"
    """Reward of a task with steps: the mean of those that count, or that of the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Value):
    """One immutable unit of work; contains no part of the solution."""

    id: str
    prompt: str
    """Instruction for the agent."""
    files: Tree = field(repr=False)
    """Initial work folder; for a task with an image, files laid over the image's work folder."""
    setup: Setup = Setup()
    grading: GradingPlan = GradingPlan()
    limits: Limits = field(default_factory=Limits)
    category: str = ""
    """Free label for per-category statistics, e.g. the kind of fault."""
    part: str = ""
    """Its arm, as `ArmName.part`."""
    agents: tuple[str, ...] = ()
    """Parts of the agents that the rollouts of a group use in turn; empty = `part` for all."""
    steps: tuple[TaskStep, ...] = ()
    """What its agent is asked in turn in one sandbox, each graded before the next; empty = `prompt` alone."""
    content_hash: str = ""
    """Hex SHA-256 over prompt, files, setup, grading plan and steps; see `task_hash`."""

    def of_rollout(self, number: int) -> Task:
        """Return the task as one rollout gets it: with the agent whose turn it is."""
        return replace(self, part=self.agents[number % len(self.agents)]) if self.agents else self


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStep(Value):
    """One step of a task."""

    name: str
    task: Task
    """Its prompt, grading and limits, and the files of the steps up to it: the base of its grade. The setup
    is that of the whole task, whose limits bound all steps together."""
    files: Tree = field(default_factory=dict, repr=False)
    """Its own files, laid over what the step before has left."""
    command: str = ""
    """Shell command run in the work folder before its agent starts."""
    min_reward: float | None = None
    """A smaller reward ends the rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One hidden check of json_io: call `function(*args)`, compare with `expected`.

    Values are JSON values, or tuples, sets and dicts of them.
    """

    function: str
    """A function of the module, or `Class.method`, called on a new object."""
    args: tuple[object, ...]
    expected: object
    exact: bool = True
    """False: numbers compare with Python's ==, so that 1, 1.0 and true are equal."""
    tolerance: float = 0.0
    """Above 0: largest allowed difference of numbers; `exact` has no effect then."""
    wrapped: bool = False
    """`expected` may be the value in a list (APPS): the task's solution decides; without one both count."""
    lists: bool = False
    """A tuple in the result counts as a list: the contests' expected values have no tuples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One hidden run of runner `stdio`: standard input and expected output."""

    stdin: str
    expected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One hidden command of runner `command`: passes if it exits with 0 and prints its markers."""

    name: str
    command: str
    """Shell command, run in the work folder of the grading sandbox."""
    markers: tuple[str, ...] = ()
    """Texts that its standard output must contain."""
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTests:
    """Hidden tests of all runners except json_io; copied into the grading sandbox only, late."""

    files: Tree = field(default_factory=dict, repr=False)
    """Files copied over the candidate's work folder: hidden tests replace anything at their path."""
    patch: str = field(default="", repr=False)
    """Unified diff of the test files, applied to the base's version of them, never the candidate's."""
    script: str = field(default="", repr=False)
    """Shell script that runs the tests; empty = the runner's own command."""
    parser: str = ""
    """swebench_log: name of the log parser."""
    fail_to_pass: tuple[str, ...] = ()
    """Exact ids of tests that the base fails and a solution passes.

    With runner `pytest` the path of a test file alone stands for all of its tests that the solution passes.
    """
    pass_to_pass: tuple[str, ...] = ()
    """Exact ids of tests that must not break."""
    expected: tuple[tuple[str, str], ...] = ()
    """Exact (id, status) map that the run must equal, for data sets graded by equality (R2E-Gym)."""
    checks: tuple[Check, ...] = ()
    """command: what is run, in order."""
    env: Mapping[str, str] = field(default_factory=dict)
    """harbor: variables of the script that runs the tests."""
    image: str = ""
    """harbor: the image that the tests run in; empty = the task's."""
    carried: tuple[str, ...] = ()
    """harbor: folders and files of the candidate that the tests get, as paths of a Tree; empty = all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """Data that only the grader may access: hidden cases or tests, and the solution."""

    task_id: str
    cases: tuple[Case, ...] = field(default=(), repr=False)
    """json_io."""
    exchanges: tuple[Exchange, ...] = field(default=(), repr=False)
    """stdio."""
    checker: str = ""
    """stdio: dotted path of a function of the host, (stdin, expected, printed) -> whether it is right; empty
    = by words and numbers."""
    by_line: bool = False
    """stdio: the words must stand on the same lines."""
    tolerance: float = 1e-6
    """stdio: by how much a number may differ that is expected with a fraction, absolutely or relative to the
    expected one; 0 = numbers are equal as numbers."""
    tests: HiddenTests = field(default=HiddenTests(), repr=False)
    """All other runners."""
    gold: Tree = field(default_factory=dict, repr=False)
    """Files of the solved work folder that differ from the task's."""
    gold_patch: str = field(default="", repr=False)
    """The solution as a unified diff, where the base is in an image; `gold` is empty then."""
    gold_reversed: bool = False
    """`gold_patch` introduced the fault (SWE-smith): the solution is its reverse."""
    solve: Tree = field(default_factory=dict, repr=False)
    """The solution as a program (Harbor): files put at /solution, of which solve.sh solves the task when it
    is run in the work folder of a sandbox."""
    solve_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of solve.sh."""
    steps: tuple[Oracle, ...] = field(default=(), repr=False)
    """Those of the task's steps, in order."""


def task_hash(
    prompt: str,
    files: Tree,
    grading: GradingPlan,
    setup: Setup = Setup(),
    steps: Sequence[TaskStep] = (),
) -> str:
    """Return the hex SHA-256 that identifies a task by content."""
    # Values equal to their default are omitted, so that a new field changes no existing hash.
    h = hashlib.sha256()
    plan = (
        f"GradingPlan(runner={grading.runner!r}, entry={grading.entry!r}, "
        f"protected={grading.protected!r}, timeout_s={grading.timeout_s!r})"
    )
    parts: list[bytes] = [prompt.encode(), plan.encode()]
    if grading.memory_mb:
        parts.append(f"memory_mb={grading.memory_mb}".encode())
    if grading.reward != "binary":
        parts.append(f"reward={grading.reward}".encode())
    if setup != Setup():
        named = (
            f"Setup(image={setup.image!r}, workdir={setup.workdir!r}, commands={setup.commands!r}, "
            f"timeout_s={setup.timeout_s!r})"
        )
        parts.append(named.encode())
    later = (
        (setup.root_commands, f"root={setup.root_commands!r}"),
        (setup.memory_mb, f"setup_memory_mb={setup.memory_mb}"),
        (setup.roots, f"roots={setup.roots!r}"),
        (setup.cpus, f"cpus={setup.cpus!r}"),
        (setup.container, f"container={setup.container}"),
        (grading.where != "clean", f"where={grading.where}"),
        (grading.steps != "mean", f"steps={grading.steps}"),
        *((True, _step_text(s)) for s in steps),
    )
    parts += [text.encode() for given, text in later if given]
    for path in sorted(files):
        parts += [path.encode(), b"x" if files[path].executable else b"-", files[path].content]
    for part in parts:
        h.update(len(part).to_bytes(8, "big"))
        h.update(part)
    return h.hexdigest()


def _step_text(step: TaskStep) -> str:
    named = f"step={step.name!r} {step.command!r} {step.min_reward!r} {step.task.content_hash}"
    return f"{named} {sorted(step.files)!r}" if step.files else named
