"""Calls over a unix socket between the controller (asyncio, no torch) and the learner process.

A frame is `magic, header length, body length`, a JSON header and the raw little-endian bytes of the arrays
named in it. Every call carries an id and gets exactly one reply with that id, in any order, so a long call
never blocks a short one. Invariant: whatever happens to the peer, each waiting call ends (reply, EngineError
or its deadline). In asyncio both ends are a `RpcPeer`, the one that connects a `RpcClient`; a process that
owns its main loop serves with `RpcServer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import struct
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from insitu import errors
from insitu.errors import EngineError, InsituError, boundary, describe_raised
from insitu.stalls import awake_timeout

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Meta = dict[str, Any]

_PREFIX = struct.Struct("<4sIQ")
_MAGIC = b"wht1"
_MAX_HEADER = 16 << 20
_MAX_BODY = 4 << 30
_DTYPES = {name: np.dtype(name) for name in ("<i2", "<i4", "<i8", "<f4", "<f8", "|b1", "|u1")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message: JSON-able values and named arrays (read-only views of the received bytes)."""

    meta: Meta
    arrays: Mapping[str, Array] = field(default_factory=dict)


def encode(meta: Meta, arrays: Mapping[str, Array] | None = None) -> bytes:
    """Return the bytes of one frame; arrays must be int16/32/64, float32/64, bool or uint8."""
    specs: list[tuple[str, str, tuple[int, ...]]] = []
    parts: list[Array] = []
    for name, array in (arrays or {}).items():
        little = array
        if array.dtype.str not in _DTYPES:
            little = np.asarray(array, dtype=array.dtype.newbyteorder("<"))
        if little.dtype.str not in _DTYPES:
            raise EngineError(f"channel: array {name!r} has dtype {array.dtype}, which is not carried")
        specs.append((name, little.dtype.str, little.shape))
        parts.append(np.ascontiguousarray(little))
    header = orjson.dumps({"meta": meta, "arrays": specs})
    prefix = _PREFIX.pack(_MAGIC, len(header), sum(part.nbytes for part in parts))
    return b"".join([prefix, header, *(part.data for part in parts)])


class Decoder:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        """Received bytes that are not part of a complete frame."""
        self._missing = _PREFIX.size
        """Bytes without which there is no further frame."""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add received bytes and yield every frame now complete. Raises EngineError on nonsense."""
        self._parts.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return
        # A long frame comes in many parts: they are joined once.
        whole, at = b"".join(self._parts), 0
        while (end := _frame_end(whole, at)) <= len(whole):
            with boundary(EngineError, "channel: malformed frame"):
                frame = _decode(whole, at, end)
            at = end
            yield frame
        self._parts = [whole[at:]] if at < len(whole) else []
        self._missing = end - len(whole)


def _frame_end(data: bytes, at: int) -> int:
    """Return where the frame at `at` ends, or its prefix if that is incomplete. Raises EngineError."""
    if len(data) - at < _PREFIX.size:
        return at + _PREFIX.size
    magic, n_header, n_body = _PREFIX.unpack_from(data, at)
    if magic != _MAGIC or n_header > _MAX_HEADER or n_body > _MAX_BODY:
        raise EngineError("channel: the peer does not speak this protocol")
    return at + _PREFIX.size + int(n_header) + int(n_body)


def _decode(data: bytes, at: int, end: int) -> Frame:
    start = at + _PREFIX.size + int(_PREFIX.unpack_from(data, at)[1])
    raw = orjson.loads(memoryview(data)[at + _PREFIX.size : start])
    # A copy: arrays that are kept must not keep what came along with them.
    body = data[start:end]
    arrays: dict[str, Array] = {}
    offset = 0
    for name, dtype, shape in raw["arrays"]:
        if dtype not in _DTYPES or min(shape, default=0) < 0:
            raise ValueError(f"array {name!r} is described as {dtype} {shape}")
        array = np.frombuffer(body, _DTYPES[dtype], math.prod(shape), offset)
        arrays[name] = array if len(shape) == 1 else array.reshape(shape)
        offset += array.nbytes
    if offset != len(body):
        raise ValueError(f"{len(body)} bytes follow a header that describes {offset}")
    return Frame(meta=raw["meta"], arrays=arrays)


def error_meta(error: InsituError) -> Meta:
    """Return the serialised error: its class name and message."""
    return {"error": str(error), "kind": type(error).__name__, "infra": error.infra}


def _as_error(meta: Meta) -> InsituError:
    """Return the error that `error_meta` described; an unknown class becomes EngineError or InsituError."""
    kind = vars(errors).get(str(meta.get("kind")))
    if not (isinstance(kind, type) and issubclass(kind, InsituError)):
        kind = EngineError if meta.get("infra", True) else InsituError
    return kind(str(meta["error"]))


Handler = Callable[[Frame], Awaitable[Frame]]
NOTHING = Frame(meta={})


class RpcPeer:
    """One end of a connection: calls the other end, and answers its calls by `handlers`.

    Many calls may be outstanding at once. After the other end is gone every call, waiting or new, raises
    EngineError with the same line.
    """

    def __init__(self, peer: str, handlers: Mapping[str, Handler] | None = None) -> None:
        self.peer = peer
        """Name of the other side, for error lines."""
        self.handlers = dict(handlers or {})
        self.late = 0
        """Replies to calls that were given up."""
        self.ended = asyncio.Event()
        self.heard_s = 0.0
        """Loop time of the last received bytes."""
        self.overdue: Callable[[str, float], None] = lambda op, silent_s: None
        """Called for a call whose answer is late, once, with the seconds since anything was heard."""
        self._long = 0
        """Waiting calls that may take long by themselves."""
        self._looks: dict[int, asyncio.TimerHandle] = {}
        self._send: Callable[[bytes], object] | None = None
        self._decoder = Decoder()
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._ids = itertools.count(1)
        self._gone = f"{peer} is not connected"

    @property
    def alive(self) -> bool:
        return not self._gone

    @property
    def gone(self) -> EngineError:
        """What every call raises after the end."""
        return EngineError(self._gone)

    def attach(self, send: Callable[[bytes], object]) -> None:
        """Begin: `send` takes the bytes for the other end."""
        self._send, self._gone = send, ""
        self.heard_s = asyncio.get_running_loop().time()

    async def call(
        self,
        op: str,
        meta: Meta | None = None,
        arrays: Mapping[str, Array] | None = None,
        *,
        deadline_s: float,
        quiet_s: float | None = None,
    ) -> Frame:
        """Send one call and wait for its reply.

        quiet_s: silence after which `overdue` is called, while no call without it waits; None = the call may
        take long, and is overdue after half of its deadline. The deadline stands still with the machine.
        Cancelling the coroutine, or the deadline, cancels the call at the other end. Raises the error that it
        answered with, or EngineError when it is gone or late.
        """
        if self._gone or self._send is None:
            raise EngineError(self._gone)
        number = next(self._ids)
        data = encode({**(meta or {}), "op": op, "id": number}, arrays)
        reply: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        self._long += quiet_s is None
        self._look_at(deadline_s / 2 if quiet_s is None else quiet_s, number, op, quiet_s)
        self._send(data)
        try:
            async with awake_timeout(deadline_s):
                return await reply
        except TimeoutError as error:
            raise EngineError(f"{self.peer} did not answer {op} within {deadline_s:g} s") from error
        finally:
            self._long -= quiet_s is None
            self._looks.pop(number).cancel()
            if self._waiting.pop(number, None) is not None and not self._gone:
                self._send(encode({"op": "cancel", "id": number}))

    def _look(self, number: int, op: str, quiet_s: float | None) -> None:
        """Report a waiting call to `overdue`; look again later if the other end is heard or has long work."""
        silent_s = asyncio.get_running_loop().time() - self.heard_s
        if quiet_s is None or (silent_s >= quiet_s and not self._long):
            self.overdue(op, silent_s)
        else:
            self._look_at(quiet_s, number, op, quiet_s)

    def _look_at(self, after_s: float, number: int, op: str, quiet_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._looks[number] = loop.call_later(after_s, self._look, number, op, quiet_s)

    def notify(self, op: str, meta: Meta) -> None:
        """Send a call that gets no reply; does nothing when the other end is gone."""
        if self._send is not None and not self._gone:
            self._send(encode({**meta, "op": op, "id": 0}))

    def feed(self, data: bytes) -> None:
        """Handle received bytes. Raises EngineError on nonsense."""
        self.heard_s = asyncio.get_running_loop().time()
        for frame in self._decoder.feed(data):
            if "op" in frame.meta:
                self._take(frame)
            else:
                self._settle(frame)

    def end(self, line: str) -> None:
        """End every call: waiting ones raise EngineError with `line`, running answers are cancelled."""
        self._gone = self._gone or line
        self.ended.set()
        waiting, self._waiting = self._waiting, {}
        for reply in waiting.values():
            if not reply.done():
                reply.set_exception(EngineError(self._gone))
        for task in self._answering.values():
            task.cancel()

    async def answered(self) -> None:
        """Wait for the end of all running answers."""
        await asyncio.gather(*self._answering.values(), return_exceptions=True)

    def _settle(self, frame: Frame) -> None:
        reply = self._waiting.pop(int(frame.meta["id"]), None)
        if reply is None or reply.done():
            self.late += 1
        elif "error" in frame.meta:
            reply.set_exception(_as_error(frame.meta))
        else:
            reply.set_result(frame)

    def _take(self, frame: Frame) -> None:
        number = int(frame.meta["id"])
        if frame.meta["op"] == "cancel":
            if number in self._answering:
                self._answering[number].cancel()
        elif not self._gone:
            task = asyncio.create_task(self._answer(number, frame))
            self._answering[number] = task
            task.add_done_callback(lambda _: self._answering.pop(number, None))

    async def _answer(self, number: int, frame: Frame) -> None:
        op = str(frame.meta["op"])
        try:
            if op not in self.handlers:
                raise EngineError(f"channel: no command {op!r}")
            answer = await self.handlers[op](frame)
            data = encode({**answer.meta, "id": number}, answer.arrays)
        except InsituError as error:
            data = encode({**error_meta(error), "id": number})
        except Exception as error:  # the boundary: the other end must not wait for a defect
            log.exception("call failed op=%s", op)
            line = f"{op} {describe_raised(error)}"
            data = encode({"error": line, "kind": "InsituError", "infra": False, "id": number})
        if number and self._send is not None and not self._gone:
            self._send(data)


async def serve_peer(peer: RpcPeer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Connect a peer to a stream until that ends; its running answers have ended afterwards."""
    peer.attach(writer.write)
    try:
        with contextlib.suppress(OSError, EngineError):
            while data := await reader.read(1 << 18):
                peer.feed(data)
    finally:
        peer.end(f"{peer.peer} is gone: the connection ended")
        await peer.answered()
        writer.close()


class RpcClient(asyncio.Protocol, RpcPeer):
    """A peer that connects to a unix socket; make one with `connect`."""

    _transport: asyncio.Transport | None = None

    @classmethod
    async def connect(
        cls,
        path: Path,
        *,
        deadline_s: float = 30.0,
        peer: str = "learner",
        handlers: Mapping[str, Handler] | None = None,
    ) -> RpcClient:
        """Connect to the server at `path`, waiting until it listens. Raises EngineError at the deadline."""
        loop = asyncio.get_running_loop()
        last = "it did not start listening"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while True:
                    try:
                        _, channel = await loop.create_unix_connection(lambda: cls(peer, handlers), str(path))
                    except OSError as error:
                        last = error.strerror or str(error)
                        await asyncio.sleep(0.02)
                    else:
                        return channel
        raise EngineError(f"{peer} is not reachable at {path} after {deadline_s:g} s: {last}")

    async def close(self, deadline_s: float = 5.0) -> None:
        """Close the connection; waiting calls end with EngineError. May be called twice."""
        if self._transport is None:
            return
        self.end(f"the connection to {self.peer} was closed")
        self._transport.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._closed.wait()

    # asyncio.Protocol, called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._transport, self._closed = transport, asyncio.Event()
            self.attach(transport.write)

    def data_received(self, data: bytes) -> None:
        try:
            self.feed(data)
        except EngineError as error:
            self.end(f"{self.peer}: {error}")
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(f"{self.peer} is gone: the connection ended")
        self._closed.set()
