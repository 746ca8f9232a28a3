"""Random seed, request id and session id of a RequestKey at an engine server.

They depend on the key alone, so a run repeats its samples and a server's log line leads to a rollout.
"""

from __future__ import annotations

import hashlib

from insitu.types import RequestKey


def _digest(*parts: object) -> bytes:
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()


def stream_seed(key: RequestKey) -> int:
    """Return the seed of one request's random stream, 0 <= seed < 2**63."""
    return int.from_bytes(_digest(key.seed, key.rollout_id, key.turn), "little") >> 1


def request_name(key: RequestKey, number: int) -> str:
    """Return the request id; `number` distinguishes requests of the same key."""
    return f"insitu-{_digest(key.seed, key.rollout_id, key.turn).hex()}-{number}"


def session_name(key: RequestKey) -> str:
    """Return a session id for routers that keep a conversation on the replica with its prefix."""
    return _digest(key.seed, key.rollout_id).hex()
