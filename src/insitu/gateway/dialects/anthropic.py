"""Anthropic Messages; pure.

Blocks of an assistant message are joined directly, those of others by a line break. A user message becomes
one `tool` message per tool result and one `user` message per run of text between them. The billing block
before Claude Code's system prompt changes between calls and is dropped, as is every `cache_control`. The
signature of a thinking block is the gateway's turn reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from insitu.gateway.dialects import client_tools, media
from insitu.gateway.dialects.base import (
    Cause,
    Envelope,
    ParsedBody,
    WireError,
    arguments_object,
    arguments_text,
    join_assistants,
    json_text,
    labels,
    mapping,
    positive,
    sequence,
    sse_event,
    stop_strings,
    string,
)
from insitu.gateway.dialects.fields import Fields, format_request, strict_tools, with_format
from insitu.types import Message, ModelRequest, Reply, ToolCall, ToolSpec

_FIELDS = Fields(
    read=frozenset(
        {
            *("messages", "system", "tools", "stream", "stop_sequences", "metadata", "cache_control"),
        }
    ),
    advisory=(
        *("model", "max_tokens", "temperature", "top_p", "top_k", "tool_choice", "thinking", "speed"),
        *("context_management", "output_config", "output_format", "service_tier", "diagnostics"),
        *("inference_geo", "billing_policy", "fallbacks", "fallback_credit_token"),
    ),
    refused=frozenset({"container", "mcp_servers", "compaction", "thread"}),
)

_BILLING = "x-anthropic-billing-header"

_TYPES: Mapping[Cause, str] = {
    "unauthorized": "authentication_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "rate_limited": "rate_limit_error",
    "session_failed": "permission_error",
    "engine_failed": "api_error",
}


class AnthropicDialect:
    """Implements `Dialect`."""

    name = "anthropic"
    grows = "messages"
    in_band: frozenset[Cause] = frozenset()

    def parse(self, body: Mapping[str, object], action: str) -> ParsedBody:
        _refuse(body)
        raw = sequence(body.get("messages"), "messages")
        if not raw:
            raise WireError("invalid_request", "messages: at least one message is required", "messages")
        messages = _system(body.get("system"))
        for i, message in enumerate(raw):
            messages += _messages(message, f"messages.{i}")
        if messages[-1:] and messages[-1].role == "assistant":
            raise WireError(
                "invalid_request",
                "This model does not support assistant message prefill. "
                "The conversation must end with a user message.",
                "messages",
            )
        offered, dropped = _tools(body)
        off = _no_tool(body)
        hints = dropped
        user = mapping(body.get("metadata") or {}, "metadata").get("user_id")
        if isinstance(user, str):
            hints = (("metadata.user_id", user), *dropped)
        request = ModelRequest(
            messages=with_format(join_assistants(messages), _format(body)),
            tools=() if off else offered,
            tool_choice_none=off and bool(offered),
            stream=bool(body.get("stream")),
            max_tokens=positive(body.get("max_tokens"), "max_tokens"),
            stop=stop_strings(body.get("stop_sequences"), "stop_sequences"),
            advisory=(
                *_FIELDS.ignored_params(body),
                *strict_tools(sequence(body.get("tools"), "tools")),
            ),
            hints=labels(hints),
        )
        return ParsedBody(request=request)

    def reply(self, reply: Reply, envelope: Envelope) -> Mapping[str, object]:
        message = _message_head(reply, envelope)
        message["content"] = [block for block, _, _ in _blocks(reply, envelope)]
        message["stop_reason"] = _stop_reason(reply)
        message["stop_sequence"] = reply.stop or None
        message["usage"] = _usage(reply, reply.sampled_tokens)
        return message

    def events(self, reply: Reply, envelope: Envelope) -> Iterator[bytes]:
        yield sse_event({"type": "message_start", "message": _message_head(reply, envelope)})
        for index, (_, opened, deltas) in enumerate(_blocks(reply, envelope)):
            yield sse_event({"type": "content_block_start", "index": index, "content_block": opened})
            if index == 0:
                yield sse_event({"type": "ping"})
            for delta in deltas:
                yield sse_event({"type": "content_block_delta", "index": index, "delta": delta})
            yield sse_event({"type": "content_block_stop", "index": index})
        yield sse_event(
            {
                "type": "message_delta",
                "delta": {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stop or None},
                "usage": _usage(reply, reply.sampled_tokens),
            }
        )
        yield sse_event({"type": "message_stop"})

    def keep_alive(self, envelope: Envelope) -> bytes:
        return sse_event({"type": "ping"})

    def error(self, error: WireError) -> Mapping[str, object]:
        message = str(error)
        if error.cause == "context_length_exceeded":
            message = f"prompt is too long: {error.used} tokens > {error.limit} maximum"
        kind = _TYPES.get(error.cause, "invalid_request_error")
        said: dict[str, object] = {"type": kind, "message": message}
        if error.code:
            said["details"] = {"error_code": error.code, "unsupported": list(error.unsupported)}
        return {"type": "error", "error": said, "request_id": f"req_{error.id}"}

    def error_event(self, error: WireError, envelope: Envelope) -> bytes:
        return sse_event({**self.error(error), "request_id": f"req_{envelope.id}"})

    def count(self, tokens: int) -> Mapping[str, object]:
        return {"input_tokens": tokens}

    def models(self, model: str) -> Mapping[str, object]:
        return {"data": [self.model(model)], "has_more": False, "first_id": model, "last_id": model}

    def model(self, model: str) -> Mapping[str, object]:
        return {
            "type": "model",
            "id": model,
            "display_name": model,
            "created_at": "1970-01-01T00:00:00Z",
            "lifecycle": "active",
        }


def _refuse(body: Mapping[str, object]) -> None:
    """Raise WireError for parameters that need memory or more than one neutral sample."""
    if body.get("thread"):
        # Official clients send all of the conversation again when they read this code, and only then.
        raise WireError(
            "invalid_request",
            "thread: message threads are not supported; send the whole conversation.",
            "thread",
            code="thread_unsupported_request",
            unsupported=("thread",),
        )
    _FIELDS.check(body)


def _format(body: Mapping[str, object]) -> str:
    """Return the instruction for the model if the client wants its answer in a format."""
    config = mapping(body.get("output_config") or {}, "output_config")
    shape = mapping(config.get("format") or body.get("output_format") or {}, "output_config.format")
    return format_request(shape.get("type"), shape.get("schema"), shape)


# --------------------------------------------------------------------------- requests


def _system(value: object) -> list[Message]:
    """Return the system prompt as one message, none if it is empty."""
    if isinstance(value, list):
        blocks = [_text(block, f"system.{i}") for i, block in enumerate(value)]
    else:
        blocks = [string(value, "system")]
    text = "\n".join(kept for block in blocks if (kept := _unbilled(block)))
    return [Message(role="system", text=text)] if text else []


def _unbilled(text: str) -> str:
    """Return `text` without the line that Claude Code changes from call to call."""
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


def _messages(raw: object, param: str) -> list[Message]:
    fields = mapping(raw, param)
    role = string(fields.get("role"), f"{param}.role")
    content = fields.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if role == "assistant":
        return [_assistant(blocks, f"{param}.content")]
    if role == "user":
        return _user(blocks, f"{param}.content")
    if role == "system":
        texts = [_text(block, f"{param}.content.{i}") for i, block in enumerate(blocks)]
        return [Message(role="system", text="\n".join(texts))]
    raise WireError("invalid_request", f"{param}.role: not a known role", f"{param}.role")


def _assistant(blocks: Sequence[object], param: str) -> Message:
    text = reasoning = ""
    calls: list[ToolCall] = []
    pointers: list[str] = []
    for i, raw in enumerate(blocks):
        at = f"{param}.{i}"
        block = mapping(raw, at)
        kind = block.get("type")
        if kind == "thinking":
            reasoning += string(block.get("thinking"), f"{at}.thinking")
            pointers.append(string(block.get("signature"), f"{at}.signature"))
        elif kind == "redacted_thinking":
            pointers.append(string(block.get("data"), f"{at}.data"))
        elif kind == "tool_use":
            given = block.get("input")
            calls.append(
                ToolCall(
                    id=string(block.get("id"), f"{at}.id"),
                    name=string(block.get("name"), f"{at}.name"),
                    arguments=arguments_text(mapping({} if given is None else given, f"{at}.input")),
                )
            )
        else:
            text += _text(block, at)
    return Message(
        role="assistant",
        text=text,
        reasoning=reasoning,
        tool_calls=tuple(calls),
        pointers=tuple(pointer for pointer in pointers if pointer),
    )


def _user(blocks: Sequence[object], param: str) -> list[Message]:
    messages: list[Message] = []
    texts: list[str] = []
    for i, raw in enumerate(blocks):
        block = mapping(raw, f"{param}.{i}")
        if block.get("type") != "tool_result":
            texts.append(_text(block, f"{param}.{i}"))
            continue
        if texts:
            messages.append(Message(role="user", text="\n".join(texts)))
            texts = []
        messages.append(_result(block, f"{param}.{i}"))
    if texts or not messages:
        messages.append(Message(role="user", text="\n".join(texts)))
    return messages


def _result(block: Mapping[str, object], param: str) -> Message:
    content = block.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    text = "\n".join(_text(part, f"{param}.content.{i}") for i, part in enumerate(parts))
    if block.get("is_error") is True and "error" not in text[:80].lower():
        text = f"Error: {text}"
    return Message(
        role="tool", text=text, tool_call_id=string(block.get("tool_use_id"), f"{param}.tool_use_id")
    )


def _text(raw: object, param: str) -> str:
    """Return the text of a block. Raises WireError for a block without text."""
    block = mapping(raw, param)
    kind = block.get("type") or "text"
    if kind == "text":
        return string(block.get("text"), f"{param}.text")
    if kind == "tool_reference":
        return string(block.get("tool_name"), f"{param}.tool_name")
    if kind == "search_result":
        found = sequence(block.get("content"), f"{param}.content")
        texts = [_text(one, f"{param}.content.{i}") for i, one in enumerate(found)]
        return "\n".join([string(block.get("title"), f"{param}.title"), *texts])
    if kind == "document":
        return _document(mapping(block.get("source"), f"{param}.source"), f"{param}.source")
    if medium := media.medium(kind):
        return media.left_out(medium)
    raise WireError(
        "invalid_request", f"{param}: content of type {str(kind)[:64]!r} is not supported", f"{param}.type"
    )


def _document(source: Mapping[str, object], param: str) -> str:
    """Return the text of a document, or the line in its place. Raises WireError."""
    kind, content = source.get("type"), source.get("content")
    if kind == "text":
        return string(source.get("data"), f"{param}.data")
    if kind == "content" and isinstance(content, list):
        return "\n".join(_text(part, f"{param}.content.{i}") for i, part in enumerate(content))
    if kind == "content":
        return string(content, f"{param}.content")
    return media.from_data("document", source.get("media_type"), source.get("data"), f"{param}.data")


def _tools(body: Mapping[str, object]) -> tuple[tuple[ToolSpec, ...], tuple[tuple[str, str], ...]]:
    """Return the tools for the model, and a label for each that only the provider could run."""
    offered: list[ToolSpec] = []
    dropped: list[tuple[str, str]] = []
    for i, raw in enumerate(sequence(body.get("tools"), "tools")):
        tool = mapping(raw, f"tools.{i}")
        name = string(tool.get("name"), f"tools.{i}.name")
        kind = string(tool.get("type"), f"tools.{i}.type")
        if kind not in ("", "custom"):
            known = client_tools.anthropic_tool(kind, tool, f"tools.{i}")
            if known is not None:
                offered.append(known)
            else:
                dropped.append(("dropped_tool", name or kind))
            continue
        if not name:
            raise WireError("invalid_request", f"tools.{i}.name: must not be empty", f"tools.{i}.name")
        schema = tool.get("input_schema")
        offered.append(
            ToolSpec(
                name=name,
                description=string(tool.get("description"), f"tools.{i}.description"),
                parameters=json_text({} if schema is None else mapping(schema, f"tools.{i}.input_schema")),
            )
        )
    return tuple(offered), tuple(dropped)


def _no_tool(body: Mapping[str, object]) -> bool:
    """Return whether no tool may be called."""
    choice = body.get("tool_choice")
    return choice is not None and mapping(choice, "tool_choice").get("type") == "none"


# --------------------------------------------------------------------------- replies

_Block = tuple[dict[str, object], dict[str, object], list[dict[str, object]]]


def _blocks(reply: Reply, envelope: Envelope) -> list[_Block]:
    """Return each content block complete, as it is opened in a stream, and the deltas that fill it."""
    blocks: list[_Block] = []
    if reply.reasoning:
        signature = reply.pointer or envelope.id
        blocks.append(
            (
                {"type": "thinking", "thinking": reply.reasoning, "signature": signature},
                {"type": "thinking", "thinking": "", "signature": ""},
                [
                    {"type": "thinking_delta", "thinking": reply.reasoning},
                    {"type": "signature_delta", "signature": signature},
                ],
            )
        )
    if reply.text:
        blocks.append(
            (
                {"type": "text", "text": reply.text},
                {"type": "text", "text": ""},
                [{"type": "text_delta", "text": reply.text}],
            )
        )
    for call in reply.tool_calls:
        given = arguments_object(call.arguments)
        head: dict[str, object] = {"type": "tool_use", "id": call.id, "name": call.name}
        partial: dict[str, object] = {"type": "input_json_delta", "partial_json": json_text(given)}
        blocks.append(({**head, "input": given}, {**head, "input": {}}, [partial]))
    return blocks


def _message_head(reply: Reply, envelope: Envelope) -> dict[str, object]:
    return {
        "id": f"msg_{envelope.id}",
        "type": "message",
        "role": "assistant",
        "model": envelope.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(reply, min(1, reply.sampled_tokens)),
    }


def _stop_reason(reply: Reply) -> str:
    if reply.tool_calls:
        return "tool_use"
    if reply.stop:
        return "stop_sequence"
    return "max_tokens" if reply.finish == "length" else "end_turn"


def _usage(reply: Reply, output: int) -> dict[str, int]:
    return {
        "input_tokens": reply.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output,
    }
