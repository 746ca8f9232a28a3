"""Lost clients, retries, twins and failing engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
from gateway_rig import ASK, Rig, said

from insitu.chat.template import TemplateRenderer
from insitu.config import load_config
from insitu.errors import CaptureError, EngineError, EngineUnavailable, GatewayError
from insitu.gateway.request import GatewayConfig
from insitu.runtime.gateway import gateway_config
from insitu.types import Generation, IntArray, Limits, RequestKey, SamplingParams

GRACE = GatewayConfig(disconnect_grace_s=0.1)


async def until(condition: object, timeout_s: float = 3.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # type: ignore[operator]  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def send_raw(rig: Rig, body: dict[str, object]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that can be cut at any point."""
    host, port = rig.origin.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    payload = json.dumps(body).encode()
    head = (
        f"POST /s/{rig.session.public_id}/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: {rig.auth['Authorization']}\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    writer.write(head.encode() + payload)
    await writer.drain()
    return reader, writer


@pytest.mark.case(42)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_the_engine(renderer: TemplateRenderer, stream: bool) -> None:
    async with Rig(renderer, [said("x")], config=GRACE, delay_s=30.0) as rig:
        _, writer = await send_raw(rig, {"messages": ASK, "stream": stream})
        await until(lambda: rig.engine.in_flight)
        writer.close()
        await until(lambda: rig.engine.aborted)
        assert rig.session.stats.aborted == 1
        trajectory = await rig.session.seal(1.0)
        assert trajectory.ledger.captured == 0
        assert not trajectory.turns


@pytest.mark.case(41)
async def test_a_retry_within_the_grace_takes_over_the_call(renderer: TemplateRenderer) -> None:
    release = asyncio.Event()

    async def hold(key: RequestKey) -> None:
        await release.wait()

    body: dict[str, object] = {"messages": ASK, "stream": False}
    async with Rig(renderer, [said("x")], before=hold) as rig:
        _, writer = await send_raw(rig, body)
        await until(lambda: rig.engine.in_flight)
        writer.close()
        await until(lambda: rig.gateway.counters.client_gone)
        retry = asyncio.create_task(rig.post(body))
        await until(lambda: rig.session.stats.replays)
        release.set()
        assert (await retry)[0] == 200
        assert len(rig.engine.sent) == 1
        ledger = (await rig.session.seal(1.0)).ledger
        assert ledger.captured == ledger.trained


async def test_a_reply_that_was_not_delivered_is_replayed(renderer: TemplateRenderer) -> None:
    release = asyncio.Event()

    async def hold(key: RequestKey) -> None:
        if key.turn == 0:
            await release.wait()

    body: dict[str, object] = {"messages": ASK, "stream": True}
    async with Rig(renderer, [said("first"), said("second")], before=hold) as rig:
        _, writer = await send_raw(rig, body)
        await until(lambda: rig.engine.in_flight)
        writer.close()
        await until(lambda: rig.gateway.counters.client_gone)
        release.set()
        await until(lambda: rig.engine.in_flight == 0)
        assert b"first" in await rig.stream(body)
        # Delivered now: the same body again is a wish for another sample.
        assert b"second" in await rig.stream(body)
        assert [s.key.turn for s in rig.engine.sent] == [0, 1]
        assert (await rig.session.seal(1.0)).ledger.balanced


@pytest.mark.case(41)
async def test_a_client_that_leaves_in_the_middle_of_its_reply_gets_it_again(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    words = np.tile(renderer.codec.encode_content(" answers questions"), 300_000)
    big = np.append(words, renderer.end_ids[0]).astype(np.int32)
    limits = Limits(max_call_tokens=10**7, max_session_tokens=10**7, max_context_tokens=10**7)
    async with Rig(renderer, [big], unix=tmp_path / "gw.sock", limits=limits) as rig:
        url = f"{rig.base}/chat/completions"
        body = {"messages": ASK, "stream": True}
        async with rig.http.post(url, json=body, headers=rig.auth) as response:
            assert response.status == 200
            await response.content.readexactly(1000)
            response.close()
        await until(lambda: rig.gateway.counters.client_gone)
        raw = await rig.stream(body)
        assert raw.endswith(b"data: [DONE]\n\n")
        assert raw.count(b" answers questions") == 300_000
        assert len(rig.engine.sent) == 1
        ledger = (await rig.session.seal(1.0)).ledger
        assert ledger.trained == len(big)


async def test_a_reply_nobody_fetched_is_excluded(renderer: TemplateRenderer) -> None:
    release = asyncio.Event()

    async def hold(key: RequestKey) -> None:
        await release.wait()

    async with Rig(renderer, [said("first")], before=hold) as rig:
        _, writer = await send_raw(rig, {"messages": ASK})
        await until(lambda: rig.engine.in_flight)
        writer.close()
        await until(lambda: rig.gateway.counters.client_gone)
        release.set()
        await until(lambda: rig.engine.in_flight == 0)
        await asyncio.sleep(0)
        ledger = (await rig.session.seal(1.0)).ledger
        assert ledger.balanced
        assert ledger.captured > 0
        assert dict(ledger.excluded) == {"undelivered": ledger.captured}


@pytest.mark.case(38, 43)
async def test_twins_in_flight_get_their_own_samples(renderer: TemplateRenderer) -> None:
    script = [said(f"sample {i}") for i in range(4)]
    async with Rig(renderer, script, delay_s=0.05) as rig:
        answers = await asyncio.gather(*(rig.post({"messages": ASK}) for _ in range(4)))
        texts = {body["choices"][0]["message"]["content"] for _, body in answers}
        assert texts == {f"sample {i}" for i in range(4)}
        assert len({s.ids.tobytes() for s in rig.engine.sent}) == 1
        trajectory = await rig.session.seal(1.0)
        assert len(trajectory.turns) == 4
        assert trajectory.ledger.balanced


async def test_too_many_at_a_time_is_a_rate_limit(renderer: TemplateRenderer) -> None:
    config = GatewayConfig(max_concurrent_calls=2, max_waiting_calls=0)
    async with Rig(renderer, [said("x")], config=config, delay_s=0.1) as rig:
        answers = await asyncio.gather(*(rig.post({"messages": ASK}) for _ in range(3)))
        assert sorted(status for status, _ in answers) == [200, 200, 429]


@pytest.mark.parametrize("count", [17, 60])
async def test_parallel_calls_beyond_the_cap_wait_their_turn(renderer: TemplateRenderer, count: int) -> None:
    """As official clients send them, who know no limit; the engine never has more than the cap."""
    busiest = 0

    async def look(key: RequestKey) -> None:
        nonlocal busiest
        busiest = max(busiest, rig.engine.in_flight)

    ask = [{"messages": ASK, "user": str(i), "stream": bool(i % 2)} for i in range(count)]
    limits = Limits(max_context_tokens=4096, max_calls=100)
    async with Rig(renderer, [said("x")], limits=limits, delay_s=0.02, before=look) as rig:
        url = f"{rig.base}/chat/completions"

        async def post(body: dict[str, object]) -> int:
            async with rig.http.post(url, json=body, headers=rig.auth) as answer:
                await answer.read()
                return answer.status

        assert set(await asyncio.gather(*map(post, ask))) == {200}
        assert busiest <= GatewayConfig().max_concurrent_calls
        assert rig.session.stats.refusals == 0
        trajectory = await rig.sealed()
        assert len(trajectory.turns) == count


@pytest.mark.slow
async def test_a_call_does_not_wait_for_ever_and_gives_its_place_back(renderer: TemplateRenderer) -> None:
    """With one place and an engine that never answers: the first call fails at its deadline, the one that
    left takes no place after it, so the next one gets it, and the last one has waited too long by then."""
    release = asyncio.Event()

    async def hold(key: RequestKey) -> None:
        await release.wait()

    config = GatewayConfig(max_concurrent_calls=1, engine_deadline_s=0.8, disconnect_grace_s=0.0)
    async with Rig(renderer, [said("x")], config=config, before=hold) as rig:

        async def post(user: str) -> tuple[int, str]:
            status, body = await rig.post({"messages": ASK, "user": user})
            return status, body["error"]["message"] if status != 200 else ""

        async def queued(user: str) -> asyncio.Task[tuple[int, str]]:
            task = asyncio.create_task(post(user))
            await asyncio.sleep(0.15)
            return task

        first = await queued("0")
        _, writer = await send_raw(rig, {"messages": ASK, "user": "gone"})
        second, third = await queued("1"), await queued("2")
        writer.close()
        await until(lambda: rig.gateway.counters.client_gone == 1)
        assert [(await call)[0] for call in (first, second, third)] == [500, 500, 429]
        assert third.result()[1] == "Too many calls at a time in this session."
        assert len(rig.engine.sent) == 2
        release.set()
        assert (await post("3"))[0] == 200
        assert len(rig.engine.sent) == 3


async def test_a_client_that_sends_and_leaves_cannot_pile_up_calls(renderer: TemplateRenderer) -> None:
    release = asyncio.Event()

    async def hold(key: RequestKey) -> None:
        await release.wait()

    config = GatewayConfig(max_concurrent_calls=2, max_waiting_calls=0, disconnect_grace_s=30.0)
    async with Rig(renderer, [said("x")], config=config, before=hold) as rig:
        for number in range(2):
            _, writer = await send_raw(rig, {"messages": ASK, "user": str(number)})
            await until(lambda number=number: rig.engine.in_flight == number + 1)
            writer.close()
        await until(lambda: rig.gateway.counters.client_gone == 2)
        assert (await rig.post({"messages": ASK, "user": "2"}))[0] == 429
        retry = asyncio.create_task(rig.post({"messages": ASK, "user": "0"}))
        await until(lambda: rig.session.stats.replays)
        release.set()
        assert (await retry)[0] == 200
        assert len(rig.engine.sent) == 2
        # Both calls are over, so there is room again.
        assert (await rig.post({"messages": ASK, "user": "2"}))[0] == 200


async def test_one_outage_under_parallel_calls_counts_once(renderer: TemplateRenderer) -> None:
    def fail(key: RequestKey) -> EngineError | None:
        return EngineUnavailable("restarting") if key.turn < 5 or key.turn in (10, 11, 12) else None

    def ask(number: int) -> dict[str, object]:
        return {"messages": [{"role": "user", "content": f"Fix {number}."}]}

    async with Rig(renderer, [said("x")], fail=fail, delay_s=0.05) as rig:
        down = await asyncio.gather(*(rig.post(ask(i)) for i in range(5)))
        assert {status for status, _ in down} == {500}
        up = await asyncio.gather(*(rig.post(ask(i)) for i in range(5)))
        assert {status for status, _ in up} == {200}
        assert rig.session.stats.infra_error == ""
        # Answered calls in between: three more failures in a row are not the fourth.
        assert [(await rig.post(ask(9)))[0] for _ in range(4)] == [500, 500, 500, 200]
        assert rig.session.stats.infra_error == ""
        assert rig.session.stats.engine_failures == 8


async def test_a_failed_call_is_made_good_by_its_own_retry_only(renderer: TemplateRenderer) -> None:
    def fail(key: RequestKey) -> EngineError | None:
        return EngineUnavailable("restarting") if key.turn == 0 else None

    async with Rig(renderer, [said("x")], fail=fail) as rig:
        assert (await rig.post({"messages": ASK}))[0] == 500
        other = {"messages": [{"role": "user", "content": "A title, please."}]}
        assert (await rig.post(other))[0] == 200
        assert rig.session.stats.infra_error == "restarting"
        assert (await rig.post({"messages": ASK}))[0] == 200
        assert rig.session.stats.infra_error == ""


async def test_a_header_that_is_no_text_does_not_break_the_log(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    config = GatewayConfig(log_dir=tmp_path)
    async with Rig(renderer, [said("x")], config=config) as rig:
        host, port = rig.origin.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        payload = json.dumps({"messages": ASK}).encode()
        head = f"POST {rig.base.removeprefix(rig.origin)}/chat/completions HTTP/1.1\r\nHost: x\r\n"
        auth = f"Authorization: {rig.auth['Authorization']}\r\nContent-Length: {len(payload)}\r\n"
        writer.write(head.encode() + auth.encode() + b"x-session-id: a\xffb\r\n\r\n" + payload)
        async with asyncio.timeout(5.0):
            assert b" 200 " in await reader.readline()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        assert len((await rig.session.seal(1.0)).turns) == 1


async def test_an_engine_failure_makes_the_session_unscorable(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("x")], fail=lambda key: EngineError("out of memory at /host/path")) as rig:
        status, body = await rig.post({"messages": ASK})
        assert status == 500
        assert body["error"]["type"] == "server_error"
        assert "host" not in json.dumps(body)
        assert rig.session.stats.infra_error == "out of memory at /host/path"
        assert (await rig.post({"messages": ASK}))[0] == 403
        assert (await rig.session.seal(1.0)).ledger.balanced


async def test_an_engine_that_hangs_is_given_up(renderer: TemplateRenderer) -> None:
    config = GatewayConfig(engine_deadline_s=0.05)
    async with Rig(renderer, [said("x")], config=config, delay_s=30.0) as rig:
        assert (await rig.post({"messages": ASK}))[0] == 500
        assert "0.05 s" in rig.session.stats.infra_error
        assert len(rig.engine.aborted) == 1


@pytest.mark.case(44)
async def test_a_generation_may_take_as_long_as_configured_and_one_that_is_too_long_may_be_asked_again(
    renderer: TemplateRenderer,
) -> None:
    keys = ["engine.kind=vllm", "engine.urls=http://x", "engine.call_timeout_s=0.3"]
    config = gateway_config(load_config(None, keys))
    late = {"s": 30.0}

    async def slow(key: RequestKey) -> None:
        await asyncio.sleep(late["s"])

    async with Rig(renderer, [said("x")], config=config, before=slow) as rig:
        began = asyncio.get_running_loop().time()
        assert (await rig.post({"messages": ASK}))[0] == 500
        assert 0.3 <= asyncio.get_running_loop().time() - began < 20.0
        assert rig.session.stats.infra_error == "engine gave no answer within 0.3 s"
        late["s"] = 0.0
        assert (await rig.post({"messages": ASK}))[0] == 200
        assert rig.session.stats.infra_error == ""
        assert (await rig.sealed()).ledger.balanced


def broken(kind: str, n: int) -> Generation:
    ids = np.arange(5, 5 + n, dtype=np.int32)
    logprobs = np.full(n, -1.0, dtype=np.float32)
    version = 0
    if kind == "short":
        logprobs = logprobs[:-1]
    elif kind == "nan":
        logprobs[0] = np.nan
    elif kind == "positive":
        logprobs[0] = 0.5
    elif kind == "empty":
        ids, logprobs = ids[:0], logprobs[:0]
    elif kind == "foreign":
        ids[0] = 10**6
    elif kind == "version":
        version = 9
    return Generation(ids=ids, logprobs=logprobs, finish="stop", version_runs=((0, version),))


@pytest.mark.case(45)
@pytest.mark.parametrize("kind", ["short", "nan", "positive", "empty", "foreign", "version"])
async def test_nonsense_from_the_engine_fails_closed(renderer: TemplateRenderer, kind: str) -> None:
    async with Rig(renderer, [said("x")]) as rig:

        async def nonsense(ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
            return broken(kind, 3)

        rig.engine.generate = nonsense  # type: ignore[method-assign]
        assert (await rig.post({"messages": ASK}))[0] == 500
        assert rig.session.stats.infra_error
        if kind in ("short", "nan", "positive"):
            with pytest.raises(CaptureError, match="r/0"):
                await rig.session.seal(1.0)
        else:
            assert (await rig.session.seal(1.0)).ledger.captured == 0


async def test_a_defect_is_not_swallowed(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("x")]) as rig:
        rig.script = ["not a reply"]  # type: ignore[list-item]
        assert (await rig.post({"messages": ASK}))[0] == 500
        with pytest.raises((TypeError, AttributeError)):
            await rig.session.seal(1.0)


@pytest.mark.case(57)
async def test_sealing_with_calls_in_flight(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("x")], delay_s=30.0) as rig:
        calls = [asyncio.create_task(rig.post({"messages": ASK})) for _ in range(3)]
        await until(lambda: rig.engine.in_flight == 3)
        trajectory = await rig.session.seal(0.1)
        assert trajectory.ledger.balanced
        assert not trajectory.turns
        answers = await asyncio.gather(*calls)
        assert {status for status, _ in answers} == {409}
        with pytest.raises(GatewayError, match="sealed"):
            await rig.session.seal(0.1)


async def test_sealing_waits_for_a_call_that_ends_in_time(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("x")], delay_s=0.1) as rig:
        call = asyncio.create_task(rig.post({"messages": ASK}))
        await until(lambda: rig.engine.in_flight)
        trajectory = await rig.session.seal(5.0)
        assert (await call)[0] == 200
        assert trajectory.ledger.trained == rig.session.stats.sampled_tokens > 0


@pytest.mark.parametrize("seed", range(12))
async def test_whenever_a_session_is_sealed_every_call_is_answered(
    renderer: TemplateRenderer, seed: int
) -> None:
    """Calls, lost clients and the seal at random times: answers for all, nothing left, ledger balanced."""
    dice = random.Random(seed)

    async def pause(key: RequestKey) -> None:
        await asyncio.sleep(dice.random() * 0.03)

    config = GatewayConfig(disconnect_grace_s=0.01, hold_headers_s=0.01, keep_alive_s=0.005)
    async with Rig(renderer, [said("x"), said("y")], before=pause, config=config) as rig:

        async def client(index: int) -> int | None:
            await asyncio.sleep(dice.random() * 0.03)
            body = {"messages": ASK, "stream": dice.random() < 0.5, "user": str(index % 2)}
            patience = 0.01 if dice.random() < 0.3 else 5.0
            try:
                async with asyncio.timeout(patience):
                    url = f"{rig.base}/chat/completions"
                    async with rig.http.post(url, json=body, headers=rig.auth) as response:
                        await response.read()
                        return response.status
            except TimeoutError:
                return None

        clients = [asyncio.create_task(client(i)) for i in range(8)]
        await asyncio.sleep(dice.random() * 0.06)
        trajectory = await rig.session.seal(0.01)
        assert {await c for c in clients} <= {200, 409, None}
        assert rig.engine.in_flight == 0
        assert trajectory.ledger.balanced
        assert trajectory.ledger.captured == rig.session.stats.sampled_tokens
        assert rig.session.failure is None
        assert rig.gateway.counters.defects == 0


async def test_closing_the_gateway_leaves_nothing_running(renderer: TemplateRenderer) -> None:
    rig = Rig(renderer, [said("x")], delay_s=30.0)
    async with rig:
        call = asyncio.create_task(rig.post({"messages": ASK}))
        await until(lambda: rig.engine.in_flight)
        await rig.gateway.__aexit__(None, None, None)
        assert rig.engine.in_flight == 0
        assert (await call)[0] == 409
    assert rig.session.state == "sealed"


async def test_many_sessions_at_once_keep_apart(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("x")], delay_s=0.01) as rig:
        sessions = [rig.gateway.open_session(f"r/{i}", seed=i, limits=Limits()) for i in range(50)]

        async def one(index: int) -> int:
            body = {"messages": [{"role": "user", "content": f"I am {index}"}]}
            headers = {"x-api-key": sessions[index].secret}
            async with rig.http.post(f"{rig.origin}/v1/chat/completions", json=body, headers=headers) as r:
                return r.status

        assert set(await asyncio.gather(*(one(i) for i in range(50)))) == {200}
        for sent in rig.engine.sent:
            index = int(sent.key.rollout_id.split("/")[1])
            assert f"I am {index}<|im_end|>" in renderer.decode(sent.ids)
            assert sent.key.seed == index
