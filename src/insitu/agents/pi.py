"""Harness of the unmodified Pi coding agent in a sandbox with access only to the gateway.

Both modes run `pi --mode rpc`, so request bodies are identical. `fresh` uses a new process and sandbox for
every rollout; `rpc` keeps the process and wipes the sandbox between rollouts. All paths in the sandbox are
constant, so that Pi's system prompt is constant too.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import orjson

from insitu.agents.artifacts import NOTHING, Artifacts, artifacts_from_config
from insitu.agents.base import PLAIN, FinishedCheck, ModelAccess, model_name
from insitu.agents.install import PI_PACKAGE, PiInstall, install_pi
from insitu.agents.node_binary import sealed_node
from insitu.agents.pi_rpc import PiRpc
from insitu.agents.termination import GRACE_S, ask_to_stop
from insitu.agents.worker import AgentEnd, SandboxTemplate, SandboxWorker, sandbox_template, write_task_files
from insitu.config import Config
from insitu.errors import HarnessError, SandboxError
from insitu.sandbox.base import Bind, Process, Sandbox, SandboxBackend
from insitu.types import Setup, Task

PROVIDER = "insitu"
NODE_AT = "/opt/node/bin/node"
MODULES_AT = "/opt/pi/node_modules"
PI_TOOLS = Path(__file__).parent / "pi_tools.js"
"""Pi extension that provides a session's host tools."""
AGENT_FOLDER = "/home/agent/.pi/agent"
COMMAND = (
    NODE_AT,
    # Saves a fifth of the memory per worker without slowing it down.
    "--max-semi-space-size=2",
    # Otherwise SIGUSR1, which any process in the sandbox may send, opens Node's debugger.
    "--disable-sigusr1",
    f"{MODULES_AT}/{PI_PACKAGE}/dist/bundle/cli.js",
    *("--mode", "rpc", "--no-session", "--provider", PROVIDER),
    *("--no-extensions", "--no-skills", "--no-prompt-templates", "--no-themes", "--no-context-files"),
    *("--no-approve", "--offline", "--thinking", "off"),
)
ENV = {
    "PI_OFFLINE": "1",
    "PI_SKIP_VERSION_CHECK": "1",
    "PI_TELEMETRY": "0",
    # The cache would be in /tmp, visible only to the first rollout of a process.
    "NODE_DISABLE_COMPILE_CACHE": "1",
    # A one-character fix can keep a file's size and mtime second, so a stale .pyc would be used.
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
# Pi reduces max_completion_tokens to the window minus its own estimate of the prompt minus 4096. The gateway
# enforces the exact limit, so the window configured in Pi is large enough never to be the tighter one.
ROOMY_CONTEXT = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """Part of ModelAccess that Pi reads only at its start."""

    name: str = "policy"
    max_call_tokens: int = 512
    compact_within: int = 0
    """Context size that Pi keeps by its own compaction; 0 = no compaction."""

    def settings(self) -> bytes:
        if not self.compact_within:
            return orjson.dumps(SETTINGS)
        kept = {"reserveTokens": 2 * self.max_call_tokens, "keepRecentTokens": self.compact_within // 8}
        return orjson.dumps(SETTINGS | {"compaction": {"enabled": True, **kept}})

    def config(self, port: int) -> bytes:
        model = {
            "id": self.name,
            "name": self.name,
            "contextWindow": self.compact_within or ROOMY_CONTEXT,
            "maxTokens": self.max_call_tokens,
            "reasoning": False,
            "input": ["text"],
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        }
        provider = {"baseUrl": f"http://127.0.0.1:{port}/v1", "api": "openai-completions", "models": [model]}
        return orjson.dumps({"providers": {PROVIDER: provider}})


def from_config(config: Config, backend: SandboxBackend) -> PiHarness:
    """Return the configured agent, installed if missing; raise SetupError if that fails."""
    access = ModelAccess(
        public_id="",
        secret="",
        model=model_name(config),
        max_call_tokens=config.limits.max_call_tokens,
        max_context_tokens=config.model.max_context_tokens,
    )
    return PiHarness(
        install_pi(),
        "rpc" if config.harness.mode == "warm" else "fresh",
        backend,
        rollouts_per_process=config.harness.max_rollouts_per_process,
        model=access,
        compact=config.harness.compact,
        artifacts=artifacts_from_config(config),
    )


class PiHarness:
    """Implements insitu.agents.base.Harness."""

    def __init__(
        self,
        install: PiInstall,
        mode: Literal["rpc", "fresh"],
        backend: SandboxBackend,
        *,
        rollouts_per_process: int = 64,
        model: ModelAccess | None = None,
        compact: bool = False,
        artifacts: Artifacts = NOTHING,
    ) -> None:
        """Set up Pi; `compact` lets it compact its context to `max_context_tokens` of `model`."""
        self._install = install
        self._node = sealed_node(install.node)
        self._backend = backend
        self._artifacts = artifacts
        self._uses = rollouts_per_process if mode == "rpc" else 1
        self._model = _model_of(model, compact=compact) if model else _Model()

    @property
    def name(self) -> str:
        return "pi"

    @property
    def version(self) -> str:
        return self._install.version

    def worker(self, gateway_socket: Path, setup: Setup = PLAIN) -> PiWorker:
        binds = (
            Bind(source=self._node, target=NODE_AT),
            Bind(source=self._install.modules, target=MODULES_AT),
        )
        template = sandbox_template(
            self._backend, gateway_socket, setup, env=ENV, binds=binds, artifacts=self._artifacts
        )
        return PiWorker(template, self._uses, self._model)


class PiWorker(SandboxWorker):
    """Worker whose Pi process starts with the sandbox."""

    def __init__(self, template: SandboxTemplate, uses: int, model: _Model) -> None:
        super().__init__("Pi", template, uses=uses)
        self._model = model
        self._process: Process | None = None
        self._rpc: PiRpc | None = None

    def _alive(self) -> bool:
        return self._process is None or self._process.poll() is None

    async def _boot(self, sandbox: Sandbox) -> None:
        await self._configure(sandbox, secret="unset")
        self._rpc = await self._start(sandbox)

    async def _configure(self, sandbox: Sandbox, secret: str) -> None:
        """Write Pi's files; Pi reloads auth.json before a request when its inode or time changed."""
        # "$" and a leading "!" are special in a stored key.
        key = secret.replace("$", "$$").replace("!", "$!", 1) if "$" in secret or "!" in secret else secret
        port = self._template.spec.gateway_port
        await sandbox.put(f"{AGENT_FOLDER}/models.json", self._model.config(port))
        await sandbox.put(f"{AGENT_FOLDER}/settings.json", self._model.settings())
        await sandbox.put(
            f"{AGENT_FOLDER}/auth.json", orjson.dumps({PROVIDER: {"type": "api_key", "key": key}})
        )

    async def _start(self, sandbox: Sandbox) -> PiRpc:
        """Start Pi and wait until it is ready, so that its start does not count as rollout time."""
        self._process = await sandbox.spawn([*COMMAND, "--model", self._model.name])
        rpc = PiRpc(self._process)
        await rpc.command("get_state")
        return rpc

    async def _prepare(self, sandbox: Sandbox, task: Task, access: ModelAccess, *, used: bool) -> None:
        model = _model_of(access, compact=self._model.compact_within > 0)
        changed, self._model = model != self._model, model
        await self._configure(sandbox, access.secret)
        await write_task_files(sandbox, task)
        if self._process is None or changed:
            if self._process is not None:
                await self._process.kill()
            self._rpc = await self._start(sandbox)
            return
        rpc = self._rpc = PiRpc(self._process)
        await rpc.command("new_session")
        if used and rpc.tampered:
            raise HarnessError("another process wrote to Pi's output")

    async def _run_agent(
        self, sandbox: Sandbox, task: Task, access: ModelAccess, finished: FinishedCheck
    ) -> AgentEnd:
        # A Pi that dies during the task is attributed to the model and is not a host failure.
        process, rpc = self._process, self._rpc
        if process is None or rpc is None:
            raise HarnessError("Pi was not started")
        try:
            run = await rpc.run(task.prompt, task.limits.wall_s, access.away_s)
        except TimeoutError:
            await ask_to_stop(sandbox)
            with contextlib.suppress(TimeoutError):
                await process.wait(GRACE_S)
            await process.kill()
            return AgentEnd(exit="timeout", detail=f"stopped after {task.limits.wall_s:g} s", reusable=False)
        except (HarnessError, SandboxError) as error:
            return AgentEnd(exit="failed", detail=str(error)[:300], reusable=False)
        if run.error:
            return AgentEnd(exit="failed", detail=run.error, log=run.log, reusable=False)
        return AgentEnd(exit="finished", log=run.log, reusable=not rpc.tampered)


def _model_of(access: ModelAccess, *, compact: bool) -> _Model:
    return _Model(
        name=access.model,
        max_call_tokens=access.max_call_tokens,
        compact_within=access.max_context_tokens if compact else 0,
    )
