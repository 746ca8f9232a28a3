"""A server that is not there when a run starts is waited for, for a time that the operator sets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from insitu.chat.model_files import read_folder
from insitu.chat.template import template_renderer
from insitu.config import WARM_START, Config, load_config
from insitu.engines import factory as opening
from insitu.engines.factory import http_options, open_engine, open_server
from insitu.engines.replicas import EngineSet
from insitu.errors import ConfigError, EngineError, EngineUnavailable
from tests.fakes.sglang import FakeSglang
from tests.fakes.vllm import FakeVllm, listening

FAKES: Mapping[str, type[FakeVllm] | type[FakeSglang]] = {"vllm": FakeVllm, "sglang": FakeSglang}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "POLL_S", 0.05)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def config(kind: str, port: int, start_s: float) -> Config:
    at = f"engine.urls=http://127.0.0.1:{port}"
    return load_config(None, [f"engine.kind={kind}", at, f"engine.start_timeout_s={start_s}"])


@pytest.mark.parametrize("kind", FAKES)
async def test_a_server_that_comes_late_is_waited_for_and_that_is_said_once(kind: str) -> None:
    port, said, missed = free_port(), list[str](), asyncio.Event()

    def announce(line: str) -> None:
        said.append(line)
        missed.set()

    async with AsyncExitStack() as stack:

        async def come() -> None:
            await missed.wait()
            await asyncio.sleep(0.2)
            await stack.enter_async_context(listening(FAKES[kind](448).app(), port))

        coming = asyncio.create_task(come())
        opened = open_engine(config(kind, port, 30), None, probe=False, announce=announce)  # type: ignore[arg-type]
        async with opened as engine:
            assert engine.info.name == kind
        await coming
    (line,) = said
    assert line.startswith(f"waiting for {kind} at http://127.0.0.1:{port} (30 s): ")


@pytest.mark.parametrize(("start_s", "lines"), [(2.0, 1), (0.0, 0)])
async def test_one_that_does_not_come_ends_the_run_with_one_line(start_s: float, lines: int) -> None:
    said = list[str]()
    with pytest.raises(EngineUnavailable, match="is not reachable for ") as caught:
        async with open_engine(
            config("vllm", free_port(), start_s),
            None,
            probe=False,
            announce=said.append,  # type: ignore[arg-type]
        ):
            pass
    assert len(said) == lines
    assert ("waited 2 s for it (engine.start_timeout_s)" in str(caught.value)) == bool(lines)


async def test_one_that_is_there_and_refuses_is_not_waited_for() -> None:
    said = list[str]()
    async with listening(FakeVllm(448, scale_out=False, dev_mode=False).app()) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(EngineError, match="cannot say which weights"):
            async with open_engine(config("vllm", port, 30), None, probe=False, announce=said.append):  # type: ignore[arg-type]
                pass
    assert said == []


@asynccontextmanager
async def fakes(*models: FakeVllm) -> AsyncIterator[Config]:
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(listening(fake.app())) for fake in models]
        yield load_config(None, ["engine.kind=vllm", f"engine.urls={','.join(urls)}"])


async def test_several_servers_of_one_model_are_one_engine() -> None:
    async with (
        fakes(FakeVllm(448), FakeVllm(448)) as several,
        open_engine(several, template_renderer(read_folder(WARM_START))) as engine,
    ):
        assert isinstance(engine, EngineSet)
        assert len(engine._members) == 2


def other_weights() -> FakeVllm:
    fake = FakeVllm(448)
    fake.sums = {name: "0" * 64 for name in fake.sums}
    return fake


def data_parallel() -> FakeVllm:
    fake = FakeVllm(448)
    fake.data_parallel = 2
    return fake


@pytest.mark.parametrize(
    ("second", "line"),
    [
        (lambda: FakeVllm(448, max_model_len=8192), r"are not alike: policy with 8192 tokens .* 4096 tokens"),
        (lambda: FakeVllm(448, scale_out=False), "are not alike: .* a version per reply"),
        (other_weights, r"hold different weights as version 0 \([0-9a-f]{12}, [0-9a-f]{12}\)"),
        (
            data_parallel,
            r"has 2 workers where one engine has 1 \(--data-parallel-size\): start a server of its",
        ),
    ],
)
async def test_servers_that_are_not_alike_are_refused_in_one_line(
    second: Callable[[], FakeVllm], line: str
) -> None:
    async with fakes(FakeVllm(448), second()) as several:
        with pytest.raises(EngineError, match=line) as caught:
            async with open_engine(several, None, probe=False):  # type: ignore[arg-type]
                pass
    assert "\n" not in str(caught.value)


async def test_servers_at_different_versions_are_refused_unless_they_get_weights() -> None:
    ahead = FakeVllm(448)
    ahead.sampler.label = "3"
    async with fakes(FakeVllm(448), ahead) as several:
        with pytest.raises(EngineError, match=r"holds other weights \(version 3, .* start both on one model"):
            async with open_engine(several, None, probe=False):  # type: ignore[arg-type]
                pass
        async with open_server(several, None, probe=False) as engines:  # type: ignore[arg-type]
            assert engines.receipt.version == 0


def test_an_address_twice_is_refused() -> None:
    twice = load_config(None, ["engine.kind=vllm", "engine.urls=http://x,http://x/v1"])
    with pytest.raises(ConfigError, match="engine.urls names http://x twice"):
        http_options(twice)
