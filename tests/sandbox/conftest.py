"""A backend and a sandbox of each local mode."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.local import LocalBackend, LocalSandbox
from insitu.sandbox.setup_hints import find_bwrap


@pytest.fixture(scope="session", params=["bubblewrap", "namespaces"])
def backend(request: pytest.FixtureRequest) -> LocalBackend:
    if request.param == "bubblewrap" and not find_bwrap():
        pytest.skip("bubblewrap is not installed")
    if request.param == "namespaces" and os.geteuid() != 0:
        pytest.skip("the namespaces mode needs root")
    return LocalBackend(request.param)


@pytest.fixture
async def sandbox(backend: LocalBackend) -> AsyncIterator[LocalSandbox]:
    async with await backend.create(SandboxSpec()) as sandbox:
        yield sandbox
