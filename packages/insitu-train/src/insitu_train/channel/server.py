"""Server half of the channel, for a process that owns its main loop (the learner).

Nothing here starts a thread: the owner calls `poll` between its own pieces of work. Replies may be given
from any thread. A client that vanishes cancels its own open calls only.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from insitu.errors import EngineError, InsituError, boundary
from insitu_train.channel.rpc import Array, Decoder, Frame, Meta, encode, error_meta

Handler = Callable[["RpcCall"], None]


class RpcCall:
    """One request that waits for its one answer: `reply` or `fail`, now or later, from any thread."""

    def __init__(self, peer: _Peer, op: str, frame: Frame) -> None:
        self.op = op
        self.meta = frame.meta
        self.arrays = frame.arrays
        self.on_cancel: Callable[[], None] | None = None
        """Called once, in the polling thread, when the client gave up before the answer."""
        self._peer = peer
        self._number = int(frame.meta["id"])

    @property
    def open(self) -> bool:
        """True until answered or cancelled."""
        return self._number in self._peer.calls

    def reply(self, meta: Meta | None = None, arrays: Mapping[str, Array] | None = None) -> None:
        """Answer. Does nothing when the call was already answered or cancelled."""
        if self._peer.calls.pop(self._number, None) is not None:
            self._peer.send(encode({**(meta or {}), "id": self._number}, arrays))

    def fail(self, error: InsituError) -> None:
        """Answer with an error; the client raises the same class with the same line."""
        if self._peer.calls.pop(self._number, None) is not None:
            self._peer.send(encode({**error_meta(error), "id": self._number}))

    def cancel(self) -> None:
        """Handle a cancellation by the client: drop the call and notify the handler."""
        if self._peer.calls.pop(self._number, None) is not None and self.on_cancel is not None:
            self.on_cancel()


class _Peer:
    """One connected client: its socket, its half-read frames and its unsent bytes."""

    def __init__(self, sock: socket.socket, wake: Callable[[], None]) -> None:
        self.sock = sock
        self.decoder = Decoder()
        self.calls: dict[int, RpcCall] = {}
        self.broken = False
        self._wake = wake
        self._outbox = bytearray()
        self._lock = threading.Lock()

    @property
    def unsent(self) -> bool:
        return bool(self._outbox)

    def send(self, data: bytes) -> None:
        with self._lock:
            self._outbox += data
        self.flush()
        if self._outbox or self.broken:
            self._wake()

    def flush(self) -> None:
        """Send what the socket takes now; the rest goes at the next poll."""
        with self._lock:
            try:
                while self._outbox and not self.broken:
                    del self._outbox[: self.sock.send(self._outbox)]
            except BlockingIOError:
                return
            except OSError:
                self.broken = True


class RpcServer:
    """Listens on a unix socket and hands each request to the handler named by its `op`.

    A handler gets a `RpcCall` (meta, arrays) in the thread that polls. It may answer at once with
    `call.reply(meta, arrays)`, or keep the call and answer later: that is how a generate request stays
    outstanding while other commands run. To learn that the client gave up, set `call.on_cancel`. Raising a
    InsituError answers with that error. An unknown `op` answers with EngineError. Handlers must not block for
    longer than other clients may wait.

    The owner's loop: `while not server.abandoned: server.poll(0 if busy else 0.2); work()`.
    """

    def __init__(self, path: Path, handlers: Mapping[str, Handler]) -> None:
        self.path = path
        self._handlers = dict(handlers)
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        self._had_client = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with boundary(EngineError, f"listen on {path}"):
            self._listener.bind(str(path))
            self._listener.listen(16)
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)

    def __enter__(self) -> RpcServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def abandoned(self) -> bool:
        """True once all clients have disconnected: the process should exit."""
        return self._had_client and not self._peers

    def wake(self) -> None:
        """Make a poll that waits in another thread return. May be called from any thread."""
        with contextlib.suppress(BlockingIOError):
            self._wake_in.send(b"\0")

    def poll(self, timeout_s: float) -> None:
        """Handle what has arrived, waiting at most `timeout_s` for the first piece."""
        for peer in list(self._peers.values()):
            self._watch(peer)
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_out:
                with contextlib.suppress(BlockingIOError):
                    self._wake_out.recv(4096)
            elif (known := self._peers.get(key.fd)) is not None:
                self._serve(known, events)

    def close(self) -> None:
        """Close every socket and remove the path; open calls are cancelled."""
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._selector.close()
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.close()
        self.path.unlink(missing_ok=True)

    def _watch(self, peer: _Peer) -> None:
        """Keep the selector's interest in writing equal to whether there is something to write."""
        if peer.broken:
            self._drop(peer)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        if self._selector.get_key(peer.sock).events != wanted:
            self._selector.modify(peer.sock, wanted)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            self._peers[sock.fileno()] = _Peer(sock, self.wake)
            self._selector.register(sock, selectors.EVENT_READ)
            self._had_client = True

    def _serve(self, peer: _Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            peer.flush()
        if events & selectors.EVENT_READ:
            try:
                data = peer.sock.recv(1 << 20)
                for frame in peer.decoder.feed(data):
                    self._dispatch(peer, frame)
            except BlockingIOError:
                return
            except (OSError, EngineError):
                data = b""
            if not data:
                self._drop(peer)

    def _dispatch(self, peer: _Peer, frame: Frame) -> None:
        op, number = str(frame.meta.get("op")), frame.meta.get("id")
        if not isinstance(number, int):
            raise EngineError("channel: a request without an id")
        if op == "cancel":
            if (open_call := peer.calls.get(number)) is not None:
                open_call.cancel()
            return
        call = RpcCall(peer, op, frame)
        peer.calls[number] = call
        handler = self._handlers.get(op)
        if handler is None:
            call.fail(EngineError(f"the learner has no command {op!r}"))
            return
        try:
            handler(call)
        except InsituError as error:
            call.fail(error)

    def _drop(self, peer: _Peer) -> None:
        self._peers.pop(peer.sock.fileno(), None)
        with contextlib.suppress(KeyError):
            self._selector.unregister(peer.sock)
        peer.sock.close()
        for call in list(peer.calls.values()):
            call.cancel()
