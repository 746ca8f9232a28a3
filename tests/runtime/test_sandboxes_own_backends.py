"""Sandboxes and engines of the user, found by path."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest

from insitu.config import load_config
from insitu.engines.factory import ProbeRenderer, open_engine, open_server
from insitu.errors import ConfigError, EngineError, SetupError
from insitu.runtime.sandboxes import check_agents, make_backend, make_pool
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.local import LocalBackend
from insitu.types import RequestKey, SamplingParams
from insitu_train.run import check_trained

SANDBOXES = """
from insitu.sandbox.local import LocalBackend
class Mine(LocalBackend):
    name = "mine"
def make(config):
    return Mine()
BACKEND = Mine("auto")
def wrong(config):
    return 3
def broken(config):
    raise ValueError("no cloud")
"""
ENGINES = """
from contextlib import asynccontextmanager
from insitu_train.demo.scripted import ScriptedEngine
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


@pytest.mark.slow
def test_what_a_backend_function_raises_is_one_line(mine: str) -> None:
    with pytest.raises(
        SetupError, match=r"mine.py:broken raised ValueError\('no cloud'\) \(mine.py line 11\)"
    ):
        make_backend(load_config(None, [f"sandbox.backend={mine}:broken"]))


FAULTY = """
from contextlib import asynccontextmanager
from insitu_train.demo.scripted import ScriptedEngine
from json import loads
from insitu.types import Generation
import numpy as np

def nothing(config):
    return None

@asynccontextmanager
async def broken(config):
    raise ValueError("no GPU")
    yield

@asynccontextmanager
async def thing(config):
    yield object()

@asynccontextmanager
async def inside(config):
    yield loads(config)

class Faulty(ScriptedEngine):
    async def generate(self, ids, params, key):
        if params.max_tokens == 1:
            raise ValueError("mine")
        if params.max_tokens == 2:
            return None
        logprobs = np.array([-1.0, np.nan, -1.0][: params.max_tokens - 1], np.float32)
        ids, runs = np.arange(3, dtype=np.int32), ((0, 0),)
        return Generation(ids=ids, logprobs=logprobs, finish="length", version_runs=runs)

@asynccontextmanager
async def faulty(config):
    assert config.engine.url == "http://127.0.0.1:9"
    yield Faulty(None, None, sampled=True)
"""


async def test_faults_of_the_users_engine_are_engine_errors_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    renderer = cast(ProbeRenderer, None)
    for name, kind, message in (
        ("nothing", EngineError, "nothing raised TypeError"),
        ("broken", EngineError, r"broken raised ValueError\('no GPU'\) \(faulty.py line 13\)"),
        ("inside", EngineError, r"inside raised TypeError\(.*\) \(faulty.py line 22\)"),
        ("thing", ConfigError, "thing opened no Engine: it lacks close, generate, info, pause, receipt"),
    ):
        config = load_config(None, [f"engine.kind={tmp_path}/faulty.py:{name}"])
        with pytest.raises(kind, match=message):
            async with open_engine(config, renderer, probe=False):
                pass
    config = load_config(None, [f"engine.kind={tmp_path}/faulty.py:faulty", "engine.urls=http://127.0.0.1:9"])
    async with open_engine(config, renderer, probe=False) as engine:
        for max_tokens, message in (
            (1, r"generate raised ValueError\('mine'\)"),
            (2, "generate returned no Generation"),
            (3, "2 logprobs for 3 ids"),
            (4, "logprob 1 is nan"),
        ):
            with pytest.raises(EngineError, match=message):
                await engine.generate(
                    np.ones(2, np.int32),
                    SamplingParams(max_tokens=max_tokens),
                    RequestKey(seed=1, rollout_id="a", turn=0),
                )


async def test_calls_go_to_the_users_engine(tmp_path: Path) -> None:
    (tmp_path / "engines.py").write_text(ENGINES)
    config = load_config(None, [f"engine.kind={tmp_path}/engines.py:opened"])
    check_trained(config)
    renderer = cast(ProbeRenderer, None)
    async with open_engine(config, renderer, probe=False) as engine:
        assert engine.info.name
    with pytest.raises(ConfigError, match="opened no LoadingEngine: it lacks has_own_head, load, rec"):
        async with open_server(config, renderer):
            pass
    with pytest.raises(ConfigError, match="unknown name 'vlm' of kind engines; did you mean vllm"):
        load_config(None, ["engine.kind=vlm"])
