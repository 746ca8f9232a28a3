"""The agent contract, over the agents that need no installation."""

from __future__ import annotations

import pytest

from insitu.agents import pi, script
from insitu.agents.base import Harness
from insitu.agents.harness import RecipeHarness
from insitu.agents.install import find
from insitu.sandbox.local import LocalBackend
from insitu.testing import AgentContract


class TestScriptAgent(AgentContract):
    """The 100-line agent of the demo."""

    @pytest.fixture
    def harness(self) -> Harness:
        return RecipeHarness(script.RECIPE, LocalBackend())


class TestPi(AgentContract):
    """The real Pi, a process per rollout."""

    @pytest.fixture
    def harness(self) -> Harness:
        if find(pi.RECIPE) is None:
            pytest.skip("pi is not installed: insitu install pi")
        return RecipeHarness(pi.RECIPE, LocalBackend())
