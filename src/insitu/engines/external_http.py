"""The trainer's side of pull mode over HTTP: long polling on a listener and with a secret of its own.

    POST /v1/take     {"limit", "wait_s"}                              -> {"requests": [...]}
    POST /v1/deliver  {"name", "ids", "logprobs", "finish", "version_runs"?}
    POST /v1/fail     {"name", "why"}
    POST /v1/open     {"names"}                                        -> {"open": [...]}
    POST /v1/publish  {"version", "checksum"}

An answer that does not count is HTTP 409 with the reason.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web

from insitu.engines.base import Receipt
from insitu.engines.external import DeliveryRejected, ExternalEngine, ExternalRequest
from insitu.errors import ConfigError, EngineError, SetupError

MAX_WAIT_S = 60.0
MAX_BODY = 64 << 20
BODY_S = 60.0
Handler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


class _ExternalHttp:
    """Routes over one engine."""

    def __init__(self, engine: ExternalEngine, secret: str) -> None:
        self._engine, self._secret = engine, secret
        self._routes: dict[str, Handler] = {
            "/v1/take": self._take,
            "/v1/deliver": self._deliver,
            "/v1/fail": self._fail,
            "/v1/open": self._open,
            "/v1/publish": self._publish,
        }

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Every failure is an answer; a trainer that leaves while it polls takes nothing with it."""
        given = http.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._secret.encode()):
            return _json({"error": "wrong or missing key"}, 401)
        handler = self._routes.get(http.path)
        if handler is None or http.method != "POST":
            return _json({"error": f"unknown: {http.method} {http.path}"}, 404)
        try:
            return _json(await handler(await _body(http)))
        except DeliveryRejected as error:
            return _json({"error": str(error)}, 409)
        except EngineError as error:
            return _json({"error": str(error)}, 400)

    async def _take(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        limit, wait_s = body.get("limit", 1), body.get("wait_s", 0.0)
        if type(limit) is not int or limit < 1 or not isinstance(wait_s, int | float) or not wait_s >= 0:
            raise EngineError("limit must be a whole number from 1, wait_s a number from 0")
        requests = await self._engine.take(limit, wait_s=min(float(wait_s), MAX_WAIT_S))
        return {"requests": [_described(request) for request in requests]}

    async def _deliver(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        runs = body.get("version_runs")
        if runs is not None and not _pairs(runs):
            raise EngineError("version_runs must be a list of [start, version]")
        self._engine.deliver(
            str(body.get("name")),
            ids=body.get("ids"),
            logprobs=body.get("logprobs"),
            finish=body.get("finish"),
            version_runs=tuple((start, version) for start, version in runs) if runs else None,
        )
        return {"ok": True}

    async def _fail(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self._engine.fail(str(body.get("name")), str(body.get("why", "")))
        return {"ok": True}

    async def _open(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        names = body.get("names")
        return {"open": self._engine.open([str(name) for name in names] if isinstance(names, list) else [])}

    async def _publish(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        version = body.get("version")
        if type(version) is not int or version < 0:
            raise EngineError("version must be a whole number from 0")
        self._engine.publish(Receipt(version=version, checksum=str(body.get("checksum", "unknown"))))
        return {"ok": True}


def _described(request: ExternalRequest) -> Mapping[str, Any]:
    return {
        "name": request.name,
        "ids": request.ids,
        "max_tokens": request.params.max_tokens,
        "temperature": request.params.temperature,
        "stop_ids": sorted(request.params.stop_ids),
        "seed": request.seed,
        "rollout_id": request.key.rollout_id,
        "turn": request.key.turn,
    }


def _pairs(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(item) is int for item in pair)
        for pair in value
    )


async def _body(http: web.BaseRequest) -> Mapping[str, Any]:
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in http.content.iter_any():
                raw += chunk
                if len(raw) > MAX_BODY:
                    raise EngineError("the body is too large")
        value = orjson.loads(raw)
    except TimeoutError as error:
        raise EngineError("the body did not arrive in time") from error
    except orjson.JSONDecodeError as error:
        raise EngineError("the body is not JSON") from error
    if not isinstance(value, dict):
        raise EngineError("the body must be a JSON object")
    return value


def _json(body: Mapping[str, Any], status: int = 200) -> web.Response:
    raw = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    return web.Response(body=raw, status=status, content_type="application/json")


def split_address(text: str, key: str) -> tuple[str, int]:
    """host:port. Raises ConfigError naming `key`."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 65536):
        raise ConfigError(f"{key}: {text!r} is not host:port")
    return host.strip("[]"), int(port)


@asynccontextmanager
async def serve_external(engine: ExternalEngine, host: str, port: int, secret: str) -> AsyncIterator[str]:
    """Listen for the trainer; its base URL. Raises SetupError when the address is taken."""
    if not secret:
        raise ConfigError(
            "engine.key_env: an external trainer needs a key, in a variable that is named there"
        )
    server = web.Server(_ExternalHttp(engine, secret).handle, handler_cancellation=True, access_log=None)
    runner = web.ServerRunner(server, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise SetupError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
