"""Agents that are one command per rollout: a Recipe says how, this module does it.

    Package --install--> Installed --Recipe--> files, environment, argv, stdin --> one process in a fresh
    sandbox

A Recipe is data and pure functions of a Start; it knows no sandbox. The process's exit is the authority,
read by the recipe's rule. Secrets travel by environment or file, never by argv. Every sandbox is new and
serves one rollout, so nothing of an agent's home lasts. Recipes: one module each; called by
runtime/agents.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from insitu.agents.artifacts import NOTHING, Artifacts
from insitu.agents.base import PLAIN, AgentExit, Left, ModelAccess
from insitu.agents.install import Installed, Package, find_node
from insitu.agents.process import AgentProcess, exit_code_rule, smoke_test
from insitu.agents.worker import AgentEnd, SandboxTemplate, SandboxWorker, sandbox_template, write_task_files
from insitu.sandbox.base import Bind, ExecResult, Sandbox, SandboxBackend
from insitu.types import Setup, Task

HOME = "/home/agent"
AGENT_AT = "/opt/agent"
"""Where the package's `node_modules` or `site` lies in the sandbox."""
NODE_AT = "/opt/node/bin/node"
LOG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What one start of an agent depends on."""

    address: str
    """http://127.0.0.1:{port}/s/{public_id}, below which every wire format has its routes; no slash."""
    secret: str
    model: str
    prompt: str
    program: str
    """The package's program, as the sandbox sees it."""
    max_call_tokens: int
    context_tokens: int
    """Prompt plus sampled tokens of one call, as the policy counts them."""

    @property
    def compact_tokens(self) -> int:
        """Prompt length from which the agent should compact: what its tools say next and the summary itself
        must still fit."""
        return max(1, min(3 * self.context_tokens // 4, self.context_tokens - 2 * self.max_call_tokens))


def no_files(start: Start) -> Mapping[str, bytes]:
    return {}


def version_flag(program: str) -> Sequence[str]:
    return [program, "--version"]


def no_stdin(start: Start) -> bytes:
    """For agents that take the prompt by argument."""
    return b""


def prompt_bytes(start: Start) -> bytes:
    return start.prompt.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One agent: everything that is particular to it."""

    name: str
    package: Package
    argv: Callable[[Start], Sequence[str]]
    env: Callable[[Start], Mapping[str, str]]
    files: Callable[[Start], Mapping[str, bytes]] = no_files
    """Content by inside path; below the home."""
    stdin: Callable[[Start], bytes] = prompt_bytes
    rule: Callable[[ExecResult], tuple[AgentExit, str]] = exit_code_rule
    """What an exit means. A timeout is not asked about."""
    node: bool = False
    """The program is run by Node, which then lies at NODE_AT."""
    memory_bytes: int | None = None
    """Private memory of one process, where the usual limit is too small for this agent's runtime."""
    version: Callable[[str], Sequence[str]] = version_flag
    """Program -> the command that shows that it starts, quickly and without a model."""
    dialect: str = "chat"
    """Wire format it speaks: chat, responses, anthropic or gemini."""


class CliHarness:
    """Implements insitu.agents.base.Harness for any Recipe."""

    def __init__(
        self,
        recipe: Recipe,
        installed: Installed,
        backend: SandboxBackend,
        *,
        artifacts: Artifacts = NOTHING,
    ) -> None:
        self._recipe = recipe
        self._backend = backend
        self._artifacts = artifacts
        self._proven: set[str] = set()
        folder = "node_modules" if installed.package.registry == "npm" else "site"
        self._program = f"{AGENT_AT}/{installed.program}"
        self._version = installed.package.version
        self._binds = [Bind(source=installed.folder / folder, target=f"{AGENT_AT}/{folder}")]
        if recipe.node:
            self._binds.append(Bind(source=find_node(installed.package.node), target=NODE_AT))

    @property
    def name(self) -> str:
        return self._recipe.name

    @property
    def version(self) -> str:
        return self._version

    def worker(self, gateway_socket: Path, setup: Setup = PLAIN) -> CliWorker:
        where = sandbox_template(
            self._backend,
            gateway_socket,
            setup,
            env={"PYTHONDONTWRITEBYTECODE": "1"},
            binds=tuple(self._binds),
            memory_bytes=self._recipe.memory_bytes,
            artifacts=self._artifacts,
        )
        return CliWorker(self._recipe, self._program, where, self._proven)


class CliWorker(SandboxWorker):
    """Serves one rollout."""

    def __init__(self, recipe: Recipe, program: str, where: SandboxTemplate, proven: set[str]) -> None:
        """`proven`: images in which the agent is known to start; added to."""
        super().__init__(recipe.name, where)
        self._proven = proven
        self._recipe = recipe
        self._program = program

    async def _boot(self, sandbox: Sandbox) -> None:
        image = self._place.spec.image
        if image and image not in self._proven:
            argv = self._recipe.version(self._program)
            await smoke_test(sandbox, [NODE_AT, *argv] if self._recipe.node else argv, self._recipe.name)
            self._proven.add(image)

    async def _prepare(self, sandbox: Sandbox, task: Task, access: ModelAccess, *, used: bool) -> None:
        for path, content in self._recipe.files(self._start(task, access)).items():
            await sandbox.put(path, content)
        await write_task_files(sandbox, task)

    async def _run_agent(self, sandbox: Sandbox, task: Task, access: ModelAccess, left: Left) -> AgentEnd:
        start = self._start(task, access)
        command = AgentProcess(
            argv=self._recipe.argv(start),
            env=self._recipe.env(start),
            stdin=self._recipe.stdin(start),
            log_bytes=LOG_BYTES,
        )
        return await command.run(sandbox, task.limits.wall_s, left, self._recipe.rule, access.away_s)

    def _start(self, task: Task, access: ModelAccess) -> Start:
        return Start(
            address=f"http://127.0.0.1:{self._place.spec.gateway_port}/s/{access.public_id}",
            secret=access.secret,
            model=access.model,
            prompt=task.prompt,
            program=self._program,
            max_call_tokens=access.max_call_tokens,
            context_tokens=access.max_context_tokens,
        )
