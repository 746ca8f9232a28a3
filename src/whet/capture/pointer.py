"""Signed node pointers: which turn a reply is, written into an opaque field that agents hand back unread.

Form: `whet`, 8 hex digits of the node, 32 hex digits of HMAC-SHA256 over it under the session's own key. The
44 characters are base64 of whole bytes in either alphabet, because some clients decode and encode the field.
A pointer is a hint among turns of equal meaning, never a reason to splice: agents paste old signatures onto
edited text. Whatever is not a pointer of this session means nothing. Caller: forest.
"""

from __future__ import annotations

import hashlib
import hmac
import re

_FORM = re.compile(r"whet([0-9a-f]{8})([0-9a-f]{32})")
_PURPOSE = b"whet node pointer\0"


def sign(key: bytes, node: int) -> str:
    """Pointer to `node` of the session that owns `key`; an empty key signs nothing."""
    return f"whet{node:08x}{_mac(key, node)}" if key else ""


def verify(key: bytes, text: str) -> int | None:
    """The node that `text` points to, or None for anything that `key` did not sign."""
    found = _FORM.fullmatch(text)
    if found is None or not key:
        return None
    node = int(found[1], 16)
    return node if hmac.compare_digest(_mac(key, node), found[2]) else None


def _mac(key: bytes, node: int) -> str:
    """128 bits of the HMAC, as hex."""
    return hmac.digest(key, _PURPOSE + node.to_bytes(8, "big"), hashlib.sha256)[:16].hex()
