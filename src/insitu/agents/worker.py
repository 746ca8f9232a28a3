"""Base class of workers that own a sandbox.

    open -> [wipe] -> prepare -> run agent -> kill all -> tree, artifacts, egress -> redacted AgentResult

Subclasses implement `_prepare` and `_run_agent`; attribution of failures and reuse of sandboxes are handled
here. A sandbox with an image or setup serves only one rollout, since it cannot be reset.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from insitu.agents.artifacts import Artifacts, attribute_loss, collect_tree, follow_links, redact
from insitu.agents.base import (
    AgentExit,
    AgentResult,
    FinishedCheck,
    GradeStep,
    ModelAccess,
    never_finished,
)
from insitu.errors import HarnessError, SandboxError, SandboxLost
from insitu.sandbox.base import Sandbox, SandboxBackend, SandboxSpec, gateway_url, memory_kills
from insitu.sandbox.base_tree import is_plain, set_up
from insitu.sandbox.host_faults import host_fault, mark
from insitu.types import Setup, Task, TaskStep, Tree

COUNTERS = ("/proc/net/snmp", "/proc/net/snmp6")
READ_S = 10.0
LOG_BYTES = 2 << 20
"""Most bytes of the output of all steps together; the end is kept."""
MIN_WALL_S = 0.1


async def _egress_attempts(sandbox: Sandbox) -> int | None:
    """Return the attempts since the start, None where the kernel does not count them."""
    try:
        read = await sandbox.exec(["/bin/cat", *COUNTERS], timeout_s=READ_S, max_output_bytes=64 << 10)
    except SandboxError:
        return None
    return count(read.stdout.decode("ascii", "replace"))


def count(snmp: str) -> int | None:
    """Return the sum over both address families of packets without a route, None if it is missing."""
    lines = [line.split() for line in snmp.splitlines()]
    tables = [line for line in lines if line[:1] == ["Ip:"]]
    if len(tables) != 2:
        return None
    found = dict(zip(*tables, strict=False)).get("OutNoRoutes", "")
    newer = {line[0]: line[1] for line in lines if len(line) == 2}.get("Ip6OutNoRoutes", "0")
    return int(found) + int(newer) if found.isdigit() and newer.isdigit() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnd:
    """Unredacted result of `_run_agent`."""

    exit: AgentExit
    detail: str = ""
    log: bytes = b""
    reusable: bool = True
    """The sandbox and its agent may serve another rollout after a wipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One run of the agent and what it left."""

    end: AgentEnd
    tree: Tree
    artifacts: Mapping[str, bytes]
    egress: int | None
    loss: str
    """Why the work folder was lost, or a further step cannot begin; empty otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxTemplate:
    """What the sandboxes of a worker have in common."""

    backend: SandboxBackend
    spec: SandboxSpec
    gateway_socket: Path
    setup: Setup
    artifacts: Artifacts


class SandboxWorker(ABC):
    """Worker with a sandbox; subclasses implement `_prepare` and `_run_agent`."""

    def __init__(self, name: str, template: SandboxTemplate, *, uses: int = 1) -> None:
        self._name = name
        self._template = template
        self._uses_left = uses if is_plain(template.setup) else 1
        self._sandbox: Sandbox | None = None
        self._dirty = False
        """The sandbox has served a rollout and must be wiped before the next."""
        self._broken = False
        self._egress = 0
        """Egress attempts of earlier rollouts in this sandbox."""
        self._further = False
        """A further step of the same task begins: what is there stays."""

    @property
    def gateway_socket(self) -> Path:
        return self._template.gateway_socket

    @property
    def healthy(self) -> bool:
        return self._sandbox is not None and self._uses_left > 0 and not self._broken and self._alive()

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def _open(self) -> None:
        """Create a new sandbox.

        Raises HarnessError and SandboxError.
        """
        sandbox = self._sandbox = await self._template.backend.create(self._template.spec)
        self._dirty, self._egress = False, 0
        try:
            await set_up(sandbox, self._template.setup)
            await self._boot(sandbox)
        except BaseException:
            await self._close()
            raise

    async def _close(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()

    async def run(
        self,
        task: Task,
        access: ModelAccess,
        finished: FinishedCheck = never_finished,
        live: Callable[[Sandbox], Awaitable[None]] | None = None,
        graded: GradeStep | None = None,
    ) -> AgentResult:
        if not self.healthy:
            raise HarnessError(f"this {self._name} worker is used up")
        if task.setup != self._template.setup:
            raise HarnessError(f"this {self._name} worker's sandbox is not that of task {task.id}")
        started = time.monotonic()
        self._uses_left -= 1
        try:
            if graded is None:
                sandbox = await self._ready(task, access)
                run = await self._run_once(sandbox, task, access, finished, stop=live is None)
                if live is not None:
                    await live(sandbox)
            else:
                run = await self._run_steps(task, access, finished, graded)
        except BaseException:
            self._broken = True
            raise
        end, used_up = run.end, live is not None or graded is not None
        self._broken = bool(run.loss) or not end.reusable or used_up
        return AgentResult(
            exit="failed" if run.loss else end.exit,
            tree=run.tree,
            detail=redact(run.loss or end.detail, access.secret),
            log=redact(end.log, access.secret),
            duration_s=time.monotonic() - started,
            egress_attempts=run.egress,
            artifacts={path: redact(content, access.secret) for path, content in run.artifacts.items()},
        )

    async def _run_once(
        self, sandbox: Sandbox, task: Task, access: ModelAccess, finished: FinishedCheck, *, stop: bool
    ) -> _Run:
        end = await self._run_guarded(sandbox, task, access, finished)
        tree, artifacts, egress, loss = await self._collect_results(sandbox, task.files, stop=stop)
        return _Run(end=end, tree=tree, artifacts=artifacts, egress=egress, loss=loss)

    async def _run_steps(
        self, task: Task, access: ModelAccess, finished: FinishedCheck, graded: GradeStep
    ) -> _Run:
        """Run the agent on each step in the same sandbox, while `graded` wants another one.

        What the agent left running lives on. Returns the last run with the first end that was no success.
        """
        left_s = task.limits.wall_s
        sandbox = await self._ready(task.steps[0].task, access)
        if trouble := await run_command(sandbox, task.steps[0]):
            raise HarnessError(trouble)
        runs: list[_Run] = []
        for number, step in enumerate(task.steps):
            if number and (trouble := await self._begin(sandbox, step, access)):
                runs[-1] = replace(runs[-1], loss=trouble)
                break
            wall_s = max(MIN_WALL_S, min(step.task.limits.wall_s, left_s))
            bounded = replace(step.task, limits=step.task.limits.changed(wall_s=wall_s))
            last, began = number + 1 == len(task.steps), access.clock()
            runs.append(await self._run_once(sandbox, bounded, access, finished, stop=last))
            left_s -= access.clock() - began
            if not await graded(number, runs[-1].tree) or runs[-1].loss:
                break
        ends = [run.end for run in runs]
        worst = next((end for end in ends if end.exit != "finished"), ends[-1])
        counted = [run.egress for run in runs if run.egress is not None]
        log = b"".join(end.log for end in ends)[-LOG_BYTES:]
        return replace(runs[-1], end=replace(worst, log=log), egress=sum(counted) if counted else None)

    async def _begin(self, sandbox: Sandbox, step: TaskStep, access: ModelAccess) -> str:
        """Prepare a further step; return why it cannot begin by the agent's doing.

        Raises SandboxError when the host is the cause.
        """
        self._further = True
        try:
            await self._prepare(sandbox, replace(step.task, files=step.files), access, used=True)
            return await run_command(sandbox, step)
        except (HarnessError, SandboxError) as error:
            lost = error if isinstance(error, SandboxError) else SandboxError(str(error))
            return await attribute_loss(lost, self._template.backend, self._template.spec, sandbox)

    async def _ready(self, task: Task, access: ModelAccess) -> Sandbox:
        """Return a prepared sandbox; one that cannot be wiped is replaced."""
        # A failed wipe was caused by the previous rollout and must not be attributed to this one.
        if self._sandbox is not None and self._dirty:
            try:
                await self._sandbox.wipe()
                await self._prepare(self._sandbox, task, access, used=True)
                return self._sandbox
            except (HarnessError, SandboxError):
                await self._close()
                await self._open()
        if self._sandbox is None:
            raise HarnessError(f"this {self._name} worker has no sandbox")
        self._dirty = True
        await self._prepare(self._sandbox, task, access, used=False)
        return self._sandbox

    async def _run_guarded(
        self, sandbox: Sandbox, task: Task, access: ModelAccess, finished: FinishedCheck
    ) -> AgentEnd:
        """Run the agent; attribute a lost sandbox to the agent unless a control sandbox fails too."""
        kills = memory_kills(sandbox)
        mark(sandbox)
        try:
            end = await self._run_agent(sandbox, task, access, finished)
        except SandboxLost as error:
            loss = await attribute_loss(error, self._template.backend, self._template.spec, sandbox)
            end = AgentEnd(exit="failed", detail=loss, reusable=False)
        else:
            if end.exit == "failed" and (fault := await host_fault(sandbox, lost=False)):
                raise SandboxLost(f"{end.detail}: {fault}")
        if end.exit == "failed" and memory_kills(sandbox) > kills:
            return replace(end, detail=f"out of memory: {end.detail}")
        return end

    async def _collect_results(
        self, sandbox: Sandbox, base: Tree, *, stop: bool
    ) -> tuple[Tree, Mapping[str, bytes], int | None, str]:
        """Return (work folder, artifacts, egress attempts, reason if the work folder was lost)."""
        used = self._template
        plain = is_plain(used.setup)
        tree, loss = await collect_tree(sandbox, used.backend, used.spec, plain=plain, stop=stop)
        if loss:
            return tree, {}, None, loss
        with contextlib.suppress(SandboxError):
            tree = await follow_links(sandbox, base, tree)
        artifacts: Mapping[str, bytes] = {}
        with contextlib.suppress(SandboxError):  # Artifacts are optional.
            artifacts = await self._template.artifacts.collect(sandbox)
        # in a sandbox elsewhere the provider drops packets outside of it
        total = None if gateway_url(sandbox) else await _egress_attempts(sandbox)
        egress = None if total is None else max(0, total - self._egress)
        self._egress = total or 0
        return tree, artifacts, egress, ""

    def _alive(self) -> bool:
        """Return whether the process started by `_boot` is still running."""
        return True

    async def _boot(self, sandbox: Sandbox) -> None:  # noqa: B027 - most agents start with their task
        """Start the part of the agent that does not depend on the task."""

    @abstractmethod
    async def _prepare(self, sandbox: Sandbox, task: Task, access: ModelAccess, *, used: bool) -> None:
        """Write the agent's files and the task's; `used`: the sandbox was wiped after another rollout.

        Raises HarnessError and SandboxError.
        """

    @abstractmethod
    async def _run_agent(
        self, sandbox: Sandbox, task: Task, access: ModelAccess, finished: FinishedCheck
    ) -> AgentEnd:
        """Run the agent on the task within its limits; afterwards its process has ended or is idle.

        Raises SandboxError when the sandbox fails.
        """


async def write_task_files(sandbox: Sandbox, task: Task, *, over: bool = False) -> None:
    """Write the task's files: as the whole work folder of a plain sandbox, else `over` the existing files."""
    if is_plain(task.setup) and not over:
        await sandbox.put_tree(task.files)
    else:
        await sandbox.lay(task.files)


async def run_command(sandbox: Sandbox, step: TaskStep) -> str:
    """Run the command of a step; return why it failed, empty if it did not. Raises SandboxError."""
    if not step.command:
        return ""
    argv = ["/bin/sh", "-c", step.command]
    done = await sandbox.exec(argv, timeout_s=step.task.setup.timeout_s)
    if done.exit_code == 0:
        return ""
    how = "took too long" if done.timed_out else f"ended with {done.exit_code}"
    lines = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines() or ["no output"]
    return f"the command of step {step.name} {how}: {ascii(lines[-1])[1:-1][:200]}"
