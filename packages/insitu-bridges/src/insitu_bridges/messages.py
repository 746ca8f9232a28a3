"""A provider whose replies are a script's: it takes whole chat requests and delivers replies as text.

    agent ──► Gateway ──► POST /v1/chat/completions ──► take()      a script, in this process or over HTTP
    agent ◄── Gateway ◄── reply, whole or streamed ◄─── deliver(), fail()

For `engine.kind = "upstream"`: rollouts of text, for evaluations, demonstrations and samplers of your own.
For tokens that are trained there is `engine.kind = "external"`. Agents must speak chat completions.

    POST /v1/take     {"limit", "wait_s"}                -> {"requests": [{"name", "messages", "tools", ...}]}
    POST /v1/deliver  {"name", "message", "finish"?}
    POST /v1/fail     {"name", "why"}

A request is handed out once and answered once; an answer that does not count is HTTP 409 with the reason.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from insitu.errors import SetupError
from insitu_bridges.external import DeliveryRejected

MAX_WAIT_S = 60.0
MAX_BODY = 64 << 20
FINISHES = ("stop", "length", "tool_calls")


@dataclass(slots=True, kw_only=True, eq=False)
class _Asked:
    name: str
    body: Mapping[str, Any]
    answer: asyncio.Future[tuple[Mapping[str, Any], str]] = field(repr=False)


class MessageQueue:
    """Requests of agents and the replies to them; made by `serve_messages`, used on its event loop."""

    def __init__(self) -> None:
        self.url = ""
        """For `engine.urls`, and for scripts that take over HTTP."""
        self._numbers = itertools.count()
        self._queue: deque[_Asked] = deque()
        self._taken: dict[str, _Asked] = {}
        self._arrived = asyncio.Event()

    async def ask(self, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
        """Return (message, finish reason) for a request's body. Raises DeliveryRejected where it failed."""
        future = asyncio.get_running_loop().create_future()
        asked = _Asked(name=f"request-{next(self._numbers)}", body=body, answer=future)
        self._queue.append(asked)
        self._arrived.set()
        try:
            return await asked.answer
        finally:
            self._taken.pop(asked.name, None)
            if asked in self._queue:
                self._queue.remove(asked)

    async def take(self, limit: int = 1, *, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """Return up to `limit` requests, oldest first, each a chat request with its `name`.

        Waits up to `wait_s` for the first; then the list may be empty.
        """
        while not self._queue:
            self._arrived.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._arrived.wait()
            except TimeoutError:
                return []
        taken = [self._queue.popleft() for _ in range(min(limit, len(self._queue)))]
        self._taken |= {asked.name: asked for asked in taken}
        return [{**asked.body, "name": asked.name} for asked in taken]

    def deliver(self, name: str, message: Mapping[str, Any], finish: str = "") -> None:
        """Answer a request with `{"content": ..., "tool_calls": [...]}` of chat completions.

        Ids of calls may be missing, and arguments may be objects. Raises DeliveryRejected, for a bad message
        too, whose request stays open.
        """
        try:
            said = _checked(message)
            orjson.dumps(said)
        except TypeError as error:
            raise DeliveryRejected(f"the message is not JSON: {error}") from error
        usual = "tool_calls" if said.get("tool_calls") else "stop"
        if finish not in ("", *FINISHES):
            raise DeliveryRejected(f"finish is {finish!a}; known: {', '.join(FINISHES)}")
        self._known(name).answer.set_result((said, finish or usual))

    def fail(self, name: str, why: str) -> None:
        """Fail a request: the agent gets an error. Raises DeliveryRejected if it is not open."""
        error = DeliveryRejected(f"the script failed: {' '.join(why.split())[:300]}")
        self._known(name).answer.set_exception(error)

    def _known(self, name: str) -> _Asked:
        asked = self._taken.get(name)
        if asked is None or asked.answer.done():
            raise DeliveryRejected(f"request {name} is not open: unknown, not taken, answered or given up")
        return asked


def _checked(message: object) -> dict[str, Any]:
    """Return a reply in the form of chat completions. Raises DeliveryRejected."""
    if not isinstance(message, Mapping):
        raise DeliveryRejected("message must be an object with content, tool_calls or both")
    content, calls = message.get("content"), message.get("tool_calls") or []
    if not isinstance(content, str | None) or not isinstance(calls, list) or not (content or calls):
        raise DeliveryRejected("content must be a text, tool_calls a list, and one of them is needed")
    said: dict[str, Any] = {"role": "assistant", "content": content}
    made = [_call(number, call) for number, call in enumerate(calls)]
    return said | ({"tool_calls": made} if made else {})


def _call(number: int, call: object) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name), **rest}, **more}:
            arguments = rest.get("arguments", {})
            text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
            name_of = str(more.get("id") or f"call_{time.time_ns():x}_{number}")
            return {"id": name_of, "type": "function", "function": {"name": name, "arguments": text}}
    raise DeliveryRejected('a call must be {"function": {"name", "arguments"}}')


class _Routes:
    def __init__(self, queue: MessageQueue, key: str) -> None:
        self._queue, self._key = queue, key

    async def handle(self, http: web.Request) -> web.StreamResponse:
        given = http.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._key.encode()):
            return _json({"error": {"message": "wrong or missing key"}}, 401)
        if http.method == "GET" and http.path == "/v1/models":
            return _json({"object": "list", "data": []})
        try:
            body = orjson.loads(await http.read())
            if http.method != "POST" or not isinstance(body, dict):
                raise DeliveryRejected("the body must be a JSON object")
            return await self._answer(http, body)
        except DeliveryRejected as error:
            return _json({"error": {"message": str(error)}}, 409)
        except orjson.JSONDecodeError:
            return _json({"error": {"message": "the body is not JSON"}}, 400)

    async def _answer(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        name = str(body.get("name"))
        if http.path == "/v1/chat/completions":
            try:
                message, finish = await self._queue.ask(body)
            except DeliveryRejected as error:
                return _json({"error": {"message": str(error), "type": "server_error"}}, 500)
            return await _reply(http, body, message, finish)
        if http.path == "/v1/take":
            limit, wait_s = body.get("limit", 1), body.get("wait_s", 0.0)
            if type(limit) is not int or limit < 1 or not isinstance(wait_s, int | float) or not wait_s >= 0:
                raise DeliveryRejected("limit must be a whole number from 1, wait_s a number from 0")
            return _json({"requests": await self._queue.take(limit, wait_s=min(float(wait_s), MAX_WAIT_S))})
        if http.path == "/v1/deliver":
            self._queue.deliver(name, body.get("message", {}), str(body.get("finish") or ""))
        elif http.path == "/v1/fail":
            self._queue.fail(name, str(body.get("why", "")))
        else:
            return _json({"error": {"message": f"unknown: {http.path} (agents need chat completions)"}}, 404)
        return _json({"ok": True})


async def _reply(
    http: web.Request, body: Mapping[str, Any], message: Mapping[str, Any], finish: str
) -> web.StreamResponse:
    head = {"id": f"chatcmpl-{time.time_ns():x}", "created": int(time.time()), "model": body.get("model", "")}
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return _json({**head, "object": "chat.completion", "choices": [choice]})
    calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", []))]
    delta = {**message, "tool_calls": calls} if calls else message
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(http)
    for part, end in ((delta, None), ({}, finish)):
        choice = {"index": 0, "delta": part, "finish_reason": end}
        chunk = {**head, "object": "chat.completion.chunk", "choices": [choice]}
        await answer.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
    await answer.write(b"data: [DONE]\n\n")
    return answer


def _json(body: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


@asynccontextmanager
async def serve_messages(key: str, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[MessageQueue]:
    """Listen for a gateway and for scripts, which both send `key`; port 0 = a free one.

    Raises SetupError when the address is taken or the key is empty.
    """
    if not key:
        raise SetupError("a provider of messages needs a key")
    queue = MessageQueue()
    app = web.Application(client_max_size=MAX_BODY)
    app.router.add_route("*", "/{tail:.*}", _Routes(queue, key).handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise SetupError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        queue.url = f"http://{host}:{runner.addresses[0][1]}"
        yield queue
    finally:
        await runner.cleanup()
