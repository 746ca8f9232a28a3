"""OpenAI chat completions; pure.

Parts of one message are joined: those of an assistant directly (clients split and merge them), others by a
line break. `developer` is `system`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from insitu.gateway.dialects import media
from insitu.gateway.dialects.base import (
    SSE_DONE,
    SSE_KEEP_ALIVE,
    Cause,
    Envelope,
    ParsedBody,
    WireError,
    json_text,
    labels,
    mapping,
    positive,
    sequence,
    sse_data,
    stop_strings,
    string,
)
from insitu.gateway.dialects.fields import Fields, format_request, refuse, strict_tools, with_format
from insitu.gateway.dialects.openai import ROLES, OpenAIDialect, client_metadata
from insitu.types import Message, ModelRequest, Reply, Role, ToolCall, ToolSpec

_ROLES: Mapping[str, Role] = {**ROLES, "tool": "tool"}

_FIELDS = Fields(
    read=frozenset(
        {
            *("messages", "tools", "stream", "stream_options", "stop", "n", "modalities", "metadata", "user"),
            *("prompt_cache_key", "safety_identifier"),
        }
    ),
    advisory=(
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "seed",
        "reasoning_effort",
        "tool_choice",
        "parallel_tool_calls",
        "prediction",
        "max_tokens",
        "max_completion_tokens",
        "response_format",
        "verbosity",
        "service_tier",
        "web_search_options",
        "function_call",
        "moderation",
        "prompt_cache_options",
        "prompt_cache_retention",
        "store",
    ),
    refused=frozenset({"logprobs", "top_logprobs", "functions", "audio"}),
)

_METADATA = ("user", "prompt_cache_key", "safety_identifier")
_UNWRITTEN = ("function_call", "name", "audio")
"""Fields of messages that are dropped, with a label."""


class ChatDialect(OpenAIDialect):
    """Implements `Dialect`."""

    name = "chat"
    grows = "messages"
    in_band: frozenset[Cause] = frozenset()

    def parse(self, body: Mapping[str, object], action: str) -> ParsedBody:
        _refuse(body)
        messages = sequence(body.get("messages"), "messages")
        if not messages:
            raise WireError("invalid_request", "'messages' must hold at least one message.", "messages")
        limits = [positive(body.get(k), k) for k in ("max_tokens", "max_completion_tokens")]
        sent = sequence(body.get("tools"), "tools")
        off = body.get("tool_choice") == "none"
        tools = () if off else sent
        request = ModelRequest(
            messages=with_format(
                [_message(m, f"messages[{i}]") for i, m in enumerate(messages)], _format(body)
            ),
            tools=tuple(_tool(t, f"tools[{i}]") for i, t in enumerate(tools)),
            tool_choice_none=off and bool(sent),
            stream=bool(body.get("stream")),
            max_tokens=min((n for n in limits if n is not None), default=None),
            stop=stop_strings(body.get("stop"), "stop"),
            hints=labels((*client_metadata(body, _METADATA, ("metadata",)), *_dropped(messages))),
            advisory=(*_FIELDS.ignored_params(body), *strict_tools(sent, "function")),
        )
        options = body.get("stream_options")
        usage = options is not None and bool(mapping(options, "stream_options").get("include_usage"))
        return ParsedBody(request=request, include_usage=usage)

    def reply(self, reply: Reply, envelope: Envelope) -> Mapping[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": reply.text or None, "refusal": None}
        if not reply.tool_calls:
            message["content"] = reply.text
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [_call(c) for c in reply.tool_calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(reply)}
        return {**_head(envelope, "chat.completion"), "choices": [choice], "usage": _usage(reply)}

    def events(self, reply: Reply, envelope: Envelope) -> Iterator[bytes]:
        deltas: list[dict[str, object]] = [{"role": "assistant", "content": ""}]
        if reply.reasoning:
            deltas.append({"reasoning_content": reply.reasoning})
        if reply.text:
            deltas.append({"content": reply.text})
        deltas += [{"tool_calls": [{"index": i, **_call(c)}]} for i, c in enumerate(reply.tool_calls)]
        head = _head(envelope, "chat.completion.chunk")
        if envelope.body.include_usage:
            head["usage"] = None
        for delta in deltas:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            yield sse_data({**head, "choices": [choice]})
        last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": _finish(reply)}
        yield sse_data({**head, "choices": [last]})
        if envelope.body.include_usage:
            yield sse_data({**head, "choices": [], "usage": _usage(reply)})
        yield SSE_DONE

    def keep_alive(self, envelope: Envelope) -> bytes:
        return SSE_KEEP_ALIVE

    def error_event(self, error: WireError, envelope: Envelope) -> bytes:
        return sse_data(self.error(error))


def _refuse(body: Mapping[str, object]) -> None:
    """Raise WireError for parameters that need memory or more than one neutral sample."""
    _FIELDS.check(body)
    if body.get("n") not in (None, 1):
        raise refuse("n")
    if body.get("modalities") not in (None, ["text"]):
        raise refuse("modalities")


def _format(body: Mapping[str, object]) -> str:
    """Return the instruction for the model if the client wants its answer in a format."""
    shape = mapping(body.get("response_format") or {}, "response_format")
    held = mapping(shape.get("json_schema") or {}, "response_format.json_schema")
    return format_request(shape.get("type"), held.get("schema"), shape)


def _dropped(messages: Sequence[object]) -> list[tuple[str, str]]:
    """Return a label for each field of messages that no renderer can write, in their order."""
    # Agents repeat a tool's name beside its answer; nothing is lost with it.
    said = [m for m in messages if isinstance(m, dict) and m.get("role") != "tool"]
    names = dict.fromkeys(name for m in said for name in _UNWRITTEN if m.get(name) is not None)
    return [("dropped_field", name) for name in names]


def _message(raw: object, param: str) -> Message:
    fields = mapping(raw, param)
    role = _ROLES.get(string(fields.get("role"), f"{param}.role"))
    if role is None:
        raise WireError("invalid_request", f"'{param}.role' is not a known role.", f"{param}.role")
    text = _content(fields.get("content"), f"{param}.content", "" if role == "assistant" else "\n")
    if role == "tool":
        return Message(role=role, text=text, tool_call_id=string(fields.get("tool_call_id"), param))
    if role != "assistant":
        return Message(role=role, text=text)
    calls = sequence(fields.get("tool_calls"), f"{param}.tool_calls")
    reasoning = fields.get("reasoning_content") or fields.get("reasoning")
    return Message(
        role=role,
        text=text,
        reasoning=reasoning if isinstance(reasoning, str) else "",
        tool_calls=tuple(_tool_call(c, f"{param}.tool_calls[{i}]") for i, c in enumerate(calls)),
    )


def _content(value: object, param: str, between: str) -> str:
    """Return the text of a content: string, null, or parts. Raises WireError for parts of unknown types."""
    if not isinstance(value, list):
        return string(value, param)
    texts = []
    for i, raw in enumerate(value):
        part = mapping(raw, f"{param}[{i}]")
        kind = part.get("type") or "text"
        medium = media.medium(kind)
        if medium == "file":
            file = mapping(part.get("file") or {}, f"{param}[{i}].file")
            texts.append(media.from_url(medium, file.get("file_data"), f"{param}[{i}].file.file_data"))
        elif medium:
            texts.append(media.left_out(medium))
        elif kind in ("text", "refusal"):
            texts.append(string(part.get(kind), f"{param}[{i}]"))
        else:
            raise WireError(
                "invalid_request", f"Content of type {kind!r} is not supported.", f"{param}[{i}].type"
            )
    return between.join(texts)


def _tool_call(raw: object, param: str) -> ToolCall:
    fields = mapping(raw, param)
    function = mapping(fields.get("function"), f"{param}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = json_text(arguments)
    return ToolCall(
        id=string(fields.get("id"), f"{param}.id"),
        name=string(function.get("name"), f"{param}.function.name"),
        arguments=string(arguments, f"{param}.function.arguments"),
    )


def _tool(raw: object, param: str) -> ToolSpec:
    fields = mapping(raw, param)
    if fields.get("type") not in (None, "function"):
        raise WireError("invalid_request", "Only tools of type 'function' are supported.", f"{param}.type")
    function = mapping(fields.get("function"), f"{param}.function")
    name = string(function.get("name"), f"{param}.function.name")
    if not name:
        raise WireError(
            "invalid_request", f"'{param}.function.name' must not be empty.", f"{param}.function.name"
        )
    parameters = function.get("parameters")
    shape: object = {} if parameters is None else mapping(parameters, f"{param}.function.parameters")
    return ToolSpec(
        name=name,
        description=string(function.get("description"), f"{param}.function.description"),
        parameters=json_text(shape),
    )


def _head(envelope: Envelope, kind: str) -> dict[str, object]:
    id = f"chatcmpl-{envelope.id}"
    return {"id": id, "object": kind, "created": envelope.created, "model": envelope.model}


def _call(call: ToolCall) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish(reply: Reply) -> str:
    if reply.tool_calls:
        return "tool_calls"
    return "length" if reply.finish == "length" else "stop"


def _usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.sampled_tokens,
        "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
    }
