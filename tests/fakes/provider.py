"""A provider's API without a model: whole and streamed answers of all four wire formats. Shipped for tests.

It knows one key, looks for it where each provider does, and keeps what it received.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from tests.fakes.vllm import listening

KEY = "operator's key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One request as it came."""

    method: str
    path: str
    """With the query."""
    headers: Mapping[str, str]
    body: bytes


class FakeProvider:
    """Make one with `serve_provider`."""

    def __init__(self, *, chunk_delay_s: float = 0.0, status: int = 200, redirect: str = "") -> None:
        self.chunk_delay_s, self.status, self.redirect = chunk_delay_s, status, redirect
        self.received: list[Received] = []
        self.reply_delay_s = 0.0
        """Before an unstreamed answer."""
        self.busy: list[tuple[int, str]] = []
        """(status, Retry-After) of the next answers; an empty header is left out."""
        self.replies: Callable[[Any], Mapping[str, Any]] | None = None
        """Body of an unstreamed chat completion -> the message of its answer; None = a word."""
        self.left = 0
        """Clients that were gone before the end of their stream."""
        self.breaks_after = 0
        """Events after which a stream breaks off; 0 = never."""
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        return app

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        body = await http.read()
        self.received.append(
            Received(method=http.method, path=http.path_qs, headers=http.headers.copy(), body=body)
        )
        if self.redirect:
            raise web.HTTPTemporaryRedirect(self.redirect)
        if _key_of(http) != KEY:
            return _json({"error": {"message": "invalid key"}}, 401)
        if self.busy:
            status, after = self.busy.pop(0)
            answer = _json({"error": {"message": "busy", "type": "rate_limit_error"}}, status)
            if after:
                answer.headers["Retry-After"] = after
            return answer
        if self.status != 200:
            answer = _json({"error": {"message": "overloaded", "type": "overloaded_error"}}, self.status)
            answer.headers["Retry-After"] = "7"
            return answer
        if http.method == "GET":
            return _json({"object": "list", "data": [{"id": "big-model"}]})
        asked: dict[str, Any] = orjson.loads(body)
        if asked.get("stream") or "streamGenerateContent" in http.path:
            return await self._stream(http)
        said = whole(http.path)
        if self.replies is not None and http.path.endswith("/chat/completions"):
            message = {"role": "assistant", **self.replies(asked)}
            said["choices"] = [{"index": 0, "finish_reason": "stop", "message": message}]
        await asyncio.sleep(self.reply_delay_s)
        answer = _json(said)
        answer.headers["Request-Id"] = "req_1"
        answer.headers["Set-Cookie"] = "spy=1"
        return answer

    async def _stream(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        try:
            for number, frame in enumerate(frames(http.path), 1):
                await response.write(frame)
                if number == self.breaks_after and http.transport is not None:
                    http.transport.abort()
                    return response
                await asyncio.sleep(self.chunk_delay_s)
        except (asyncio.CancelledError, ConnectionResetError):
            self.left += 1
            raise
        await response.write_eof()
        return response


def whole(path: str) -> dict[str, Any]:
    """An unstreamed answer: 100 prompt tokens, 40 of them cached, 20 sampled."""
    usage: dict[str, Any]
    if path.endswith("/messages"):
        usage = {"input_tokens": 60, "cache_read_input_tokens": 40, "output_tokens": 20}
        return {"type": "message", "content": [{"type": "text", "text": "hello"}], "usage": usage}
    if path.endswith("/responses"):
        details = {"cached_tokens": 40}
        usage = {"input_tokens": 100, "input_tokens_details": details, "output_tokens": 20}
        return {"object": "response", "output": [], "usage": usage}
    if "generateContent" in path.lower() or ":" in path:
        usage = {"promptTokenCount": 100, "cachedContentTokenCount": 40, "candidatesTokenCount": 20}
        return {"candidates": [], "usageMetadata": usage}
    details = {"cached_tokens": 40}
    usage = {"prompt_tokens": 100, "prompt_tokens_details": details, "completion_tokens": 20}
    return {"object": "chat.completion", "choices": [{"message": {"content": "hello"}}], "usage": usage}


def frames(path: str) -> list[bytes]:
    """A streamed answer with the same usage; chat completions name none unless asked."""
    if path.endswith("/messages"):
        start = {"input_tokens": 60, "cache_read_input_tokens": 40, "output_tokens": 1}
        events: list[Any] = [
            {"type": "message_start", "message": {"usage": start}},
            *({"type": "content_block_delta", "delta": {"text": f"w{i} "}} for i in range(20)),
            {"type": "message_delta", "usage": {"output_tokens": 20}},
            {"type": "message_stop"},
        ]
        return [b"event: %s\ndata: %s\n\n" % (e["type"].encode(), orjson.dumps(e)) for e in events]
    if path.endswith("/responses"):
        last = {"type": "response.completed", "response": whole(path)}
        return [b"data: " + orjson.dumps(e) + b"\n\n" for e in [{"type": "response.created"}, last]]
    if ":" in path:
        return [b"data: " + orjson.dumps(whole(path)) + b"\r\n\r\n"]
    words = [{"choices": [{"delta": {"content": f"w{i} "}}]} for i in range(20)]
    return [*(b"data: " + orjson.dumps(word) + b"\n\n" for word in words), b"data: [DONE]\n\n"]


def _key_of(http: web.Request) -> str:
    if "messages" in http.path:
        return http.headers.get("x-api-key", "")
    if "v1beta" in http.path:
        return http.headers.get("x-goog-api-key", "")
    return http.headers.get("Authorization", "").removeprefix("Bearer ")


def _json(body: Mapping[str, object], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


@asynccontextmanager
async def serve_provider(**options: Any) -> AsyncIterator[FakeProvider]:
    """A fake provider on a free loopback port."""
    fake = FakeProvider(**options)
    async with listening(fake.app()) as origin:
        fake.url = origin
        yield fake
