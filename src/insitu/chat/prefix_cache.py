"""A bounded memory of root blocks: sub-agents, retries and twins open with the same system text and tools,
which are the largest part of most first prompts. Kept by digest, so the texts themselves are not held.
Callers: render/template and render/known.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from insitu.types import IntArray, Message, ToolSpec

MAX_ROOTS = 128
"""Most root blocks kept per family."""
MAX_IDS = 4_000_000
"""Most ids kept per family (16 MB)."""


class RootCache:
    """Ids of root blocks by the digest of what they are made from; the one used longest ago goes first.

    Safe to use from worker threads: two that miss at a time both render, to the same ids.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[bytes, IntArray] = OrderedDict()
        self._ids = 0
        self._lock = threading.Lock()

    def get(
        self,
        system: Sequence[Message],
        tools: Sequence[ToolSpec],
        make: Callable[[Sequence[Message], Sequence[ToolSpec]], IntArray],
    ) -> IntArray:
        """The ids of this root, made by `make` when they are not held. Not to be written to."""
        key = _digest(system, tools)
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                self._held.move_to_end(key)
                return held
        made = make(system, tools)
        made.setflags(write=False)
        with self._lock:
            if key not in self._held:
                self._held[key] = made
                self._ids += len(made)
            while len(self._held) > MAX_ROOTS or (self._ids > MAX_IDS and len(self._held) > 1):
                self._ids -= len(self._held.popitem(last=False)[1])
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
