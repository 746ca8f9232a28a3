"""One server or several as one engine: what dies or disagrees, and what becomes of requests and weights."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import insitu
from insitu.engines.base import Receipt
from insitu.engines.http import HttpOptions
from insitu.engines.replicas import EngineSet
from insitu.engines.vllm import VllmEngine, open_vllm
from insitu.errors import EngineError, EngineUnavailable, TrainError
from insitu.types import Generation, RequestKey, SamplingParams
from insitu_train.weights.files import DiskPublisher, PublishOptions
from tests.fakes.exporter import FakeExporter
from tests.fakes.vllm import FakeVllm, serve_vllm
from tests.fakes.weight_folders import served_sums

VOCAB = 40


class Run:
    """Fake servers, the set of them, and the publisher of a run's weights."""

    def __init__(self, fakes: list[FakeVllm], engine: EngineSet, folder: Path, said: list[str]) -> None:
        self.fakes, self.engine, self.said = fakes, engine, said
        self.exporter = FakeExporter()
        publisher = DiskPublisher(self.exporter, engine, PublishOptions(folder=folder))
        self.publish, self.training = publisher.publish, publisher.training

    @property
    def fake(self) -> FakeVllm:
        return self.fakes[0]


@asynccontextmanager
async def servers(
    folder: Path,
    count: int = 1,
    *,
    max_wait_s: float = 10.0,
    restarts: int = 3,
    share_gpu: bool = False,
    delay_s: float = 0.005,
) -> AsyncIterator[Run]:
    said: list[str] = []
    async with AsyncExitStack() as stack:
        fakes, engines = [], dict[str, VllmEngine]()
        for _ in range(count):
            fake = await stack.enter_async_context(serve_vllm(VOCAB, token_delay_s=delay_s))
            fake.sums = served_sums(FakeExporter().tensors)
            options = HttpOptions(url=fake.url, call_deadline_s=5.0, control_deadline_s=2.0, retries=1)
            engines[fake.url] = await stack.enter_async_context(open_vllm(options))
            fakes.append(fake)
        engine = EngineSet(
            engines, max_wait_s=max_wait_s, restarts=restarts, share_gpu=share_gpu, say=said.append
        )
        await stack.enter_async_context(engine)
        yield Run(fakes, engine, folder, said)


async def sample(engine: EngineSet, slot: int | str, turn: int = 0, tokens: int = 12) -> Generation:
    key = RequestKey(seed=1, rollout_id=f"r{slot}", turn=turn)
    return await engine.generate(np.arange(4, dtype=np.int32), SamplingParams(max_tokens=tokens), key)


async def test_requests_that_its_death_cut_short_are_made_again_with_the_published_weights(
    tmp_path: Path,
) -> None:
    async with servers(tmp_path) as run:
        fake, engine, said = run.fake, run.engine, run.said
        await run.publish(3)
        before = [(await sample(engine, slot)).ids.tolist() for slot in range(4)]
        running = [asyncio.create_task(sample(engine, slot)) for slot in range(4)]
        await asyncio.sleep(0.02)
        fake.restart()
        after = await asyncio.gather(*running)
        assert [made.ids.tolist() for made in after] == before
        assert {made.version_runs for made in after} == {((0, 3),)}
        assert len(run.exporter.wanted) == 1, "the trainer was not asked: it may be further"
        assert len(said) == 1
        assert said[0].endswith("restoring version 3")
        await run.publish(4)
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
    """Running calls and calls without a server get the reply of the restarted server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    server, said, lost = await life(port), list[str](), asyncio.Event()

    def say(line: str) -> None:
        said.append(line)
        lost.set()

    try:
        options = HttpOptions(url=f"http://127.0.0.1:{port}", call_deadline_s=20.0, control_deadline_s=5.0)
        async with open_vllm(options) as inner, AsyncExitStack() as stack:
            engine = await stack.enter_async_context(EngineSet({"one": inner}, max_wait_s=30.0, say=say))
            publisher = DiskPublisher(FakeExporter(), engine, PublishOptions(folder=tmp_path))
            fresh = (await sample(engine, 0)).ids.tolist()
            await publisher.publish(3)
            before = [(await sample(engine, slot)).ids.tolist() for slot in range(3)]
            assert before[0] != fresh
            under_way = [asyncio.create_task(sample(engine, slot)) for slot in range(2)]
            await asyncio.sleep(0.05)
            server.kill()
            await server.wait()
            late = asyncio.create_task(sample(engine, 2))
            async with asyncio.timeout(30.0):
                await lost.wait()
            server = await life(port)
            after = await asyncio.gather(*under_way, late)
        assert [made.ids.tolist() for made in after] == before
        assert {made.version_runs for made in after} == {((0, 3),)}
        assert [line.rpartition("; ")[2] for line in said] == ["waiting 30 s for it", "restoring version 3"]
    finally:
        server.kill()
        await server.wait()


async def test_a_failure_of_a_server_that_holds_its_weights_is_a_failure(tmp_path: Path) -> None:
    async with servers(tmp_path) as run:
        engine, said = run.engine, run.said
        await run.publish(1)
        with pytest.raises(EngineError, match="out of vocabulary"):
            key = RequestKey(seed=1, rollout_id="r", turn=0)
            await engine.generate(np.array([VOCAB + 1], np.int32), SamplingParams(max_tokens=2), key)
        assert said == []


async def test_a_server_that_stays_away_is_one_clear_line(tmp_path: Path) -> None:
    async with servers(tmp_path, max_wait_s=0.3) as run:
        engine = run.engine
        await run.publish(1)
        gone = HttpOptions(url="http://127.0.0.1:9", retries=0)
        http = engine._members[0].engine.http  # type: ignore[attr-defined]
        http.options, http._base = gone, gone.url
        with pytest.raises(
            EngineError, match=r"is not reachable .*; the server did not come back within 0\.3 s"
        ):
            await sample(engine, 0)


async def test_the_engine_sleeps_while_the_trainer_works(tmp_path: Path) -> None:
    async with servers(tmp_path, share_gpu=True) as run:
        fake = run.fake
        async with run.training():
            assert fake.sleeping
        assert not fake.sleeping
    async with servers(tmp_path) as run, run.training():
        assert not run.fake.sleeping


async def back_soon(fake: FakeVllm) -> None:
    await asyncio.sleep(0.1)
    fake.away = False


@pytest.mark.parametrize("when", ["before it sleeps", "asleep", "when it is to wake"])
async def test_a_server_that_is_started_again_around_a_step_does_not_end_the_run(
    when: str, tmp_path: Path
) -> None:
    async with servers(tmp_path, share_gpu=True) as run:
        fake, engine = run.fake, run.engine
        await run.publish(1)
        before = await sample(engine, 0)
        async with asyncio.TaskGroup() as group:
            if when == "before it sleeps":
                fake.restart()
                fake.away = True
                group.create_task(back_soon(fake))
            async with run.training():
                assert fake.sleeping
                if when != "before it sleeps":
                    fake.restart()
                if when == "when it is to wake":
                    fake.away = True
                    group.create_task(back_soon(fake))
            assert not fake.sleeping
        again = await sample(engine, 0)
        assert (again.ids.tolist(), again.version_runs) == (before.ids.tolist(), ((0, 1),))
        await run.publish(2)
        assert (await sample(engine, 0)).version_runs == ((0, 2),)


async def test_requests_wait_while_the_trainer_has_the_gpu_even_if_the_server_lost_its_weights(
    tmp_path: Path,
) -> None:
    """Loading weights then would take the memory that the trainer works in."""
    async with servers(tmp_path, share_gpu=True) as run:
        fake, engine = run.fake, run.engine
        await run.publish(1)
        running = asyncio.create_task(sample(engine, 0))
        await asyncio.sleep(0.02)
        async with run.training():
            assert (await running).version_runs == ((0, 1),)
            fake.restart()
            late = asyncio.create_task(sample(engine, 1))
            assert not (await asyncio.wait([late], timeout=0.2))[0]
            assert fake.sampler.label == "default"
        assert (await late).version_runs == ((0, 1),)


async def test_what_ended_a_step_is_told_even_when_the_server_is_gone_too(tmp_path: Path) -> None:
    async with servers(tmp_path, share_gpu=True, max_wait_s=0.2) as run:
        fake = run.fake
        await run.publish(1)
        with pytest.raises(TrainError, match="no update"):
            async with run.training():
                fake.away = True
                raise TrainError("loss nan: no update")
        fake.away = False


@pytest.mark.slow
async def test_a_defect_in_the_check_of_a_server_ends_the_waits_for_it(tmp_path: Path) -> None:
    async def broken() -> None:
        raise OSError("no such socket")

    async with servers(tmp_path, max_wait_s=30.0) as run:
        await run.publish(1)
        run.engine.check = broken  # type: ignore[method-assign]
        gone = HttpOptions(url="http://127.0.0.1:9", retries=0)
        http = run.engine._members[0].engine.http  # type: ignore[attr-defined]
        http.options, http._base = gone, gone.url
        async with asyncio.timeout(20.0):
            with pytest.raises(EngineError, match="OSError: no such socket"):
                await sample(run.engine, 0)


async def test_all_who_wait_share_one_patience(tmp_path: Path) -> None:
    """Also who asks once it is over: it is asked once more, and answers again as soon as it is back."""
    async with servers(tmp_path, max_wait_s=1.0) as run:
        fake, engine = run.fake, run.engine
        await run.publish(1)
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
    async with servers(tmp_path, restarts=2) as run:
        fake, engine, said = run.fake, run.engine, run.said
        await run.publish(1)
        server = engine._members[0].engine
        real = server.generate

        async def poison(ids: object, params: object, key: RequestKey) -> Generation:
            if key.rollout_id == "r9":
                fake.restart()
                raise EngineUnavailable("vllm broke off")
            return await real(ids, params, key)  # type: ignore[arg-type]

        server.generate = poison  # type: ignore[method-assign,assignment]
        async with asyncio.timeout(10.0):
            with pytest.raises(EngineError, match="vllm broke off"):
                await sample(engine, 9)
            with pytest.raises(EngineError, match="restarted more than 2 times since version 1"):
                await sample(engine, 0)
        assert len(said) == 2
        await run.publish(2)
        assert (await sample(engine, 0)).version_runs == ((0, 2),)
        with pytest.raises(EngineError, match="vllm broke off"):
            await sample(engine, 9)
        assert len(said) == 4, "a publication resets the count"


# --------------------------------------------------------------------------- several servers


def served(fake: FakeVllm) -> list[int]:
    """Numbers of generations that it got and finished."""
    return [len(fake.sampler.received), len([job for job in fake.sampler.received if job.finish])]


async def test_sessions_stay_and_new_ones_go_where_the_fewest_are(tmp_path: Path) -> None:
    async with servers(tmp_path, 3, delay_s=0.0) as run:
        await run.publish(1)
        for turn in range(3):
            for slot in range(6):
                await sample(run.engine, slot, turn)
        per_server = [
            {headers["X-Session-ID"] for headers in fake.headers if "X-Session-ID" in headers}
            for fake in run.fakes
        ]
        assert [len(sessions) for sessions in per_server] == [2, 2, 2]
        assert len(set.union(*per_server)) == 6
        for slot in range(4):
            run.engine.release(f"r{slot}")
        before = [served(fake)[0] for fake in run.fakes]
        for slot in range(10, 14):
            await sample(run.engine, slot)
        assert [served(fake)[0] - b for fake, b in zip(run.fakes, before, strict=True)] in (
            [2, 1, 1],
            [1, 2, 1],
            [2, 2, 0],
            [1, 1, 2],
        )
        assert max(len(member.sessions) for member in run.engine._members) == 2


async def test_a_server_that_dies_loses_only_its_sessions_and_returns_with_the_newest_weights(
    tmp_path: Path,
) -> None:
    async with servers(tmp_path, 2) as run:
        first, second = run.fakes
        await run.publish(1)
        alone = [(await sample(run.engine, slot)).ids.tolist() for slot in range(4)]
        running = [asyncio.create_task(sample(run.engine, slot, 0)) for slot in range(4)]
        while not first.sampler.jobs or not second.sampler.jobs:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        first.restart()
        first.away = True
        replies = await asyncio.gather(*running)
        assert [reply.ids.tolist() for reply in replies] == alone, "the same request draws the same tokens"
        assert "1 of 2 servers are left" in run.said[0]
        await run.publish(2)
        assert first.sampler.label == "default"
        before = served(first)
        assert {(await sample(run.engine, slot, 1)).version_runs for slot in range(4)} == {((0, 2),)}
        assert served(first) == before
        first.away = False
        async with asyncio.timeout(10.0):
            while run.engine._members[0].error is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert first.sampler.label == "2"
        assert "serves again, with version 2" in run.said[-1]
        reply = await sample(run.engine, "new")
        assert reply.version_runs == ((0, 2),)
        assert served(first)[1] > before[1], "the server with the fewest sessions is the one that returned"
        assert first.sums == second.sums


@pytest.mark.slow
async def test_a_version_exists_only_when_all_that_serve_have_it(tmp_path: Path) -> None:
    """A call at the server that is first to have it returns when the other one has it too."""
    async with servers(tmp_path, 2) as run:
        first, second = run.fakes
        await run.publish(1)
        await asyncio.gather(*(sample(run.engine, slot) for slot in range(2)))
        second.hangs.add("/collective_rpc")
        publication = asyncio.create_task(run.publish(2))
        while first.sampler.label != "2":  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        early = asyncio.create_task(sample(run.engine, 0))
        assert not (await asyncio.wait([early], timeout=0.3))[0]
        assert run.engine.receipt.version == 1
        await publication
        assert (await early).version_runs == ((0, 2),)
        assert "1 of 2 servers are left" in run.said[0]
        second.hangs.clear()


@pytest.mark.parametrize("how", ["refuses", "spoiled", "another receipt"])
async def test_one_that_disagrees_is_fenced_and_fed_again(how: str, tmp_path: Path) -> None:
    async with servers(tmp_path, 3) as run:
        await run.publish(1)
        bad = run.fakes[2]
        if how == "refuses":
            bad.refusals = 1
        elif how == "spoiled":
            bad.spoils = "model.norm.weight"
        else:
            engine = run.engine._members[2].engine
            real = engine.load

            async def other(*args: object, **options: object) -> Receipt:
                engine.load = real  # type: ignore[method-assign]
                receipt: Receipt = await real(*args, **options)  # type: ignore[arg-type]
                return replace(receipt, checksum="other")

            engine.load = other  # type: ignore[method-assign,assignment]
        receipt = await run.publish(2)
        assert receipt == run.engine.receipt
        assert receipt.version == 2
        assert "2 of 3 servers are left" in run.said[0]
        assert {(await sample(run.engine, slot)).version_runs for slot in range(4)} == {((0, 2),)}
        bad.spoils = ""
        async with asyncio.timeout(10.0):
            while run.engine._members[2].error is not None and how != "spoiled":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await run.publish(3)
        assert run.fakes[0].sampler.label == "3"


async def test_without_a_majority_there_is_no_version(tmp_path: Path) -> None:
    async with servers(tmp_path, 2) as run:
        await run.publish(1)
        engine = run.engine._members[1].engine
        real = engine.load

        async def other(*args: object, **options: object) -> Receipt:
            return replace(await real(*args, **options), checksum="other")  # type: ignore[arg-type]

        engine.load = other  # type: ignore[method-assign,assignment]
        with pytest.raises(EngineError, match="hold different weights after an update to version 2"):
            await run.publish(2)


async def test_all_sleep_and_wake_and_one_that_does_not_is_left_out(tmp_path: Path) -> None:
    async with servers(tmp_path, 2, share_gpu=True) as run:
        await run.publish(1)
        async with run.training():
            assert [fake.sleeping for fake in run.fakes] == [True, True]
            run.fakes[1].away = True
        assert not run.fakes[0].sleeping
        assert (await sample(run.engine, 0)).version_runs == ((0, 1),)


async def test_a_poisonous_request_does_not_take_all_servers_with_it(tmp_path: Path) -> None:
    async with servers(tmp_path, 2, restarts=1) as run:
        await run.publish(1)
        for member, fake in zip(run.engine._members, run.fakes, strict=True):
            real = member.engine.generate

            async def poison(
                ids: object, params: object, key: RequestKey, fake: FakeVllm = fake, real: object = real
            ) -> Generation:
                if key.rollout_id == "r9":
                    fake.restart()
                    raise EngineUnavailable("vllm broke off")
                return await real(ids, params, key)  # type: ignore[operator,no-any-return]

            member.engine.generate = poison  # type: ignore[method-assign,assignment]
        with pytest.raises(EngineUnavailable, match="vllm broke off"):
            await sample(run.engine, 9)
        assert {(await sample(run.engine, slot)).version_runs for slot in range(3)} == {((0, 1),)}
