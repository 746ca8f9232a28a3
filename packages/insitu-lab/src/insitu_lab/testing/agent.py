"""Contract of an agent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from insitu.agents.base import AgentResult, Harness, ModelAccess
from insitu.chat.renderer import ChatRenderer
from insitu.gateway.server import Gateway
from insitu.gateway.token_backend import TokenBackend
from insitu.storage.temp_dirs import scratch_folder
from insitu.types import FileEntry, IntArray, Limits, Message, RequestKey, Task, Trajectory
from insitu_lab.exactness import training_faults
from insitu_lab.open_renderer import open_renderer
from insitu_train.demo.scripted import ScriptedEngine

SEAL_S = 10.0
FILES = {"app.py": FileEntry(content=b"def f(a, b):\n    return a + b\n")}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRun:
    """One run of an agent against a scripted engine."""

    result: AgentResult
    trajectory: Trajectory
    engine: ScriptedEngine
    prompts: tuple[str, ...]
    """Decoded prompt of each model call."""
    secret: str


@pytest.mark.asyncio
class AgentContract:
    """Subclass it and define the fixture `harness`, a `Harness` over a sandbox backend.

    The scripted policy ends each run with `final_message`. `insitu conformance` goes on from here: tools,
    sub-agents and compaction.
    """

    final_message: Message = Message(role="assistant", text="Done.")
    """Reply on which the agent ends its run."""
    wall_s: float = 60.0
    """Timeout of a run, start-up of the agent included."""
    max_context_tokens: int = 1 << 17

    @pytest.fixture
    def renderer(self, tmp_path: Path) -> ChatRenderer:
        return open_renderer(tmp_path / "model")

    async def run(
        self,
        harness: Harness,
        renderer: ChatRenderer,
        prompt: str = "Say that you are done.",
        *,
        wall_s: float = 0.0,
        delay_s: float = 0.0,
        policy: Callable[[IntArray, RequestKey], Message] | None = None,
    ) -> AgentRun:
        """Run the agent on one task; the engine waits `delay_s` before each reply."""
        limits = Limits(
            wall_s=wall_s or self.wall_s,
            max_call_tokens=2048,
            max_session_tokens=1 << 20,
            max_context_tokens=self.max_context_tokens,
        )
        task = Task(id="contract", prompt=prompt, files=FILES, limits=limits)
        answer = policy or (lambda ids, key: self.final_message)
        engine = ScriptedEngine(renderer, answer, sampled=True, delay_s=delay_s)
        async with AsyncExitStack() as stack:
            # Unix socket paths are limited to 107 bytes.
            path = stack.enter_context(scratch_folder()) / "gateway"
            gateway = await stack.enter_async_context(Gateway(TokenBackend(engine, renderer)))
            await stack.enter_async_context(gateway.listen_unix(path))
            # The worker stops the agent, not the session: its own wall time is longer.
            session = gateway.open_session(
                f"contract/{path.parent.name}", seed=1, limits=limits.changed(wall_s=3600.0), listener=path
            )
            access = ModelAccess(
                public_id=session.public_id,
                secret=session.secret,
                max_call_tokens=limits.max_call_tokens,
                max_context_tokens=limits.max_context_tokens,
            )
            async with harness.worker(path) as worker:
                result = await worker.run(task, access)
            trajectory = await session.seal(SEAL_S)
        prompts = tuple(renderer.decode(request.ids) for request in engine.sent)
        return AgentRun(
            result=result, trajectory=trajectory, engine=engine, prompts=prompts, secret=session.secret
        )

    async def test_a_run_ends_by_itself(self, harness: Harness, renderer: ChatRenderer) -> None:
        run = await self.run(harness, renderer)
        assert run.result.exit == "finished", run.result.detail or run.result.log.decode(errors="replace")
        assert run.engine.sent, "the agent made no model call"
        assert run.result.tree["app.py"] == FILES["app.py"]

    async def test_the_prompt_reaches_the_model(self, harness: Harness, renderer: ChatRenderer) -> None:
        run = await self.run(harness, renderer, "Say the word zanzibar.")
        assert any("zanzibar" in prompt for prompt in run.prompts)

    async def test_every_token_is_in_the_ledger(self, harness: Harness, renderer: ChatRenderer) -> None:
        run = await self.run(harness, renderer)
        replies = {key.turn: reply for key, reply in run.engine.answers.items()}
        assert list(training_faults(run.trajectory, replies)) == []
        ledger = run.trajectory.ledger
        assert ledger.balanced
        assert ledger.captured == sum(len(reply.ids) for reply in replies.values())
        assert ledger.trained > 0, dict(ledger.excluded)

    async def test_a_timeout_stops_the_agent(self, harness: Harness, renderer: ChatRenderer) -> None:
        run = await self.run(harness, renderer, wall_s=2.0, delay_s=600.0)
        assert run.result.exit == "timeout"
        assert run.result.tree["app.py"] == FILES["app.py"]

    async def test_the_secret_is_in_no_log_or_artifact(
        self, harness: Harness, renderer: ChatRenderer
    ) -> None:
        run = await self.run(harness, renderer)
        secret = run.secret.encode()
        assert secret not in run.result.log
        assert run.secret not in run.result.detail
        assert not [path for path, content in run.result.artifacts.items() if secret in content]

    async def test_concurrent_runs_do_not_mix(self, harness: Harness, renderer: ChatRenderer) -> None:
        words = ("zanzibar", "quixotic")
        runs = await asyncio.gather(*(self.run(harness, renderer, f"Say the word {word}.") for word in words))
        for run, own, other in zip(runs, words, reversed(words), strict=True):
            assert run.result.exit == "finished", run.result.detail
            assert any(own in prompt for prompt in run.prompts)
            assert not any(other in prompt for prompt in run.prompts)
