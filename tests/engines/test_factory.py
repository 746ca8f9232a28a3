"""A server that is not there when a run starts is waited for, for a time that the operator sets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack

import pytest

from insitu.config import Config, load_config
from insitu.engines import factory as opening
from insitu.engines.factory import open_engine
from insitu.errors import EngineError, EngineUnavailable
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
    at = f"engine.url=http://127.0.0.1:{port}"
    return load_config(
        None, [f"engine.kind={kind}", at, "engine.retries=0", f"engine.start_timeout_s={start_s}"]
    )


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


@pytest.mark.parametrize(("start_s", "lines"), [(0.3, 1), (0.0, 0)])
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
    assert ("waited 0.3 s for it (engine.start_timeout_s)" in str(caught.value)) == bool(lines)


async def test_one_that_is_there_and_refuses_is_not_waited_for() -> None:
    said = list[str]()
    async with listening(FakeVllm(448, scale_out=False, dev_mode=False).app()) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(EngineError, match="cannot say which weights"):
            async with open_engine(config("vllm", port, 30), None, probe=False, announce=said.append):  # type: ignore[arg-type]
                pass
    assert said == []
