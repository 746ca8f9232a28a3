"""Contract suites for the authors of agents, sandboxes, engines and task sources.

Subclass a contract in a test module and define its one fixture; pytest then runs its `test_*` methods:

    from insitu.testing import SandboxContract

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
    from insitu.testing.agent import AgentContract
    from insitu.testing.engine import EngineContract
    from insitu.testing.sandbox import SandboxContract
    from insitu.testing.task_source import TaskSourceContract

__all__ = ["AgentContract", "EngineContract", "SandboxContract", "TaskSourceContract"]

_MODULES = {
    "AgentContract": "insitu.testing.agent",
    "EngineContract": "insitu.testing.engine",
    "SandboxContract": "insitu.testing.sandbox",
    "TaskSourceContract": "insitu.testing.task_source",
}

_HELPERS = ("sandbox_commands", "sandbox_files", "sandbox_isolation", "shell")

pytest.register_assert_rewrite(*_MODULES.values(), *(f"insitu.testing.{name}" for name in _HELPERS))


def __getattr__(name: str) -> Any:
    """Import a contract at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'insitu.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
