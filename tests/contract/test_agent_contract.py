"""The agent contract, over the agents that need no installation."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.agents import pi, script
from insitu.agents.base import Harness
from insitu.agents.harness import RecipeHarness
from insitu.agents.install import find
from insitu.agents.recipe import parse_agent
from insitu.sandbox.local import LocalBackend
from insitu_lab.testing import AgentContract

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


class TestScriptAgent(AgentContract):
    """The 100-line agent of the demo."""

    @pytest.fixture
    def harness(self) -> Harness:
        return RecipeHarness(script.RECIPE, LocalBackend())


class TestOwnAgent(AgentContract):
    """The example of a user's own agent."""

    @pytest.fixture
    def harness(self, monkeypatch: pytest.MonkeyPatch) -> Harness:
        monkeypatch.chdir(ROOT)
        return RecipeHarness(parse_agent("examples/own/agent.toml"), LocalBackend())


class TestPi(AgentContract):
    """The real Pi, a process per rollout."""

    @pytest.fixture
    def harness(self) -> Harness:
        if find(pi.RECIPE) is None:
            pytest.skip("pi is not installed: insitu install pi")
        return RecipeHarness(pi.RECIPE, LocalBackend())
