"""A server that was started again in the middle of a run gets the run's weights back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

import insitu
from insitu.engines.http import HttpOptions
from insitu.engines.vllm import open_vllm
from insitu.errors import EngineError, EngineUnavailable, TrainError
from insitu.training.weights.files import DiskPublisher, PublishOptions
from insitu.training.weights.reconnect import ReconnectingEngine
from insitu.types import Generation, RequestKey, SamplingParams
from tests.fakes.exporter import FakeExporter
from tests.fakes.vllm import FakeVllm, serve_vllm
from tests.fakes.weight_folders import served_sums

VOCAB = 40


@asynccontextmanager
async def server(
    folder: Path, *, max_wait_s: float = 10.0, restarts: int = 3, share_gpu: bool = False
) -> AsyncIterator[tuple[FakeVllm, ReconnectingEngine, list[str], FakeExporter]]:
    said: list[str] = []
    exporter = FakeExporter()
    async with serve_vllm(VOCAB, token_delay_s=0.005) as fake:
        fake.sums = served_sums(exporter.tensors)
        options = HttpOptions(url=fake.url, call_deadline_s=5.0, control_deadline_s=2.0)
        async with open_vllm(options) as engine:
            publisher = DiskPublisher(exporter, engine, PublishOptions(folder=folder))
            yield (
                fake,
                ReconnectingEngine(
                    engine,
                    publisher,
                    max_wait_s=max_wait_s,
                    restarts=restarts,
                    share_gpu=share_gpu,
                    say=said.append,
                ),
                said,
                exporter,
            )


async def sample(engine: ReconnectingEngine, slot: int) -> Generation:
    key = RequestKey(seed=1, rollout_id=f"r{slot}", turn=0)
    return await engine.generate(np.arange(4, dtype=np.int32), SamplingParams(max_tokens=12), key)


async def test_requests_that_its_death_cut_short_are_made_again_with_the_published_weights(
    tmp_path: Path,
) -> None:
    async with server(tmp_path) as (fake, engine, said, exporter):
        await engine.publish(3)
        before = [(await sample(engine, slot)).ids.tolist() for slot in range(4)]
        running = [asyncio.create_task(sample(engine, slot)) for slot in range(4)]
        await asyncio.sleep(0.02)
        fake.restart()
        after = await asyncio.gather(*running)
        assert [made.ids.tolist() for made in after] == before
        assert {made.version_runs for made in after} == {((0, 3),)}
        assert len(exporter.wanted) == 1, "the trainer was not asked: it may be further"
        assert len(said) == 1
        assert said[0].endswith("restoring version 3")
        await engine.publish(4)
        assert (await sample(engine, 0)).version_runs == ((0, 4),)


LIFE = """
import asyncio, sys
from tests.fakes.exporter import FakeExporter
from tests.fakes.vllm import FakeVllm, listening
from tests.fakes.weight_folders import served_sums

async def live():
    fake = FakeVllm(40, token_delay_s=0.02)
    fake.sums = served_sums(FakeExporter().tensors)
    async with listening(fake.app(), int(sys.argv[1])):
        await asyncio.Event().wait()

asyncio.run(live())
"""


async def life(port: int) -> asyncio.subprocess.Process:
    """A server of its own, when it answers."""
    source = str(Path(insitu.__file__).parents[1])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LIFE, str(port), env={**os.environ, "PYTHONPATH": source}
    )
    async with asyncio.timeout(30.0):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return process
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_server_that_is_killed_9_samples_nothing_with_the_weights_it_comes_back_with(
    tmp_path: Path,
) -> None:
    """A process, and its keeper. Calls under way and calls that find nobody get what they would have got."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    server, said = await life(port), list[str]()
    try:
        options = HttpOptions(url=f"http://127.0.0.1:{port}", call_deadline_s=20.0, control_deadline_s=5.0)
        async with open_vllm(options) as inner:
            publisher = DiskPublisher(FakeExporter(), inner, PublishOptions(folder=tmp_path))
            engine = ReconnectingEngine(inner, publisher, max_wait_s=30.0, say=said.append)
            fresh = (await sample(engine, 0)).ids.tolist()
            await engine.publish(3)
            before = [(await sample(engine, slot)).ids.tolist() for slot in range(3)]
            assert before[0] != fresh
            under_way = [asyncio.create_task(sample(engine, slot)) for slot in range(2)]
            await asyncio.sleep(0.05)
            server.kill()
            await server.wait()
            late = asyncio.create_task(sample(engine, 2))
            server = await life(port)
            after = await asyncio.gather(*under_way, late)
        assert [made.ids.tolist() for made in after] == before
        assert {made.version_runs for made in after} == {((0, 3),)}
        assert len(said) == 1
        assert said[0].endswith("restoring version 3")
    finally:
        server.kill()
        await server.wait()


async def test_a_failure_of_a_server_that_holds_its_weights_is_a_failure(tmp_path: Path) -> None:
    async with server(tmp_path) as (_, engine, said, _exporter):
        await engine.publish(1)
        with pytest.raises(EngineError, match="out of vocabulary"):
            key = RequestKey(seed=1, rollout_id="r", turn=0)
            await engine.generate(np.array([VOCAB + 1], np.int32), SamplingParams(max_tokens=2), key)
        assert said == []


async def test_a_server_that_stays_away_is_one_clear_line(tmp_path: Path) -> None:
    async with server(tmp_path, max_wait_s=0.3) as (_, engine, _said, _exporter):
        await engine.publish(1)
        gone = HttpOptions(url="http://127.0.0.1:9", retries=0)
        engine._engine._http.options = gone  # type: ignore[attr-defined]
        engine._engine._http._base = gone.url  # type: ignore[attr-defined]
        with pytest.raises(
            EngineError, match=r"is not reachable .*; the server did not come back within 0\.3 s"
        ):
            await sample(engine, 0)


async def test_the_engine_sleeps_while_the_trainer_works(tmp_path: Path) -> None:
    async with server(tmp_path, share_gpu=True) as (fake, engine, _, _exporter):
        async with engine.training():
            assert fake.sleeping
        assert not fake.sleeping
    async with server(tmp_path) as (fake, engine, _, _exporter), engine.training():
        assert not fake.sleeping


async def back_soon(fake: FakeVllm) -> None:
    await asyncio.sleep(0.1)
    fake.away = False


@pytest.mark.parametrize("when", ["before it sleeps", "asleep", "when it is to wake"])
async def test_a_server_that_is_started_again_around_a_step_does_not_end_the_run(
    when: str, tmp_path: Path
) -> None:
    async with server(tmp_path, share_gpu=True) as (fake, engine, _, _exporter):
        await engine.publish(1)
        before = await sample(engine, 0)
        async with asyncio.TaskGroup() as group:
            if when == "before it sleeps":
                fake.restart()
                fake.away = True
                group.create_task(back_soon(fake))
            async with engine.training():
                assert fake.sleeping
                if when != "before it sleeps":
                    fake.restart()
                if when == "when it is to wake":
                    fake.away = True
                    group.create_task(back_soon(fake))
            assert not fake.sleeping
        again = await sample(engine, 0)
        assert (again.ids.tolist(), again.version_runs) == (before.ids.tolist(), ((0, 1),))
        await engine.publish(2)
        assert (await sample(engine, 0)).version_runs == ((0, 2),)


async def test_requests_wait_while_the_trainer_has_the_gpu_even_if_the_server_lost_its_weights(
    tmp_path: Path,
) -> None:
    """Loading weights then would take the memory that the trainer works in."""
    async with server(tmp_path, share_gpu=True) as (fake, engine, _, _exporter):
        await engine.publish(1)
        running = asyncio.create_task(sample(engine, 0))
        await asyncio.sleep(0.02)
        async with engine.training():
            assert (await running).version_runs == ((0, 1),)
            fake.restart()
            late = asyncio.create_task(sample(engine, 1))
            assert not (await asyncio.wait([late], timeout=0.2))[0]
            assert fake.sampler.label == "default"
        assert (await late).version_runs == ((0, 1),)


async def test_what_ended_a_step_is_told_even_when_the_server_is_gone_too(tmp_path: Path) -> None:
    async with server(tmp_path, share_gpu=True, max_wait_s=0.2) as (fake, engine, _, _exporter):
        await engine.publish(1)
        with pytest.raises(TrainError, match="no update"):
            async with engine.training():
                fake.away = True
                raise TrainError("loss nan: no update")
        fake.away = False


async def test_all_who_wait_share_one_patience(tmp_path: Path) -> None:
    """Also who asks once it is over: it is asked once more, and answers again as soon as it is back."""
    async with server(tmp_path, max_wait_s=1.0) as (fake, engine, _, _exporter):
        await engine.publish(1)
        fake.away = True
        began = time.monotonic()
        waiting = [sample(engine, slot) for slot in range(6)]
        failed = await asyncio.gather(*waiting, return_exceptions=True)
        assert all("the server did not come back within 1 s" in str(error) for error in failed)
        with pytest.raises(EngineError, match="the server did not come back"):
            await sample(engine, 7)
        assert time.monotonic() - began < 4.0
        fake.restart()
        fake.away = False
        assert (await sample(engine, 0)).version_runs == ((0, 1),)


async def test_what_kills_the_server_again_and_again_is_given_up(tmp_path: Path) -> None:
    async with server(tmp_path, restarts=2) as (fake, engine, said, _exporter):
        await engine.publish(1)
        real = engine._engine.generate

        async def poison(ids: object, params: object, key: RequestKey) -> Generation:
            if key.rollout_id == "r9":
                fake.restart()
                raise EngineUnavailable("vllm broke off")
            return await real(ids, params, key)  # type: ignore[arg-type]

        engine._engine.generate = poison  # type: ignore[method-assign,assignment]
        async with asyncio.timeout(10.0):
            with pytest.raises(EngineError, match="restarted more than 2 times since version 1"):
                await sample(engine, 9)
        assert len(said) == 2
        await engine.publish(2)
        assert (await sample(engine, 0)).version_runs == ((0, 2),)
        with pytest.raises(EngineError, match="more than 2 times"):
            await sample(engine, 9)
        assert len(said) == 4, "a publication resets the count"
