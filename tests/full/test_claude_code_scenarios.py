"""The four configurations of examples/claude_code with the real agent and a scripted policy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from insitu.agents.recipe import resolve_agent
from insitu.config import load_config
from insitu.sandbox.local import LocalBackend
from insitu_lab.conformance.agent_tools import AGENT_TOOLS
from insitu_lab.conformance.run import conform

pytestmark = pytest.mark.full
FOLDER = Path(__file__).parents[2] / "examples" / "claude_code"


@pytest.mark.parametrize(
    ("name", "compactions", "subagents", "segments"),
    [
        ("linear", None, None, {"final": 1}),
        ("subagents", None, 2, {"subagent": 2, "final": 1}),
        ("compact", 1, None, {"wipe": 2, "final": 1}),
        ("mixed", 1, 2, {"subagent": 2, "wipe": 1, "final": 1}),
    ],
)
async def test_what_a_scenario_makes_of_segments(
    name: str, compactions: int | None, subagents: int | None, segments: dict[str, int]
) -> None:
    config = load_config(FOLDER / f"{name}.toml")
    window = config.model.max_context_tokens
    tools = replace(AGENT_TOOLS["claude_code"], compacts=bool(config.harness.compact), window_tokens=window)
    recipe = resolve_agent(config.harness)
    found = await conform(recipe, LocalBackend(), tools=tools, compact=config.harness.compact)
    assert found.ok, found.failures
    assert (found.compactions, found.subagents, Counter(found.segments)) == (compactions, subagents, segments)
    assert found.trained == found.sampled
