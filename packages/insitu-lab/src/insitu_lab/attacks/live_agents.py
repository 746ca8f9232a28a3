"""Agents that attack from a real harness's sandbox with a gateway session and its secret.

    script -> sandbox of a harness -(unix socket)-> Gateway -> ScriptedEngine

The same code as in a rollout makes, stops and captures their sandbox.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from insitu.agents.base import AgentResult, ModelAccess
from insitu.agents.harness import RecipeHarness
from insitu.agents.recipe import Recipe
from insitu.chat.template import TemplateRenderer
from insitu.gateway.server import Gateway
from insitu.gateway.session import Session, SessionStats
from insitu.gateway.token_backend import TokenBackend
from insitu.sandbox.base import SandboxBackend
from insitu.types import Limits, Message, Task, Trajectory
from insitu_lab.open_renderer import open_renderer
from insitu_train.demo.scripted import ScriptedEngine

SEAL_S = 5.0
LIMITS = Limits(wall_s=60.0, max_calls=8, max_call_tokens=64, max_context_tokens=4096)


@functools.cache
def renderer() -> TemplateRenderer:
    with tempfile.TemporaryDirectory(prefix="insitu-") as folder:
        return open_renderer(Path(folder) / "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackOutcome:
    """Result of an attacking agent, with its session's trajectory."""

    result: AgentResult
    trajectory: Trajectory
    stats: SessionStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedGateway:
    """A gateway with a constant policy, for attacking agents."""

    gateway: Gateway
    backend: SandboxBackend
    folder: Path
    engine: ScriptedEngine

    @asynccontextmanager
    async def session(self, name: str) -> AsyncIterator[tuple[Session, Path]]:
        """Open a session on its own socket. The caller seals it."""
        path = self.folder / name
        async with self.gateway.listen_unix(path):
            yield self.gateway.open_session(f"attack/{name}", seed=1, limits=LIMITS, listener=path), path

    async def agent(self, name: str, script: str, task: Task) -> AttackOutcome:
        """Run `script` as an agent with shell and Python on a task. Raises SandboxError and HarnessError."""
        harness = RecipeHarness(Recipe(name="attack", command=("/bin/sh", "-c", script)), self.backend)
        async with self.session(name) as (session, path), harness.worker(path) as worker:
            access = ModelAccess(
                public_id=session.public_id,
                secret=session.secret,
                max_call_tokens=LIMITS.max_call_tokens,
                max_context_tokens=LIMITS.max_context_tokens,
            )
            try:
                result = await worker.run(replace(task, limits=LIMITS), access)
            finally:
                trajectory = await session.seal(SEAL_S)
            return AttackOutcome(result=result, trajectory=trajectory, stats=session.stats)


@asynccontextmanager
async def open_scripted_gateway(backend: SandboxBackend) -> AsyncIterator[ScriptedGateway]:
    tokens = await asyncio.to_thread(renderer)
    engine = ScriptedEngine(
        tokens,
        lambda ids, key: Message(role="assistant", text="I see."),
        max_context_tokens=LIMITS.max_context_tokens,
    )
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="insitu-"))
        gateway = await stack.enter_async_context(Gateway(TokenBackend(engine, tokens)))
        yield ScriptedGateway(gateway=gateway, backend=backend, folder=Path(folder), engine=engine)
