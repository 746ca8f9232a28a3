"""Agents that are one command per rollout: Recipe (data) and CliHarness (execution).

    Package --install--> Installed --Recipe--> files, environment, argv, stdin --> one process in a fresh
    sandbox

A Recipe is data and pure functions of a Start, without access to a sandbox. The recipe's rule interprets the
exit of the process. Secrets are passed by environment or file, never by argv. Every rollout has a new
sandbox.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from insitu.agents.artifacts import NOTHING, Artifacts
from insitu.agents.base import PLAIN, AgentExit, FinishedCheck, ModelAccess
from insitu.agents.install import Installed, Package, find_node
from insitu.agents.process import AgentProcess, exit_code_rule, smoke_test
from insitu.agents.worker import AgentEnd, SandboxTemplate, SandboxWorker, sandbox_template, write_task_files
from insitu.registry import BUILT_IN, find
from insitu.sandbox.base import Bind, ExecResult, Sandbox, SandboxBackend
from insitu.types import Setup, Task

HOME = "/home/agent"
AGENT_AT = "/opt/agent"
"""Location of the package's `node_modules` or `site` in the sandbox."""
NODE_AT = "/opt/node/bin/node"
LOG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Inputs of one start of an agent."""

    address: str
    """Base URL of all wire formats: http://127.0.0.1:{port}/s/{public_id}, without trailing slash."""
    secret: str
    model: str
    prompt: str
    program: str
    """Path of the package's program in the sandbox."""
    max_call_tokens: int
    context_tokens: int
    """Context window: prompt plus sampled tokens of one call, counted by the policy's tokenizer."""

    @property
    def compact_tokens(self) -> int:
        """Prompt length from which the agent should compact."""
        # The next tool outputs and the summary itself must still fit into the context.
        return max(1, min(3 * self.context_tokens // 4, self.context_tokens - 2 * self.max_call_tokens))


def no_files(start: Start) -> Mapping[str, bytes]:
    return {}


def version_flag(program: str) -> Sequence[str]:
    return [program, "--version"]


def no_stdin(start: Start) -> bytes:
    """Return empty stdin, for agents that take the prompt as an argument."""
    return b""


def prompt_bytes(start: Start) -> bytes:
    return start.prompt.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that is specific to one agent."""

    name: str
    package: Package
    argv: Callable[[Start], Sequence[str]]
    env: Callable[[Start], Mapping[str, str]]
    files: Callable[[Start], Mapping[str, bytes]] = no_files
    """Content by path in the sandbox, below the home folder."""
    stdin: Callable[[Start], bytes] = prompt_bytes
    rule: Callable[[ExecResult], tuple[AgentExit, str]] = exit_code_rule
    """Interprets the exit of the process; not called after a timeout."""
    node: bool = False
    """The program is run by Node, installed at NODE_AT."""
    memory_bytes: int | None = None
    """Memory limit of one process if the default is too small for this agent's runtime."""
    version: Callable[[str], Sequence[str]] = version_flag
    """Program -> command of a quick start check without a model."""
    dialect: str = "chat"
    """Wire format it speaks: chat, responses, anthropic or gemini."""


def shipped_recipes() -> dict[str, Recipe]:
    """Return the built-in agents that are recipes, by name."""
    found = {name: find("agents", name) for name in BUILT_IN["agents"]}
    return {name: recipe for name, recipe in found.items() if isinstance(recipe, Recipe)}


class CliHarness:
    """Harness for any Recipe."""

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
        self._verified_images: set[str] = set()
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
        template = sandbox_template(
            self._backend,
            gateway_socket,
            setup,
            env={"PYTHONDONTWRITEBYTECODE": "1"},
            binds=tuple(self._binds),
            memory_bytes=self._recipe.memory_bytes,
            artifacts=self._artifacts,
        )
        return CliWorker(self._recipe, self._program, template, self._verified_images)


class CliWorker(SandboxWorker):
    """Worker that serves one rollout."""

    def __init__(
        self, recipe: Recipe, program: str, template: SandboxTemplate, verified_images: set[str]
    ) -> None:
        """Set up a worker; `verified_images` is the shared set of images in which the agent starts."""
        super().__init__(recipe.name, template)
        self._verified_images = verified_images
        self._recipe = recipe
        self._program = program

    async def _boot(self, sandbox: Sandbox) -> None:
        image = self._template.spec.image
        if image and image not in self._verified_images:
            argv = self._recipe.version(self._program)
            await smoke_test(sandbox, [NODE_AT, *argv] if self._recipe.node else argv, self._recipe.name)
            self._verified_images.add(image)

    async def _prepare(self, sandbox: Sandbox, task: Task, access: ModelAccess, *, used: bool) -> None:
        for path, content in self._recipe.files(self._start(task, access)).items():
            await sandbox.put(path, content)
        await write_task_files(sandbox, task)

    async def _run_agent(
        self, sandbox: Sandbox, task: Task, access: ModelAccess, finished: FinishedCheck
    ) -> AgentEnd:
        start = self._start(task, access)
        command = AgentProcess(
            argv=self._recipe.argv(start),
            env=self._recipe.env(start),
            stdin=self._recipe.stdin(start),
            log_bytes=LOG_BYTES,
        )
        return await command.run(sandbox, task.limits.wall_s, finished, self._recipe.rule, access.away_s)

    def _start(self, task: Task, access: ModelAccess) -> Start:
        return Start(
            address=f"http://127.0.0.1:{self._template.spec.gateway_port}/s/{access.public_id}",
            secret=access.secret,
            model=access.model,
            prompt=task.prompt,
            program=self._program,
            max_call_tokens=access.max_call_tokens,
            context_tokens=access.max_context_tokens,
        )
