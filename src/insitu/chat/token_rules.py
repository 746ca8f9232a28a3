"""What all renderers over a codec have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from insitu.chat.codec import Codec
from insitu.chat.renderer import Capabilities, ParsedReply, RootCache, check_tools, with_own_ids
from insitu.chat.tool_formats import FORMATS, is_open_reasoning, reasoning_close
from insitu.types import Finish, IntArray, Message, ToolSpec


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenRules(ABC):
    """The part of `ChatRenderer` that follows from a codec and the ends of turns."""

    fingerprint: str
    codec: Codec
    caps: Capabilities
    stop_ids: frozenset[int]
    end_ids: tuple[int, ...]
    """The usual end of a turn (one stop id) and the scaffold ids after it; empty if open-ended."""
    in_reasoning: bool
    """The generation prompt opens <think>."""
    roots: RootCache

    @property
    def vocab_size(self) -> int:
        return self.codec.vocab_size

    @abstractmethod
    def _root(self, system: Sequence[Message], tools: Sequence[ToolSpec]) -> IntArray: ...

    @abstractmethod
    def append(self, messages: Sequence[Message]) -> IntArray: ...

    def open(self, system: Sequence[Message], tools: Sequence[ToolSpec]) -> IntArray:
        if tools:
            check_tools(self.caps)
        return self.roots.get(system, tools, self._root)

    def close(self, sampled: IntArray, finish: Finish) -> IntArray:
        last = int(sampled[-1]) if len(sampled) else -1
        if self.end_ids and last == self.end_ids[0]:
            return np.array(self.end_ids[1:], dtype=np.int32)
        ids = list(self.end_ids)
        if last not in self.stop_ids and is_open_reasoning(self.codec, sampled, self.in_reasoning):
            ids = [*reasoning_close(self.codec), *ids]
        return np.array(ids, dtype=np.int32)

    def join(self, sampled: IntArray, finish: Finish, messages: Sequence[Message]) -> IntArray:
        if self.caps.tool_format == "kimi":
            messages = with_own_ids(messages, self.parse(sampled).calls)
        close, run = self.close(sampled, finish), self.append(messages)
        if self.caps.open_ended and len(run) and len(sampled) and int(run[0]) == int(sampled[-1]):
            run = run[1:]
        return np.concatenate([close, run]).astype(np.int32, copy=False)

    def parse(self, sampled: IntArray, tools: Sequence[ToolSpec] = ()) -> ParsedReply:
        return FORMATS[self.caps.tool_format](self.codec, sampled, self.stop_ids, self.in_reasoning, tools)

    def decode(self, ids: IntArray) -> str:
        return self.codec.decode(ids)

    def injections(self, text: str) -> int:
        return self.codec.markers_in(text)
