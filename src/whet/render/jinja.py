"""Chat templates as the Hugging Face libraries run them: a sandboxed jinja2 with the usual helpers.

Every string from outside passes through `shield` before the template sees it. Dates are frozen when the
template is loaded: a session that crosses midnight must not change its own past. Caller: render/template.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from whet.errors import RenderError
from whet.types import Message, ToolSpec

SENTINEL = "\udcf0whet\udcf1"
"""Stands in a message that is rendered only to find out what comes after it. This very object passes the
shield; an equal string from outside does not."""


class ChatTemplate:
    """One compiled template with its constant variables."""

    def __init__(self, source: str, variables: Mapping[str, object], shield: Callable[[str], str]) -> None:
        """Raises RenderError when the template does not compile."""
        now = datetime.datetime.now()
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: now.strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise RenderError(f"chat template does not compile: {error}") from error
        self._outside = shield
        self.variables = dict(variables)
        day = now.date().isoformat() if "strftime_now" in source else ""
        self.identity = json.dumps([source, self.variables, day], sort_keys=True)
        """Everything that decides what the template writes."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, generation_prompt: bool = False
    ) -> str:
        """Text with outside strings still shielded. Raises RenderError when the template refuses."""
        try:
            return self._template.render(
                **self.variables,
                messages=[self._message(m) for m in messages],
                tools=[self._tool(t) for t in tools] or None,
                add_generation_prompt=generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise RenderError(f"chat template refuses the conversation: {error}") from error

    def _shield(self, text: str) -> str:
        return text if text is SENTINEL else self._outside(text)

    def _message(self, message: Message) -> dict[str, object]:
        shown: dict[str, object] = {"role": message.role, "content": self._shield(message.text)}
        if message.reasoning:
            shown["reasoning_content"] = self._shield(message.reasoning)
        if message.tool_calls:
            shown["tool_calls"] = [
                {
                    "id": self._shield(call.id),
                    "type": "function",
                    "function": {
                        "name": self._shield(call.name),
                        "arguments": self._arguments(call.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        if message.role == "tool":
            shown["tool_call_id"] = self._shield(message.tool_call_id)
        return shown

    def _arguments(self, raw: str) -> object:
        """A mapping where the text is a JSON object, as templates expect; else the text itself."""
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            return self._shield(raw)
        return self._shielded(value) if isinstance(value, dict) else self._shield(raw)

    def _tool(self, tool: ToolSpec) -> dict[str, object]:
        return {
            "type": "function",
            "function": {
                "name": self._shield(tool.name),
                "description": self._shield(tool.description),
                "parameters": self._shielded(json.loads(tool.parameters)),
            },
        }

    def _shielded(self, value: object) -> object:
        """The JSON value with every string in it shielded, keys included."""
        if isinstance(value, str):
            return self._shield(value)
        if isinstance(value, dict):
            return {self._shield(k): self._shielded(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._shielded(v) for v in value]
        return value


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes. Shielded characters must pass, so nothing is escaped to ASCII."""
    if ensure_ascii:
        raise TemplateError("tojson(ensure_ascii=True) is not supported")
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> str:
    raise TemplateError(message)
