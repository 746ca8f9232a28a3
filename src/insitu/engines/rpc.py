"""Calls over a unix socket between the controller (asyncio, no torch) and the learner process.

A frame is `magic, header length, body length`, a JSON header and the raw little-endian bytes of the arrays
named in it. Every call carries an id and gets exactly one reply with that id, in any order, so a long call
never blocks a short one. Invariant: whatever happens to the peer, each waiting call ends (reply, EngineError
or its deadline). The client half is `RpcClient`, the server half `RpcServer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from insitu import errors
from insitu.errors import EngineError, InsituError, boundary

Array = npt.NDArray[Any]
Meta = dict[str, Any]

_PREFIX = struct.Struct("<4sIQ")
_MAGIC = b"wht1"
_MAX_HEADER = 16 << 20
_MAX_BODY = 4 << 30
_DTYPES = frozenset({"<i4", "<i8", "<f4", "<f8", "|b1", "|u1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message: JSON-able values and named arrays (read-only views of the received bytes)."""

    meta: Meta
    arrays: Mapping[str, Array] = field(default_factory=dict)


def encode(meta: Meta, arrays: Mapping[str, Array] | None = None) -> bytes:
    """Return the bytes of one frame; arrays must be int32/64, float32/64, bool or uint8."""
    specs, parts = [], []
    for name, array in (arrays or {}).items():
        little = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
        if little.dtype.str not in _DTYPES:
            raise EngineError(f"channel: array {name!r} has dtype {array.dtype}, which is not carried")
        specs.append([name, little.dtype.str, list(little.shape)])
        parts.append(little.tobytes())
    header = orjson.dumps({"meta": meta, "arrays": specs})
    return b"".join([_PREFIX.pack(_MAGIC, len(header), sum(map(len, parts))), header, *parts])


class Decoder:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add received bytes and yield every frame now complete. Raises EngineError on nonsense."""
        self._buffer += data
        while len(self._buffer) >= _PREFIX.size:
            magic, n_header, n_body = _PREFIX.unpack_from(self._buffer)
            if magic != _MAGIC or n_header > _MAX_HEADER or n_body > _MAX_BODY:
                raise EngineError("channel: the peer does not speak this protocol")
            start, end = _PREFIX.size + n_header, _PREFIX.size + n_header + n_body
            if len(self._buffer) < end:
                return
            header, body = bytes(self._buffer[_PREFIX.size : start]), bytes(self._buffer[start:end])
            del self._buffer[:end]
            with boundary(EngineError, "channel: malformed frame"):
                frame = _decode(header, body)
            yield frame


def _decode(header: bytes, body: bytes) -> Frame:
    raw = orjson.loads(header)
    arrays: dict[str, Array] = {}
    offset = 0
    for name, dtype, shape in raw["arrays"]:
        if dtype not in _DTYPES or any(n < 0 for n in shape):
            raise ValueError(f"array {name!r} is described as {dtype} {shape}")
        count = math.prod(shape)
        arrays[name] = np.frombuffer(body, np.dtype(dtype), count, offset).reshape(shape)
        offset += arrays[name].nbytes
    if offset != len(body):
        raise ValueError(f"{len(body)} bytes follow a header that describes {offset}")
    return Frame(meta=raw["meta"], arrays=arrays)


def error_meta(error: InsituError) -> Meta:
    """Return the serialised error: its class name and message."""
    return {"error": str(error), "kind": type(error).__name__}


def _as_error(meta: Meta) -> InsituError:
    """Return the error that `error_meta` described; an unknown class becomes EngineError."""
    kind = vars(errors).get(str(meta.get("kind")))
    if not (isinstance(kind, type) and issubclass(kind, InsituError)):
        kind = EngineError
    return kind(str(meta["error"]))


class RpcClient(asyncio.Protocol):
    """Client half: many calls may be outstanding at once. Make one with `Channel.connect`.

    After the peer is gone every call, waiting or new, raises EngineError with the same line.
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        """Name of the other side, for error lines."""
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._ids = itertools.count(1)
        self._gone = f"{peer} is not connected"
        self._closed = asyncio.Event()

    @classmethod
    async def connect(cls, path: Path, *, deadline_s: float = 30.0, peer: str = "learner") -> RpcClient:
        """Connect to the server at `path`, waiting until it listens. Raises EngineError at the deadline."""
        loop = asyncio.get_running_loop()
        last = "it did not start listening"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while True:
                    try:
                        _, channel = await loop.create_unix_connection(lambda: cls(peer), str(path))
                    except OSError as error:
                        last = error.strerror or str(error)
                        await asyncio.sleep(0.02)
                    else:
                        return channel
        raise EngineError(f"{peer} is not reachable at {path} after {deadline_s:g} s: {last}")

    @property
    def alive(self) -> bool:
        return not self._gone

    async def call(
        self,
        op: str,
        meta: Meta | None = None,
        arrays: Mapping[str, Array] | None = None,
        *,
        deadline_s: float,
    ) -> Frame:
        """Send one call and wait for its reply.

        Cancelling the coroutine, or the deadline, cancels the call at the server. Raises the error the
        server answered with, or EngineError when it is gone or late.
        """
        if self._gone or self._transport is None:
            raise EngineError(self._gone)
        number = next(self._ids)
        reply: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        self._transport.write(encode({**(meta or {}), "op": op, "id": number}, arrays))
        try:
            async with asyncio.timeout(deadline_s):
                return await reply
        except TimeoutError as error:
            raise EngineError(f"{self.peer} did not answer {op} within {deadline_s:g} s") from error
        finally:
            if self._waiting.pop(number, None) is not None and not self._gone:
                self._transport.write(encode({"op": "cancel", "id": number}))

    async def close(self, deadline_s: float = 5.0) -> None:
        """Close the connection; waiting calls end with EngineError. May be called twice."""
        if self._transport is None:
            return
        self._end(f"the connection to {self.peer} was closed")
        self._transport.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._closed.wait()

    # asyncio.Protocol, called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._transport = transport
            self._gone = ""

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                self._settle(frame)
        except EngineError as error:
            self._end(f"{self.peer}: {error}")
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"{self.peer} is gone: the connection ended")
        self._closed.set()

    def _settle(self, frame: Frame) -> None:
        reply = self._waiting.pop(int(frame.meta["id"]), None)
        if reply is None or reply.done():
            return
        if "error" in frame.meta:
            reply.set_exception(_as_error(frame.meta))
        else:
            reply.set_result(frame)

    def _end(self, line: str) -> None:
        self._gone = self._gone or line
        waiting, self._waiting = self._waiting, {}
        for reply in waiting.values():
            if not reply.done():
                reply.set_exception(EngineError(self._gone))
