"""Text -> tool call, for models that cannot call tools; per session, off by default; pure.

Only the reply on the wire is translated: the sampled ids stay unchanged, and the text is sent along with the
call. Forms, in this order: a JSON object anywhere in the text, a fenced shell block, a Python call and, as an
option, the whole text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from insitu.chat.renderer import ParsedCall, ParsedReply
from insitu.gateway.dialects.base import json_text
from insitu.types import ToolSpec

_FENCE = re.compile(r"^```(?:bash|sh|shell|console)?[ \t]*\n(.*?)\n?^```[ \t]*$", re.DOTALL | re.MULTILINE)
_MAX_BRACES = 64
_MAX_PYTHON = 8192
_MAX_NAMES, _MAX_NAME = 8, 48


@dataclass(frozen=True, slots=True, kw_only=True)
class TextShim:
    """Options of the translation of text into calls."""

    tool: str = "bash"
    """The agent's tool that runs a command."""
    argument: str = "command"
    """Its argument that holds the command."""
    whole_text: bool = False
    """A text in none of the forms is a command as a whole."""


def not_offered(shim: TextShim | None, tools: Sequence[ToolSpec]) -> str:
    """Return a line if an agent does not offer the tool of the shim: nothing is translated then.

    Empty for a request without any tool: a title, a summary.
    """
    if shim is None or not tools or any(tool.name == shim.tool for tool in tools):
        return ""
    names = ", ".join(repr(tool.name[:_MAX_NAME]) for tool in tools[:_MAX_NAMES])
    return (
        f"gateway.shim_tool {shim.tool!r} is not among the tools that the agent offers ({names}): no text"
        " becomes a call"
    )


def translated(parsed: ParsedReply, shim: TextShim | None, tools: Sequence[ToolSpec]) -> ParsedReply:
    """Return the reply with its text as a call where it stands for one, else the same object."""
    if shim is None or parsed.calls or all(tool.name != shim.tool for tool in tools):
        return parsed
    call = translate(shim, parsed.text)
    return parsed if call is None else replace(parsed, calls=(call,))


def translate(shim: TextShim, text: str) -> ParsedCall | None:
    """Return the call in `text`, None for an answer.

    A text with both a command and a final answer is a command.
    """
    command = _from_json(shim, text)
    if command is None and not _answers(text):
        command = _from_fence(text) or _from_python(shim, text)
        if command is None and shim.whole_text and text.strip():
            command = text.strip()
    if not command:
        return None
    return ParsedCall(name=shim.tool, arguments=json_text({shim.argument: command}))


def _objects(text: str) -> list[dict[str, object]]:
    """Return the JSON objects in the text, outermost only."""
    decoder = json.JSONDecoder()
    found: list[dict[str, object]] = []
    behind = 0
    for brace in islice(re.finditer(r"\{", text), _MAX_BRACES):
        if brace.start() < behind:
            continue
        try:
            value, behind = decoder.raw_decode(text, brace.start())
        except (ValueError, RecursionError):
            continue
        found.append(value)
    return found


def _inner(value: dict[str, object]) -> dict[str, object]:
    arguments = value.get("arguments", value)
    return arguments if isinstance(arguments, dict) else value


def _from_json(shim: TextShim, text: str) -> str | None:
    for value in _objects(text):
        command = _inner(value).get(shim.argument)
        if isinstance(command, str) and command:
            return command
    return None


def _answers(text: str) -> bool:
    return any("final_answer" in _inner(value) for value in _objects(text))


def _from_fence(text: str) -> str | None:
    found = _FENCE.search(text)
    return found[1] if found else None


def _from_python(shim: TextShim, text: str) -> str | None:
    """`tool(command="...")` or `terminal("...")`, as a whole."""
    if len(text) > _MAX_PYTHON:
        return None
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return None
    if call.func.id not in (shim.tool, "terminal"):
        return None
    named = {k.arg: k.value for k in call.keywords}
    value = named.get(shim.argument, call.args[0] if call.args else None)
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
