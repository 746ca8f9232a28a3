"""Server-sent events: frames as bytes.

A frame is one line of data and an empty line; comments keep a connection alive.
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

HEADERS: Mapping[str, str] = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def data(value: Mapping[str, object]) -> bytes:
    """Return one `data:` frame. JSON text has no raw line breaks, so one line is enough."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def event(value: Mapping[str, object]) -> bytes:
    """Return a frame named after the value's `type`, as providers with typed events send them."""
    return f"event: {value['type']}\n".encode() + data(value)
