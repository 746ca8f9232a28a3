"""The backend, a model server and the installed Pi."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from insitu.agents.install import Installed, find, install
from insitu.agents.pi import RECIPE
from insitu.sandbox.local import LocalBackend
from insitu.types import FileEntry, Task

if TYPE_CHECKING:
    from scripted_server import ScriptedServer


@pytest.fixture(scope="session")
def backend() -> LocalBackend:
    return LocalBackend("auto")


@pytest.fixture(scope="session")
def pi() -> Installed:
    """Installed where INSITU_REQUIRE_PI=1 says that it must be; otherwise only used when it is there."""
    if os.environ.get("INSITU_REQUIRE_PI") == "1":
        return install(RECIPE)
    found = find(RECIPE)
    if found is None:
        pytest.skip("Pi is not installed: insitu install pi (or set INSITU_REQUIRE_PI=1)")
    return found


@pytest.fixture
def task() -> Task:
    files = {
        "app.py": FileEntry(content=b"def f(a, b):\n    return a + b\n"),
        "check.py": FileEntry(content=b"import app\nassert app.f(3, 4) == 12\nprint('ok')\n"),
    }
    return Task(id="t", prompt="Fix f.", files=files)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ScriptedServer]:
    from scripted_server import READ_EDIT_CHECK, ScriptedServer, play

    async with ScriptedServer(tmp_path / "gateway.sock", play(READ_EDIT_CHECK)) as running:
        yield running
