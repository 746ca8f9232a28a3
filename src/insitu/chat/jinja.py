"""Chat templates as the Hugging Face libraries run them: a sandboxed jinja2 with the usual helpers.

Every string from outside passes through `shield` before the template sees it. Dates are frozen when the
template is loaded: a session that crosses midnight must not change its own past. Caller: render/template.
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


class GenerationTag(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks what a model says, for libraries that mask by it;
    the text itself is what stands inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        parser.stream.expect("name:generation")
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Finds `message.role` without first failing to find it among a dictionary's methods."""

    _METHODS = frozenset(dir(dict))

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in self._METHODS:
            return obj[attribute]
        return super().getattr(obj, attribute)


class ChatTemplate:
    """One compiled template with its constant variables."""

    def __init__(self, source: str, variables: Mapping[str, object], shield: Callable[[str], str]) -> None:
        """Raises RenderError when the template does not compile."""
        now = datetime.datetime.now()
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
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
        """Everything that decides what the template writes."""
        self._shown = self._taken(shield)

    def _taken(self, shield: Callable[[str], str]) -> TemplateInputs:
        """Call arguments as a mapping; as JSON text for a template that takes only that."""
        call = ToolCall(id="call_a", name="look", arguments='{"a": 1}')
        called = [Message(role="user", text="x"), Message(role="assistant", tool_calls=(call,))]
        for shown in (TemplateInputs(shield), TemplateInputs(shield, arguments_as_text=True)):
            self._shown = shown
            try:
                self.render(called)
            except RenderError:
                continue
            return shown
        return TemplateInputs(shield)

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, generation_prompt: bool = False
    ) -> str:
        """Text with outside strings still shielded. Raises RenderError when the template refuses."""
        try:
            return self._template.render(
                **self.variables,
                messages=[self._shown.message(m) for m in messages],
                tools=[self._shown.tool(t) for t in tools] or None,
                add_generation_prompt=generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise RenderError(f"chat template refuses the conversation: {error}") from error


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
