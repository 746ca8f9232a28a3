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
from whet.harness.install import PI_PACKAGE, PiInstall, sealed_node
from whet.harness.outcome import bounded, harvest
from whet.harness.pi_rpc import PiRpc, PiRun
from whet.sandbox.base import Bind, Process, Sandbox, SandboxBackend, SandboxSpec
from whet.types import Task

PROVIDER = "whet"
NODE_AT = "/opt/node/bin/node"
MODULES_AT = "/opt/pi/node_modules"
PI_TOOLS = Path(__file__).parent / "pi_tools.js"
"""Pi extension that gives Pi a session's host tools."""
AGENT_FOLDER = "/home/agent/.pi/agent"
COMMAND = (
    NODE_AT,
    # A fifth less memory per worker, at no cost in time.
    "--max-semi-space-size=2",
    # Else a signal, which anything in the box may send, makes Node open a debugger.
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
# gateway knows the true length and answers for it, so Pi hears of a window that is never the tighter one.
ROOMY_CONTEXT = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What of a ModelAccess Pi reads at its start only."""

    name: str = "policy"
    max_call_tokens: int = 512
    compact_within: int = 0
    """Context that Pi keeps below by its own compaction; 0 = it never compacts."""

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
        compact: bool = False,
    ) -> None:
        """`compact`: Pi may compact its context, within `max_context_tokens` of `model`."""
        self._install = install
        self._node = sealed_node(install.node)
        self._backend = backend
        self._uses = rollouts_per_process if mode == "rpc" else 1
        self._model = _model_of(model, compact=compact) if model else _Model()

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
                Bind(source=self._node, target=NODE_AT),
                Bind(source=self._install.modules, target=MODULES_AT),
            ),
            network="gateway_only",
            gateway_socket=gateway_socket,
        )
        return PiWorker(self._backend, bounded(spec, self._backend), gateway_socket, self._uses, self._model)


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
        await self._open()
        return self

    async def _open(self) -> None:
        """A new box with a Pi that listens. Raises HarnessError and SandboxError: the host's doing."""
        box = self._box = await self._backend.create(self._spec)
        try:
            await self._configure(box, secret="unset")
            await self._start(box)
        except BaseException:
            await self._close()
            raise
        self._dirty = False

    async def _close(self) -> None:
        box, self._box, self._process = self._box, None, None
        if box is not None:
            await box.close()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close()

    async def _configure(self, box: Sandbox, secret: str) -> None:
        """Pi's files. It looks at auth.json anew before every request, by inode and time."""
        # In a stored key "$" and a leading "!" have a meaning.
        key = secret.replace("$", "$$").replace("!", "$!", 1) if "$" in secret or "!" in secret else secret
        await box.put(f"{AGENT_FOLDER}/models.json", self._model.config(self._spec.gateway_port))
        await box.put(f"{AGENT_FOLDER}/settings.json", self._model.settings())
        await box.put(f"{AGENT_FOLDER}/auth.json", orjson.dumps({PROVIDER: {"type": "api_key", "key": key}}))

    async def _start(self, box: Sandbox) -> PiRpc:
        """Start Pi and wait until it listens, so that its start is no part of a rollout."""
        self._process = await box.spawn([*COMMAND, "--model", self._model.name])
        rpc = PiRpc(self._process)
        await rpc.command("get_state")
        return rpc

    async def run(self, task: Task, access: ModelAccess) -> AgentResult:
        if not self.healthy:
            raise HarnessError("this Pi worker is used up")
        begun = time.monotonic()
        self._uses_left -= 1
        try:
            box, rpc = await self._ready(task, access)
            outcome, detail, run = await self._attempt(rpc, task)
            tree, why = await harvest(box, self._backend, self._spec)
        except BaseException:
            self._broken = True
            raise
        if outcome != "finished" or why or rpc.odd:
            self._broken = True
        return AgentResult(
            exit="failed" if why else outcome,
            tree=tree,
            detail=(why or detail).replace(access.secret, "***"),
            log=run.log.replace(access.secret.encode(), b"***") if run else b"",
            duration_s=time.monotonic() - begun,
        )

    async def _ready(self, task: Task, access: ModelAccess) -> tuple[Sandbox, PiRpc]:
        """Everything in place for the prompt. A used box that does not come clean was spoilt by the rollout
        before, whose doing must not be laid on this one: it gets a new box."""
        if self._box is not None and self._dirty:
            try:
                return self._box, await self._prepare(self._box, task, access)
            except (HarnessError, SandboxError):
                await self._close()
                await self._open()
        if self._box is None:
            raise HarnessError("this Pi worker has no box")
        return self._box, await self._prepare(self._box, task, access)

    async def _prepare(self, box: Sandbox, task: Task, access: ModelAccess) -> PiRpc:
        used, self._dirty = self._dirty, True
        if used:
            await box.wipe()
        model = _model_of(access, compact=self._model.compact_within > 0)
        changed, self._model = model != self._model, model
        await self._configure(box, access.secret)
        await box.put_tree(task.files)
        if self._process is None or changed:
            if self._process is not None:
                await self._process.kill()
            return await self._start(box)
        rpc = PiRpc(self._process)
        await rpc.command("new_session")
        if used and rpc.odd:
            raise HarnessError("something but Pi wrote to Pi's output")
        return rpc

    async def _attempt(self, rpc: PiRpc, task: Task) -> tuple[AgentExit, str, PiRun | None]:
        """A Pi that dies while it works on the task did so by the model's doing: no host failure."""
        try:
            run = await rpc.run(task.prompt, task.limits.wall_s)
        except TimeoutError:
            return "timeout", f"stopped after {task.limits.wall_s:g} s", None
        except (HarnessError, SandboxError) as error:
            return "failed", str(error)[:300], None
        if run.error:
            return "failed", run.error, run
        return "finished", "", run


def _model_of(access: ModelAccess, *, compact: bool) -> _Model:
    return _Model(
        name=access.model,
        max_call_tokens=access.max_call_tokens,
        compact_within=access.max_context_tokens if compact else 0,
    )
