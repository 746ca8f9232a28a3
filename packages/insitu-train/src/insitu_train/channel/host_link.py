"""The link between a learner and the agent of another host: frames of rpc.py over TCP, both ends in threads.

Both ends prove that they hold the same secret before anything else is said; what follows is neither encrypted
nor signed. Each end sends a beat every second, so that silence means that the other end is gone.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import threading
from collections.abc import Iterator, Mapping

from insitu.errors import ConfigError, EngineError, TrainError, boundary
from insitu_train.channel.rpc import Array, Decoder, Frame, Meta, encode

SECRET = "INSITU_RANKS_SECRET"
"""Environment variable with the secret that the learner and all hosts share."""
BEAT_S = 1.0
_HELLO_S = 20.0
"""Time for each message before both ends know each other."""
_HELLO_BYTES = 1 << 16
"""Most bytes that an unknown end may send."""


def silence_s(step_timeout_s: float) -> float:
    """Return the silence after which the other end counts as gone."""
    return min(30.0, max(5.0, step_timeout_s / 4))


def secret_of(environment: Mapping[str, str]) -> str:
    """Return the shared secret. Raises ConfigError."""
    if not (found := environment.get(SECRET, "")):
        raise ConfigError(f"{SECRET} is not set: give the learner's machine and each host the same secret")
    return found


def reachable(address: str) -> str:
    """Return HOST:PORT as other machines may reach it: this one's name in the place of all its addresses."""
    return address.replace("0.0.0.0", socket.gethostname(), 1) if address.startswith("0.0.0.0:") else address


class HostLink:
    """One end of a connection; frames are read in one thread, sent from any."""

    def __init__(self, sock: socket.socket, quiet_s: float = _HELLO_S) -> None:
        """Take a connection. Raises OSError where it has already ended, and closes it."""
        self.quiet_s = quiet_s
        """Silence that ends the link."""
        try:
            sock.setblocking(True)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # addresses of this end and of the other
            self.here, self.there = str(sock.getsockname()[0]), str(sock.getpeername()[0])
        except OSError:
            sock.close()
            raise
        self._sock, self._decoder, self._lock = sock, Decoder(), threading.Lock()
        self._limit = _HELLO_BYTES
        self._ready = self._frames()

    def known(self) -> None:
        """Take frames of any size from now on: the other end has proved itself."""
        self._limit = 0

    def send(self, meta: Meta, arrays: Mapping[str, Array] | None = None) -> None:
        """Send a frame. Raises TrainError."""
        self.send_bytes(encode(meta, arrays))

    def send_bytes(self, data: bytes) -> None:
        """Send an encoded frame. Raises TrainError."""
        with self._lock, boundary(TrainError, "the link ended"):
            self._sock.sendall(data)

    def beat(self) -> None:
        """Say to a known end that this one is there, unless it is sending."""
        if not self._limit and self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError):
                    self._sock.sendall(encode({"op": "beat"}))
            finally:
                self._lock.release()

    def receive(self) -> Frame:
        """Return the next frame. Raises TrainError at the end of the link, after silence, or on nonsense."""
        with boundary(TrainError, "the link ended"):
            if (frame := next(self._ready, None)) is None:
                raise TrainError("the other end closed it")
            return frame

    def expect(self, op: str) -> Meta:
        """Return the next frame's values. Raises TrainError when it refuses or is another one."""
        meta = self.receive().meta
        if meta.get("op") == "refused":
            raise RefusedError(str(meta["line"]))
        if meta.get("op") != op:
            raise TrainError("the other end does not speak this protocol")
        return meta

    def close(self) -> None:
        """End the link; a thread that reads it sees the end."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _frames(self) -> Iterator[Frame]:
        waiting, taken = select.poll(), 0
        waiting.register(self._sock, select.POLLIN)
        while True:
            if not waiting.poll(1000 * self.quiet_s):
                raise TrainError(f"nothing was heard for {self.quiet_s:g} s")
            if not (data := self._sock.recv(_HELLO_BYTES if self._limit else 1 << 20)):
                return
            taken += len(data)
            if self._limit and taken > self._limit:
                raise TrainError("the other end does not speak this protocol")
            try:
                for frame in self._decoder.feed(data):
                    if frame.meta.get("op") != "beat":
                        yield frame
            except EngineError as error:
                raise TrainError(str(error)) from error


class RefusedError(TrainError):
    """The other end refused this one for good."""


def _proof(secret: str, *parts: str) -> str:
    return hmac.digest(secret.encode(), json.dumps(parts).encode(), "sha256").hex()


def welcome(link: HostLink, secret: str) -> Meta:
    """Learner: let a host prove itself; return what it says about itself. Raises TrainError."""
    nonce = secrets.token_hex(16)
    link.send({"op": "challenge", "nonce": nonce})
    hello = link.expect("hello")
    with boundary(TrainError, "read a hello"):
        about, theirs = str(hello["about"]), str(hello["nonce"])
        proved = hmac.compare_digest(str(hello["proof"]), _proof(secret, "host", nonce, theirs, about))
        if not proved:
            raise RefusedError(f"another secret ({SECRET})")
        found: Meta = json.loads(about)
    link.send({"op": "welcome", "proof": _proof(secret, "learner", theirs, nonce)})
    link.known()
    return found


def greet(link: HostLink, secret: str, about: Meta) -> None:
    """Host: prove itself to the learner, and the learner to it. Raises TrainError."""
    nonce, said = secrets.token_hex(16), json.dumps(about)
    theirs = str(link.expect("challenge")["nonce"])
    proof = _proof(secret, "host", theirs, nonce, said)
    link.send({"op": "hello", "nonce": nonce, "about": said, "proof": proof})
    answer = link.expect("welcome")
    if not hmac.compare_digest(str(answer.get("proof")), _proof(secret, "learner", nonce, theirs)):
        raise RefusedError(f"the learner has another secret ({SECRET})")
    link.known()
