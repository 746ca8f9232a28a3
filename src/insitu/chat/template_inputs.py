"""Messages and tools as chat templates and the `renderers` package take them: the OpenAI shapes, every string
from outside shielded so that no control marker can begin in it. Callers: render/jinja and render/known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

from insitu.types import Message, ToolSpec

SENTINEL = "\udcf0insitu\udcf1"
"""Stands in a message that is rendered only to find out what comes after it. This very object passes the
shield; an equal string from outside does not."""


@dataclass(frozen=True, slots=True)
class TemplateInputs:
    """Converts with one codec's shield."""

    outside: Callable[[str], str]
    arguments_as_text: bool = False
    """Call arguments as JSON text, where the taker cannot do with a mapping."""

    def shield(self, text: str) -> str:
        return text if text is SENTINEL else self.outside(text)

    def message(self, message: Message) -> dict[str, object]:
        shown: dict[str, object] = {"role": message.role, "content": self.shield(message.text)}
        if message.reasoning:
            shown["reasoning_content"] = self.shield(message.reasoning)
        if message.tool_calls:
            shown["tool_calls"] = [
                {
                    "id": self.shield(call.id),
                    "type": "function",
                    "function": {
                        "name": self.shield(call.name),
                        "arguments": self.arguments(call.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        if message.role == "tool":
            shown["tool_call_id"] = self.shield(message.tool_call_id)
        return shown

    def arguments(self, raw: str) -> object:
        """A mapping where the text is a JSON object, as templates expect; else the text itself. Numbers that
        Python cannot hold (1e400, NaN) leave it text, so that they are not written as other numbers."""
        try:
            value = _ARGUMENTS.decode(raw)
        except (ValueError, RecursionError):
            return self.shield(raw)
        if self.arguments_as_text or not isinstance(value, dict):
            return self.shield(raw)
        return self.value(value)

    def tool(self, tool: ToolSpec) -> dict[str, object]:
        return {
            "type": "function",
            "function": {
                "name": self.shield(tool.name),
                "description": self.shield(tool.description),
                "parameters": self.value(json.loads(tool.parameters)),
            },
        }

    def value(self, value: object) -> object:
        """The JSON value with every string in it shielded, keys included."""
        if isinstance(value, str):
            return self.shield(value)
        if isinstance(value, dict):
            return {self.shield(k): self.value(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.value(v) for v in value]
        return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} has no JSON form")
    return number


_ARGUMENTS = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
