"""The black box: what reaches the provider, what comes back, what is kept and what it may cost."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from insitu.config import load_config
from insitu.errors import ConfigError, GatewayError
from insitu.gateway.admin import Admin
from insitu.gateway.body_parser import INLINE_BYTES
from insitu.gateway.dialects.base import WireError
from insitu.gateway.request import GatewayConfig
from insitu.gateway.routes import parse_path
from insitu.gateway.server import Gateway
from insitu.gateway.session import Rejections
from insitu.gateway.text_log import spent_in
from insitu.types import Limits
from insitu_bridges.provider.backend import ProviderBackend, ProviderSession, checked_model, open_provider
from insitu_bridges.provider.limits import ProviderOptions
from insitu_bridges.provider.upstream import upstream_options
from insitu_bridges.provider.usage import Prices, usage_of
from tests.fakes.provider import KEY, FakeProvider, frames, serve_provider, whole

ROUTES = [
    ("v1/chat/completions", "Authorization", f"Bearer {KEY}"),
    ("v1/responses", "Authorization", f"Bearer {KEY}"),
    ("v1/messages", "x-api-key", KEY),
    ("v1beta/models/big-model:generateContent", "x-goog-api-key", KEY),
]
PRICES = Prices(input=1.0, cached=0.1, output=10.0)
COST = (60 * 1.0 + 40 * 0.1 + 20 * 10.0) / 1e6


class Lab:
    """A provider, the gateway before it, one session and its agent."""

    def __init__(
        self,
        provider: FakeProvider,
        backend: ProviderBackend,
        gateway: Gateway,
        session: ProviderSession,
        base: str,
    ) -> None:
        self.provider, self.backend, self.gateway = provider, backend, gateway
        self.session, self.base = session, base
        self.http: aiohttp.ClientSession

    @property
    def head(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.session.secret}"}

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, bytes, Any]:
        named = {"model": "big-model", **body} if isinstance(body, dict) and "v1beta" not in path else body
        raw = body if isinstance(body, bytes) else json.dumps(named).encode()
        async with self.http.post(
            f"{self.base}/{path}", data=raw, headers={**self.head, **headers}
        ) as answer:
            return answer.status, await answer.read(), answer.headers

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.session.record.path.read_text().splitlines()]


@asynccontextmanager
async def lab(
    folder: Path,
    *,
    max_calls: int = 100,
    provider: Any = None,
    config: GatewayConfig | None = None,
    **options: Any,
) -> AsyncIterator[Lab]:
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(serve_provider(**(provider or {})))
        chosen = ProviderOptions(
            **{
                "url": fake.url,
                "model": "big-model",
                "key": KEY,
                "prices": PRICES,
                "max_wait_s": 0.0,
                **options,
            }
        )
        backend = await stack.enter_async_context(open_provider(chosen, folder))
        gateway = await stack.enter_async_context(Gateway(backend, config))
        listener = await stack.enter_async_context(gateway.listen_tcp())
        session = gateway.open_session("r/0", limits=Limits(max_calls=max_calls))
        assert isinstance(session, ProviderSession)
        made = Lab(fake, backend, gateway, session, f"{listener.origin}/s/{session.public_id}")
        made.http = await stack.enter_async_context(aiohttp.ClientSession())
        yield made


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# --------------------------------------------------------------------------- there and back


@pytest.mark.parametrize(("path", "header", "value"), ROUTES)
async def test_a_request_goes_there_and_back_unchanged(
    tmp_path: Path, path: str, header: str, value: str
) -> None:
    raw = b'{ "model": "big-model",\n "temperature":0.30, "x": "\\u00e9" }'
    async with lab(tmp_path) as it:
        status, reply, headers = await it.post(path, raw, **{"anthropic-version": "2023-06-01", "X-Spy": "1"})
        assert (status, json.loads(reply)) == (200, whole("/" + path))
        (sent,) = it.provider.received
        assert (sent.method, sent.path, sent.body) == ("POST", "/" + path, raw)
        assert sent.headers[header] == value
        assert it.session.secret not in str(dict(sent.headers))
        assert sent.headers["anthropic-version"] == "2023-06-01"
        assert "X-Spy" not in sent.headers
        assert headers["Request-Id"] == "req_1"
        assert "Set-Cookie" not in headers
        await it.session.seal(1)
        (line,) = it.lines
        assert line["request"] == json.loads(raw)
        assert line["reply"] == json.loads(reply)
        assert (line["status"], line["complete"]) == (200, True)
        usage = {"prompt_tokens": 100, "cached_tokens": 40, "sampled_tokens": 20, "estimated": False}
        assert line["usage"] == {**usage, "written_tokens": 0}
        assert it.session.stats.cost == pytest.approx(COST)
        assert KEY not in it.session.record.path.read_text()


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/responses", "v1/messages"])
async def test_a_stream_comes_back_byte_for_byte(tmp_path: Path, path: str) -> None:
    async with lab(tmp_path) as it:
        status, reply, headers = await it.post(path, {"stream": True})
        assert (status, reply) == (200, b"".join(frames("/" + path)))
        assert headers["Content-Type"] == "text/event-stream"
        await it.session.seal(1)
        assert it.lines[0]["reply"] == reply.decode()
        assert it.lines[0]["usage"]["estimated"] == (path == "v1/chat/completions")


async def test_gemini_streams_with_its_query_and_no_other(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        path = "v1beta/models/big-model:streamGenerateContent"
        _, reply, _ = await it.post(f"{path}?alt=sse&key=leak&x=1", {"contents": []})
        assert reply == b"".join(frames("/" + path))
        assert it.provider.received[0].path == f"/{path}?alt=sse"


async def test_a_stream_is_handed_on_as_it_comes(tmp_path: Path) -> None:
    async with lab(tmp_path, provider={"chunk_delay_s": 0.05}) as it:
        url = f"{it.base}/v1/messages"
        async with it.http.post(url, json={"model": "big-model", "stream": True}, headers=it.head) as answer:
            first = await answer.content.readany()
            assert first == frames("/v1/messages")[0]
            assert not it.session.record.path.exists()


async def test_models_are_the_providers(tmp_path: Path) -> None:
    async with lab(tmp_path) as it, it.http.get(f"{it.base}/v1/models", headers=it.head) as answer:
        assert (await answer.json())["data"] == [{"id": "big-model"}]


async def test_nothing_of_it_can_be_trained(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        await it.post("v1/messages", {})
        trajectory = await it.session.seal(1)
        assert (trajectory.segments, trajectory.turns) == ((), ())
        assert trajectory.ledger.balanced
        assert trajectory.ledger.captured == 0
        with pytest.raises(GatewayError, match="already sealed"):
            await it.session.seal(1)
        assert (await it.post("v1/messages", {}))[0] == 409


async def test_the_admin_api_opens_and_seals_sessions_before_a_provider(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        admin = Admin(it.gateway)
        async with admin.listen_tcp() as listener:
            head = {"Authorization": f"Bearer {admin.secret}"}

            async def ask(method: str, path: str, body: Any = None) -> tuple[int, Any]:
                url = f"{listener.origin}/{path}"
                async with it.http.request(method, url, json=body, headers=head) as answer:
                    return answer.status, await answer.json()

            tool = {"name": "report", "parameters": {"type": "object"}}
            assert (await ask("POST", "sessions", {"tools": [tool]}))[0] == 400
            status, opened = await ask("POST", "sessions", {"rollout_id": "r/9", "limits": {"max_calls": 1}})
            assert status == 201
            url = f"{it.base.rpartition('/')[0]}/{opened['public_id']}/v1/messages"
            for wanted in (200, 403):
                auth = {"x-api-key": opened["secret"]}
                async with it.http.post(url, json={"model": "big-model"}, headers=auth) as answer:
                    assert answer.status == wanted
            _, sealed = await ask("POST", f"sessions/{opened['public_id']}/seal", {})
            assert (sealed["stats"]["calls"], sealed["stats"]["cost"]) == (1, pytest.approx(COST))
            assert sealed["ledger"]["captured"] == 0
            status, refused = await ask("GET", f"sessions/{opened['public_id']}/export")
            assert (status, "no tokens" in refused["error"]["message"]) == (409, True)


# --------------------------------------------------------------------------- failures


async def test_the_providers_errors_are_its_own(tmp_path: Path) -> None:
    async with lab(tmp_path, provider={"status": 529}) as it:
        status, reply, headers = await it.post("v1/messages", {})
        assert status == 529
        assert json.loads(reply)["error"]["type"] == "overloaded_error"
        assert headers["Retry-After"] == "7"
        assert it.session.stats.cost == 0


async def test_requests_that_the_gateway_refuses_are_counted(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        assert (await it.post("v1/chat/completions", b"["))[0] == 400
        assert (await it.post("v1/nothing", {}))[0] == 404
        stats = it.session.stats
        assert stats.calls == 0
        assert stats.rejections == Rejections(2, "HTTP 400: The body is not JSON.")


async def test_a_provider_that_is_not_there(tmp_path: Path) -> None:
    async with lab(tmp_path, url="http://127.0.0.1:9") as it:
        status, reply, _ = await it.post("v1/messages", {})
        assert status == 500
        assert json.loads(reply)["type"] == "error"
        assert b"127.0.0.1" not in reply


async def test_a_provider_that_hangs(tmp_path: Path) -> None:
    async with lab(tmp_path, provider={"chunk_delay_s": 5.0}, call_deadline_s=0.2) as it:
        with pytest.raises(aiohttp.ClientPayloadError):
            await it.post("v1/messages", {"stream": True})
        await it.session.seal(1)
        assert (it.lines[0]["complete"], it.lines[0]["status"]) == (False, 200)


async def test_a_stream_that_breaks_off_breaks_off_for_the_agent(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        it.provider.breaks_after = 3
        with pytest.raises(aiohttp.ClientPayloadError):
            await it.post("v1/messages", {"stream": True})
        await it.session.seal(1)
        (line,) = it.lines
        assert not line["complete"]
        assert line["reply"] == b"".join(frames("/v1/messages")[:3]).decode()


async def test_an_agent_that_leaves_ends_the_call_at_the_provider(tmp_path: Path) -> None:
    async with lab(tmp_path, provider={"chunk_delay_s": 0.05}) as it:
        url = f"{it.base}/v1/messages"
        async with it.http.post(url, json={"model": "big-model", "stream": True}, headers=it.head) as answer:
            await answer.content.readany()
            answer.close()
        await until(lambda: it.provider.left)
        await until(lambda: it.session.record.path.exists() and it.lines)
        (line,) = it.lines
        assert not line["complete"]
        assert line["usage"]["prompt_tokens"] == 100, "what was sampled until then was paid for"
        assert it.session.stats.cost > 0


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/messages"])
async def test_an_agent_that_leaves_before_the_last_words_pays_for_the_others(
    tmp_path: Path, path: str
) -> None:
    async with lab(tmp_path, provider={"chunk_delay_s": 0.01}) as it:
        url, body = f"{it.base}/{path}", {"model": "big-model", "stream": True}
        async with it.http.post(url, json=body, headers=it.head) as answer:
            got = b""
            while b"w18" not in got:
                got += await answer.content.readany()
            answer.close()
        await until(lambda: it.session.record.path.exists() and it.lines)
        usage = it.lines[0]["usage"]
        assert 19 <= usage["sampled_tokens"] <= 60, "each word is a token, and the estimate no wild one"
        assert usage["estimated"]
        assert it.session.stats.cost >= 19 * PRICES.output / 1e6


async def test_an_agent_that_leaves_before_an_answer_pays_for_its_question(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        it.provider.reply_delay_s = 30.0
        task = asyncio.create_task(it.post("v1/messages", {"x": "x" * 3000}))
        await until(lambda: it.provider.received)
        task.cancel()
        await until(lambda: it.session.record.path.exists() and it.lines)
        assert it.lines[0]["usage"]["prompt_tokens"] >= 1000
        assert it.session.stats.estimated_calls == 1


async def test_what_no_provider_read_costs_nothing(tmp_path: Path) -> None:
    async with lab(tmp_path, provider={"status": 529}, max_wait_s=30.0) as it:
        task = asyncio.create_task(it.post("v1/messages", {"x": "x" * 3000}))
        await until(lambda: it.provider.received)
        await asyncio.sleep(0.05)
        task.cancel()
        await until(lambda: it.session.record.path.exists() and it.lines)
        assert it.session.stats.cost == 0


async def test_sealing_cuts_what_does_not_end(tmp_path: Path) -> None:
    async with lab(tmp_path, provider={"chunk_delay_s": 5.0}) as it:
        task = asyncio.create_task(it.post("v1/messages", {"stream": True}))
        await until(lambda: it.provider.received)
        async with asyncio.timeout(5):
            await it.session.seal(0.1)
        with pytest.raises(aiohttp.ClientError):
            await task
        assert not it.lines[0]["complete"]


# --------------------------------------------------------------------------- limits


async def test_the_cost_limit_stops_the_agent(tmp_path: Path) -> None:
    async with lab(tmp_path, max_cost=1.5 * COST) as it:
        assert [(await it.post("v1/messages", {}))[0] for _ in range(3)] == [200, 200, 403]
        status, reply, headers = await it.post("v1/messages", {})
        assert status == 403
        assert "cost limit" in json.loads(reply)["error"]["message"]
        assert headers["x-should-retry"] == "false"
        assert len(it.provider.received) == 2


async def test_a_stream_without_usage_costs_what_its_bytes_say(tmp_path: Path) -> None:
    async with lab(tmp_path, max_cost=1e-6) as it:
        assert (await it.post("v1/chat/completions", {"stream": True}))[0] == 200
        assert it.backend.spent.estimated_calls == 1
        assert (await it.post("v1/chat/completions", {"stream": True}))[0] == 403


async def test_the_call_limit_is_per_session(tmp_path: Path) -> None:
    async with lab(tmp_path, max_calls=2) as it:
        assert [(await it.post("v1/messages", {}))[0] for _ in range(3)] == [200, 200, 403]
        other = it.gateway.open_session("r/1", limits=Limits(max_calls=2))
        url = it.base.replace(it.session.public_id, other.public_id)
        head = {"x-api-key": other.secret}
        async with it.http.post(f"{url}/v1/messages", json={"model": "big-model"}, headers=head) as answer:
            assert answer.status == 200


async def test_token_counts_are_no_calls_and_bounded(tmp_path: Path) -> None:
    async with lab(tmp_path, max_calls=2) as it:
        count = "v1/messages/count_tokens"
        assert [(await it.post(count, {}))[0] for _ in range(3)] == [200] * 3
        assert (await it.post("v1/messages", {}))[0] == 200
        assert [(await it.post(count, {}))[0] for _ in range(18)] == [200] * 17 + [403]
        assert it.session.stats.budget_stop == "", "the agent lacks nothing that it needs"
        assert (await it.post("v1/messages", {}))[0] == 200
        await until(lambda: len(it.lines) == 22)  # a line is written after its reply
        assert (it.session.stats.calls, spent_in(tmp_path).calls) == (2, 2)
        assert [line["turn"] for line in it.lines] == list(range(22))
        status, reply, _ = await it.post(count, {})
        assert (status, b"call limit" in reply, it.session.stats.budget_stop) == (403, True, "")
        assert (await it.post("v1/messages", {}))[0] == 403
        assert it.session.stats.budget_stop == "calls"


async def test_requests_per_minute(tmp_path: Path) -> None:
    async with lab(tmp_path, requests_per_minute=2) as it:
        assert [(await it.post("v1/messages", {}))[0] for _ in range(3)] == [200, 200, 429]
        _, reply, headers = await it.post("v1/messages", {})
        assert json.loads(reply)["error"]["type"] == "rate_limit_error"
        assert int(headers["Retry-After"]) >= 1


async def test_requests_at_a_time(tmp_path: Path) -> None:
    async with lab(tmp_path, max_concurrent=2, provider={"chunk_delay_s": 0.05}) as it:
        answers = await asyncio.gather(*(it.post("v1/messages", {"stream": True}) for _ in range(5)))
        assert sorted(status for status, _, _ in answers) == [200, 200, 429, 429, 429]


async def test_calls_that_wait_for_their_turn_hold_their_bodies_within_one_bound(tmp_path: Path) -> None:
    config = GatewayConfig(max_intake_bytes=150_000)
    body = {"stream": True, "x": "x" * 60_000}
    slow = {"chunk_delay_s": 0.02}
    async with lab(tmp_path, provider=slow, config=config, max_concurrent=1, max_wait_s=30.0) as it:
        first = asyncio.create_task(it.post("v1/messages", body))
        await until(lambda: it.provider.received)
        second = asyncio.create_task(it.post("v1/messages", body))
        await until(lambda: it.gateway.intake.held > 120_000)
        status, reply, _ = await it.post("v1/messages", body)
        assert (status, b"Too much" in reply) == (429, True)
        assert [(await first)[0], (await second)[0]] == [200, 200]
        assert (await it.post("v1/messages", body))[0] == 200
        await it.session.seal(1)
        assert it.gateway.intake.held == 0


async def test_a_sealed_session_leaves_its_key_behind_for_a_while_and_nothing_else(tmp_path: Path) -> None:
    async with lab(tmp_path, config=GatewayConfig(sealed_kept=2)) as it:
        sealed = [it.gateway.open_session(f"r/{i}", limits=Limits(max_calls=1)) for i in range(1, 6)]
        for session in sealed:
            await session.seal(0.0)
        assert it.gateway.open_sessions() == [it.session]
        assert (await it.post("v1/messages", {}))[0] == 200
        reported = []
        for session in sealed:
            url = f"{it.base}/v1/messages"
            head = {"Authorization": f"Bearer {session.secret}"}
            async with it.http.post(url, json={"model": "big-model"}, headers=head) as answer:
                reported.append(answer.status)
        assert reported == [401, 401, 401, 409, 409]


async def test_the_model_of_a_long_body_is_looked_for_off_the_event_loop() -> None:
    route = parse_path("/v1/messages")
    assert route is not None
    for size, inline in ((10, True), (INLINE_BYTES, False)):
        body = b'{"model": "big-model", "x": "' + b"x" * size + b'"}'
        looking = asyncio.create_task(checked_model(route, body, "big-model", 1 << 20))
        await asyncio.sleep(0)
        assert looking.done() == inline
        await looking
        with pytest.raises(WireError, match="does not exist"):
            await checked_model(route, body, "other", 1 << 20)
    with pytest.raises(WireError, match="too many items"):
        await checked_model(route, b'{"model": "big-model", "x": [' + b"1," * 50 + b"1]}", "big-model", 40)


async def test_nobody_else_of_the_machine_reads_a_record(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        async with lab(tmp_path) as it:
            assert (await it.post("v1/messages", {}))[0] == 200
            await it.session.seal(1)
            assert it.session.record.path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("v1/messages", b'{"model": "dear-model"}', 404),
        ("v1/messages/count_tokens", b'{"model": "dear-model"}', 404),
        ("v1/chat/completions", b'{"model": "big-model", "models": ["dear-model"]}', 400),
        ("v1/chat/completions", b'{"model": "dear-model", "model": "big-model"}', 400),
        ("v1/chat/completions", b'{"model": "big-model", "Model": "dear-model"}', 400),
        ("v1/chat/completions", b'{"\\u006dodel": "dear-model"}', 404),
        ("v1/chat/completions", b'{"model": ["big-model"]}', 404),
        ("v1/responses", b"{}", 400),
        ("v1/responses", b'["model"]', 400),
        ("v1/responses", b"{", 400),
        ("v1/responses", b"\xff", 400),
        ("v1beta/models/dear-model:generateContent", b"{}", 404),
        ("v1beta/models/big-model:generateContent", b'{"model": "models/dear-model"}', 404),
        ("v1beta/models/dear-model:x/models/big-model:generateContent", b"{}", 404),
    ],
)
async def test_no_other_model_than_the_one_with_prices(
    tmp_path: Path, path: str, body: bytes, status: int
) -> None:
    async with lab(tmp_path) as it:
        got, reply, _ = await it.post(path, body)
        assert got == status
        assert json.loads(reply)["error"]["message"]
        assert not it.provider.received
        assert it.session.turns == 0
        good = b'{"model": "models/big-model"}' if "v1beta" in path else b'{"model": "big-model"}'
        way = "v1beta/models/big-model:generateContent" if "v1beta" in path else path
        assert (await it.post(way, good))[0] == 200


# --------------------------------------------------------------------------- who and where


async def test_only_the_right_key_opens_a_session(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        other = it.gateway.open_session("r/1", limits=Limits(max_calls=2))
        for secret in ("", "wrong", KEY, other.secret):
            url, head = f"{it.base}/v1/messages", {"x-api-key": secret}
            async with it.http.post(url, json={}, headers=head) as answer:
                assert answer.status == 401
        assert not it.provider.received


@pytest.mark.parametrize(
    "path",
    [
        "v1/files",
        "v1/chat/completions/../../admin",
        "v1/%2e%2e/admin",
        "v1/models/..%2f..%2fadmin:generateContent",
        "v1beta/models/http:%2f%2f169.254.169.254:generateContent",
        "v1beta/models/a%3fb:generateContent",
        "v1beta/models/a%23:generateContent",
        "v1beta/models/@evil.example:generateContent",
        "v1/tools/x",
        "metrics",
        "//evil.example/v1/messages",
    ],
)
async def test_nothing_but_model_routes_of_the_one_origin(tmp_path: Path, path: str) -> None:
    async with lab(tmp_path) as it:
        url = aiohttp.client.URL(f"{it.base}/{path}", encoded=True)
        async with it.http.post(url, json={}, headers=it.head) as answer:
            assert answer.status in (404, 405) or "models/" in path
        for sent in it.provider.received:
            assert sent.path.startswith(("/v1/models/", "/v1beta/models/"))
            assert ".." not in sent.path
            assert "?" not in sent.path


async def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    async with serve_provider() as elsewhere, lab(tmp_path, provider={"redirect": elsewhere.url}) as it:
        url = f"{it.base}/v1/messages"
        async with it.http.post(
            url, json={"model": "big-model"}, headers=it.head, allow_redirects=False
        ) as answer:
            assert answer.status == 307
            assert "Location" not in answer.headers
        assert not elsewhere.received


@pytest.mark.parametrize("url", ["", "example.com", "file:///etc", "http://key@example.com", "http://x/?k=1"])
async def test_a_base_url_that_is_none(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="engine.urls"):
        async with open_provider(ProviderOptions(url=url, model="big-model"), tmp_path):
            pass


def test_what_cannot_be_read_is_estimated_upwards() -> None:
    for reply in (b"", b"{", b'{"usage": null}', b'{"usage": {}}'[:-2], b"data: {}\n\n"):
        assert usage_of(b"x" * 300, reply).prompt_tokens == 100
        assert usage_of(b"x" * 300, reply).estimated
        assert usage_of(b"x" * 300, reply).sampled_tokens * 3 >= len(reply)
    assert Prices(input=2.0).cost(usage_of(b"", b'{"usage": {"prompt_tokens": 1000000}}')) == 2.0


async def test_an_agent_that_says_it_is_done_does_not_seal_its_session(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        exit_url = f"{it.base.replace('/s/', '/rollout/')}/exit"
        for _ in range(2):
            async with it.http.post(exit_url, headers=it.head) as answer:
                assert answer.status == 200
        assert (await it.post("v1/messages", {}))[0] == 409
        assert (await it.session.seal(1)).ledger.balanced


def events(*values: object) -> bytes:
    return b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values)


START = {"type": "message_start", "message": {"usage": {"input_tokens": 1000, "output_tokens": 1}}}
WORDS = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "some words here and "}}
USED = {"promptTokenCount": 9, "candidatesTokenCount": 70}
CHUNK = {"candidates": [{"content": {"parts": [{"text": "x" * 300}]}}]}


@pytest.mark.parametrize(
    ("reply", "prompt", "sampled", "estimated"),
    [
        (events(START, *[WORDS] * 2000), 1000, 14_000, True),
        (events(START, *[WORDS] * 2000, {"usage": {"output_tokens": 8000}}), 1000, 8000, False),
        (events(START), 1000, 1, True),
        (events(START, WORDS)[:-20], 1000, 26, True),
        (events({**CHUNK, "usageMetadata": {"promptTokenCount": 9}}), 9, 100, True),
        (events({**CHUNK, "usageMetadata": USED}), 9, 70, False),
        (events(CHUNK)[6:-2].join([b"[", b",\r\n"]), 100, 120, True),
        (json.dumps([CHUNK, CHUNK]).encode(), 100, 200, True),
        (events({"type": "response.output_text.delta", "delta": "x" * 30}), 100, 10, True),
        (events({"item": {"type": "reasoning", "encrypted_content": "x" * 30}}), 100, 10, True),
        (events({"choices": [{"delta": {"content": "x"}}], "usage": {"completion_tokens": 4}}), 100, 4, True),
    ],
)
def test_what_came_after_the_last_usage_is_estimated(
    reply: bytes, prompt: int, sampled: int, estimated: bool
) -> None:
    usage = usage_of(b"x" * 300, reply)
    assert (usage.prompt_tokens, usage.sampled_tokens, usage.estimated) == (prompt, sampled, estimated)


def test_what_was_not_kept_of_a_long_reply_counts_where_its_end_does_not() -> None:
    cut = events(START, WORDS)
    assert usage_of(b"", cut, dropped=3_000_000).sampled_tokens >= 1_000_000
    whole = cut + events({"usage": {"output_tokens": 8}})
    assert usage_of(b"", whole, dropped=3_000_000).sampled_tokens == 8


def test_what_is_written_to_the_providers_cache_has_a_price() -> None:
    anthropic = b'{"usage": {"input_tokens": 10, "cache_creation_input_tokens": 1000, "output_tokens": 1}}'
    others = (
        b'{"usage": {"prompt_tokens": 1010, "completion_tokens": 1,'
        b' "prompt_tokens_details": {"cache_write_tokens": 1000}}}'
    )
    for reply in (anthropic, others):
        usage = usage_of(b"", reply)
        assert (usage.prompt_tokens, usage.written_tokens) == (1010, 1000)
        assert Prices(input=1.0, cache_write=1.25).cost(usage) == pytest.approx(1260 / 1e6)
        assert Prices(input=1.0).cost(usage) == pytest.approx(1010 / 1e6)
    keys = ("kind=upstream", "urls=http://x", "model=m", "prices={input=1.0, cache_write=1.25}")
    config = load_config(None, [f"engine.{key}" for key in keys])
    assert upstream_options(config).prices == Prices(input=1.0, cache_write=1.25)
