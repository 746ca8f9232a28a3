"""Terminus-style agent: the model sees a terminal and types into it.

The agent loop is insitu's own package `terminus_agent`, which runs on the sandbox's Python.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from insitu.agents.artifacts import NOTHING, Artifacts, artifacts_from_config
from insitu.agents.script import AGENT_AT, ScriptHarness
from insitu.config import Config
from insitu.sandbox.base import SandboxBackend
from insitu.types import FileEntry

LOOP = Path(__file__).with_name("terminus_agent")
START = (
    f"import runpy, sys; sys.path.insert(0, {AGENT_AT!r}); "
    f"runpy.run_module({LOOP.name!r}, run_name='__main__')"
)


def from_config(config: Config, backend: SandboxBackend) -> ScriptHarness:
    """Return the configured agent."""
    warm = config.harness.mode == "warm"
    return terminus(backend, warm=warm, artifacts=artifacts_from_config(config))


def terminus(backend: SandboxBackend, *, warm: bool = False, artifacts: Artifacts = NOTHING) -> ScriptHarness:
    """Return the harness; its version is a digest of the loop's source."""
    source = {path.name: path.read_bytes() for path in sorted(LOOP.glob("*.py"))}
    return ScriptHarness(
        ["python3", "-I", "-S", "-c", START],
        {f"{LOOP.name}/{name}": FileEntry(content=content) for name, content in source.items()},
        backend,
        name="terminus",
        version=hashlib.sha256(repr(source).encode()).hexdigest()[:12],
        warm=warm,
        artifacts=artifacts,
    )
