"""Chat templates in a sandboxed jinja2 environment with the helpers of the Hugging Face libraries.

Every outside string passes through `shield` before the template sees it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from insitu.chat.template_inputs import TemplateInputs
from insitu.errors import RenderError
from insitu.types import Message, ToolCall, ToolSpec


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
        self.variables = dict(variables)
        day = now.date().isoformat() if "strftime_now" in source else ""
        self.identity = json.dumps([source, self.variables, day], sort_keys=True)
        """Everything that determines the template's output."""
        self._inputs = self._choose_inputs(shield)

    def _choose_inputs(self, shield: Callable[[str], str]) -> TemplateInputs:
        """Return inputs with call arguments as a mapping, or as JSON text for templates that need that."""
        call = ToolCall(id="call_a", name="look", arguments='{"a": 1}')
        called = [Message(role="user", text="x"), Message(role="assistant", tool_calls=(call,))]
        for inputs in (TemplateInputs(shield), TemplateInputs(shield, arguments_as_text=True)):
            self._inputs = inputs
            try:
                self.render(called)
            except RenderError:
                continue
            return inputs
        return TemplateInputs(shield)

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, generation_prompt: bool = False
    ) -> str:
        """Return the text, outside strings still shielded; raise RenderError if the template fails."""
        try:
            return self._template.render(
                **self.variables,
                messages=[self._inputs.message(m) for m in messages],
                tools=[self._inputs.tool(t) for t in tools] or None,
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
