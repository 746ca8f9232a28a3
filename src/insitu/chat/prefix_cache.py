"""A bounded LRU cache of root blocks: system text and tools.

Sub-agents, retries and parallel attempts open with the same root, which is the largest part of most first
prompts.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from insitu.types import IntArray, Message, ToolSpec

MAX_ROOTS = 128
"""Most root blocks cached per renderer."""
MAX_IDS = 4_000_000
"""Most ids cached per renderer (16 MB)."""


class RootCache:
    """LRU cache of root block ids, keyed by the digest of their source.

    Thread-safe: two concurrent misses both render, to the same ids.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, IntArray] = OrderedDict()
        self._ids = 0
        self._lock = threading.Lock()

    def get(
        self,
        system: Sequence[Message],
        tools: Sequence[ToolSpec],
        make: Callable[[Sequence[Message], Sequence[ToolSpec]], IntArray],
    ) -> IntArray:
        """Return the ids of this root, rendered by `make` on a miss (read-only)."""
        key = _digest(system, tools)
        with self._lock:
            cached = self._blocks.get(key)
            if cached is not None:
                self._blocks.move_to_end(key)
                return cached
        made = make(system, tools)
        made.setflags(write=False)
        with self._lock:
            if key not in self._blocks:
                self._blocks[key] = made
                self._ids += len(made)
            while len(self._blocks) > MAX_ROOTS or (self._ids > MAX_IDS and len(self._blocks) > 1):
                self._ids -= len(self._blocks.popitem(last=False)[1])
        return made


def _digest(system: Sequence[Message], tools: Sequence[ToolSpec]) -> bytes:
    h = hashlib.blake2b(digest_size=16)
    parts = [f"{len(system)}"]
    for message in system:
        parts += [message.role, message.text]
    for tool in tools:
        parts += [tool.name, tool.description, tool.parameters]
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        h.update(len(raw).to_bytes(8, "big"))
        h.update(raw)
    return h.digest()
