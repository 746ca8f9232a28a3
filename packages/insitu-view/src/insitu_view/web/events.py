"""Live updates: one stream of server-sent events per visible tab, with cursors and no data."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import orjson
from aiohttp import web

from insitu.errors import InsituError
from insitu.storage.queries import WATCH
from insitu_view.web.guard import HEADERS
from insitu_view.web.runs import WATCHED, RunHandle

POLL_S = 1.0
COMMENT_S = 15.0


class _RunInThread(Protocol):
    def __call__(self, function: Callable[[], Any]) -> Awaitable[Any]: ...


async def stream_events(request: web.Request, run: RunHandle, in_thread: _RunInThread) -> web.StreamResponse:
    """Send `{rollouts, steps, running, state, bytes}` now and whenever the run's files change."""
    answer = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
    await answer.prepare(request)
    seen: object = None
    sent_s = time.monotonic()
    try:
        while True:
            signature = await in_thread(lambda: (run.signature(), run.state()))
            if signature != seen:
                seen, sent_s = signature, time.monotonic()
                event = await in_thread(lambda: watch(run))
                await answer.write(b"data: " + orjson.dumps(event) + b"\n\n")
            elif time.monotonic() - sent_s > COMMENT_S:
                sent_s = time.monotonic()
                await answer.write(b": alive\n\n")
            await asyncio.sleep(POLL_S)
    except ConnectionError:
        return answer


def watch(run: RunHandle) -> dict[str, Any]:
    """Return the cursors of a run: newest row of rollouts, last step, rollouts under way, file sizes."""
    found: dict[str, Any] = {"rollouts": None, "steps": None, "running": 0, "problem": ""}
    try:
        with run.reader() as reader:
            found |= reader.one(WATCH) or {}
    except InsituError as error:
        found["problem"] = type(error).__name__
    sizes = {name: size for name, (size, _) in zip(WATCHED, run.signature(), strict=True)}
    return {**found, "state": run.state(), "bytes": sizes}
