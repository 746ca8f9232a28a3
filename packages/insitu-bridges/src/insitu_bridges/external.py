"""Pull mode: a trainer fetches requests (prompt ids, parameters, key), samples itself and delivers the ids.

    insitu:    generate() ── queue ──► take()            the trainer, in this process or over `external_http`
             generate() ◄─────────── deliver(), fail()

A request is handed out once and answered once. An answer to one that is unknown, was given up (deadline,
client gone) or has its answer is refused, and so is one that breaks the contract of an engine; then
`generate` raises.
`publish` says which weights the trainer samples with from now on.

    POST /v1/take     {"limit", "wait_s"}                              -> {"requests": [...]}
    POST /v1/deliver  {"name", "ids", "logprobs", "finish", "version_runs"?}
    POST /v1/fail     {"name", "why"}
    POST /v1/open     {"names"}                                        -> {"open": [...]}
    POST /v1/publish  {"version", "checksum"}

The listener has a secret of its own; an answer that does not count is HTTP 409 with the reason.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import os
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
from aiohttp import web

from insitu.config import Config
from insitu.config.base import split_address
from insitu.engines.base import EngineInfo, PauseMode, Receipt
from insitu.engines.factory import secret_from_environment
from insitu.engines.http import request_name, stream_seed
from insitu.engines.response_checks import RawReply, checked
from insitu.errors import ConfigError, EngineError, EngineUnavailable, SetupError, boundary
from insitu.types import Generation, IntArray, RequestKey, SamplingParams, VersionRuns
from insitu.types.codec import read

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
        with boundary(EngineError, "version_runs must be a list of [start, version]"):
            runs = read(VersionRuns | None, body.get("version_runs"))
        self._engine.deliver(
            str(body.get("name")),
            ids=body.get("ids"),
            logprobs=body.get("logprobs"),
            finish=body.get("finish"),
            version_runs=runs or None,
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


def _described(request: _ExternalRequest) -> Mapping[str, Any]:
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


@asynccontextmanager
async def open_external(config: Config, announce: Callable[[str], None]) -> AsyncIterator[ExternalEngine]:
    """Yield the engine of a configuration; `announce` gets the line with the address for the trainer.

    Raises ConfigError without a key, SetupError when the address is taken.
    """
    table = config.engine
    host, port = split_address(table.listen)
    engine = ExternalEngine(
        max_context_tokens=config.model.max_context_tokens, call_deadline_s=table.call_timeout_s
    )
    secret = secret_from_environment(table.key_env)
    async with serve_external(engine, host, port, secret) as url:
        announce(f"waiting for the trainer at {url} (key in {table.key_env})")
        try:
            yield engine
        finally:
            await engine.close()


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
            why = os.strerror(error.errno) if error.errno else str(error)
            raise SetupError(f"engine.listen: cannot listen on {host}:{port}: {why}") from error
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


Gone = Literal["was answered before", "was given up", "failed before"]
REMEMBERED = 4096
"""Ended requests remembered by id, so that a late answer is rejected with the reason."""


class DeliveryRejected(EngineError):
    """The trainer's answer is rejected; the message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExternalRequest:
    """A sampling request for the trainer."""

    name: str
    """To be given back with the answer."""
    ids: IntArray = field(repr=False)
    params: SamplingParams
    key: RequestKey

    @property
    def seed(self) -> int:
        """Seed of the key's random stream."""
        return stream_seed(self.key)


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    request: _ExternalRequest
    answer: asyncio.Future[Generation]
    version: int = -1
    """Published when the trainer took it."""


class ExternalEngine:
    """Implements `engines.base.Engine`; the other half is for the trainer."""

    def __init__(self, *, max_context_tokens: int, call_deadline_s: float = 600.0) -> None:
        self._max_context, self._deadline_s = max_context_tokens, call_deadline_s
        self._receipt = Receipt(version=0, checksum="unknown")
        self._numbers = itertools.count()
        self._queue: deque[_Waiting] = deque()
        self._taken: dict[str, _Waiting] = {}
        self._gone: OrderedDict[str, Gone] = OrderedDict()
        self._arrived, self._idle, self._running = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._running.set()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(name="external", max_context_tokens=self._max_context)

    @property
    def receipt(self) -> Receipt:
        return self._receipt

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        """Wait for the trainer's answer. Raises EngineError; after a cancellation its answer is refused."""
        request = _ExternalRequest(
            name=request_name(key, next(self._numbers)), ids=ids.copy(), params=params, key=key
        )
        waiting = _Waiting(request=request, answer=asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._arrived.set()
        try:
            async with asyncio.timeout(self._deadline_s):
                return await waiting.answer
        except TimeoutError as error:
            raise EngineUnavailable(f"the trainer gave no answer within {self._deadline_s:g} s") from error
        finally:
            if request.name not in self._gone:
                self._end(waiting, "was given up")

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Hand out nothing more. `wait` waits for what is out, `abort` gives it up, `keep` leaves it."""
        self._running.clear()
        if mode == "abort":
            for waiting in list(self._taken.values()):
                if not waiting.answer.done():
                    waiting.answer.set_exception(EngineError("the request was aborted by a pause"))
                self._end(waiting, "was given up")
        if mode == "wait":
            await self._until_idle()

    async def _until_idle(self) -> None:
        """Undo the pause when it is given up: no caller will resume."""
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._idle.wait()
        except BaseException as error:
            self._running.set()
            if isinstance(error, TimeoutError):
                line = f"the trainer did not end its requests in {self._deadline_s:g} s"
                raise EngineError(line) from error
            raise

    async def resume(self) -> None:
        self._running.set()

    async def close(self) -> None:
        """Every waiting request fails."""
        for waiting in [*self._queue, *self._taken.values()]:
            if not waiting.answer.done():
                waiting.answer.set_exception(EngineError("the engine was closed"))
                self._end(waiting, "was given up")

    # ----------------------------------------------------------------------- the trainer's side

    async def take(self, limit: int = 1, *, wait_s: float = 0.0) -> list[_ExternalRequest]:
        """Up to `limit` requests, oldest first; waits up to `wait_s` for the first, then may be empty."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + wait_s
        while not (self._queue and self._running.is_set()):
            signal = self._running if not self._running.is_set() else self._arrived
            try:
                async with asyncio.timeout(ends - loop.time()):
                    await signal.wait()
            except TimeoutError:
                return []
        taken = [self._queue.popleft() for _ in range(min(limit, len(self._queue)))]
        if not self._queue:
            self._arrived.clear()
        for waiting in taken:
            waiting.version = self._receipt.version
            self._taken[waiting.request.name] = waiting
        self._idle.clear()
        return [waiting.request for waiting in taken]

    def open(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that still want an answer: the trainer may stop working on the others."""
        return [name for name in names if name in self._taken]

    def deliver(
        self,
        name: str,
        *,
        ids: object,
        logprobs: object,
        finish: object,
        version_runs: VersionRuns | None = None,
    ) -> None:
        """Answer a request: lists of ids and of one logprob each, and stop or length.

        Without version runs all ids belong to the version published when the request was taken; the answer is
        rejected if another version has been published since. Raises DeliveryRejected; an invalid answer also
        fails the request.
        """
        waiting = self._known(name)
        runs = version_runs or ((0, waiting.version),)
        raw = RawReply(ids=ids, logprobs=logprobs, finish=finish, version_runs=runs)
        try:
            if not version_runs and waiting.version != self._receipt.version:
                raise EngineError(
                    f"external: version {self._receipt.version} was published since the request was taken at "
                    f"{waiting.version}, so the answer must have version runs"
                )
            if any(version > self._receipt.version for _, version in runs):
                raise EngineError(f"external: version runs {list(runs)} are newer than what was published")
            generation = checked(raw, waiting.request.ids, waiting.request.params, "external")
        except EngineError as error:
            waiting.answer.set_exception(error)
            self._end(waiting, "failed before")
            raise DeliveryRejected(f"the answer to {name} breaks the contract: {error}") from error
        waiting.answer.set_result(generation)
        self._end(waiting, "was answered before")

    def fail(self, name: str, why: str) -> None:
        """Fail a request, so that `generate` raises; raise DeliveryRejected if it is not open."""
        waiting = self._known(name)
        waiting.answer.set_exception(EngineError(f"the trainer failed: {' '.join(why.split())[:300]}"))
        self._end(waiting, "failed before")

    def publish(self, receipt: Receipt) -> None:
        """Set the version that the trainer samples with; raise DeliveryRejected for an older one."""
        if receipt.version < self._receipt.version:
            raise DeliveryRejected(
                f"version {receipt.version} is older than {self._receipt.version}, which is published"
            )
        self._receipt = receipt

    def _known(self, name: str) -> _Waiting:
        waiting = self._taken.get(name)
        if waiting is not None and not waiting.answer.done():
            return waiting
        # A cancelled task marks its future before it runs again.
        gone = "is not known or was not handed out" if waiting is None else "was given up"
        raise DeliveryRejected(f"request {name} {self._gone.get(name, gone)}")

    def _end(self, waiting: _Waiting, how: Gone) -> None:
        name = waiting.request.name
        if waiting in self._queue:
            self._queue.remove(waiting)
        if not self._queue:
            self._arrived.clear()
        self._taken.pop(name, None)
        if not self._taken:
            self._idle.set()
        self._gone[name] = how
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
