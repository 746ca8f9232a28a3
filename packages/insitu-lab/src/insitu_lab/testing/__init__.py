"""Contract suites for the authors of agents, sandboxes, engines and task sources.

Subclass a contract in a test module and define its one fixture; pytest then runs its `test_*` methods:

    from insitu_lab.testing import SandboxContract

    class TestMySandbox(SandboxContract):
        @pytest.fixture
        def backend(self):
            return MyBackend()

Needs pytest and pytest-asyncio (the extra `insitu[testing]`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from insitu_lab.testing.agent import AgentContract
    from insitu_lab.testing.engine import EngineContract
    from insitu_lab.testing.sandbox import SandboxContract
    from insitu_lab.testing.task_source import TaskSourceContract

__all__ = ["AgentContract", "EngineContract", "SandboxContract", "TaskSourceContract"]

_MODULES = {
    "AgentContract": "insitu_lab.testing.agent",
    "EngineContract": "insitu_lab.testing.engine",
    "SandboxContract": "insitu_lab.testing.sandbox",
    "TaskSourceContract": "insitu_lab.testing.task_source",
}

_HELPERS = ("sandbox_commands", "sandbox_files", "sandbox_isolation", "shell")

pytest.register_assert_rewrite(*_MODULES.values(), *(f"insitu_lab.testing.{name}" for name in _HELPERS))


def __getattr__(name: str) -> Any:
    """Import a contract at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'insitu_lab.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
