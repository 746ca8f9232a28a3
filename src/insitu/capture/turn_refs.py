"""References to sampled turns: minted tool-call ids and signed references in opaque fields.

A signed reference is `insitu`, 10 hex digits of the node, 32 hex digits of a keyed BLAKE2b over it with a key
of the session. The 48 characters are base64 of whole bytes in either alphabet, because some clients decode
and encode the field. Both only choose among turns of equal meaning, they never justify a splice: agents paste
old signatures onto edited text. Anything that this session did not mint or sign is ignored.
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
    """Return the signed reference to `node`; an empty key signs nothing."""
    return f"insitu{node:010x}{_mac(key, node)}" if key else ""


def verify(key: bytes, text: str) -> int | None:
    """Return the node that `text` references, None for anything that `key` did not sign."""
    found = _FORM.fullmatch(text)
    if found is None or not key:
        return None
    node = int(found[1], 16)
    return node if hmac.compare_digest(_mac(key, node), found[2]) else None


def _mac(key: bytes, node: int) -> str:
    """Return the 128-bit tag as hex."""
    return hashlib.blake2b(node.to_bytes(8, "big"), key=key[:64], person=_PURPOSE, digest_size=16).hexdigest()


class TurnIndex:
    """Resolves references in a message to sampled nodes of one session."""

    def __init__(self, nodes: Nodes, key: bytes) -> None:
        self._nodes = nodes
        self._key = key
        self._minted: dict[str, int] = {}

    def pointer(self, node: int) -> str:
        return sign(self._key, self._nodes.sampled(node).id)

    def taken(self, calls: Iterable[str]) -> bool:
        """Return whether one of these call ids was minted before."""
        return any(call in self._minted for call in calls)

    def mint(self, calls: Iterable[str], node: int) -> None:
        self._minted.update((call, node) for call in calls)

    def pointed(self, message: Message) -> set[int]:
        """Return the sampled nodes with valid signed references in this message."""
        if not message.pointers:
            return set()
        found = {verify(self._key, text) for text in message.pointers}
        return {node for node in found if node is not None and self._nodes.is_sampled(node)}

    def minters(self, message: Message) -> set[int]:
        """Return the sampled nodes that minted a call id of this message."""
        return {self._minted[call.id] for call in message.tool_calls if call.id in self._minted}

    def of(self, message: Message) -> set[int]:
        return self.pointed(message) | self.minters(message)

    def referenced(self, messages: Sequence[Message]) -> list[SampledNode]:
        """Return the turns referenced in `messages`, in order, without repetitions."""
        named = (node for m in messages if m.role == "assistant" for node in sorted(self.of(m)))
        return [self._nodes.sampled(node) for node in dict.fromkeys(named)]
