"""Decoders of runs, and the piece of text of each token.

Without the model folder there is no text, and pages show ids.
"""

from __future__ import annotations

import codecs
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from insitu.chat.load import load_renderer
from insitu.chat.message_text import MessageText
from insitu.chat.validation import CodecRenderer
from insitu.config import Config
from insitu.errors import InsituError
from insitu.storage.run_dir import tokenizer_folder
from insitu.types import IntArray, MessageSpans


class Words(MessageText):
    """Decoder of one run's tokens."""

    def __init__(self, renderer: CodecRenderer) -> None:
        super().__init__(renderer)
        self._codec = renderer.codec

    def bytes(self, ids: IntArray) -> bytes:
        """Return the text of ids as bytes, control tokens included."""
        return b"".join(self._codec.pieces(ids))

    def pieces(self, ids: IntArray) -> tuple[str, list[int]]:
        """Return the text of ids and the end of each piece in UTF-16 units.

        A character of several tokens belongs to the last of them.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        parts, ends, length = [], [], 0
        for piece in self._codec.pieces(ids):
            part = decoder.decode(piece)
            parts.append(part)
            length += len(part) + sum(character > "\uffff" for character in part)
            ends.append(length)
        tail = decoder.decode(b"", final=True)
        if tail and ends:
            parts.append(tail)
            ends[-1] += len(tail)
        return "".join(parts), ends


class WordsCache:
    """Decoders of runs, loaded once each; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, Words | str] = {}

    def of(self, config: Config) -> tuple[Words | None, str]:
        """Return the decoder of a run, or None and the reason why there is none."""
        if config.engine.kind == "upstream":
            return None, "the run holds text of a provider and no tokens"
        key = f"{config.run.dir}|{config.model.path}|{config.model.renderer}"
        with self._lock:
            if key not in self._kept:
                try:
                    self._kept[key] = Words(load_renderer(tokenizer_folder(config), config.model.renderer))
                except InsituError as error:
                    self._kept[key] = "the tokenizer of the run cannot be loaded: " + " ".join(
                        str(error).split()
                    )
            found = self._kept[key]
        return (found, "") if isinstance(found, Words) else (None, found)


def message_spans(turn: Mapping[str, Any]) -> MessageSpans:
    """Return the recorded messages of a stored turn; empty where none were."""
    return tuple((role, start, stop, name) for role, start, stop, name in orjson.loads(turn["spans"] or "[]"))


def prompt_of(messages: Sequence[dict[str, Any]]) -> str:
    """Return the task's prompt: the last user message of the first prompt."""
    return next((m["text"] for m in reversed(messages) if m["role"] in ("user", "human")), "")
