"""Messages and tools in the OpenAI shapes that chat templates and the `renderers` package take.

Every outside string is shielded so that no control marker can begin in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

from insitu.types import Message, ToolSpec

SENTINEL = "\udcf0insitu\udcf1"
"""Placeholder in a message that is rendered only to find what follows it.

This object itself passes the shield unchanged; an equal string from outside does not.
"""


@dataclass(frozen=True, slots=True)
class TemplateInputs:
    """Converter that uses one codec's shield."""

    outside: Callable[[str], str]
    arguments_as_text: bool = False
    """Pass call arguments as JSON text, for templates that do not accept a mapping."""

    def shield(self, text: str) -> str:
        return text if text is SENTINEL else self.outside(text)

    def message(self, message: Message) -> dict[str, object]:
        converted: dict[str, object] = {"role": message.role, "content": self.shield(message.text)}
        if message.reasoning:
            converted["reasoning_content"] = self.shield(message.reasoning)
        if message.tool_calls:
            converted["tool_calls"] = [
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
            converted["tool_call_id"] = self.shield(message.tool_call_id)
        return converted

    def arguments(self, raw: str) -> object:
        """Return a mapping if the text is a JSON object, as templates expect; else the shielded text."""
        # Numbers that Python cannot represent (1e400, NaN) stay text, so that their spelling does not change.
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
        """Return the JSON value with every string in it shielded, keys included."""
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
