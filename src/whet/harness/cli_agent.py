"""Agents that are one command per rollout: a Recipe says how, this module does it.

    Package --install--> Installed --Recipe--> files, environment, argv, stdin --> one process in a fresh box

A Recipe is data and pure functions of a Start; it knows no sandbox. The process's exit is the authority,
read by the recipe's rule. Secrets travel by environment or file, never by argv. Every box is new and serves
one rollout, so nothing of an agent's home lasts. Recipes: one module each; called by collect/agents.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from whet.errors import HarnessError
from whet.harness.base import AgentExit, AgentResult, ModelAccess
from whet.harness.install import Installed, Package, find_node
from whet.harness.outcome import bounded, harvest
from whet.sandbox.base import Bind, ExecResult, Sandbox, SandboxBackend, SandboxSpec
from whet.types import Task

HOME = "/home/agent"
AGENT_AT = "/opt/agent"
"""Where the package's `node_modules` or `site` lies in the box."""
NODE_AT = "/opt/node/bin/node"
LOG_BYTES = 1 << 20
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What one start of an agent depends on."""

    address: str
    """http://127.0.0.1:{port}/s/{public_id}, below which every wire format has its routes; no slash."""
    secret: str
    model: str
    prompt: str
    program: str
    """The package's program, as the box sees it."""
    max_call_tokens: int
    context_tokens: int
    """Prompt plus sampled tokens of one call, as the policy counts them."""

    @property
    def compact_tokens(self) -> int:
        """Prompt length from which the agent should compact: what its tools say next and the summary itself
        must still fit."""
        return max(1, min(3 * self.context_tokens // 4, self.context_tokens - 2 * self.max_call_tokens))


def exit_code_rule(result: ExecResult) -> tuple[AgentExit, str]:
    """Exit code 0 is finished; else failed with the last line the agent complained with."""
    if result.exit_code == 0:
        return "finished", ""
    said = (result.stderr.strip() or result.stdout.strip()).decode("utf-8", "replace")
    lines = _COLOURS.sub("", said).splitlines() or [""]
    return "failed", f"exit code {result.exit_code}: {lines[-1][:300]}"


def no_files(start: Start) -> Mapping[str, bytes]:
    return {}


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
    dialect: str = "chat"
    """Wire format it speaks: chat, responses, anthropic or gemini."""


class CliHarness:
    """Implements whet.harness.base.Harness for any Recipe."""

    def __init__(self, recipe: Recipe, installed: Installed, backend: SandboxBackend) -> None:
        self._recipe = recipe
        self._backend = backend
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

    def worker(self, gateway_socket: Path) -> CliWorker:
        spec = SandboxSpec(
            env={"PYTHONDONTWRITEBYTECODE": "1"},
            binds=tuple(self._binds),
            network="gateway_only",
            gateway_socket=gateway_socket,
        )
        spec = bounded(spec, self._backend)
        if spec.memory_bytes is not None and self._recipe.memory_bytes is not None:
            spec = replace(spec, memory_bytes=self._recipe.memory_bytes)
        return CliWorker(self._recipe, self._program, self._backend, spec, gateway_socket)


class CliWorker:
    """Implements whet.harness.base.Worker; serves one rollout."""

    def __init__(
        self, recipe: Recipe, program: str, backend: SandboxBackend, spec: SandboxSpec, gateway_socket: Path
    ) -> None:
        self._recipe = recipe
        self._program = program
        self._backend = backend
        self._spec = spec
        self._socket = gateway_socket
        self._box: Sandbox | None = None
        self._used = False

    @property
    def gateway_socket(self) -> Path:
        return self._socket

    @property
    def healthy(self) -> bool:
        return self._box is not None and not self._used

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
        box = self._box
        if box is None or self._used:
            raise HarnessError(f"this {self._recipe.name} worker is used up")
        begun = time.monotonic()
        self._used = True
        start = self._start(task, access)
        for path, content in self._recipe.files(start).items():
            await box.put(path, content)
        await box.put_tree(task.files)
        result = await box.exec(
            self._recipe.argv(start),
            timeout_s=task.limits.wall_s,
            env=self._recipe.env(start),
            stdin=self._recipe.stdin(start),
            max_output_bytes=LOG_BYTES,
        )
        tree, why = await harvest(box, self._backend, self._spec)
        outcome, detail = self._judge(result, task.limits.wall_s) if not why else ("failed", why)
        secret = access.secret.encode()
        return AgentResult(
            exit=outcome,
            tree=tree,
            detail=detail.replace(access.secret, "***"),
            log=(result.stdout + result.stderr).replace(secret, b"***"),
            duration_s=time.monotonic() - begun,
        )

    def _judge(self, result: ExecResult, wall_s: float) -> tuple[AgentExit, str]:
        if result.timed_out:
            return "timeout", f"stopped after {wall_s:g} s"
        return self._recipe.rule(result)

    def _start(self, task: Task, access: ModelAccess) -> Start:
        return Start(
            address=f"http://127.0.0.1:{self._spec.gateway_port}/s/{access.public_id}",
            secret=access.secret,
            model=access.model,
            prompt=task.prompt,
            program=self._program,
            max_call_tokens=access.max_call_tokens,
            context_tokens=access.max_context_tokens,
        )
