"""Harness of any command, for tests."""

from __future__ import annotations

from collections.abc import Sequence

from insitu.agents.artifacts import NOTHING, Artifacts
from insitu.agents.harness import RecipeHarness
from insitu.agents.recipe import Recipe
from insitu.sandbox.base import SandboxBackend
from insitu.types import Tree


def command_harness(
    command: Sequence[str],
    backend: SandboxBackend,
    *,
    name: str = "command",
    files: Tree | None = None,
    warm: bool = False,
    artifacts: Artifacts = NOTHING,
) -> RecipeHarness:
    """Return a harness of one command, by default without files and with one rollout per sandbox."""
    recipe = Recipe(name=name, command=command, files=files or {})
    return RecipeHarness(recipe, backend, uses=64 if warm else 1, artifacts=artifacts)
