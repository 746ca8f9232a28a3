"""What a connection may do and what is said of it: strangers, slow and half-closed clients."""

from __future__ import annotations

import asyncio
import http.client
import io
import logging
import socket
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gateway_rig import ASK, Rig, said

from insitu.chat.template import TemplateRenderer
from insitu.gateway import connection
from insitu.gateway.dialects.base import WireError, positive
from insitu.types import Limits, RequestKey

SECRET = b"the-prompt-of-an-agent"


async def raw(rig: Rig, sent: bytes, *, half_close: bool = False) -> tuple[bytes, bytes]:
    """(first bytes, rest) of what comes back for these bytes."""
    host, port = rig.origin.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    if half_close:
        writer.write_eof()
    async with asyncio.timeout(5):
        first = await reader.read(4096)
        rest = await reader.read() if half_close else b""
    writer.close()
    return first, rest


def request(rig: Rig, body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [
        f"POST /s/{rig.session.public_id}/v1/chat/completions HTTP/1.1",
        "Host: x",
        f"Authorization: {rig.auth['Authorization']}",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


CALL = b'{"model": "m", "messages": [{"role": "user", "content": "Fix f."}]}'


async def test_bytes_that_are_no_http_are_one_bounded_line(
    renderer: TemplateRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with Rig(renderer, [said("x")]) as rig:
        key = rig.auth["Authorization"].encode()
        for ending in (b"\n", b"\r\n"):
            for _ in range(100):
                head = b"POST /v1/messages HTTP/1.1" + ending + b"Authorization: " + key + ending
                answer, _ = await raw(rig, head + b"Content-Length: x" + ending + ending + SECRET)
                assert answer.startswith(b"HTTP/1.0 400") or answer.startswith(b"HTTP/1.1 400")
                assert b'"type":"invalid_request_error"' in answer
                assert SECRET not in answer
        text = caplog.text
        assert SECRET.decode() not in text
        assert rig.session.secret not in text
        assert "Traceback" not in text
        ours = [r for r in caplog.records if r.name == connection.log.name]
        assert 1 <= len(ours) <= 5
        assert all(len(record.getMessage()) < 200 for record in ours)
        assert [r for r in caplog.records if r.name.startswith("aiohttp")] == []
        assert (await rig.post({"messages": ASK}))[0] == 200


async def test_a_client_that_waits_for_100_continue_gets_it(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("x")]) as rig:
        host, port = rig.origin.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = request(rig, b"", "Expect: 100-continue", length=len(CALL))
        writer.write(head)
        async with asyncio.timeout(5):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(CALL)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        # No body is read that would be refused for its key.
        refused, _ = await raw(rig, head.replace(b"Bearer ", b"Bearer no"))
        assert refused.startswith(b"HTTP/1.1 401")


async def test_a_client_that_closed_its_sending_half_gets_its_answer(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("Done.")], delay_s=0.4) as rig:
        first, rest = await raw(rig, request(rig, CALL), half_close=True)
        whole = first + rest
        assert whole.startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert b"HTTP/1.1 200" in whole
        assert b"Done." in whole
        trajectory = await rig.sealed()
        assert trajectory.ledger.excluded == {}
        assert rig.session.stats.aborted == 0


async def test_the_standard_library_reads_the_answer_on_a_half_closed_connection(
    renderer: TemplateRenderer,
) -> None:
    def ask(rig: Rig) -> tuple[int, bytes]:
        client = http.client.HTTPConnection(rig.origin.removeprefix("http://"), timeout=5)
        client.request("POST", f"/s/{rig.session.public_id}/v1/chat/completions", CALL, rig.auth)
        with client.sock as connection:
            connection.shutdown(socket.SHUT_WR)
            answer = client.getresponse()
            return answer.status, answer.read()

    async with Rig(renderer, [said("Done.")], delay_s=0.4) as rig:
        status, body = await asyncio.to_thread(ask, rig)
        assert (status, b"Done." in body) == (200, True)


async def test_a_client_that_closed_both_halves_is_noticed_at_once(renderer: TemplateRenderer) -> None:
    began = asyncio.Event()

    async def look(key: RequestKey) -> None:
        began.set()
        await asyncio.sleep(30)

    async with Rig(renderer, [said("x")], before=look) as rig:
        host, port = rig.origin.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(request(rig, CALL))
        await began.wait()
        writer.close()
        async with asyncio.timeout(0.5):
            while not rig.gateway.counters.client_gone:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_a_connection_without_a_request_is_closed(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "FIRST_REQUEST_S", 0.1)
    async with Rig(renderer, [said("x")]) as rig:
        for begun in (b"", b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nX-Slow: "):
            host, port = rig.origin.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(begun)
            async with asyncio.timeout(2):
                assert await reader.read() == b""
            writer.close()
        assert (await rig.post({"messages": ASK}))[0] == 200


@pytest.mark.parametrize(
    ("path", "headers", "shape"),
    [
        ("/v1/files", {"anthropic-version": "2023-06-01"}, '"type":"not_found_error"'),
        ("/v1/files", {}, '"code":"not_found"'),
        ("/v1/files", {"x-goog-api-key": "k"}, '"status":"NOT_FOUND"'),
        ("/v1alpha/files", {}, '"status":"NOT_FOUND"'),
        ("/v1beta/models/g:batchEmbedContents", {}, '"status":"NOT_FOUND"'),
    ],
    ids=str,
)
async def test_unknown_routes_are_refused_in_the_providers_shape(
    renderer: TemplateRenderer, path: str, headers: dict[str, str], shape: str
) -> None:
    async with Rig(renderer, [said("x")]) as rig:
        url = rig.base.removesuffix("/v1") + path
        async with rig.http.post(url, json={}, headers={**rig.auth, **headers}) as answer:
            assert answer.status == 404
            assert shape in await answer.text()


async def test_gemini_takes_its_key_from_the_query(renderer: TemplateRenderer) -> None:
    body = {"contents": [{"parts": [{"text": "Hi"}]}]}
    async with Rig(renderer, [said("x")]) as rig:
        base = rig.base.removesuffix("/v1")
        for path, secret, status in (
            ("/v1beta/models/g:generateContent", rig.session.secret, 200),
            ("/v1alpha/models/g:generateContent", rig.session.secret, 200),
            ("/v1beta/models/g:generateContent", "no", 401),
            ("/v1/chat/completions", rig.session.secret, 401),
        ):
            async with rig.http.post(f"{base}{path}", params={"key": secret}, json=body) as answer:
                assert answer.status == status
                assert rig.session.secret not in await answer.text()


async def test_every_answer_names_its_request(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("x")]) as rig:
        seen = set()
        for stream, path in ((False, "/chat/completions"), (True, "/chat/completions"), (False, "/none")):
            body = {"messages": ASK, "stream": stream}
            async with rig.http.post(f"{rig.base}{path}", json=body, headers=rig.auth) as answer:
                await answer.read()
                assert answer.headers["request-id"] == answer.headers["x-request-id"]
                seen.add(answer.headers["request-id"])
        assert len(seen) == 3
        assert all(id.startswith("req_") for id in seen)


def test_a_whole_number_may_be_written_as_a_float() -> None:
    assert positive(10.0, "max_tokens") == 10
    for wrong in (10.5, 0.0, True, "10"):
        with pytest.raises(WireError):
            positive(wrong, "max_tokens")


async def test_logprobs_that_never_vary_are_refused_over_short_replies(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("ok")], sampled=True) as rig:
        honest = rig.engine.generate

        async def filled_in(*args: Any) -> Any:
            made = await honest(*args)
            return replace(made, logprobs=np.zeros(len(made.ids), np.float32))

        rig.engine.generate = filled_in  # type: ignore[method-assign]
        statuses = [(await rig.post({"messages": ASK, "user": str(i)}))[0] for i in range(40)]
        assert statuses[0] == 200
        assert statuses[-1] == 403
        assert "logprobs of this session" in rig.session.stats.infra_error
        await rig.session.seal(0.0)
    async with Rig(renderer, [said("ok")]) as rig:
        statuses = [(await rig.post({"messages": ASK, "user": str(i)}))[0] for i in range(40)]
        assert set(statuses) == {200}


async def test_a_body_that_cannot_fit_the_context_is_not_read_to_its_end(renderer: TemplateRenderer) -> None:
    """Reading tens of megabytes keeps other sessions waiting, whatever comes of it."""
    limits = Limits(max_context_tokens=4096)
    body = b'{"messages": [{"role": "user", "content": "' + b"x" * (33 << 20) + b'"}]}'
    async with Rig(renderer, [said("x")], limits=limits) as rig:
        url = f"{rig.base}/chat/completions"
        async with rig.http.post(url, data=io.BytesIO(body), headers=rig.auth) as answer:
            assert answer.status == 413
        assert rig.session.bodies.parsed_bytes == 0
        assert (await rig.post({"messages": ASK}))[0] == 200
    async with Rig(renderer, [said("x")], limits=Limits(max_context_tokens=400_000)) as rig:
        url = f"{rig.base}/chat/completions"
        async with rig.http.post(url, data=io.BytesIO(body), headers=rig.auth) as answer:
            assert answer.status == 400
            assert "context length" in await answer.text()
