"""Text of stored tokens: messages of a prompt, parsed replies, and how a rollout ended.

The recorder keeps ids only. Messages of a prompt are found by their recorded places or by control tokens,
replies by the renderer's own parser.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from insitu.chat.renderer import ChatRenderer
from insitu.errors import InsituError
from insitu.types import Finish, IntArray, MessageSpans, Turn

MAX_CHARS = 20_000
"""Characters of one text that are returned unless more are asked for; the true length is always there."""
_ROLE = re.compile(
    r"\s*(system|user|assistant|tool|developer|human|model|ipython|observation|function)\b:?\n?"
)
_RESULT = re.compile(r"\s*<tool_response>\n?(.*?)\n?</tool_response>\s*", re.DOTALL)
_LAST_TURNS = 20
"""Turns in which the end of a rollout is looked for."""
_LINE_CHARS = 240
_FAILED = re.compile(
    r"\b(errors?|could not|cannot|can't|not found|no such|failed|invalid|denied|unable|traceback)\b", re.I
)


class MessageText:
    """Decoder of tokens to messages and replies."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        # Ids that open or close a message: a prompt is cut there.
        self._edges = np.array(sorted(renderer.stop_ids), dtype=np.int32)

    def text(self, ids: IntArray) -> str:
        """Return the text of ids, control tokens included."""
        return self._renderer.decode(ids)

    def bare_text(self, ids: IntArray) -> str:
        """Return the text of ids without the control tokens that end a message."""
        return self.text(ids[np.isin(ids, self._edges, invert=True)])

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

    def ending(self, turns: Sequence[Turn]) -> str:
        """Return how a rollout without a change ended, as its last turns show it; empty if they do not."""
        if not turns:
            return ""
        last = self.reply(turns[-1].ids, turns[-1].finish, 1)
        if last["malformed"]:
            return "the last call could not be parsed"
        for turn in reversed(turns[-_LAST_TURNS:]):
            for message in reversed(self.messages(turn.context_ids, 1000, turn.spans)):
                line = message["text"].strip().partition("\n")[0][:_LINE_CHARS]
                if message["role"] == "tool" and _FAILED.search(line):
                    return (
                        f"the last failed call{' of ' + message['name'] if message['name'] else ''}: {line}"
                    )
        return "" if last["calls"] else "the agent said that it was done without an edit"


def clamped(text: str, limit: int) -> dict[str, Any]:
    """Return a text cut at `limit` characters with its true length in characters and lines."""
    return {"text": text[:limit], "chars": len(text), "lines": text.count("\n") + 1}
