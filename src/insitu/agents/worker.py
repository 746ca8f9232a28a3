"""The life of a worker that owns a sandbox: opened, equipped, driven, stopped, harvested, closed.

    open -> [wipe] -> equip -> drive -> stop all -> artifacts, egress, tree -> AgentResult, redacted

An agent's module says how its sandbox is equipped and how the agent is driven; everything else, and so every
rule about blame and about what may serve again, is here. A sandbox whose task has an image or a setup serves
one rollout: nothing could make it new again.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from insitu.agents.artifacts import NOTHING, Artifacts, attribute_loss, bounded, collect_tree, redact
from insitu.agents.base import PLAIN, AgentExit, AgentResult, Left, ModelAccess, never
from insitu.errors import HarnessError, SandboxError, SandboxLost
from insitu.sandbox.base import Bind, Sandbox, SandboxBackend, SandboxSpec, memory_kills
from insitu.sandbox.base_tree import is_plain, set_up
from insitu.sandbox.egress import egress_attempts
from insitu.types import Setup, Task, Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnd:
    """How the agent's part ended. The worker redacts it."""

    exit: AgentExit
    detail: str = ""
    log: bytes = b""
    reusable: bool = True
    """The sandbox, and the agent in it, may serve another rollout once it is wiped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxTemplate:
    """Where a worker's sandboxes come from, what they are, and what of theirs is kept."""

    backend: SandboxBackend
    spec: SandboxSpec
    setup: Setup = PLAIN
    artifacts: Artifacts = NOTHING

    @property
    def gateway_socket(self) -> Path:
        """Raises HarnessError for a sandbox that reaches no gateway."""
        if self.spec.gateway_socket is None:
            raise HarnessError("a worker's sandbox needs the gateway's socket")
        return self.spec.gateway_socket


def sandbox_template(
    backend: SandboxBackend,
    gateway_socket: Path,
    setup: Setup,
    *,
    env: Mapping[str, str],
    binds: tuple[Bind, ...] = (),
    memory_bytes: int | None = None,
    artifacts: Artifacts = NOTHING,
) -> SandboxTemplate:
    """An agent's sandbox for a task's setup. `memory_bytes`: of one process, where the usual limit is
    small."""
    spec = SandboxSpec(
        image=setup.image,
        workdir=setup.workdir,
        root_setup=bool(setup.root_commands),
        env=env,
        binds=binds,
        network="gateway_only",
        gateway_socket=gateway_socket,
    )
    spec = bounded(spec, backend)
    if spec.memory_bytes is not None and memory_bytes is not None:
        spec = replace(spec, memory_bytes=memory_bytes)
    return SandboxTemplate(backend=backend, spec=spec, setup=setup, artifacts=artifacts)


class SandboxWorker(ABC):
    """Implements insitu.agents.base.Worker but for `_prepare` and `_run_agent`."""

    def __init__(self, name: str, sandbox_template: SandboxTemplate, *, uses: int = 1) -> None:
        self._name = name
        self._place = sandbox_template
        self._uses_left = uses if is_plain(sandbox_template.setup) else 1
        self._sandbox: Sandbox | None = None
        self._dirty = False
        """The sandbox has had a rollout: the next one needs it emptied."""
        self._broken = False
        self._egress = 0
        """Attempts of this sandbox that earlier rollouts made."""

    @property
    def gateway_socket(self) -> Path:
        return self._place.gateway_socket

    @property
    def healthy(self) -> bool:
        return self._sandbox is not None and self._uses_left > 0 and not self._broken and self._alive()

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close()

    async def _open(self) -> None:
        """A new sandbox. Raises HarnessError and SandboxError: the host's doing, or the task's."""
        sandbox = self._sandbox = await self._place.backend.create(self._place.spec)
        self._dirty, self._egress = False, 0
        try:
            await set_up(sandbox, self._place.setup)
            await self._boot(sandbox)
        except BaseException:
            await self._close()
            raise

    async def _close(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()

    async def run(self, task: Task, access: ModelAccess, left: Left = never) -> AgentResult:
        if not self.healthy:
            raise HarnessError(f"this {self._name} worker is used up")
        if task.setup != self._place.setup:
            raise HarnessError(f"this {self._name} worker's sandbox is not that of task {task.id}")
        begun = time.monotonic()
        self._uses_left -= 1
        try:
            sandbox = await self._ready(task, access)
            ending = await self._run_guarded(sandbox, task, access, left)
            tree, artifacts, egress, why = await self._gathered(sandbox)
        except BaseException:
            self._broken = True
            raise
        self._broken = bool(why) or not ending.reusable
        return AgentResult(
            exit="failed" if why else ending.exit,
            tree=tree,
            detail=redact(why or ending.detail, access.secret),
            log=redact(ending.log, access.secret),
            duration_s=time.monotonic() - begun,
            egress_attempts=egress,
            artifacts={path: redact(content, access.secret) for path, content in artifacts.items()},
        )

    async def _ready(self, task: Task, access: ModelAccess) -> Sandbox:
        """Everything in place for the prompt. A used sandbox that does not come clean was spoilt by the
        rollout before, whose doing must not be laid on this one: it gets a new sandbox."""
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

    async def _run_guarded(self, sandbox: Sandbox, task: Task, access: ModelAccess, left: Left) -> AgentEnd:
        """A sandbox that is lost under its agent was so by the agent's doing, unless no sandbox works."""
        kills = memory_kills(sandbox)
        try:
            ending = await self._run_agent(sandbox, task, access, left)
        except SandboxLost as error:
            why = await attribute_loss(error, self._place.backend, self._place.spec, sandbox)
            ending = AgentEnd(exit="failed", detail=why, reusable=False)
        if ending.exit == "failed" and memory_kills(sandbox) > kills:
            return replace(ending, detail=f"out of memory: {ending.detail}")
        return ending

    async def _gathered(self, sandbox: Sandbox) -> tuple[Tree, Mapping[str, bytes], int | None, str]:
        """Work folder, artifacts, attempts to get out, and why the work folder cannot be had if so."""
        where = self._place
        tree, why = await collect_tree(sandbox, where.backend, where.spec, plain=is_plain(where.setup))
        if why:
            return tree, {}, None, why
        artifacts: Mapping[str, bytes] = {}
        with contextlib.suppress(SandboxError):  # the tree is what counts
            artifacts = await self._place.artifacts.collect(sandbox)
        seen = await egress_attempts(sandbox)
        fresh = None if seen is None else max(0, seen - self._egress)
        self._egress = seen or 0
        return tree, artifacts, fresh, ""

    def _alive(self) -> bool:
        """Whether what `_boot` started is still there."""
        return True

    async def _boot(self, sandbox: Sandbox) -> None:  # noqa: B027 - most agents start with their task
        """What of the agent is started with its sandbox, before any task is known."""

    @abstractmethod
    async def _prepare(self, sandbox: Sandbox, task: Task, access: ModelAccess, *, used: bool) -> None:
        """Put the agent's files and the task's; `used`: the sandbox was wiped after another rollout.

        Raises HarnessError and SandboxError."""

    @abstractmethod
    async def _run_agent(self, sandbox: Sandbox, task: Task, access: ModelAccess, left: Left) -> AgentEnd:
        """Run the agent on the task within its limits; its process is over, or idle, afterwards.

        Raises SandboxError when the sandbox fails."""


async def write_task_files(sandbox: Sandbox, task: Task) -> None:
    """The task's files: all there is in a plain sandbox, over what an image or a setup has left in
    another."""
    if is_plain(task.setup):
        await sandbox.put_tree(task.files)
    else:
        await sandbox.lay(task.files)
