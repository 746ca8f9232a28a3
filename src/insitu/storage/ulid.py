"""ULIDs: 26 characters that sort by creation time, strictly increasing within one process.

Layout (github.com/ulid/spec): 48 bits of milliseconds, 80 random bits, Crockford base 32.
"""

from __future__ import annotations

import secrets
import threading
import time

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_lock = threading.Lock()
_last = 0


def new_ulid() -> str:
    """Return a new id, larger than all earlier ids of this process even when the clock steps back."""
    global _last
    with _lock:
        value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
        _last = max(value, _last + 1)
        value = _last
    return "".join(_ALPHABET[value >> shift & 31] for shift in range(125, -1, -5))
