"""Run one agent in a real sandbox at the real gateway, and check the result.

    ScriptedPolicy <-ids- ScriptedEngine <- Gateway <-socket- (Recorder) <- sandbox with the unmodified agent

Nothing but the gateway can be reached from the sandbox, so all model traffic is in its session. Every token
that the policy produced must be in the ledger: trained, or excluded for a named reason.
"""

from __future__ import annotations

import asyncio
import platform
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from insitu.agents.base import AgentResult, Harness, ModelAccess
from insitu.agents.harness import RecipeHarness
from insitu.agents.recipe import Recipe
from insitu.errors import InsituError
from insitu.gateway.server import Gateway
from insitu.gateway.session import Session
from insitu.gateway.token_backend import TokenBackend
from insitu.progress.base import View
from insitu.sandbox.base import SandboxBackend
from insitu.sandbox.local import LocalBackend
from insitu.types import Limits, Task, Trajectory
from insitu_lab.conformance.agent_tools import AGENT_TOOLS, OWN_AGENT, AgentTools
from insitu_lab.conformance.checks import ConformanceResult, judge, traffic_failures
from insitu_lab.conformance.recorder import WireRecorder
from insitu_lab.conformance.scripted_policy import FILES, PROMPT, ScriptedPolicy
from insitu_lab.open_renderer import Splitter, open_renderer
from insitu_train.demo.scripted import ScriptedEngine

SEED = 1
MAX_CALL_TOKENS = 2048
WALL_S = 300.0
MOST_WINDOW_TOKENS = 160_000
SEAL_S = 10.0


def make_harness(
    recipe: Recipe, backend: SandboxBackend, access: ModelAccess, compact: bool | int = True
) -> Harness:
    """Return the agent, installed if missing.

    Raises SetupError.
    """
    return RecipeHarness(recipe, backend, access=access, compact=compact)


async def conform(
    recipe: Recipe,
    backend: SandboxBackend,
    record: Path | None = None,
    *,
    tools: AgentTools | None = None,
    compact: bool | int = True,
) -> ConformanceResult:
    """Run one agent and check it; failures of any kind are in the result.

    An agent that failed and whose own prompt nearly fills the window is run again with a larger one. `tools`:
    what the policy does with the agent, None = all it can; `compact` as `harness.compact`.
    """
    tools = tools or AGENT_TOOLS.get(recipe.name, OWN_AGENT)
    finding = await _conform(recipe, tools, backend, record, compact)
    while finding.window_too_small and not finding.ok and tools.window_tokens < MOST_WINDOW_TOKENS:
        tools = replace(tools, window_tokens=tools.window_tokens * 3 // 2)
        finding = await _conform(recipe, tools, backend, record, compact)
    return finding


async def conform_all(
    recipes: Mapping[str, Recipe], record: Path | None, view: View
) -> dict[str, ConformanceResult]:
    """Run agents one after the other."""
    backend, findings = LocalBackend(), {}
    view.stage("checking agents", len(recipes))
    for done, (name, recipe) in enumerate(recipes.items(), 1):
        view.note(name)
        findings[name] = await conform(recipe, backend, record)
        view.advance(done)
    return findings


async def _conform(
    recipe: Recipe, tools: AgentTools, backend: SandboxBackend, record: Path | None, compact: bool | int
) -> ConformanceResult:
    access = ModelAccess(
        public_id="", secret="", max_call_tokens=MAX_CALL_TOKENS, max_context_tokens=tools.window_tokens
    )
    try:
        harness = await asyncio.to_thread(make_harness, recipe, backend, access, compact)
        with tempfile.TemporaryDirectory(prefix="insitu-") as folder:
            return await _run(harness, tools, Path(folder), record)
    except InsituError as error:
        return ConformanceResult(failures=(str(error),))


async def _run(harness: Harness, tools: AgentTools, folder: Path, record: Path | None) -> ConformanceResult:
    renderer = await asyncio.to_thread(open_renderer, folder / "model")
    policy = ScriptedPolicy(renderer, Splitter(folder / "model" / "tokenizer.json", seed=1), tools)
    engine = ScriptedEngine(renderer, policy, sampled=True)
    limits = Limits(
        wall_s=WALL_S,
        max_calls=200,
        max_call_tokens=MAX_CALL_TOKENS,
        max_session_tokens=1 << 20,
        max_context_tokens=tools.window_tokens,
    )
    task = Task(id="conformance", prompt=PROMPT, files=FILES, limits=limits)
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(Gateway(TokenBackend(engine, renderer)))
        reached = folder / "gateway"
        await stack.enter_async_context(gateway.listen_unix(reached))
        recorder = WireRecorder(reached)
        entrance = folder / "relay" if record else reached
        if record:
            await stack.enter_async_context(recorder.listen(entrance))
        session = gateway.open_session(
            f"conformance/{harness.name}", seed=SEED, limits=limits, listener=reached
        )
        result, trajectory = await _rollout(harness, session, task, entrance)
        if record:
            hidden = {session.secret: "***", f"/s/{session.public_id}": "", session.public_id: "ID"}
            # Some agents report the machine to the model.
            hidden |= {platform.release(): "RELEASE", platform.version(): "VERSION"}
            path = record / f"{harness.name}.jsonl.xz"
            head = {
                **{"agent": harness.name, "version": harness.version, "rollout": session.rollout_id},
                **{"seed": SEED, "limits": limits.model_dump(), "books": _books(trajectory)},
            }
            await asyncio.to_thread(recorder.write, path, head, hidden)
    finding = judge(harness.version, policy.tools, policy, engine, session, result, trajectory)
    return replace(finding, failures=(*finding.failures, *traffic_failures(gateway.counters)))


def _books(trajectory: Trajectory) -> dict[str, object]:
    """Return what depends on a session's messages alone, not on the vocabulary: its shape and drifts."""
    return {
        "parents": [turn.parent for turn in trajectory.turns],
        "labels": [segment.label for segment in trajectory.segments],
        "drifts": [[note.kind, note.cause, note.request, note.turn] for note in trajectory.drifts],
        "excluded": [[turn.index, turn.excluded] for turn in trajectory.turns if turn.excluded],
    }


async def _rollout(
    harness: Harness, session: Session, task: Task, entrance: Path
) -> tuple[AgentResult, Trajectory]:
    access = ModelAccess(
        public_id=session.public_id,
        secret=session.secret,
        max_call_tokens=task.limits.max_call_tokens,
        max_context_tokens=task.limits.max_context_tokens,
    )
    async with harness.worker(entrance) as worker:
        try:
            result = await worker.run(task, access)
        finally:
            trajectory = await session.seal(SEAL_S)
    return result, trajectory
