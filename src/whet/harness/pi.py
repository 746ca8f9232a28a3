"""The Pi coding agent, unmodified, in a local box that can reach nothing but the gateway.

Both modes drive `pi --mode rpc`, so a request's body is the same in both. `fresh` gives every rollout its
own process and box; `rpc` keeps the process and empties everything around it between two rollouts. All
paths inside are constant, so Pi's system prompt is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import orjson

from whet.errors import HarnessError, SandboxError
from whet.harness.base import AgentExit, AgentResult, ModelAccess
from whet.harness.install import PI_PACKAGE, PiInstall
from whet.harness.pi_rpc import PiRpc, PiRun
from whet.harness.script import OVER_CAPS, capture
from whet.sandbox.base import Bind, Process, Sandbox, SandboxBackend, SandboxSpec
from whet.types import Task

PROVIDER = "whet"
NODE_AT = "/opt/node/bin/node"
MODULES_AT = "/opt/pi/node_modules"
AGENT_FOLDER = "/home/agent/.pi/agent"
COMMAND = (
    NODE_AT,
    # A fifth less memory per worker, at no cost in time.
    "--max-semi-space-size=2",
    f"{MODULES_AT}/{PI_PACKAGE}/dist/bundle/cli.js",
    *("--mode", "rpc", "--no-session", "--provider", PROVIDER),
    *("--no-extensions", "--no-skills", "--no-prompt-templates", "--no-themes", "--no-context-files"),
    *("--no-approve", "--offline", "--thinking", "off"),
)
ENV = {
    "PI_OFFLINE": "1",
    "PI_SKIP_VERSION_CHECK": "1",
    "PI_TELEMETRY": "0",
    # It would lie in /tmp, visible to the first rollout of a process only.
    "NODE_DISABLE_COMPILE_CACHE": "1",
    # A one-character fix keeps a file's size and second, so a stale .pyc would win over it.
    "PYTHONDONTWRITEBYTECODE": "1",
}
SETTINGS = {
    "retry": {"enabled": False, "provider": {"maxRetries": 0}},
    "compaction": {"enabled": False},
    "enableInstallTelemetry": False,
    "enableAnalytics": False,
    "cacheWarming": "off",
    "images": {"blockImages": True},
}
# Pi lowers max_completion_tokens to what its own estimate of the prompt leaves of the window, less 4096. The
# gateway knows the true length, so the window Pi hears of must never be the tighter one.
ROOMY_CONTEXT = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What of a ModelAccess Pi reads at its start only."""

    name: str = "policy"
    context_tokens: int = 32768
    max_call_tokens: int = 512

    def config(self, port: int) -> bytes:
        model = {
            "id": self.name,
            "name": self.name,
            "contextWindow": max(self.context_tokens, ROOMY_CONTEXT),
            "maxTokens": self.max_call_tokens,
            "reasoning": False,
            "input": ["text"],
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        }
        provider = {"baseUrl": f"http://127.0.0.1:{port}/v1", "api": "openai-completions", "models": [model]}
        return orjson.dumps({"providers": {PROVIDER: provider}})


class PiHarness:
    """Implements whet.harness.base.Harness."""

    def __init__(
        self,
        install: PiInstall,
        mode: Literal["rpc", "fresh"],
        backend: SandboxBackend,
        *,
        rollouts_per_process: int = 64,
        model: ModelAccess | None = None,
    ) -> None:
        self._install = install
        self._backend = backend
        self._uses = rollouts_per_process if mode == "rpc" else 1
        self._model = _model_of(model) if model else _Model()

    @property
    def name(self) -> str:
        return "pi"

    @property
    def version(self) -> str:
        return self._install.version

    def worker(self, gateway_socket: Path) -> PiWorker:
        spec = SandboxSpec(
            env=ENV,
            binds=(
                Bind(source=self._install.node, target=NODE_AT),
                Bind(source=self._install.modules, target=MODULES_AT),
            ),
            network="gateway_only",
            gateway_socket=gateway_socket,
        )
        return PiWorker(self._backend, spec, gateway_socket, self._uses, self._model)


class PiWorker:
    """Implements whet.harness.base.Worker."""

    def __init__(
        self, backend: SandboxBackend, spec: SandboxSpec, gateway_socket: Path, uses: int, model: _Model
    ) -> None:
        self._backend = backend
        self._socket = gateway_socket
        self._spec = spec
        self._uses_left = uses
        self._model = model
        self._box: Sandbox | None = None
        self._process: Process | None = None
        self._dirty = False
        self._broken = False

    @property
    def gateway_socket(self) -> Path:
        return self._socket

    @property
    def healthy(self) -> bool:
        alive = self._process is None or self._process.poll() is None
        return self._uses_left > 0 and alive and not self._broken and self._box is not None

    async def __aenter__(self) -> Self:
        self._box = await self._backend.create(self._spec)
        try:
            await self._configure(self._box, secret="unset")
            await self._start(self._box)
        except BaseException:
            await self._box.close()
            raise
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

    async def _configure(self, box: Sandbox, secret: str) -> None:
        """Pi's files. It looks at auth.json anew before every request, by inode and time."""
        # In a stored key "$" and a leading "!" have a meaning.
        key = secret.replace("$", "$$").replace("!", "$!", 1) if "$" in secret or "!" in secret else secret
        await box.put(f"{AGENT_FOLDER}/models.json", self._model.config(self._spec.gateway_port))
        await box.put(f"{AGENT_FOLDER}/settings.json", orjson.dumps(SETTINGS))
        await box.put(f"{AGENT_FOLDER}/auth.json", orjson.dumps({PROVIDER: {"type": "api_key", "key": key}}))

    async def _start(self, box: Sandbox) -> PiRpc:
        """Start Pi and wait until it listens, so that its start is no part of a rollout."""
        self._process = await box.spawn([*COMMAND, "--model", self._model.name])
        rpc = PiRpc(self._process)
        await rpc.command("get_state")
        return rpc

    async def run(self, task: Task, access: ModelAccess) -> AgentResult:
        box = self._box
        if box is None or not self.healthy:
            raise HarnessError("this Pi worker is used up")
        begun = time.monotonic()
        self._uses_left -= 1
        try:
            rpc = await self._prepare(box, task, access)
            outcome, detail, run = await self._attempt(rpc, task)
            await box.kill_all()
            tree = await capture(box)
        except BaseException:
            self._broken = True
            raise
        if outcome != "finished":
            self._broken = True
        secret = access.secret.encode()
        return AgentResult(
            exit=outcome if tree is not None else "failed",
            tree=tree or {},
            detail=detail.replace(access.secret, "***") if tree is not None else OVER_CAPS,
            log=run.log.replace(secret, b"***") if run else b"",
            duration_s=time.monotonic() - begun,
        )

    async def _prepare(self, box: Sandbox, task: Task, access: ModelAccess) -> PiRpc:
        if self._dirty:
            await box.wipe()
        self._dirty = True
        model = _model_of(access)
        changed, self._model = model != self._model, model
        await self._configure(box, access.secret)
        await box.put_tree(task.files)
        if self._process is None or changed:
            if self._process is not None:
                await self._process.kill()
            return await self._start(box)
        rpc = PiRpc(self._process)
        await rpc.command("new_session")
        return rpc

    async def _attempt(self, rpc: PiRpc, task: Task) -> tuple[AgentExit, str, PiRun | None]:
        """A Pi that dies while it works on the task did so by the model's doing: no host failure."""
        try:
            run = await rpc.run(task.prompt, task.limits.wall_s)
        except TimeoutError:
            return "timeout", f"stopped after {task.limits.wall_s:g} s", None
        except (HarnessError, SandboxError) as error:
            return "failed", str(error), None
        if run.error:
            return "failed", run.error.splitlines()[0][:300], run
        return "finished", "", run


def _model_of(access: ModelAccess) -> _Model:
    return _Model(
        name=access.model, context_tokens=access.context_tokens, max_call_tokens=access.max_call_tokens
    )
