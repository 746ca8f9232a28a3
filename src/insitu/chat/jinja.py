"""Chat templates in a sandboxed jinja2 environment with the helpers of the Hugging Face libraries.

Every outside string passes through `shield` before the template sees it.
Messages and tools get the OpenAI shapes; every outside string is shielded so that no control marker can begin
in it.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from insitu.errors import RenderError
from insitu.types import Message, ToolCall, ToolSpec

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
    text_in_object: bool = False
    """Pass arguments that are no JSON object as {"arguments": text}: the rules lose or refuse text."""

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
            value = _ARGUMENTS.decode(raw) if raw.strip() else {}
            shielded = self.value(value)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            if not self.text_in_object:
                return self.shield(raw)
            value, shielded = {"arguments": raw}, {"arguments": self.shield(raw)}
            raw = json.dumps(value, ensure_ascii=False)
        return self.shield(raw.strip() or "{}") if self.arguments_as_text else shielded

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


def fitting_inputs(
    shield: Callable[[str], str], render: Callable[[TemplateInputs, Sequence[Message]], str]
) -> TemplateInputs:
    """Return the form in which these rules show call arguments, found by rendering probes."""

    def shows(inputs: TemplateInputs, arguments: str, shown: str) -> bool:
        call = ToolCall(id="call_a", name="look", arguments=arguments)
        called = [Message(role="user", text="x"), Message(role="assistant", tool_calls=(call,))]
        try:
            return shown in render(inputs, called)
        except RenderError:
            return False

    for inputs in (TemplateInputs(shield), TemplateInputs(shield, arguments_as_text=True)):
        if shows(inputs, '{"a": 1}', ""):
            return replace(inputs, text_in_object=not shows(inputs, "no object", "no object"))
    return TemplateInputs(shield)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} has no JSON form")
    return number


_ARGUMENTS = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


class _GenerationTag(Extension):
    """The `{% generation %}` ... `{% endgeneration %}` tag; renders its body unchanged.

    Other libraries use it to mask the model's output.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja's own attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        parser.stream.expect("name:generation")
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Environment that looks up `message.role` as a key before trying a dictionary's methods."""

    _METHODS = frozenset(dir(dict))

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in self._METHODS:
            return obj[attribute]
        return super().getattr(obj, attribute)


class ChatTemplate:
    """One compiled template with its constant variables."""

    def __init__(self, source: str, variables: Mapping[str, object], shield: Callable[[str], str]) -> None:
        """Compile the template; raise RenderError if it does not compile."""
        # Frozen at load: a session that crosses midnight must not change its own past.
        now = datetime.datetime.now()
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: now.strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise RenderError(f"chat template does not compile: {error}") from error
        # A plain mapping: jinja copies it for every rendering, and copies a chain of mappings key by key.
        self._template.globals = dict(self._template.globals)
        self.source, self.variables = source, dict(variables)
        day = now.date().isoformat() if "strftime_now" in source else ""
        self.identity = json.dumps([source, self.variables, day], sort_keys=True)
        """Everything that determines the template's output."""
        self._inputs = fitting_inputs(shield, self._render)
        self._end = self._end_of_text()

    def _end_of_text(self) -> str:
        """Return the eos_token that the template writes behind everything but a generation prompt (Phi-3)."""
        eos, ask = self.variables.get("eos_token"), [Message(role="user", text="x")]
        try:
            plain, prompted = (self._render(self._inputs, ask, (), prompt) for prompt in (False, True))
        except RenderError:
            return ""
        written = isinstance(eos, str) and plain.endswith(eos) and not prompted.startswith(plain)
        return str(eos) if written else ""

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, generation_prompt: bool = False
    ) -> str:
        """Return the text, outside strings still shielded; raise RenderError if the template fails."""
        text = self._render(self._inputs, messages, tools, generation_prompt)
        return text if generation_prompt else text.removesuffix(self._end)

    def _render(
        self,
        inputs: TemplateInputs,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        generation_prompt: bool = False,
    ) -> str:
        try:
            return self._template.render(
                **self.variables,
                messages=[inputs.message(m) for m in messages],
                tools=[inputs.tool(t) for t in tools] or None,
                add_generation_prompt=generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise RenderError(f"chat template rejects the conversation: {error}") from error


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes; shielded characters must pass, so nothing is escaped to ASCII."""
    if ensure_ascii:
        raise TemplateError("tojson(ensure_ascii=True) is not supported")
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> str:
    raise TemplateError(message)
