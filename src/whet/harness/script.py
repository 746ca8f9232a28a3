"""Any command as an agent: one process in a fresh box per rollout; its exit code is the authority.

The command finds OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL and the model's limits (CONTEXT_TOKENS for
prompt and reply together, CALL_TOKENS for a reply) in its environment and the prompt on its stdin and in the
file that PROMPT_FILE names. It starts in the work folder.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from whet.errors import HarnessError, SandboxError
from whet.harness.base import AgentExit, AgentResult, ModelAccess
from whet.harness.outcome import bounded, harvest
from whet.sandbox.base import ExecResult, Sandbox, SandboxBackend, SandboxSpec
from whet.types import Task, Tree

AGENT_AT = "/home/agent/agent"
PROMPT_AT = "/home/agent/prompt.txt"
LOG_BYTES = 64 << 10


class ScriptHarness:
    """Implements whet.harness.base.Harness.

    `files` are laid under AGENT_AT in the box before the start; `argv` may name them. With `warm` the box,
    not the process, serves many rollouts and is emptied in between.
    """

    def __init__(
        self,
        argv: Sequence[str],
        files: Tree,
        backend: SandboxBackend,
        *,
        name: str = "script",
        version: str = "",
        warm: bool = False,
    ) -> None:
        if not argv:
            raise HarnessError("the script harness needs a command")
        self._argv = tuple(argv)
        self._files = dict(files)
        self._backend = backend
        self._name = name
        self._version = version
        self._warm = warm

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> str:
        return self._version

    def worker(self, gateway_socket: Path) -> ScriptWorker:
        spec = SandboxSpec(
            env={"PYTHONDONTWRITEBYTECODE": "1"}, network="gateway_only", gateway_socket=gateway_socket
        )
        limited = bounded(spec, self._backend)
        return ScriptWorker(self._backend, limited, gateway_socket, self._argv, self._files, warm=self._warm)


class ScriptWorker:
    """Implements whet.harness.base.Worker."""

    def __init__(
        self,
        backend: SandboxBackend,
        spec: SandboxSpec,
        gateway_socket: Path,
        argv: tuple[str, ...],
        files: Tree,
        *,
        warm: bool,
    ) -> None:
        self._backend = backend
        self._socket = gateway_socket
        self._spec = spec
        self._argv = argv
        self._files = files
        self._warm = warm
        self._box: Sandbox | None = None
        self._dirty = False
        """The box has had a rollout: the next one needs it emptied."""
        self._broken = False

    @property
    def gateway_socket(self) -> Path:
        return self._socket

    @property
    def healthy(self) -> bool:
        return self._box is not None and not self._broken and (self._warm or not self._dirty)

    async def __aenter__(self) -> Self:
        self._box = await self._backend.create(self._spec)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        box, self._box = self._box, None
        if box is not None:
            await box.close()

    async def run(self, task: Task, access: ModelAccess) -> AgentResult:
        if not self.healthy:
            raise HarnessError("this script worker is used up")
        begun = time.monotonic()
        try:
            box = await self._ready(task)
            result = await box.exec(
                self._argv,
                timeout_s=task.limits.wall_s,
                env=self._environment(access),
                stdin=task.prompt.encode(),
                max_output_bytes=LOG_BYTES,
            )
            tree, why = await harvest(box, self._backend, self._spec)
        except BaseException:
            self._broken = True
            raise
        outcome, detail = _judge(result, task.limits.wall_s) if not why else ("failed", why)
        secret = access.secret.encode()
        self._broken = result.timed_out or bool(why)
        return AgentResult(
            exit=outcome,
            tree=tree,
            detail=detail.replace(access.secret, "***"),
            log=(result.stdout + result.stderr).replace(secret, b"***"),
            duration_s=time.monotonic() - begun,
        )

    async def _ready(self, task: Task) -> Sandbox:
        """The task in a clean box; a new one where the rollout before has spoilt the old."""
        if self._box is None:
            raise HarnessError("this script worker has no box")
        used = self._dirty
        try:
            await self._prepare(self._box, task)
        except SandboxError:
            if not used:
                raise
            await self._box.close()
            self._box, self._dirty = await self._backend.create(self._spec), False
            await self._prepare(self._box, task)
        return self._box

    async def _prepare(self, box: Sandbox, task: Task) -> None:
        if self._dirty:
            await box.wipe()
        self._dirty = True
        for path, entry in self._files.items():
            await box.put(f"{AGENT_AT}/{path}", entry.content, executable=entry.executable)
        await box.put(PROMPT_AT, task.prompt.encode())
        await box.put_tree(task.files)

    def _environment(self, access: ModelAccess) -> dict[str, str]:
        address = f"http://127.0.0.1:{self._spec.gateway_port}/s/{access.public_id}/v1"
        return {
            "OPENAI_BASE_URL": address,
            "OPENAI_API_KEY": access.secret,
            "OPENAI_MODEL": access.model,
            "PROMPT_FILE": PROMPT_AT,
            "CONTEXT_TOKENS": str(access.max_context_tokens),
            "CALL_TOKENS": str(access.max_call_tokens),
        }


def _judge(result: ExecResult, wall_s: float) -> tuple[AgentExit, str]:
    if result.timed_out:
        return "timeout", f"stopped after {wall_s:g} s"
    if result.exit_code == 0:
        return "finished", ""
    lines = result.stderr.decode("utf-8", "replace").strip().splitlines() or [""]
    return "failed", f"exit code {result.exit_code}: {lines[-1][:300]}"
