"""Which turn a reply was: minted tool-call ids, and signed pointers in opaque fields that agents hand back.

A pointer is `insitu`, 10 hex digits of the node, 32 hex digits of a keyed BLAKE2b over it under the session's
own key. The 48 characters are base64 of whole bytes in either alphabet, because some clients decode and
encode the field. Both are hints among turns of equal meaning, never a reason to splice: agents paste old
signatures onto edited text. Whatever this session did not mint or sign means nothing. Caller: forest.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence

from insitu.capture.nodes import Nodes, SampledNode
from insitu.types import Message

_FORM = re.compile(r"insitu([0-9a-f]{10})([0-9a-f]{32})")
_PURPOSE = b"insitu node"


def sign(key: bytes, node: int) -> str:
    """Pointer to `node` of the session that owns `key`; an empty key signs nothing."""
    return f"insitu{node:010x}{_mac(key, node)}" if key else ""


def verify(key: bytes, text: str) -> int | None:
    """The node that `text` points to, or None for anything that `key` did not sign."""
    found = _FORM.fullmatch(text)
    if found is None or not key:
        return None
    node = int(found[1], 16)
    return node if hmac.compare_digest(_mac(key, node), found[2]) else None


def _mac(key: bytes, node: int) -> str:
    """The 128-bit tag, as hex. A key is cut where the hash cuts it; a session's has 32 bytes."""
    return hashlib.blake2b(node.to_bytes(8, "big"), key=key[:64], person=_PURPOSE, digest_size=16).hexdigest()


class TurnIndex:
    """Resolves what a message says of its origin to sampled nodes of one session."""

    def __init__(self, nodes: Nodes, key: bytes) -> None:
        self._nodes = nodes
        self._key = key
        self._minted: dict[str, int] = {}

    def pointer(self, node: int) -> str:
        return sign(self._key, self._nodes.sampled(node).id)

    def taken(self, calls: Iterable[str]) -> bool:
        """Whether one of these call ids was minted before."""
        return any(call in self._minted for call in calls)

    def mint(self, calls: Iterable[str], node: int) -> None:
        self._minted.update((call, node) for call in calls)

    def pointed(self, message: Message) -> set[int]:
        """Sampled nodes that valid pointers in this message name."""
        if not message.pointers:
            return set()
        found = {verify(self._key, text) for text in message.pointers}
        return {node for node in found if node is not None and self._nodes.is_sampled(node)}

    def minters(self, message: Message) -> set[int]:
        """Sampled nodes that minted a call id of this message."""
        return {self._minted[call.id] for call in message.tool_calls if call.id in self._minted}

    def of(self, message: Message) -> set[int]:
        return self.pointed(message) | self.minters(message)

    def echoed(self, messages: Sequence[Message]) -> list[SampledNode]:
        """Held turns named in `messages`, in order, without repeats."""
        named = (node for m in messages if m.role == "assistant" for node in sorted(self.of(m)))
        return [self._nodes.sampled(node) for node in dict.fromkeys(named)]
