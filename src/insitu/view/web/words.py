"""Text of stored tokens: pieces of ids, messages of a prompt, parsed replies.

The recorder keeps ids only. Messages of a prompt are found by its control tokens, replies by the renderer's
own parser. Without the model folder there is no text, and pages show ids.
"""

from __future__ import annotations

import codecs
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from insitu.chat.load import load_renderer
from insitu.chat.validation import CodecRenderer
from insitu.config import Config
from insitu.errors import InsituError
from insitu.storage.run_dir import tokenizer_folder
from insitu.types import Finish, IntArray, MessageSpans

MAX_CHARS = 20_000
"""Characters of one text that are sent unless more are asked for; the true length is always sent."""
_ROLE = re.compile(
    r"\s*(system|user|assistant|tool|developer|human|model|ipython|observation|function)\b:?\n?"
)
_RESULT = re.compile(r"\s*<tool_response>\n?(.*?)\n?</tool_response>\s*", re.DOTALL)


class Words:
    """Decoder of one run's tokens."""

    def __init__(self, renderer: CodecRenderer) -> None:
        self._renderer = renderer
        # Ids that open or close a message: a prompt is cut there.
        self._edges = np.array(sorted(renderer.stop_ids), dtype=np.int32)

    def text(self, ids: IntArray) -> str:
        """Return the text of ids, control tokens included."""
        return self._renderer.decode(ids)

    def messages(
        self, context: IntArray, limit: int = MAX_CHARS, spans: MessageSpans = ()
    ) -> list[dict[str, Any]]:
        """Return the messages of new prompt tokens: role, name, text, its length, and where its ids are.

        `spans` are those that were recorded; without them messages are found by control tokens.
        """
        if spans:
            return [
                {"role": role, "name": name, "start": start, "stop": stop}
                | clamped(self._message(context[start:stop], role), limit)
                for role, start, stop, name in spans
            ]
        edges = np.flatnonzero(np.isin(context, self._edges)).tolist()
        found = []
        for start, stop in zip([-1, *edges], [*edges, len(context)], strict=True):
            text = self.text(context[start + 1 : stop])
            if not text.strip():
                continue
            named = _ROLE.match(text)
            role, text = (named[1], text[named.end() :]) if named else ("context", text)
            results = _RESULT.findall(text) if role in ("user", "tool", "context") else []
            for part in results or [text]:
                if results or part.strip() or role not in ("assistant", "model"):
                    kind = "tool" if results else role
                    place = {"role": kind, "name": "", "start": start + 1, "stop": stop}
                    found.append({**place, **clamped(part, limit)})
        return found

    def _message(self, ids: IntArray, role: str) -> str:
        """Return the text of one message without the template's frame."""
        parts = np.split(ids, np.flatnonzero(np.isin(ids, self._edges)))
        texts = [self.text(part[np.isin(part, self._edges, invert=True)]) for part in parts]
        texts = [text for text in texts if text.strip()]
        if texts and (named := _ROLE.match(texts[0])) and named.end() > len(named[1]):
            texts[0] = texts[0][named.end() :]
        text = "".join(texts)
        result = _RESULT.fullmatch(text) if role == "tool" else None
        return result[1] if result else text

    def reply(self, ids: IntArray, finish: Finish, limit: int = MAX_CHARS) -> dict[str, Any]:
        """Return a sampled reply: text, reasoning and calls, each with its true length."""
        try:
            parsed = self._renderer.parse(ids)
        except InsituError:
            return {"text": clamped(self.text(ids), limit), "reasoning": None, "calls": [], "malformed": True}
        return {
            "text": clamped(parsed.text, limit),
            "reasoning": clamped(parsed.reasoning, limit) if parsed.reasoning else None,
            "calls": [{"name": call.name, **clamped(call.arguments, limit)} for call in parsed.calls],
            "malformed": parsed.malformed,
        }

    def pieces(self, ids: IntArray) -> tuple[str, list[int]]:
        """Return the text of ids and the end of each piece in UTF-16 units.

        A character of several tokens belongs to the last of them.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        parts, ends, length = [], [], 0
        for piece in self._renderer.codec.pieces(ids):
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


def clamped(text: str, limit: int) -> dict[str, Any]:
    """Return a text cut at `limit` characters with its true length in characters and lines."""
    return {"text": text[:limit], "chars": len(text), "lines": text.count("\n") + 1}


def prompt_of(messages: Sequence[dict[str, Any]]) -> str:
    """Return the task's prompt: the last user message of the first prompt."""
    return next((m["text"] for m in reversed(messages) if m["role"] in ("user", "human")), "")
