"""What a request is before a dialect sees it: its path, its key and its decoded body, within limits.

Nothing here depends on a session. Bodies are read with a cap on what they unpack to, a deadline and a cap on
their nesting. Caller: server.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import orjson
from aiohttp import web

from whet.gateway.dialects.base import WireError


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Limits of the server itself; those of a rollout are its Limits."""

    model_name: str = "policy"
    """What replies call the model, whatever the agent asked for."""
    max_body_bytes: int = 64 << 20
    """After decompression."""
    max_json_depth: int = 128
    body_timeout_s: float = 60.0
    hold_headers_s: float = 10.0
    """A stream's status line waits this long for the engine, so that early failures keep a real status."""
    keep_alive_s: float = 10.0
    engine_deadline_s: float = 600.0
    write_timeout_s: float = 60.0
    """A client that does not read its reply for so long is gone."""
    disconnect_grace_s: float = 2.0
    """How long a call without client waits for its retry before it is aborted at the engine."""
    max_concurrent_calls: int = 16
    """Per session."""
    inline_chars: int = 100_000
    """Text up to this length is encoded on the event loop."""
    sealed_kept: int = 4096
    """How many sealed sessions are remembered, so that late calls are told so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A request's path, taken apart."""

    public_id: str | None
    """None on the key-only routes."""
    action: str


async def read_body(http: web.BaseRequest, config: GatewayConfig) -> Mapping[str, object]:
    """The decoded JSON object. Raises WireError for anything else or anything too large."""
    raw = bytearray()
    try:
        async with asyncio.timeout(config.body_timeout_s):
            async for chunk in http.content.iter_any():
                raw += chunk
                if len(raw) > config.max_body_bytes:
                    raise WireError("too_large", "The request body is too large.")
    except TimeoutError as error:
        raise WireError("invalid_request", "The request body did not arrive in time.") from error
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise WireError("invalid_request", "The request body is not valid JSON.") from error
    if not isinstance(body, dict):
        raise WireError("invalid_request", "The request body must be a JSON object.")
    if _deeper(body, config.max_json_depth):
        raise WireError("invalid_request", "The request body is nested too deeply.")
    return body


def take_apart(path: str) -> Route | None:
    """`/s/{public_id}/v1/{action}` or `/v1/{action}`."""
    parts = path.split("/", 4)
    if len(parts) == 5 and parts[:2] == ["", "s"] and parts[3] == "v1":
        return Route(public_id=parts[2], action=parts[4])
    parts = path.split("/", 2)
    if len(parts) == 3 and parts[:2] == ["", "v1"]:
        return Route(public_id=None, action=parts[2])
    return None


def secret_of(http: web.BaseRequest) -> str | None:
    """The key from the headers providers use; never from the URL, which leaks into logs."""
    scheme, _, bearer = http.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and bearer.strip():
        return bearer.strip()
    for name in ("x-api-key", "x-goog-api-key"):
        if http.headers.get(name):
            return http.headers[name]
    return None


def body_digest(action: str, body: Mapping[str, object]) -> bytes:
    """Equal for bodies that are equal after parsing: agents mark retries by nothing else."""
    raw = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(action.encode() + b"\0" + raw, digest_size=16).digest()


def _deeper(value: object, limit: int) -> bool:
    """True when the JSON value is nested more than `limit` levels; without recursion."""
    level: list[object] = [value]
    for _ in range(limit):
        following: list[object] = []
        for item in level:
            inside = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            following += [v for v in inside if isinstance(v, dict | list)]
        if not following:
            return False
        level = following
    return True
