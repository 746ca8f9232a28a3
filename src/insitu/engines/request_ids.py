"""What a RequestKey is called at an engine server: its random seed, its request id, its session.

Functions of the key alone, so a run repeats its draws and a log line at the server leads to a rollout.
"""

from __future__ import annotations

import hashlib

from insitu.types import RequestKey


def _digest(*parts: object) -> bytes:
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()


def stream_seed(key: RequestKey) -> int:
    """The seed of one request's random stream, 0 <= seed < 2**63."""
    return int.from_bytes(_digest(key.seed, key.rollout_id, key.turn), "little") >> 1


def request_name(key: RequestKey, number: int) -> str:
    """`number` tells two requests of the same key apart: servers refuse an id that is already running."""
    return f"insitu-{_digest(key.seed, key.rollout_id, key.turn).hex()}-{number}"


def session_name(key: RequestKey) -> str:
    """For routers that keep a conversation on the replica that holds its prefix."""
    return _digest(key.seed, key.rollout_id).hex()
