"""Real agents before a provider: their calls are passed on, their work is graded, their text is kept.

The provider is a gateway of ours with a scripted engine, so it speaks every wire format as a provider must,
and knows to the token what was sent to it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from insitu.agents.base import ModelAccess
from insitu.agents.pool import Sockets, WorkerPool
from insitu.agents.recipe import named_recipe
from insitu.attempt import AttemptExecutor, AttemptSpec
from insitu.gateway.server import Gateway
from insitu.gateway.text_log import spent_in
from insitu.gateway.token_backend import TokenBackend
from insitu.grading.grader import Grader
from insitu.sandbox.local import LocalBackend
from insitu.types import Case, GradingPlan, Limits, Oracle, Status, Task, Tree, Verdict, task_hash
from insitu_bridges.provider.backend import open_provider
from insitu_bridges.provider.limits import ProviderOptions
from insitu_lab.conformance.agent_tools import AGENT_TOOLS
from insitu_lab.conformance.run import make_harness
from insitu_lab.conformance.scripted_policy import FILES, PROMPT, ScriptedPolicy
from insitu_lab.open_renderer import Splitter, open_renderer
from insitu_train.demo.scripted import ScriptedEngine

pytestmark = pytest.mark.full

MODEL = "big-model"
LIMITS = Limits(
    wall_s=150.0,
    max_calls=60,
    max_call_tokens=2048,
    max_session_tokens=1 << 20,
    max_context_tokens=AGENT_TOOLS["pi"].window_tokens,
)
GRADING = GradingPlan(runner="json_io", entry="app.py")
TASK = Task(
    id="area",
    prompt=PROMPT,
    files=FILES,
    grading=GRADING,
    limits=LIMITS,
    content_hash=task_hash(PROMPT, FILES, GRADING),
)
ORACLE = Oracle(
    task_id="area", cases=tuple(Case(function="area", args=(w, 7), expected=w * 7) for w in (3, 9, 0))
)


@asynccontextmanager
async def upstream(agent: str, tmp_path: Path) -> AsyncIterator[tuple[Gateway, ScriptedEngine]]:
    """A scripted model behind a gateway, as a provider, and the pass-through before it."""
    renderer = open_renderer(tmp_path)
    play = replace(AGENT_TOOLS[agent], spawn=None, wait=None, compacts=False, repeats=0)
    policy = ScriptedPolicy(renderer, Splitter(tmp_path / "tokenizer.json", seed=5), play)
    engine = ScriptedEngine(renderer, policy, sampled=True)
    async with Gateway(TokenBackend(engine, renderer)) as inner, inner.listen_tcp() as listener:
        session = inner.open_session("provider", seed=0, limits=LIMITS)
        options = ProviderOptions(
            url=f"{listener.origin}/s/{session.public_id}", model=MODEL, key=session.secret, max_wait_s=30.0
        )
        async with (
            open_provider(options, tmp_path / "records") as backend,
            Gateway(backend) as gateway,
        ):
            yield gateway, engine


@pytest.mark.parametrize("agent", ["pi", "claude_code", "codex"])
async def test_an_agent_before_a_provider_is_graded_and_holds_no_token(agent: str, tmp_path: Path) -> None:
    backend = LocalBackend("auto")
    grader = Grader(backend)

    async def judge(task: Task, tree: Tree) -> Verdict:
        return await grader.grade(task, ORACLE, tree)

    reported = ModelAccess(
        public_id="",
        secret="",
        model=MODEL,
        max_call_tokens=LIMITS.max_call_tokens,
        max_context_tokens=LIMITS.max_context_tokens,
    )
    harness = make_harness(named_recipe(agent), backend, reported)
    async with (
        upstream(agent, tmp_path) as (gateway, engine),
        gateway.listen_unix(tmp_path / "g"),
        WorkerPool(harness, 1, Sockets([tmp_path / "g"]), strict=True) as workers,
    ):
        attempts = AttemptExecutor(gateway, workers, judge, model=MODEL)
        rollout = await attempts.run(
            AttemptSpec(rollout_id="rollout/00000/000/00", task=TASK, seed=1, evaluation=True)
        )
    assert (rollout.status, rollout.error, rollout.reward) == (Status.OK, "", 1.0)
    assert (rollout.trajectory.segments, rollout.trajectory.turns) == ((), ())
    assert rollout.trajectory.ledger.captured == 0
    spent = spent_in(tmp_path / "records")
    assert spent.estimated_calls == 0
    assert spent.prompt_tokens == sum(len(request.ids) for request in engine.sent)
    assert spent.sampled_tokens == sum(len(answer.ids) for answer in engine.answers.values())
