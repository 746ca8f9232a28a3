"""Harness of any Recipe, and the worker that runs one process per rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from insitu.agents.artifacts import AGENT_PROCESSES, NOTHING, Artifacts
from insitu.agents.base import PLAIN, FinishedCheck, ModelAccess
from insitu.agents.install import Installed, find_node, install
from insitu.agents.node_binary import sealed_node
from insitu.agents.recipe import NODE_AT, Recipe, Start
from insitu.agents.termination import GRACE_S, KILL_S, attend
from insitu.agents.worker import AgentEnd, SandboxTemplate, SandboxWorker, write_task_files
from insitu.errors import HarnessError, SetupError
from insitu.registry import find
from insitu.sandbox.base import Bind, Sandbox, SandboxBackend, SandboxSpec, gateway_url
from insitu.types import Setup, Task

LOG_BYTES = 1 << 20
"""Limit of stdout and of stderr each; output beyond it is discarded."""
START_S = 60.0
AWAY_MOST_S = 3600.0
"""Longest engine downtime that a session waits for."""
# Runs in a temporary home that is removed, so that the agent finds no trace of it at its real start.
_IN_TEMPORARY_HOME = (
    "export HOME=/tmp/start TMPDIR=/tmp/start; mkdir $HOME && cd $HOME || exit 126; "
    '"$@"; code=$?; cd /; rm -rf /tmp/start; exit $code'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How the workers of one harness start their agent."""

    recipe: Recipe
    program: tuple[str, ...]
    """Templates that replace the first word of the command; Node first for its scripts."""
    uses: int
    """Rollouts per sandbox."""
    access: ModelAccess
    """Model and limits of agents that start before their first session; without address and key."""
    compact: bool | int
    verified_images: set[str] = field(default_factory=set)
    """Images in which the agent starts."""

    def start(
        self, template: SandboxTemplate, sandbox: Sandbox, access: ModelAccess, prompt: str = ""
    ) -> Start:
        origin = gateway_url(sandbox) or f"http://127.0.0.1:{template.spec.gateway_port}"
        start = Start(
            address=f"{origin}/s/{access.public_id}",
            api_key=access.secret,
            model=access.model,
            prompt=prompt,
            max_call_tokens=access.max_call_tokens,
            context_tokens=access.max_context_tokens,
            compact=self.compact,
            root=self.recipe.root,
        )
        return replace(start, prompt=self.recipe.asked(start)) if prompt else start

    def argv(self, start: Start) -> list[str]:
        return [start.fill(word) for word in (*self.program, *self.recipe.command[1:])]


class RecipeHarness:
    """Implements insitu.agents.base.Harness."""

    def __init__(
        self,
        recipe: Recipe,
        backend: SandboxBackend,
        *,
        installed: Installed | None = None,
        uses: int = 1,
        access: ModelAccess | None = None,
        compact: bool | int = False,
        artifacts: Artifacts = NOTHING,
    ) -> None:
        """Set up an agent and install it if missing; a sandbox serves `uses` rollouts.

        Raises SetupError.
        """
        self._backend, self._artifacts = backend, artifacts
        if recipe.worker is not None and "stdin_pipe" not in backend.capabilities:
            if not recipe.without_pipes:
                raise SetupError(f"agent {recipe.name} needs pipes, which sandboxes of {backend.name} lack")
            recipe = replace(recipe, command=recipe.without_pipes, worker=None)
        if "binds" not in backend.capabilities:
            uses = 1  # the agent can change its own files there
        installed = installed or install(recipe)
        self.binds: tuple[Bind, ...] = ()
        """The installed packages, and Node where the agent needs it."""
        if installed.folder is not None:
            self.binds += (Bind(source=installed.folder, target=recipe.root, may_copy=True),)
        if "{node}" in (*installed.program, *recipe.command):
            node = sealed_node(find_node(recipe.node))
            self.binds += (Bind(source=node, target=NODE_AT, may_copy=True),)
        self._launch = Launch(
            recipe=recipe,
            program=installed.program,
            uses=uses,
            access=access or ModelAccess(public_id="", secret=""),
            compact=compact,
        )

    @property
    def name(self) -> str:
        return self._launch.recipe.name

    @property
    def version(self) -> str:
        return self._launch.recipe.version

    def worker(self, gateway_socket: Path, setup: Setup = PLAIN, gateway_url: str = "") -> SandboxWorker:
        recipe = self._launch.recipe
        spec = SandboxSpec.of(
            setup,
            # A one-character fix can keep a file's size and mtime second, so a stale .pyc would be used.
            env={"PYTHONDONTWRITEBYTECODE": "1"},
            binds=self.binds,
            network="gateway_only" if "gateway_only" in self._backend.capabilities else "public",
            gateway_socket=gateway_socket,
            gateway_url=gateway_url,
        )
        if "resource_limits" in self._backend.capabilities:
            memory = max(recipe.process_memory_bytes, setup.memory_mb << 20)
            spec = replace(spec, memory_bytes=memory, max_processes=AGENT_PROCESSES)
        template = SandboxTemplate(
            backend=self._backend,
            spec=spec,
            gateway_socket=gateway_socket,
            setup=setup,
            artifacts=self._artifacts,
        )
        return (recipe.worker or _CommandWorker)(template, self._launch)


class _CommandWorker(SandboxWorker):
    """Worker that runs one process per rollout."""

    def __init__(self, template: SandboxTemplate, launch: Launch) -> None:
        super().__init__(launch.recipe.name, template, uses=launch.uses)
        self._launch = launch

    async def _boot(self, sandbox: Sandbox) -> None:
        image, launch = self._template.spec.image, self._launch
        if not image or image in launch.verified_images or "{files}" in launch.program[0]:
            return
        start = launch.start(self._template, sandbox, launch.access)
        argv = [start.fill(word) for word in (*launch.program, *launch.recipe.check)]
        if not launch.recipe.check:
            argv = ["/bin/sh", "-c", 'command -v "$0"', argv[0]]
        if failure := await _start_failure(sandbox, argv):
            raise HarnessError(f"{start.fill(launch.program[-1])} does not start in this image {failure}")
        launch.verified_images.add(image)

    async def _prepare(self, sandbox: Sandbox, task: Task, access: ModelAccess, *, used: bool) -> None:
        start = self._launch.start(self._template, sandbox, access, task.prompt)
        recipe, container = self._launch.recipe, self._template.setup.container
        files = recipe.home_files(start)
        if container:
            files = find("parts", "offer_servers")(recipe.name, start.home, files, container)
        for path, content, executable in files:
            await sandbox.put(path, content, executable=executable)
        await write_task_files(sandbox, task, over=self._further)

    async def _run_agent(
        self, sandbox: Sandbox, task: Task, access: ModelAccess, finished: FinishedCheck
    ) -> AgentEnd:
        recipe = self._launch.recipe
        start = self._launch.start(self._template, sandbox, access, task.prompt)
        wall_s = task.limits.wall_s
        running = asyncio.create_task(
            sandbox.exec(
                self._launch.argv(start),
                # Fallback timeout: `attend` stops the process earlier.
                timeout_s=wall_s + AWAY_MOST_S + GRACE_S + 2 * KILL_S,
                env=recipe.environment(start),
                stdin=recipe.stdin(start),
                max_output_bytes=LOG_BYTES,
            )
        )
        result, why = await attend(running, sandbox, wall_s=wall_s, finished=finished, clock=access.clock)
        log = result.stdout + result.stderr
        if why == "deadline" or result.timed_out:
            return AgentEnd(exit="timeout", detail=f"stopped after {wall_s:g} s", log=log, reusable=False)
        if why == "finished":
            return AgentEnd(exit="finished", detail="reported completion and was stopped", log=log)
        outcome, detail = recipe.rule(result)
        return AgentEnd(exit=outcome, detail=detail, log=log)


async def _start_failure(sandbox: Sandbox, argv: Sequence[str]) -> str:
    """Start a program and return why it failed; empty if it exits with 0."""
    # The image may lack libraries; such a failure must not be attributed to the agent.
    done = await sandbox.exec(["/bin/sh", "-c", _IN_TEMPORARY_HOME, "sh", *argv], timeout_s=START_S)
    if done.exit_code == 0:
        return ""
    lines = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines() or ["no output"]
    # Node ends the report of an exception with its own version.
    errors = [line.strip() for line in lines if "rror:" in line] or lines[-1:]
    how = "timeout" if done.timed_out else f"exit code {done.exit_code}"
    return f"({how}): {errors[0][:200]}"


async def check_start(recipe: Recipe, installed: Installed, backend: SandboxBackend) -> None:
    """Start an installed program in a sandbox, with `Recipe.check`, else with --version or --help.

    Raises SetupError and SandboxError.
    """
    harness = RecipeHarness(recipe, backend, installed=installed)
    start = Start(
        address="", api_key="", model="", prompt="", max_call_tokens=1, context_tokens=1, root=recipe.root
    )
    program = [start.fill(word) for word in installed.program]
    sandbox = await backend.create(SandboxSpec(binds=harness.binds, network="none"))
    try:
        for arguments in [recipe.check] if recipe.check else [("--help",), ("--version",)]:
            failure = await _start_failure(sandbox, [*program, *arguments])
            if not failure:
                return
    finally:
        await sandbox.close()
    name = PurePosixPath(recipe.command[0]).name
    raise SetupError(f"agent {recipe.name}: {name} in {installed.folder} does not start {failure}")
