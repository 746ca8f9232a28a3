"""Host tools: calls by which the agent reports to the operator, or acts on an environment.

A report returns only an acknowledgement; a tool of an environment returns its observation.

A tool is registered for a session, its arguments are checked against its schema, and calls are kept in order
for the operator. The answer is an acknowledgement, the tool's own or an error of the schema; never a reward.
Agents get a tool through the MCP server below or the Pi extension. For an agent with neither it is
injected into the model's tools, and the gateway replaces the agent's error about the unknown tool by the
acknowledgement.
The MCP server is stateless JSON-RPC over HTTP, one JSON answer per POST: the secret identifies the session,
so there is no session header, event stream or resumption.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Literal

import orjson
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry
from referencing.exceptions import Unresolvable

from insitu._version import __version__
from insitu.capture.message_history import History
from insitu.errors import ConfigError
from insitu.gateway.dialects.base import WireError, json_text
from insitu.types import Message, ModelRequest, ToolCall, ToolSpec

SERVER = "insitu"
"""Name of the MCP server; agents prepend it to the names of its tools."""

RESERVED = frozenset({"reset", "step", "state", "close"})
"""Names of an environment's own operations, which an agent must never have."""

Source = Literal["agent", "model", "hook"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,47}")
_MAX_TOOLS = 64
_MAX_ERROR = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTool:
    """One tool, as registered by the operator."""

    name: str
    description: str
    parameters: Mapping[str, object]
    """JSON schema (2020-12) of the arguments, an object; `$ref` only within itself."""
    answer: Callable[[Mapping[str, object]], Awaitable[str]] | None = None
    """Returns what the model reads; None = an acknowledgement. Its errors are infrastructure failures."""
    ends: bool = False
    """An accepted call ends the rollout: later model calls get a last reply that is not sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCall:
    """One call of a host tool."""

    index: int
    """Order within the session, from 0."""
    name: str
    arguments: str
    """JSON text."""
    source: Source
    """`agent`: through the tool endpoint or the MCP server. `model`: a reply called an injected tool.
    `hook`: what the hook on tool calls did to a call of the agent's."""
    error: str = ""
    """Why the arguments were refused; empty when the call was accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offered:
    """The tools of a request, and those with the host tools; reused while a conversation goes on."""

    offered_by_agent: Sequence[ToolSpec]
    tools: tuple[ToolSpec, ...]
    injected: Mapping[str, HostTool]


class ToolBox:
    """The host tools of one session and their calls. Raises ConfigError for invalid tools."""

    def __init__(
        self, tools: Sequence[HostTool] = (), *, max_calls: int = 1000, max_bytes: int = 16 << 20
    ) -> None:
        """Register tools; `max_bytes` limits the arguments of all calls together."""
        if len(tools) > _MAX_TOOLS or len({tool.name for tool in tools}) < len(tools):
            raise ConfigError(f"host tools need different names and may be {_MAX_TOOLS} at most")
        self.tools = tuple(tools)
        self.calls: list[HostCall] = []
        self.on_call: Callable[[HostCall], None] = lambda call: None
        """Callback for each call; must not raise."""
        self.ended = False
        """A tool that ends the rollout was called."""
        self._checks = {tool.name: _validator(tool) for tool in tools}
        self._calls_left, self._bytes_left = max_calls, max_bytes
        self._answers: dict[str, str] = {}
        """Minted id of a call of an injected tool -> answer for the model."""
        self._offered: _Offered | None = None
        self._waiting: dict[str, Callable[[], Awaitable[str]]] = {}
        """Minted id of a call -> what makes its answer, once the agent has the call."""
        self._asking: asyncio.Task[None] | None = None
        """The newest answer that is made; answers are made one after the other."""

    def __bool__(self) -> bool:
        return bool(self.tools)

    def call(self, name: str, arguments: object, source: Source = "agent") -> Mapping[str, object]:
        """Check and keep one call. Raises WireError for an unknown tool and when there were too many.

        An agent's arguments wrapped as `{"arguments": {...}}`, as upstream's clients send them, are unwrapped
        where the tool has parameters and none of this name.
        """
        check = self._checks.get(name)
        if check is None:
            raise WireError("not_found", "There is no such tool.")
        if source == "agent":
            arguments = _unwrapped(check, arguments)
        if not self._calls_left:
            raise WireError("rate_limited", "This session has called host tools too often.")
        text = json_text(arguments)
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > self._bytes_left:
            raise WireError("rate_limited", "This session has sent too much to host tools.")
        self._calls_left, self._bytes_left = self._calls_left - 1, self._bytes_left - size
        error = _schema_error(check, arguments)
        self.ended |= not error and any(tool.ends for tool in self.tools if tool.name == name)
        self.keep(name, text, source, error)
        return {"ok": False, "error": error} if error else {"ok": True}

    def keep(self, name: str, arguments: str, source: Source, error: str = "") -> None:
        """Record a call."""
        call = HostCall(index=len(self.calls), name=name, arguments=arguments, source=source, error=error)
        self.calls.append(call)
        self.on_call(call)

    def delivered(self, call_ids: Iterable[str]) -> None:
        """Begin to make the answers of calls that the agent has; a lost reply takes no step."""
        for call_id in call_ids:
            if answer := self._waiting.pop(call_id, None):
                self._asking = asyncio.create_task(self._ask(call_id, answer, self._asking))

    async def answered(self, messages: Sequence[Message] = ()) -> None:
        """Return when all answers are made; raise what making one of them raised."""
        if self._waiting:  # the agent may be faster than the note that it has its reply
            new = takewhile(lambda message: message.role != "assistant", reversed(messages))
            self.delivered([message.tool_call_id for message in new if message.role == "tool"][::-1])
        if self._asking is not None:
            await asyncio.shield(self._asking)

    def close(self) -> None:
        """Make no more answers."""
        self._waiting.clear()
        if self._asking is not None:
            self._asking.cancel()

    def prepare(self, request: ModelRequest) -> tuple[ModelRequest, Mapping[str, HostTool]]:
        """Return the request with the host tools that the agent does not offer itself, by their names in it.

        Only a request that offers tools gets more: summaries and titles stay unchanged. Depends only on the
        request and on earlier acknowledgements, so an unchanged prefix stays unchanged.
        """
        if self._answers:
            # Known messages have their answers already: reading them would parse the whole body again.
            request = replace(request, messages=History.of(request.messages).changed(self._answered))
        if not request.tools or not self.tools:
            return request, {}
        if self._offered is None or self._offered.offered_by_agent is not request.tools:
            self._offered = self._with_host_tools(request.tools)
        return replace(request, tools=self._offered.tools), self._offered.injected

    def _with_host_tools(self, offered_by_agent: Sequence[ToolSpec]) -> _Offered:
        offered = {tool.name for tool in offered_by_agent}
        injected: dict[str, HostTool] = {}
        for tool in self.tools:
            if not offered & exposed_names(tool.name):
                injected[tool.name] = tool
            elif tool.answer is not None:  # the agent's own tool of this name does something else
                injected[f"env_{tool.name}"] = tool
        specs = tuple(
            ToolSpec(name=name, description=t.description, parameters=json_text(t.parameters))
            for name, t in injected.items()
        )
        tools = (*offered_by_agent, *specs)
        return _Offered(offered_by_agent=offered_by_agent, tools=tools, injected=injected)

    def _answered(self, message: Message) -> Message:
        answer = self._answers.get(message.tool_call_id) if message.role == "tool" else None
        return message if answer is None else replace(message, text=answer)

    def sampled(self, calls: Sequence[ToolCall], injected: Mapping[str, HostTool]) -> None:
        """Process the calls of a reply; those of injected tools are answered here."""
        for call in calls:
            if call.name not in injected:
                continue
            tool, arguments = injected[call.name], _decoded(call.arguments)
            try:
                answer = self.call(tool.name, arguments, "model")
            except WireError as error:
                answer = {"ok": False, "error": str(error)}
            if answer["ok"] and tool.answer is not None and isinstance(arguments, dict):
                self._waiting[call.id] = partial(tool.answer, arguments)
            else:
                self._answers[call.id] = json_text(answer)

    async def _ask(
        self, call_id: str, answer: Callable[[], Awaitable[str]], before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await before
        self._answers[call_id] = await answer()


def exposed_names(name: str) -> frozenset[str]:
    """Return the names that agents give a tool of our MCP server or extension."""
    return frozenset(
        {name, f"mcp__{SERVER}__{name}", f"mcp_{SERVER}_{name}", f"{SERVER}_{name}", f"{SERVER}__{name}"}
    )


def _decoded(arguments: str) -> object:
    try:
        return orjson.loads(arguments) if arguments.strip() else {}
    except orjson.JSONDecodeError:
        return arguments


def _unwrapped(check: Draft202012Validator, arguments: object) -> object:
    match arguments:
        case {"arguments": dict(inner), **more} if not more:
            declared = check.schema.get("properties", {})
            return inner if declared and "arguments" not in declared else arguments
    return arguments


def _schema_error(check: Draft202012Validator, arguments: object) -> str:
    """Return the schema error of the arguments, bounded; empty when they are valid."""
    error: ValidationError | None = next(check.iter_errors(arguments), None)
    if error is None:
        return ""
    where = "/".join(str(part) for part in error.absolute_path)
    return f"{where + ': ' if where else ''}{error.message}"[:_MAX_ERROR]


def _validator(tool: HostTool) -> Draft202012Validator:
    if not _NAME.fullmatch(tool.name) or tool.name in RESERVED:
        raise ConfigError(f"host tool {tool.name!r}: not a valid tool name")
    if tool.parameters.get("type") != "object":
        raise ConfigError(f"host tool {tool.name!r}: its schema must have type object")
    try:
        Draft202012Validator.check_schema(dict(tool.parameters))
        # An empty registry: nothing is ever fetched.
        check = Draft202012Validator(dict(tool.parameters), registry=Registry())
        _schema_error(check, {})
    except SchemaError as error:
        raise ConfigError(f"host tool {tool.name!r}: not a JSON schema: {error.message}") from error
    except Unresolvable as error:
        raise ConfigError(f"host tool {tool.name!r}: a $ref leads nowhere: {error}") from error
    return check


VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Newest first."""

INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32600, -32601, -32602


class _RpcError(Exception):
    """A JSON-RPC error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def mcp_answer(tools: ToolBox, message: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the response to one message, None for a notification or a response."""
    if "method" not in message and ("result" in message or "error" in message):
        return None
    number = message.get("id")
    method = message.get("method")
    if number is None and isinstance(method, str):
        return None
    try:
        if not isinstance(method, str) or not isinstance(number, str | int):
            raise _RpcError(INVALID_REQUEST, "not a JSON-RPC request")
        params = message.get("params") or {}
        if not isinstance(params, dict):
            raise _RpcError(INVALID_PARAMS, "params must be an object")
        return {"jsonrpc": "2.0", "id": number, "result": _result(tools, method, params)}
    except _RpcError as error:
        failure = {"code": error.code, "message": str(error)}
        return {"jsonrpc": "2.0", "id": number, "error": failure}


def _result(tools: ToolBox, method: str, params: Mapping[str, object]) -> Mapping[str, object]:
    if method == "initialize":
        asked = params.get("protocolVersion")
        return {
            "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": SERVER, "version": __version__},
        }
    if method == "ping":
        return {}
    if method == "tools/list":
        return {"tools": list(listed_tools(tools))}
    if method == "tools/call":
        return _call(tools, params)
    raise _RpcError(METHOD_NOT_FOUND, f"no such method: {method[:64]}")


def listed_tools(tools: ToolBox) -> list[Mapping[str, object]]:
    """Return the tools in MCP form."""
    return [
        {"name": tool.name, "description": tool.description, "inputSchema": tool.parameters}
        for tool in tools.tools
    ]


def _call(tools: ToolBox, params: Mapping[str, object]) -> Mapping[str, object]:
    name = params.get("name")
    try:
        result = tools.call(name if isinstance(name, str) else "", params.get("arguments") or {})
    except WireError as error:
        if error.cause == "not_found":
            raise _RpcError(INVALID_PARAMS, str(error)) from error
        result = {"ok": False, "error": str(error)}
    return {"content": [{"type": "text", "text": json_text(result)}], "isError": not result["ok"]}
