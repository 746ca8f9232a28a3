"""The unmodified Pi coding agent.

Fresh and warm mode both run `pi --mode rpc`, so request bodies are identical. The process starts with the
sandbox, before the task; in warm mode it stays and the sandbox is wiped between rollouts. All paths in the
sandbox are constant, so that Pi's system prompt is constant too.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from insitu.agents.base import FinishedCheck, ModelAccess
from insitu.agents.harness import Launch
from insitu.agents.pi_rpc import PiRpc
from insitu.agents.recipe import Recipe, Start
from insitu.agents.termination import GRACE_S, ask_to_stop
from insitu.agents.worker import AgentEnd, SandboxTemplate, SandboxWorker, write_task_files
from insitu.errors import HarnessError, SandboxError
from insitu.sandbox.base import Process, Sandbox
from insitu.types import Task

PROVIDER = "insitu"
PI_TOOLS = Path(__file__).parent / "pi_tools.js"
"""Pi extension that provides a session's host tools."""
AUTH = ".pi/agent/auth.json"
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


def _settings(start: Start) -> str:
    if not start.compact:
        return json.dumps(SETTINGS)
    reserved = start.context_tokens - start.compact_tokens if start.compact > 1 else 2 * start.max_call_tokens
    kept = {"reserveTokens": reserved, "keepRecentTokens": start.context_tokens // 8}
    return json.dumps(SETTINGS | {"compaction": {"enabled": True, **kept}})


def _models(start: Start) -> str:
    model = {
        "id": start.model,
        "name": start.model,
        "contextWindow": start.context_tokens if start.compact else ROOMY_CONTEXT,
        "maxTokens": start.max_call_tokens,
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    # Without the session's path: a warm process serves many sessions.
    origin = start.address.partition("/s/")[0]
    provider = {"baseUrl": f"{origin}/v1", "api": "openai-completions", "models": [model]}
    return json.dumps({"providers": {PROVIDER: provider}})


def _auth(start: Start) -> str:
    # "$" and a leading "!" are special in a stored key.
    key = start.api_key or "unset"
    key = key.replace("$", "$$").replace("!", "$!", 1) if "$" in key or "!" in key else key
    return json.dumps({PROVIDER: {"type": "api_key", "key": key}})


class _PiWorker(SandboxWorker):
    """Worker whose Pi process starts with the sandbox."""

    def __init__(self, template: SandboxTemplate, launch: Launch) -> None:
        super().__init__("Pi", template, uses=launch.uses)
        self._launch = launch
        self._config: dict[str, bytes] = {}
        """Files that the running process has read only at its start."""
        self._process: Process | None = None
        self._rpc: PiRpc | None = None

    def _alive(self) -> bool:
        return self._process is None or self._process.poll() is None

    async def _boot(self, sandbox: Sandbox) -> None:
        start = self._launch.start(self._template, sandbox, self._launch.access)
        await self._configure(sandbox, start)
        self._rpc = await self._spawn(sandbox, start)

    async def _configure(self, sandbox: Sandbox, start: Start) -> bool:
        """Write Pi's files; return whether Pi must be restarted.

        Pi reloads auth.json before a request when its inode or time changed.
        """
        files = {path: content for path, content, _ in self._launch.recipe.home_files(start)}
        for path, content in files.items():
            await sandbox.put(path, content)
        config = {path: content for path, content in files.items() if not path.endswith(AUTH)}
        changed, self._config = config != self._config, config
        return changed

    async def _spawn(self, sandbox: Sandbox, start: Start) -> PiRpc:
        """Start Pi and wait until it is ready, so that its start does not count as rollout time."""
        env = {name: start.fill(text) for name, text in self._launch.recipe.env.items()}
        self._process = await sandbox.spawn(self._launch.argv(start), env=env)
        rpc = PiRpc(self._process)
        await rpc.command("get_state")
        return rpc

    async def _prepare(self, sandbox: Sandbox, task: Task, access: ModelAccess, *, used: bool) -> None:
        start = self._launch.start(self._template, sandbox, access)
        changed = await self._configure(sandbox, start)
        await write_task_files(sandbox, task, over=self._further)
        if self._process is None or changed or self._further:
            if self._process is not None:
                await self._process.kill()
            self._rpc = await self._spawn(sandbox, start)
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
            prompt = self._launch.start(self._template, sandbox, access, task.prompt).prompt
            run = await rpc.run(prompt, task.limits.wall_s, access.clock)
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


_PROGRAM = (
    "{node}",
    # Saves a fifth of the memory per worker without slowing it down.
    "--max-semi-space-size=2",
    # Otherwise SIGUSR1, which any process in the sandbox may send, opens Node's debugger.
    "--disable-sigusr1",
    "{root}/node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js",
)
_OPTIONS = (
    *("--no-session", "--provider", PROVIDER),
    *("--no-extensions", "--no-skills", "--no-prompt-templates", "--no-themes", "--no-context-files"),
    *("--no-approve", "--offline", "--thinking", "off", "--model", "{model}"),
)
RECIPE = Recipe(
    name="pi",
    npm=("@earendil-works/pi-coding-agent@0.87.1",),
    # Part of Pi's system prompt.
    root="/opt/pi",
    command=(*_PROGRAM, "--mode", "rpc", *_OPTIONS),
    without_pipes=(*_PROGRAM, "--print", *_OPTIONS),
    env={
        "PI_OFFLINE": "1",
        "PI_SKIP_VERSION_CHECK": "1",
        "PI_TELEMETRY": "0",
        # The cache would be in /tmp, visible only to the first rollout of a process.
        "NODE_DISABLE_COMPILE_CACHE": "1",
    },
    config_files={
        ".pi/agent/models.json": _models,
        ".pi/agent/settings.json": _settings,
        AUTH: _auth,
    },
    worker=_PiWorker,
)
