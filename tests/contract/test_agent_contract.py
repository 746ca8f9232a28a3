"""The agent contract, over the agents that need no installation."""

from __future__ import annotations

from pathlib import Path

import pytest

import insitu.demo
from insitu.agents.base import Harness
from insitu.agents.install import find_pi
from insitu.agents.pi import PiHarness
from insitu.agents.script import AGENT_AT, ScriptHarness
from insitu.sandbox.local import LocalBackend
from insitu.testing import AgentContract
from insitu.types import FileEntry


class TestScriptAgent(AgentContract):
    """The 100-line agent of the demo."""

    @pytest.fixture
    def harness(self) -> Harness:
        code = (Path(insitu.demo.__file__).parent / "script_agent.py").read_bytes()
        command = ["python3", "-I", "-S", f"{AGENT_AT}/agent.py"]
        return ScriptHarness(command, {"agent.py": FileEntry(content=code)}, LocalBackend())


class TestPi(AgentContract):
    """The real Pi, a process per rollout."""

    @pytest.fixture
    def harness(self) -> Harness:
        if (pi := find_pi()) is None:
            pytest.skip("pi is not installed: python -m insitu.agents.install pi")
        return PiHarness(pi, "fresh", LocalBackend())
