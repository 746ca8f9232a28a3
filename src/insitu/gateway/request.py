"""What a request is before a dialect sees it: its key, its hints and its decoded body, within limits.

Nothing here depends on a session. Bodies are read with a cap on what they unpack to, a deadline and a cap on
their nesting. Caller: server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import orjson
from aiohttp import web

from insitu.gateway.dialects.base import WireError, deeper
from insitu.gateway.host_tools import HostTool
from insitu.gateway.routes import Route, dialect_of
from insitu.gateway.text_tool_calls import TextShim

_INLINE_UNPACK = 1 << 16
"""A packed body up to this size is unpacked on the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Limits of the server itself; those of a rollout are its Limits."""

    model_name: str = "policy"
    """What replies call the model, whatever the agent asked for."""
    max_body_bytes: int = 64 << 20
    """After decompression."""
    max_json_depth: int = 128
    max_json_items: int = 250_000
    """Values in all arrays and objects of a body. A conversation has fewer than tokens; a JSON reader lets
    nothing else run until it is through, for 0.1 us a value."""
    max_intake_bytes: int = 512 << 20
    """Of all bodies together that are being read, unpacked or parsed."""
    max_connections: int = 4096
    """Per listener; more are closed at once."""
    max_tool_body_bytes: int = 1 << 20
    """Of one call of a host tool."""
    body_timeout_s: float = 60.0
    hold_headers_s: float = 10.0
    """A stream's status line waits this long for the engine, so that early failures keep a real status."""
    keep_alive_s: float = 10.0
    engine_deadline_s: float = 600.0
    """Of one generation. A call that takes longer fails; the agent may ask again."""
    write_timeout_s: float = 60.0
    """A client that does not read its reply for so long is gone."""
    disconnect_grace_s: float = 2.0
    """How long a call without client waits for its retry before it is aborted at the engine."""
    max_concurrent_calls: int = 16
    """Per session, at the engine; further ones wait for those, as long as for an engine."""
    max_waiting_calls: int = 256
    """Per session; further ones are refused."""
    inline_chars: int = 100_000
    """Text up to this length is encoded on the event loop."""
    auxiliary: Literal["exclude", "train"] = "exclude"
    """Turns of side calls (capture.segments): left out of training, or trained as a sub-agent's."""
    keep_reasoning: Literal["all", "template"] = "all"
    """Reasoning of earlier turns: kept as it was sampled, or dropped where the family's rules drop it."""
    tools: tuple[HostTool, ...] = ()
    """Host tools of sessions that are opened without their own."""
    shim: TextShim | None = None
    """Text -> tool call, for sessions that are opened without their own."""
    log_dir: Path | None = None
    """Folder in which each session keeps a log of its forest while it lives; None = no logs."""
    sealed_kept: int = 4096
    """How many sealed sessions are remembered, so that late calls are told so."""


@dataclass(slots=True, kw_only=True)
class GatewayCounters:
    """Since the gateway started; they only grow."""

    requests: int = 0
    replies: int = 0
    refused: int = 0
    """Requests answered with an error."""
    unauthorized: int = 0
    client_gone: int = 0
    defects: int = 0
    """Unexpected exceptions at the request boundary."""


class MemoryBudget:
    """Bytes of the bodies that no session has taken on yet, over all connections of a gateway."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0

    def take(self, count: int) -> None:
        """Raises WireError, which agents answer by asking again, when that is more than may be held."""
        if self.held + count > self._limit:
            raise WireError("rate_limited", "Too much is being sent at a time.")
        self.held += count


class MemoryShare:
    """What one request holds of an Intake, until it leaves the `with` block."""

    __slots__ = ("_count", "_intake")

    def __init__(self, intake: MemoryBudget) -> None:
        self._intake, self._count = intake, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._intake.held -= self._count

    def take(self, count: int) -> None:
        self._intake.take(count)
        self._count += count


async def read_body(
    http: web.BaseRequest,
    config: GatewayConfig,
    max_bytes: int | None = None,
    share: MemoryShare | None = None,
) -> bytes:
    """The body, unpacked. Raises WireError when it is too large or too slow."""
    chunks: list[bytes] = []
    size = 0
    limit = config.max_body_bytes if max_bytes is None else max_bytes

    def take(chunk: bytes) -> None:
        nonlocal size
        chunks.append(chunk)
        size += len(chunk)
        if share is not None:
            share.take(len(chunk))
        if size > limit:
            raise WireError("too_large", "The request body is too large.")

    expected = http.headers.get("Expect", "").lower() == "100-continue"
    if expected and http.transport is not None and not http.content.is_eof():
        http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if http.content.is_eof():  # it came with the headers: nothing to wait for
        take(http.content.read_nowait())
    else:
        try:
            async with asyncio.timeout(config.body_timeout_s):
                async for chunk in http.content.iter_any():
                    take(chunk)
        except TimeoutError as error:
            raise WireError("invalid_request", "The request body did not arrive in time.") from error
    raw = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    plain = await _plain(http, raw, limit)
    if share is not None:
        share.take(len(plain) - len(raw) if plain is not raw else 0)
    return plain


async def _plain(http: web.BaseRequest, raw: bytes, limit: int) -> bytes:
    """Unpacked, if it was packed. Raises WireError."""
    encoding = http.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding in ("identity", ""):
        return raw
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise WireError("invalid_request", "This Content-Encoding is not supported.")
    if len(raw) < _INLINE_UNPACK:
        return _unpacked(raw, limit)
    return await asyncio.to_thread(_unpacked, raw, limit)


_ESCAPE = re.compile(
    rb"(?:\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}){1,4096}"
    rb"|\\(u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
"""Many whole pairs at a time, or another escape; the group is a half."""


def mended(raw: bytes) -> bytes:
    """JSON text with U+FFFD for each escaped half of a surrogate pair.

    JavaScript agents cut texts within an emoji, and no strict reader takes what is left.
    """
    # Not searched for a half first: in one search of a long body no other call of the gateway goes on.
    return _ESCAPE.sub(lambda found: found[0] if found[1] is None else b"\\ufffd", raw)


_DIGITS = bytes(ord("0") if 48 <= byte <= 57 else ord(" ") for byte in range(256))
_LONG = b"0" * 19


def loads(raw: bytes) -> Any:
    """The JSON value, whole numbers of any size exact. Raises orjson.JSONDecodeError; halves of surrogate
    pairs are looked for only then."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raw = mended(raw)
        value = orjson.loads(raw)
    # orjson makes a float of a number beyond 64 bits, and an agent may echo one in a call's arguments.
    if _LONG in raw.translate(_DIGITS):
        # Thousands of digits or levels are beyond Python's reader: then orjson's value stands.
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(raw)
    return value


def sorted_json(value: object) -> bytes:
    """One spelling for all JSON texts of a value that `loads` gave."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # a number beyond 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


async def read_json(http: web.BaseRequest, config: GatewayConfig, max_bytes: int) -> Mapping[str, object]:
    """The body as a JSON object. Raises WireError."""
    return decode(await read_body(http, config, max_bytes), config.max_json_depth, config.max_json_items)


_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A JSON string, or what is left when it has no end: each byte is looked at once."""


def crowded(raw: bytes, max_items: int) -> bool:
    """True when the arrays and objects of a JSON text surely hold more than `max_items` values; False may
    still hold twice as many. Told by its commas and brackets: readers let nothing else run until they are
    through, and that is seconds for tens of millions of values."""
    if len(raw) <= max_items:
        return False
    commas = containers = at = 0
    if raw.count(b",") <= max_items and raw.count(b"[") + raw.count(b"{") <= max_items + 1:
        return False
    for text in _TEXT.finditer(raw):
        commas += raw.count(b",", at, text.start())
        containers += raw.count(b"[", at, text.start()) + raw.count(b"{", at, text.start())
        if max(commas, containers - 1) > max_items:
            return True
        at = text.end()
    commas += raw.count(b",", at)
    containers += raw.count(b"[", at) + raw.count(b"{", at)
    return max(commas, containers - 1) > max_items


def decode(raw: bytes, max_depth: int, max_items: int) -> Mapping[str, object]:
    """The JSON object that `raw` is. Raises WireError for anything else or anything too large."""
    if crowded(raw, max_items):
        raise WireError("invalid_request", "The request body has too many items.")
    try:
        body = loads(raw)
    except orjson.JSONDecodeError as error:
        raise WireError("invalid_request", "The request body is not valid JSON.") from error
    if not isinstance(body, dict):
        raise WireError("invalid_request", "The request body must be a JSON object.")
    if deeper(body, max_depth, max_items):
        raise WireError("invalid_request", "The request body is nested too deeply or has too many items.")
    return body


def _unpacked(raw: bytes, limit: int) -> bytes:
    """Never makes more than `limit` bytes and one. Raises WireError."""
    unpack = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip or zlib, by its header
    try:
        body = unpack.decompress(raw, limit + 1)
    except zlib.error as error:
        raise WireError("invalid_request", "The request body cannot be unpacked.") from error
    if len(body) > limit:
        raise WireError("too_large", "The request body is too large.")
    if not unpack.eof or unpack.unused_data:
        raise WireError("invalid_request", "The request body cannot be unpacked.")
    return body


def secret_of(http: web.BaseRequest) -> str | None:
    """The key from the headers that providers use, and from the query `key` of Gemini's paths, as some of its
    clients send it: no path or query is logged here."""
    scheme, _, bearer = http.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and bearer.strip():
        return bearer.strip()
    for name in ("x-api-key", "x-goog-api-key"):
        if http.headers.get(name):
            return http.headers[name]
    versions = ("/v1beta/", "/v1alpha/")
    return http.query.get("key") if any(version in http.path for version in versions) else None


def dialect_name(http: web.BaseRequest, route: Route | None) -> str:
    """Name of the wire format of the answer, by the path or else by headers of the clients."""
    name = dialect_of(http.path) if route is None else route.dialect
    if name:
        return name
    if "anthropic-version" in http.headers:
        return "anthropic"
    return "gemini" if "x-goog-api-key" in http.headers else "chat"


_HINTS = (
    "x-claude-code-session-id",
    "x-claude-code-agent-id",
    "x-session-id",
    "x-session-affinity",
    "x-parent-session-id",
    "x-codex-window-id",
    "session-id",
    "thread-id",
    "x-stainless-retry-count",
)
_HINT_CHARS = 128


def hints_of(http: web.BaseRequest) -> tuple[tuple[str, str], ...]:
    """What the agent says of itself in its headers: labels, never keys. Bytes that are no UTF-8 reach us as
    lone surrogates, which no file can hold."""
    return tuple((name, _plain_text(http.headers[name])) for name in _HINTS if name in http.headers)


def _plain_text(value: str) -> str:
    return value[:_HINT_CHARS].encode("utf-8", "replace").decode()
