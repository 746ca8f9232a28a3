"""Pull mode: what a trainer may and may not do."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import numpy as np
import pytest

from insitu.config import load_config
from insitu.engines.base import Receipt
from insitu.engines.factory import open_engine
from insitu.errors import ConfigError, EngineError, SetupError
from insitu.types import Generation, IntArray, RequestKey, SamplingParams
from insitu_bridges.external import DeliveryRejected, ExternalEngine, serve_external

PROMPT: IntArray = np.array([1, 2, 3], dtype=np.int32)
GOOD: dict[str, Any] = {"ids": [5, 6], "logprobs": [-0.5, -1.0], "finish": "length"}


def asked(engine: ExternalEngine, turn: int = 0) -> asyncio.Task[Generation]:
    key = RequestKey(seed=1, rollout_id="r/0", turn=turn)
    params = SamplingParams(max_tokens=2, temperature=0.7, stop_ids=frozenset({9}))
    return asyncio.create_task(engine.generate(PROMPT, params, key))


def make(**options: Any) -> ExternalEngine:
    return ExternalEngine(max_context_tokens=64, **{"call_deadline_s": 5.0, **options})


async def test_a_request_and_its_answer() -> None:
    engine = make()
    engine.publish(Receipt(version=3, checksum="abc"))
    task = asked(engine)
    (request,) = await engine.take(4, wait_s=5)
    assert request.ids.tolist() == PROMPT.tolist()
    assert (request.params.max_tokens, request.params.temperature) == (2, 0.7)
    assert engine.open([request.name, "other"]) == [request.name]
    engine.deliver(request.name, **GOOD)
    said = await task
    assert said.ids.tolist() == [5, 6]
    assert said.version_runs == ((0, 3),)
    assert engine.open([request.name]) == []


async def test_taking_waits_and_then_comes_back_empty() -> None:
    engine = make()
    assert await engine.take(wait_s=0) == []
    assert await engine.take(wait_s=0.05) == []
    later = asyncio.create_task(engine.take(wait_s=5))
    await asyncio.sleep(0.05)
    task = asked(engine)
    (request,) = await later
    engine.deliver(request.name, **GOOD)
    await task


async def test_an_answer_counts_once() -> None:
    engine = make()
    task = asked(engine)
    (request,) = await engine.take(wait_s=5)
    engine.deliver(request.name, **GOOD)
    with pytest.raises(DeliveryRejected, match="was answered before"):
        engine.deliver(request.name, **GOOD)
    with pytest.raises(DeliveryRejected, match="not known"):
        engine.deliver("insitu-nobody-0", **GOOD)
    await task


async def test_a_request_that_was_not_handed_out_cannot_be_answered() -> None:
    engine = make()
    task = asked(engine)
    await asyncio.sleep(0)
    (waiting,) = engine._queue
    with pytest.raises(DeliveryRejected, match="not handed out"):
        engine.deliver(waiting.request.name, **GOOD)
    task.cancel()


async def test_the_deadline_and_a_late_answer() -> None:
    engine = make(call_deadline_s=0.1)
    task = asked(engine)
    (request,) = await engine.take(wait_s=5)
    with pytest.raises(EngineError, match="no answer within 0.1 s"):
        await task
    with pytest.raises(DeliveryRejected, match="was given up"):
        engine.deliver(request.name, **GOOD)


async def test_a_cancelled_request_is_not_handed_out_and_its_answer_refused() -> None:
    engine = make()
    taken, queued = asked(engine, 0), asked(engine, 1)
    await asyncio.sleep(0)
    (request,) = await engine.take(1, wait_s=5)
    for task in (taken, queued):
        task.cancel()
    await asyncio.wait([taken, queued])
    assert await engine.take(4, wait_s=0.05) == []
    assert engine.open([request.name]) == []
    with pytest.raises(DeliveryRejected, match="was given up"):
        engine.deliver(request.name, **GOOD)


async def test_an_answer_to_a_request_that_is_just_given_up_is_refused() -> None:
    """Also before the one that waited for it has run again; an aborting pause passes over it."""
    engine = make()
    task = asked(engine)
    (request,) = await engine.take(wait_s=5)
    task.cancel()
    with pytest.raises(DeliveryRejected, match="was given up"):
        engine.deliver(request.name, **GOOD)
    with pytest.raises(DeliveryRejected, match="was given up"):
        engine.fail(request.name, "no")
    await engine.pause("abort")
    await asyncio.wait([task])
    assert task.cancelled()


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_a_pause_that_was_given_up_holds_nobody(how: str) -> None:
    engine = make(call_deadline_s=5.0 if how == "cancelled" else 0.05)
    asked(engine)
    (request,) = await engine.take(wait_s=5)
    if how == "cancelled":
        pausing = asyncio.create_task(engine.pause())
        await asyncio.sleep(0)
        pausing.cancel()
        await asyncio.wait([pausing])
    else:
        engine._idle.clear()
        with pytest.raises(EngineError, match="did not end its requests"):
            await engine.pause()
    later = asked(engine, 1)
    (next_one,) = [taken for taken in await engine.take(2, wait_s=5) if taken.name != request.name]
    engine.deliver(next_one.name, **GOOD)
    assert (await later).ids.tolist() == [5, 6]


@pytest.mark.case(45)
@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"ids": [5, 6, 7], "logprobs": [-1.0] * 3}, "3 tokens where 1 to 2"),
        ({"logprobs": [-1.0]}, "1 logprobs for 2 ids"),
        ({"logprobs": [-1.0, float("nan")]}, "logprob 1 is nan"),
        ({"logprobs": None}, "no logprobs"),
        ({"ids": []}, "0 tokens"),
        ({"ids": [9, 5]}, "follow a stop id"),
        ({"finish": "stop"}, "not a stop id"),
        ({"version_runs": ((0, 1),)}, "newer than what was published"),
        ({"version_runs": ((1, 0),)}, "do not cover"),
    ],
)
async def test_a_broken_answer_fails_the_request(change: dict[str, Any], line: str) -> None:
    engine = make()
    task = asked(engine)
    (request,) = await engine.take(wait_s=5)
    with pytest.raises(DeliveryRejected, match=line):
        engine.deliver(request.name, **{**GOOD, **change})
    with pytest.raises(EngineError, match=line):
        await task
    with pytest.raises(DeliveryRejected, match="failed before"):
        engine.deliver(request.name, **GOOD)


async def test_a_trainer_that_fails_says_so() -> None:
    engine = make()
    task = asked(engine)
    (request,) = await engine.take(wait_s=5)
    engine.fail(request.name, "out of\nmemory")
    with pytest.raises(EngineError, match="the trainer failed: out of memory"):
        await task


async def test_versions_do_not_go_back() -> None:
    engine = make()
    engine.publish(Receipt(version=2, checksum="a"))
    with pytest.raises(DeliveryRejected, match="older"):
        engine.publish(Receipt(version=1, checksum="b"))


async def test_weights_that_changed_since_the_request_was_taken() -> None:
    engine = make()
    first, second = asked(engine), asked(engine, 1)
    one, two = await engine.take(2, wait_s=5)
    engine.publish(Receipt(version=1, checksum="a"))
    with pytest.raises(DeliveryRejected, match="version 1 was published since"):
        engine.deliver(one.name, **GOOD)
    with pytest.raises(EngineError, match="must have version runs"):
        await first
    engine.deliver(two.name, **GOOD, version_runs=((0, 0), (1, 1)))
    assert (await second).version_runs == ((0, 0), (1, 1))


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_pause_modes(mode: Any) -> None:
    engine = make()
    out = asked(engine, 0)
    (request,) = await engine.take(wait_s=5)
    await engine.pause(mode)
    waiting = asked(engine, 1)
    assert await engine.take(wait_s=0.05) == []
    if mode == "abort":
        with pytest.raises(EngineError, match="aborted"):
            await out
    else:
        engine.deliver(request.name, **GOOD)
        await out
    await engine.resume()
    (request,) = await engine.take(wait_s=5)
    engine.deliver(request.name, **GOOD)
    await waiting


async def test_closing_fails_whoever_waits() -> None:
    engine = make()
    task = asked(engine)
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await task


@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        ("take", b"[]", 400),
        ("take", b"{", 400),
        ("take", b'{"limit": 0}', 400),
        ("take", b'{"wait_s": -1}', 400),
        ("deliver", b'{"name": "x"}', 409),
        ("deliver", b'{"name": "x", "version_runs": [1]}', 400),
        ("fail", b'{"name": "x"}', 409),
        ("publish", b'{"version": -1}', 400),
        ("nothing", b"{}", 404),
    ],
)
async def test_what_a_trainer_gets_wrong_over_http(route: str, body: bytes, status: int) -> None:
    async with serve_external(make(), "127.0.0.1", 0, "s") as url, aiohttp.ClientSession() as http:
        head = {"Authorization": "Bearer s"}
        async with http.post(f"{url}/v1/{route}", data=body, headers=head) as answer:
            assert answer.status == status
            assert (await answer.json())["error"]
        async with http.post(f"{url}/v1/{route}", data=body, headers={"Authorization": "Bearer t"}) as answer:
            assert answer.status == 401


async def test_without_a_key_nobody_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs a key"):
        async with serve_external(make(), "127.0.0.1", 0, ""):
            pass
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    config = load_config(overrides=["engine.kind=external", "engine.key_env=NO_SUCH_KEY"])
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        async with open_engine(config, None):  # type: ignore[arg-type]
            pass


async def test_a_taken_port() -> None:
    async with serve_external(make(), "127.0.0.1", 0, "s") as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(SetupError, match="cannot listen"):
            async with serve_external(make(), "127.0.0.1", port, "s"):
                pass
