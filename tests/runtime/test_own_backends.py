"""Sandboxes and engines of the user, found by path."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from insitu.config import load_config
from insitu.engines.factory import ProbeRenderer, open_engine, open_server
from insitu.errors import ConfigError
from insitu.runtime.sandboxes import check_agents, make_backend, make_pool
from insitu.runtime.training import check_trained
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.local import LocalBackend

SANDBOXES = """
from insitu.sandbox.local import LocalBackend
class Mine(LocalBackend):
    name = "mine"
def make(config):
    return Mine(config.sandbox.mode)
BACKEND = Mine("auto")
def wrong(config):
    return 3
"""
ENGINES = """
from contextlib import asynccontextmanager
from insitu.engines.scripted import ScriptedEngine
@asynccontextmanager
async def opened(config):
    yield ScriptedEngine(None, None)
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(SANDBOXES)
    return str(tmp_path / "mine.py")


@pytest.mark.slow
async def test_sandboxes_come_from_the_users_backend(mine: str) -> None:
    for name in ("make", "BACKEND"):
        config = load_config(None, [f"sandbox.backend={mine}:{name}"])
        check_agents(config)
        assert make_backend(config).name == "mine"
        async with make_pool(config) as pool, await pool.create(SandboxSpec()) as sandbox:
            done = await sandbox.exec(["echo", "hello"], timeout_s=20)
            assert done.stdout == b"hello\n"


@pytest.mark.slow
def test_a_backend_object_is_used_as_it_is() -> None:
    backend = LocalBackend("auto")
    config = load_config(None, {"sandbox.backend": backend})
    assert make_backend(config) is backend


@pytest.mark.slow
def test_what_is_no_backend_is_refused(mine: str) -> None:
    with pytest.raises(ConfigError, match="is not a SandboxBackend or a function returning one"):
        make_backend(load_config(None, [f"sandbox.backend={mine}:wrong"]))
    with pytest.raises(ConfigError, match="unknown name 'dokcer' of kind sandboxes; did you mean docker"):
        load_config(None, ["sandbox.backend=dokcer"])


async def test_calls_go_to_the_users_engine(tmp_path: Path) -> None:
    (tmp_path / "engines.py").write_text(ENGINES)
    config = load_config(None, [f"engine.kind={tmp_path}/engines.py:opened"])
    check_trained(config)
    renderer = cast(ProbeRenderer, None)
    async with open_engine(config, renderer, probe=False) as engine:
        assert engine.info.name
    with pytest.raises(ConfigError, match="cannot load weights: it is not a LoadingEngine"):
        async with open_server(config, renderer):
            pass
    with pytest.raises(ConfigError, match="unknown name 'vlm' of kind engines; did you mean vllm"):
        load_config(None, ["engine.kind=vlm"])
