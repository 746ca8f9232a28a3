"""Reading of requests before a dialect sees them: key, labels and decoded body, within limits.

Bodies are read with limits on their unpacked size, their time, their nesting and their number of values.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
from aiohttp import web

from insitu.capture.drift_log import plain
from insitu.gateway.dialects.base import WireError, deeper
from insitu.gateway.host_tools import HostTool
from insitu.gateway.routes import Route, dialect_of
from insitu.gateway.text_tool_calls import TextShim
from insitu.gateway.tool_hooks import ToolHook

zstd: Any = None
"""The standard library's module, or its backport; None = zstd bodies are refused."""
with contextlib.suppress(ImportError):
    zstd = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
_UNREADABLE: tuple[type[Exception], ...] = (zlib.error, *([] if zstd is None else [zstd.ZstdError]))

_INLINE_UNPACK = 1 << 16
"""A packed body up to this size is unpacked on the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Limits and options of the server; those of a rollout are its Limits."""

    model_name: str = "policy"
    """What replies call the model, whatever the agent asked for."""
    max_body_bytes: int = 64 << 20
    """After decompression."""
    max_json_depth: int = 128
    max_json_items: int = 250_000
    """Values in all arrays and objects of a body. Conversations have fewer than tokens; a JSON parser blocks
    the event loop for 0.1 us per value."""
    max_intake_bytes: int = 512 << 20
    """All bodies together that are being read, unpacked or parsed."""
    max_connections: int = 4096
    """Per listener; more are closed at once."""
    max_tool_body_bytes: int = 1 << 20
    """One call of a host tool."""
    body_timeout_s: float = 60.0
    hold_headers_s: float = 10.0
    """A stream waits this long for the engine before its status line, so that early failures have a real
    status."""
    keep_alive_s: float = 10.0
    engine_deadline_s: float = 600.0
    """One generation. A call that takes longer fails; the agent may retry."""
    write_timeout_s: float = 60.0
    """A client that does not read its reply for this long is considered gone."""
    disconnect_grace_s: float = 2.0
    """Time that a call without a client waits for its retry before it is aborted at the engine."""
    max_concurrent_calls: int = 16
    """Per session, at the engine; further ones wait, up to the engine deadline."""
    max_waiting_calls: int = 256
    """Per session; further ones are refused."""
    inline_chars: int = 100_000
    """Text up to this length is encoded on the event loop."""
    auxiliary: Literal["exclude", "train"] = "exclude"
    """Turns of side calls (capture.segments): left out of training, or trained as a sub-agent's."""
    keep_reasoning: Literal["all", "template"] = "all"
    """Reasoning of earlier turns: kept as sampled, or dropped where the renderer drops it."""
    tools: tuple[HostTool, ...] = ()
    """Host tools of sessions that are opened without tools of their own."""
    hook: ToolHook | None = None
    """Sees tool calls and results of all sessions."""
    shim: TextShim | None = None
    """Text -> tool call, for sessions that are opened without a shim of their own."""
    log_dir: Path | None = None
    """Folder with a log of each live session of tokens; None = no logs."""
    sealed_kept: int = 4096
    """Number of sealed sessions whose secrets still get "session closed" instead of "unauthorized"."""


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
    """Bytes of the bodies that no session has taken yet, over all connections of a gateway."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yield what reserves bytes until the block ends.

        It raises WireError when the limit is exceeded; agents retry.
        """
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            if self.held + count > self._limit:
                raise WireError("rate_limited", "Too much is being sent at a time.")
            self.held += count
            taken += count

        try:
            yield take
        finally:
            self.held -= taken


def _untaken(count: int) -> None:
    """Take bytes of a body that counts for no budget."""


async def read_body(
    http: web.BaseRequest,
    config: GatewayConfig,
    max_bytes: int | None = None,
    reserve: Callable[[int], None] = _untaken,
) -> bytes:
    """Return the body, unpacked, after `reserve` of its bytes.

    Raises WireError when it is too large or too slow.
    """
    chunks: list[bytes] = []
    size = 0
    limit = config.max_body_bytes if max_bytes is None else max_bytes

    def take(chunk: bytes) -> None:
        nonlocal size
        chunks.append(chunk)
        size += len(chunk)
        reserve(len(chunk))
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
    plain = await _unpack(http, raw, limit)
    reserve(len(plain) - len(raw) if plain is not raw else 0)
    return plain


_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""First bytes of packed bodies: some clients send them without a header. No JSON text begins so."""
_PACKED = ("gzip", "deflate", "zstd") if zstd is not None else ("gzip", "deflate")
_ZSTD_WINDOW = 26
"""Power of two of the bytes that a decoder may hold besides its output."""


async def _unpack(http: web.BaseRequest, raw: bytes, limit: int) -> bytes:
    """Unpack a packed body. Raises WireError."""
    encoding = http.headers.get("Content-Encoding", "").strip().lower().removeprefix("x-")
    if encoding in ("identity", ""):
        encoding = next((name for magic, name in _MAGIC.items() if raw.startswith(magic)), "")
    if not encoding:
        return raw
    if encoding not in _PACKED:
        known = ", ".join(_PACKED)
        message = f"Content-Encoding {encoding[:64]!r} is not supported; send the body plain or as {known}."
        raise WireError("unsupported_encoding", message)
    if len(raw) < _INLINE_UNPACK:
        return _unpacked(raw, encoding, limit)
    return await asyncio.to_thread(_unpacked, raw, encoding, limit)


_ESCAPE = re.compile(
    rb"(?:\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}){1,4096}"
    rb"|\\(u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
"""Many complete pairs at a time, or another escape; the group is a lone half."""


def replace_lone_surrogates(raw: bytes) -> bytes:
    """Replace each escaped half of a surrogate pair by U+FFFD.

    JavaScript agents cut texts within an emoji, which no strict parser accepts.
    """
    # No search for a half first: one search of a long body would block the event loop.
    return _ESCAPE.sub(lambda found: found[0] if found[1] is None else b"\\ufffd", raw)


_DIGITS = bytes(ord("0") if 48 <= byte <= 57 else ord(" ") for byte in range(256))
_LONG = b"0" * 19


def loads(raw: bytes) -> Any:
    """Return the JSON value with exact integers of any size. Raises orjson.JSONDecodeError.

    Only a body that is refused is searched for halves of surrogate pairs.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raw = replace_lone_surrogates(raw)
        value = orjson.loads(raw)
    # orjson makes a float of a number beyond 64 bits, and an agent may echo one in a call's arguments.
    if _LONG in raw.translate(_DIGITS):
        # Thousands of digits or levels are beyond Python's reader: then orjson's value stands.
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(raw)
    return value


def sorted_json(value: object) -> bytes:
    """Return the same text for all spellings of a JSON value that `loads` returned."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # a number beyond 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


async def read_json(http: web.BaseRequest, config: GatewayConfig, max_bytes: int) -> Mapping[str, object]:
    """Return the body as a JSON object. Raises WireError."""
    return decode(await read_body(http, config, max_bytes), config.max_json_depth, config.max_json_items)


_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A JSON string, or an unterminated one; each byte is looked at once."""


def too_many_values(raw: bytes, max_items: int) -> bool:
    """Return whether the arrays and objects of a JSON text surely hold more than `max_items` values.

    False may still mean up to twice as many. Counts commas and brackets, because a parser blocks the event
    loop for seconds on tens of millions of values.
    """
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
    """Return the JSON object in `raw`. Raises WireError for anything else or anything too large."""
    if too_many_values(raw, max_items):
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


def _unpacked(raw: bytes, encoding: str, limit: int) -> bytes:
    """Unpack at most `limit` bytes. Raises WireError."""
    try:
        if encoding == "zstd":
            options = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW}
            unpack = zstd.ZstdDecompressor(options=options)
        else:
            unpack = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip or zlib, by its header
        body: bytes = unpack.decompress(raw, limit + 1)
    except _UNREADABLE as error:
        if "memory" in str(error):
            raise WireError("too_large", "The request body is too large.") from error
        raise WireError("invalid_request", "The request body cannot be unpacked.") from error
    if len(body) > limit:
        raise WireError("too_large", "The request body is too large.")
    if not unpack.eof or unpack.unused_data:
        raise WireError("invalid_request", "The request body cannot be unpacked.")
    return body


def secret_of(http: web.BaseRequest) -> str | None:
    """Return the key from the headers that providers use.

    Also from the query `key` of Gemini paths, as some clients send it: no path or query is logged.
    """
    scheme, _, bearer = http.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and bearer.strip():
        return bearer.strip()
    for name in ("x-api-key", "x-goog-api-key"):
        if http.headers.get(name):
            return http.headers[name]
    versions = ("/v1beta/", "/v1alpha/")
    return http.query.get("key") if any(version in http.path for version in versions) else None


def dialect_name(http: web.BaseRequest, route: Route | None) -> str:
    """Return the name of the wire format of the answer, by the path or else by client headers."""
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
    """Return client metadata from the headers: labels, never keys."""
    return tuple((name, plain(http.headers[name], _HINT_CHARS)) for name in _HINTS if name in http.headers)
