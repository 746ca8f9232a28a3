"""Host tools: what the operator lets the agent say to the outside of its sandbox, and nothing comes back.

A tool is registered for one session, its arguments are checked against its schema, calls are kept in order
for the operator, and the answer is an acknowledgement or the schema's complaint: never a result, never a
reward. Agents get a tool through the MCP server (mcp.py) or the Pi extension; to an agent that has neither it
is injected into the model's tools, and then the gateway itself answers: the agent only sees a tool that it
does not know, and what it says about that is replaced by the acknowledgement. Callers: session, turn, server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import orjson
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry
from referencing.exceptions import Unresolvable

from insitu.capture.message_history import History
from insitu.errors import ConfigError
from insitu.gateway.dialects.base import WireError, json_text
from insitu.types import Message, ModelRequest, ToolCall, ToolSpec

SERVER = "insitu"
"""What agents call the MCP server; they put it in front of the names of its tools."""

RESERVED = frozenset({"reset", "step", "state", "close"})
"""Names of an environment's own operations: an agent must never hold them."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,47}")
_MAX_TOOLS = 64
_MAX_ERROR = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTool:
    """One tool as the operator registers it."""

    name: str
    description: str
    parameters: Mapping[str, object]
    """JSON schema (2020-12) of the arguments, an object; `$ref` only within itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCall:
    """One call of a host tool, as it came."""

    index: int
    """Order within the session, from 0."""
    name: str
    arguments: str
    """JSON text."""
    source: Literal["agent", "model"]
    """`agent`: through the tool endpoint or the MCP server. `model`: a reply called an injected tool."""
    error: str = ""
    """Why the arguments were refused; empty when the call was accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offered:
    """What a request offers, and what it offers with ours: the same object while a conversation goes on."""

    given: Sequence[ToolSpec]
    tools: tuple[ToolSpec, ...]
    injected: frozenset[str]


class ToolBox:
    """The host tools of one session and what was called. Raises ConfigError for tools that cannot be."""

    def __init__(
        self, tools: Sequence[HostTool] = (), *, max_calls: int = 1000, max_bytes: int = 16 << 20
    ) -> None:
        """`max_bytes`: of the arguments of all calls together, which are kept for the operator."""
        if len(tools) > _MAX_TOOLS or len({tool.name for tool in tools}) < len(tools):
            raise ConfigError(f"host tools need different names and may be {_MAX_TOOLS} at most")
        self.tools = tuple(tools)
        self.calls: list[HostCall] = []
        self.on_call: Callable[[HostCall], None] = lambda call: None
        """Hears each call as it is kept; must not raise."""
        self._checks = {tool.name: _validator(tool) for tool in tools}
        self._max_calls, self._bytes_left = max_calls, max_bytes
        self._answers: dict[str, str] = {}
        """Minted id of a call of an injected tool -> what the model is told."""
        self._offered: _Offered | None = None

    def __bool__(self) -> bool:
        return bool(self.tools)

    def call(
        self, name: str, arguments: object, source: Literal["agent", "model"] = "agent"
    ) -> Mapping[str, object]:
        """Check and keep one call. Raises WireError for an unknown tool and when there were too many."""
        check = self._checks.get(name)
        if check is None:
            raise WireError("not_found", "There is no such tool.")
        if len(self.calls) >= self._max_calls:
            raise WireError("rate_limited", "This session has called host tools too often.")
        text = json_text(arguments)
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > self._bytes_left:
            raise WireError("rate_limited", "This session has sent too much to host tools.")
        self._bytes_left -= size
        error = _complaint(check, arguments)
        call = HostCall(index=len(self.calls), name=name, arguments=text, source=source, error=error)
        self.calls.append(call)
        self.on_call(call)
        return {"ok": False, "error": error} if error else {"ok": True}

    def prepare(self, request: ModelRequest) -> tuple[ModelRequest, frozenset[str]]:
        """The request with host tools the agent does not offer itself, and their names.

        Only a request that offers tools gets more: summaries and titles stay what they are. A function of the
        request and of acknowledgements given before, so an unchanged prefix stays unchanged.
        """
        if self._answers:
            given = request.messages
            # Known messages are answered already: to look at them would read the whole body again.
            messages: Sequence[Message] = (
                given.changed(self._answered)
                if isinstance(given, History)
                else tuple(map(self._answered, given))
            )
            request = replace(request, messages=messages)
        if not request.tools or not self.tools:
            return request, frozenset()
        if self._offered is None or self._offered.given is not request.tools:
            self._offered = self._with_ours(request.tools)
        return replace(request, tools=self._offered.tools), self._offered.injected

    def _with_ours(self, given: Sequence[ToolSpec]) -> _Offered:
        offered = {tool.name for tool in given}
        missing = [tool for tool in self.tools if not offered & exposed_names(tool.name)]
        specs = tuple(
            ToolSpec(name=t.name, description=t.description, parameters=json_text(t.parameters))
            for t in missing
        )
        names = frozenset(tool.name for tool in missing)
        return _Offered(given=given, tools=(*given, *specs), injected=names)

    def _answered(self, message: Message) -> Message:
        answer = self._answers.get(message.tool_call_id) if message.role == "tool" else None
        return message if answer is None else replace(message, text=answer)

    def sampled(self, calls: Sequence[ToolCall], injected: frozenset[str]) -> None:
        """The model called `calls` in a reply; those of injected tools happen here and now."""
        for call in calls:
            if call.name not in injected:
                continue
            try:
                answer = self.call(call.name, _decoded(call.arguments), "model")
            except WireError as error:
                answer = {"ok": False, "error": str(error)}
            self._answers[call.id] = json_text(answer)


def exposed_names(name: str) -> frozenset[str]:
    """What agents call a tool that they have from our MCP server or extension."""
    return frozenset(
        {name, f"mcp__{SERVER}__{name}", f"mcp_{SERVER}_{name}", f"{SERVER}_{name}", f"{SERVER}__{name}"}
    )


def _decoded(arguments: str) -> object:
    try:
        return orjson.loads(arguments) if arguments.strip() else {}
    except orjson.JSONDecodeError:
        return arguments


def _complaint(check: Draft202012Validator, arguments: object) -> str:
    """What the schema says against the arguments, bounded; empty when nothing."""
    error: ValidationError | None = next(check.iter_errors(arguments), None)
    if error is None:
        return ""
    where = "/".join(str(part) for part in error.absolute_path)
    return f"{where + ': ' if where else ''}{error.message}"[:_MAX_ERROR]


def _validator(tool: HostTool) -> Draft202012Validator:
    if not _NAME.fullmatch(tool.name) or tool.name in RESERVED:
        raise ConfigError(f"host tool {tool.name!r}: not a name that a tool may have")
    if tool.parameters.get("type") != "object":
        raise ConfigError(f"host tool {tool.name!r}: its schema must have type object")
    try:
        Draft202012Validator.check_schema(dict(tool.parameters))
        # An empty registry: nothing is ever fetched.
        check = Draft202012Validator(dict(tool.parameters), registry=Registry())
        _complaint(check, {})
    except SchemaError as error:
        raise ConfigError(f"host tool {tool.name!r}: not a JSON schema: {error.message}") from error
    except Unresolvable as error:
        raise ConfigError(f"host tool {tool.name!r}: a $ref leads nowhere: {error}") from error
    return check
