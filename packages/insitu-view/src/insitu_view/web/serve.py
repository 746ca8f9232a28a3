"""`insitu view`: a read-only web server over run directories (docs/viewer-api.md).

One event loop; queries run in two threads, plans and decoding in a third. Nothing of a run is locked or
written, and no process of it has to be alive.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gzip
import hashlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from insitu.errors import ConfigError, InsituError, SetupError
from insitu.storage.queries import interrupted
from insitu.storage.store import EmptyStore
from insitu_view.web.context import Context, Tagged
from insitu_view.web.events import stream_events
from insitu_view.web.guard import DOWNLOAD_HEADERS, HEADERS, Guard, is_loopback, refusal
from insitu_view.web.query import BadRequest, Query
from insitu_view.web.routes import HEAVY, PAGES, Page, compare, download
from insitu_view.web.runs import RunHandle, Runs, run_info, without_paths

DEFAULT_PORT = 7430
PORTS_TRIED = 20
MAX_ANSWER_BYTES = 8 << 20
STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".ico": "image/x-icon",
}


CONTEXT = web.AppKey("context", Context)


def make_app(runs: Runs, guard: Guard) -> web.Application:
    """Return the application; its threads end with it."""
    app = web.Application(middlewares=[guard.middleware], client_max_size=1 << 10)
    app[CONTEXT] = Context(runs=runs)
    app.on_cleanup.append(_close)
    app.router.add_get("/api/runs", _runs)
    app.router.add_get("/api/compare", functools.partial(_answer, page=compare, named=False))
    app.router.add_get("/api/{run:[^/]+}/events", _events)
    app.router.add_get("/api/{run:[^/]+}/download", functools.partial(_download, page=download))
    for name, page in PAGES.items():
        handler = functools.partial(_answer, page=page, heavy=name in HEAVY)
        app.router.add_get(f"/api/{{run:[^/]+}}/{name}", handler)
    for file in sorted(STATIC.rglob("*")):
        if file.is_file() and file.suffix in _TYPES:
            at = "/" if file.name == "index.html" else f"/{file.relative_to(STATIC).as_posix()}"
            app.router.add_get(at, functools.partial(_static, file=file))
    return app


async def _close(app: web.Application) -> None:
    context = app[CONTEXT]
    context.queries.shutdown(wait=False, cancel_futures=True)
    context.heavy.shutdown(wait=False, cancel_futures=True)


async def _static(request: web.Request, *, file: Path) -> web.StreamResponse:
    headers = {**HEADERS, "Content-Type": _TYPES[file.suffix], "Cache-Control": "no-cache"}
    raw, packed, tag = _read_static(file)
    headers["ETag"] = tag
    if request.headers.get("If-None-Match") == tag:
        return web.Response(status=304, headers=headers)
    if "gzip" not in request.headers.get("Accept-Encoding", ""):
        return web.Response(body=raw, headers=headers)
    return web.Response(body=packed, headers={**headers, "Content-Encoding": "gzip"})


@functools.cache
def _read_static(file: Path) -> tuple[bytes, bytes, str]:
    """Return a file as it is, compressed, and its entity tag."""
    raw = file.read_bytes()
    return raw, gzip.compress(raw, mtime=0), f'"{hashlib.sha256(raw).hexdigest()[:16]}"'


async def _runs(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    found = await context.run(lambda: [run_info(run) for run in context.runs.all()])
    return _json({"runs": found})


async def _answer(
    request: web.Request, *, page: Page, heavy: bool = False, named: bool = True
) -> web.StreamResponse:
    """Answer with a page as JSON, or in its binary form; every failure is one line."""
    context, run = request.app[CONTEXT], None
    try:
        if named:
            run = await context.run(lambda: context.runs.named(request.match_info["run"]))
            handle = run
        else:
            handle = RunHandle("", Path())
        query = Query(request.query)
        found = await context.run(lambda: page(context, handle, query), heavy=heavy)
    except BadRequest as error:
        return refusal(400, str(error))
    except EmptyStore:
        return refusal(404, f"{'' if run is None else run.name} holds no rollouts yet")
    except InsituError as error:
        if interrupted(error):
            return refusal(503, "the query took too long: narrow it by a filter")
        return refusal(404, without_paths(error, run))
    if isinstance(found, Tagged):
        headers = {**HEADERS, "ETag": found.tag}
        if request.headers.get("If-None-Match") == found.tag:
            return web.Response(status=304, headers=headers)
        return _json(found, headers)
    return _json(found)


def _json(found: Mapping[str, Any] | bytes, headers: Mapping[str, str] = HEADERS) -> web.Response:
    binary = isinstance(found, bytes)
    body = found if isinstance(found, bytes) else encode(found)
    if len(body) > MAX_ANSWER_BYTES:
        return refusal(413, f"the answer is larger than {MAX_ANSWER_BYTES >> 20} MiB: ask for less")
    kind = "application/octet-stream" if binary else "application/json"
    answer = web.Response(body=body, headers={**headers, "Content-Type": kind})
    if len(body) > 4096:
        answer.enable_compression()
    return answer


def encode(found: Mapping[str, Any]) -> bytes:
    """Return a page as JSON."""
    try:
        return orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # lone surrogates cannot be encoded as UTF-8
        import json

        return json.dumps(found, default=str).encode()


async def _download(
    request: web.Request, *, page: Callable[[Context, RunHandle, Query], tuple[str, bytes]]
) -> web.StreamResponse:
    """Answer with a file of a run as an attachment that no browser shows."""
    context, run = request.app[CONTEXT], None
    try:
        run = await context.run(lambda: context.runs.named(request.match_info["run"]))
        handle, query = run, Query(request.query)
        name, body = await context.run(lambda: page(context, handle, query))
    except BadRequest as error:
        return refusal(400, str(error))
    except InsituError as error:
        return refusal(404, without_paths(error, run))
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)[-100:] or "file"
    headers = {**HEADERS, **DOWNLOAD_HEADERS, "Content-Type": "application/octet-stream"}
    headers["Content-Disposition"] = f'attachment; filename="{safe}"'
    return web.Response(body=body, headers=headers)


async def _events(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    try:
        run = await context.run(lambda: context.runs.named(request.match_info["run"]))
    except InsituError as error:
        return refusal(404, without_paths(error, None))
    return await stream_events(request, run, context.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """A server that is listening."""

    host: str
    port: int
    token: str

    @property
    def url(self) -> str:
        """Address with the token; opening it once sets the cookie."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/?token={self.token}"


@contextlib.asynccontextmanager
async def serving(
    paths: Sequence[Path], *, host: str = "127.0.0.1", port: int | None = None, allow_network: bool = False
) -> AsyncIterator[Viewer]:
    """Serve runs inside the context.

    `port`: None = DEFAULT_PORT or the next free one. Raises ConfigError for an address beyond loopback
    without `allow_network`, SetupError for a port in use, RecordError for a path without runs.
    """
    if not is_loopback(host) and not allow_network:
        raise ConfigError(
            f"--host {host} can be reached from other machines, and traffic is not encrypted: use"
            " `ssh -L` to this machine instead, or add --allow-network"
        )
    runs = Runs(paths)
    with _bound(host, port) as listener:
        chosen = listener.getsockname()[1]
        guard = Guard(host, chosen)
        runner = web.AppRunner(
            make_app(runs, guard), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
        )
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            yield Viewer(host=host, port=chosen, token=guard.token)
        finally:
            await runner.cleanup()


def _bound(host: str, port: int | None) -> socket.socket:
    """Return a listening socket; raise SetupError when its port is taken."""
    candidates = [port] if port is not None else list(range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in candidates:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host.strip("[]"), candidate))
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise SetupError(f"cannot listen on {host}:{candidate}: {error.strerror}") from error
    taken = f"port {port} is" if port is not None else f"ports {candidates[0]} to {candidates[-1]} are"
    raise SetupError(f"{taken} in use; choose another with --port")
