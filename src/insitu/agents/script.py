"""Any command as an agent: one process per rollout; exit code 0 means finished.

Environment of the command: OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, CONTEXT_TOKENS (limit of prompt
plus reply), CALL_TOKENS (limit of a reply) and PROMPT_FILE. The prompt is also on stdin. The working
directory is the work folder.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from insitu.agents.artifacts import NOTHING, Artifacts, artifacts_from_config
from insitu.agents.base import PLAIN, FinishedCheck, ModelAccess
from insitu.agents.process import AgentProcess, exit_code_rule, smoke_test
from insitu.agents.worker import AgentEnd, SandboxTemplate, SandboxWorker, sandbox_template, write_task_files
from insitu.config import Config
from insitu.errors import HarnessError
from insitu.sandbox.base import Sandbox, SandboxBackend
from insitu.types import FileEntry, Setup, Task, Tree

AGENT_AT = "/home/agent/agent"
PROMPT_AT = "/home/agent/prompt.txt"
LOG_BYTES = 64 << 10
SCRIPT_AGENT = Path(__file__).parent.parent / "demo" / "script_agent.py"
"""The agent of `harness.agent = "script"`: one file, standard library only."""


def from_config(config: Config, backend: SandboxBackend) -> ScriptHarness:
    """Return the agent `script`; its version is a digest of its source."""
    content = SCRIPT_AGENT.read_bytes()
    return ScriptHarness(
        ["python3", "-S", "-E", f"{AGENT_AT}/{SCRIPT_AGENT.name}"],
        {SCRIPT_AGENT.name: FileEntry(content=content)},
        backend,
        version=hashlib.sha256(content).hexdigest()[:12],
        warm=config.harness.mode == "warm",
        artifacts=artifacts_from_config(config),
    )


class ScriptHarness:
    """Harness for a command.

    `files` are written below AGENT_AT in the sandbox. With `warm` the sandbox, but not the process, is reused
    for many rollouts and wiped between them.
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
        artifacts: Artifacts = NOTHING,
    ) -> None:
        if not argv:
            raise HarnessError("the script harness needs a command")
        self._argv = tuple(argv)
        self._files = dict(files)
        self._backend = backend
        self._name = name
        self._version = version
        self._warm = warm
        self._artifacts = artifacts

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> str:
        return self._version

    def worker(self, gateway_socket: Path, setup: Setup = PLAIN) -> ScriptWorker:
        env = {"PYTHONDONTWRITEBYTECODE": "1"}
        template = sandbox_template(self._backend, gateway_socket, setup, env=env, artifacts=self._artifacts)
        return ScriptWorker(template, self._argv, self._files, warm=self._warm)


class ScriptWorker(SandboxWorker):
    """Worker whose sandbox serves one rollout, or any number if `warm`."""

    def __init__(self, template: SandboxTemplate, argv: tuple[str, ...], files: Tree, *, warm: bool) -> None:
        super().__init__("script", template, uses=sys.maxsize if warm else 1)
        self._argv = argv
        self._files = files

    async def _boot(self, sandbox: Sandbox) -> None:
        if self._template.spec.image and not self._argv[0].startswith(AGENT_AT):
            find_program = ["/bin/sh", "-c", 'command -v "$0"', self._argv[0]]
            await smoke_test(sandbox, find_program, self._argv[0])

    async def _prepare(self, sandbox: Sandbox, task: Task, access: ModelAccess, *, used: bool) -> None:
        for path, entry in self._files.items():
            await sandbox.put(f"{AGENT_AT}/{path}", entry.content, executable=entry.executable)
        await sandbox.put(PROMPT_AT, task.prompt.encode())
        await write_task_files(sandbox, task)

    async def _run_agent(
        self, sandbox: Sandbox, task: Task, access: ModelAccess, finished: FinishedCheck
    ) -> AgentEnd:
        address = f"http://127.0.0.1:{self._template.spec.gateway_port}/s/{access.public_id}/v1"
        env = {
            "OPENAI_BASE_URL": address,
            "OPENAI_API_KEY": access.secret,
            "OPENAI_MODEL": access.model,
            "PROMPT_FILE": PROMPT_AT,
            "CONTEXT_TOKENS": str(access.max_context_tokens),
            "CALL_TOKENS": str(access.max_call_tokens),
        }
        command = AgentProcess(argv=self._argv, env=env, stdin=task.prompt.encode(), log_bytes=LOG_BYTES)
        return await command.run(sandbox, task.limits.wall_s, finished, exit_code_rule, access.away_s)
