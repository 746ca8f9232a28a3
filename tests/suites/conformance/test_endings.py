"""How real agents end when a session does: budget spent, engine gone, prompt too long. None may hang.

Pi in every run; the others, which are large, in the full runs only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from insitu.agents.base import AgentResult, ModelAccess
from insitu.agents.recipe import named_recipe
from insitu.chat.template import TemplateRenderer
from insitu.errors import EngineError
from insitu.gateway.server import Gateway
from insitu.gateway.session import SessionStats
from insitu.gateway.token_backend import TokenBackend
from insitu.sandbox.local import LocalBackend
from insitu.types import Limits, Task
from insitu_lab.conformance.agent_tools import AGENT_TOOLS
from insitu_lab.conformance.run import make_harness
from insitu_lab.conformance.scripted_policy import FILES, PROMPT, ScriptedPolicy
from insitu_lab.open_renderer import Splitter
from insitu_train.demo.scripted import ScriptedEngine

pytestmark = pytest.mark.slow

Ending = Literal["budget", "engine", "overflow"]
ENDINGS: tuple[Ending, ...] = ("budget", "engine", "overflow")
CALLS = 12
SMALL = {"pi": 1200, "mini_swe": 1200}
"""Contexts that the first prompts of these agents do not fill at once; 9000 tokens for the others."""
OTHERS = sorted(set(AGENT_TOOLS) - {"pi"})


async def rollout(
    name: str, ending: Ending, renderer: TemplateRenderer, splitter: Splitter, folder: Path
) -> tuple[AgentResult, SessionStats, int]:
    """(result, counters of the session, requests that the gateway saw)."""
    tight = ending == "overflow"
    limits = Limits(
        wall_s=150.0,
        max_calls=4 if ending == "budget" else CALLS,
        max_call_tokens=500 if tight else 2048,
        max_session_tokens=1 << 20,
        max_context_tokens=SMALL.get(name, 9000) if tight else AGENT_TOOLS[name].window_tokens,
    )
    engine = ScriptedEngine(renderer, ScriptedPolicy(renderer, splitter, AGENT_TOOLS[name]), sampled=True)
    if ending == "engine":
        engine.fail = lambda key: EngineError("gone") if key.turn >= 2 else None
    access = ModelAccess(
        public_id="",
        secret="",
        max_call_tokens=limits.max_call_tokens,
        max_context_tokens=limits.max_context_tokens,
    )
    harness = make_harness(named_recipe(name), LocalBackend("auto"), access)
    async with Gateway(TokenBackend(engine, renderer)) as gateway, gateway.listen_unix(folder / "g"):
        session = gateway.open_session("r", seed=1, limits=limits, listener=folder / "g")
        reached = ModelAccess(
            public_id=session.public_id,
            secret=session.secret,
            max_call_tokens=limits.max_call_tokens,
            max_context_tokens=limits.max_context_tokens,
        )
        task = Task(id="t", prompt=PROMPT, files=FILES, limits=limits)
        async with harness.worker(folder / "g") as worker:
            result = await worker.run(task, reached)
        await session.seal(5.0)
        return result, session.stats, gateway.counters.requests


def check(ending: Ending, result: AgentResult, stats: SessionStats, requests: int) -> None:
    assert result.exit != "timeout", result.detail
    assert requests < 2 * CALLS, "the agent kept asking"
    assert {"app.py", "check.py", "notes.txt"} <= set(result.tree)
    if ending == "budget":
        assert stats.budget_stop == "calls"
    elif ending == "engine":
        assert stats.infra_error == "gone"
        assert result.exit == "failed"
    else:
        assert stats.overflows
        assert result.exit == "failed"


@pytest.mark.parametrize("ending", ENDINGS)
async def test_pi_ends_with_its_session(
    ending: Ending, renderer: TemplateRenderer, splitter: Splitter, tmp_path: Path, needs_pi: None
) -> None:
    check(ending, *await rollout("pi", ending, renderer, splitter, tmp_path))


@pytest.mark.full
@pytest.mark.case(55)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("ending", ENDINGS)
async def test_every_agent_ends_with_its_session(
    name: str, ending: Ending, renderer: TemplateRenderer, splitter: Splitter, tmp_path: Path
) -> None:
    check(ending, *await rollout(name, ending, renderer, splitter, tmp_path))
