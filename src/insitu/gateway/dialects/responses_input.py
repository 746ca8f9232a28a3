"""Parser of Responses bodies; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from insitu.gateway.dialects import client_tools, compaction, media
from insitu.gateway.dialects.base import (
    ParsedBody,
    WireError,
    json_text,
    labels,
    mapping,
    positive,
    sequence,
    string,
)
from insitu.gateway.dialects.fields import Fields, format_request, refuse, strict_tools, with_format
from insitu.gateway.dialects.openai import ROLES, client_metadata
from insitu.types import Message, ModelRequest, ToolCall, ToolSpec

_FIELDS = Fields(
    read=frozenset(
        {
            *("input", "instructions", "tools", "stream", "include", "store", "previous_response_id"),
            *("prompt_cache_key", "client_metadata", "metadata", "user", "safety_identifier"),
        }
    ),
    advisory=(
        "model",
        "max_output_tokens",
        "temperature",
        "top_p",
        "tool_choice",
        "parallel_tool_calls",
        "reasoning",
        "truncation",
        "verbosity",
        "service_tier",
        "max_tool_calls",
        "context_management",
        "text",
        "stream_options",
        "access_programs",
        "image",
        "moderation",
        "personality",
        "prompt_cache_options",
        "prompt_cache_retention",
    ),
    refused=frozenset({"conversation", "prompt", "background", "top_logprobs"}),
)

_METADATA = ("prompt_cache_key", "user", "safety_identifier")
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")

_FREE_FORM = json_text(
    {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    }
)
"""Schema of a free-form tool for the model."""


def parse(body: Mapping[str, object], *, compact: bool = False) -> ParsedBody:
    """Parse a body; `compact`: of the route that only compacts. Raises WireError."""
    _refuse(body)
    messages: list[Message] = []
    instructions = string(body.get("instructions"), "instructions")
    if instructions:
        messages.append(Message(role="system", text=instructions))
    tools = _Tools()
    _offer(tools, body)
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else sequence(given, "input")
    if not items:
        raise WireError("invalid_request", "'input' must hold at least one item.", "input")
    items, asked = compaction.without_trigger(items)
    items = compaction.in_effect(items)
    reader = _Reader(messages=messages, tools=tools)
    for i, item in enumerate(items):
        reader.read(mapping(item, f"input[{i}]"), f"input[{i}]")
    if compact or asked:
        reader.messages.append(compaction.ASKED)
    off = body.get("tool_choice") == "none"
    request = ModelRequest(
        messages=with_format(reader.messages, _format(body)),
        tools=() if off else tuple(tools.offered),
        tool_choice_none=off and bool(tools.offered),
        stream=bool(body.get("stream")) and not compact,
        max_tokens=positive(body.get("max_output_tokens"), "max_output_tokens"),
        advisory=(*_FIELDS.ignored_params(body), *strict_tools(tools.strict)),
        hints=labels((*client_metadata(body, _METADATA, ("client_metadata", "metadata")), *tools.dropped)),
    )
    return ParsedBody(
        request=request,
        names=tools.names,
        compaction=compact or asked,
        history=tuple(map(json_text, compaction.kept(items))) if compact else None,
        echo={name: body[name] for name in ("instructions", "metadata") if body.get(name) is not None},
        kept=None if compact or body.get("store") is False else tuple(map(json_text, items)),
    )


def _refuse(body: Mapping[str, object]) -> None:
    """Raise WireError for parameters that need memory or more than one neutral sample."""
    _FIELDS.check(body)
    if body.get("previous_response_id") is not None:  # known ids were resolved before
        raise refuse("previous_response_id")
    if "message.output_text.logprobs" in sequence(body.get("include"), "include"):
        raise refuse("include")


def _format(body: Mapping[str, object]) -> str:
    """Return the instruction for the model if the client wants its answer in a format."""
    text = mapping(body.get("text") or {}, "text")
    shape = mapping(text.get("format") or {}, "text.format")
    return format_request(shape.get("type"), shape.get("schema"), shape)


# --------------------------------------------------------------------------- tools


@dataclass(slots=True)
class _Tools:
    """Tools for the model, the wire form of their calls, and labels of dropped tools."""

    offered: list[ToolSpec] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    strict: list[dict[str, object]] = field(default_factory=list)
    """Tools with `strict`, with their names for the model."""
    taken: set[str] = field(default_factory=set)
    """Names of the tools for the model."""


def _offer(tools: _Tools, body: Mapping[str, object]) -> None:
    for i, raw in enumerate(sequence(body.get("tools"), "tools")):
        tool = mapping(raw, f"tools[{i}]")
        if tool.get("type") != "namespace":
            _one(tools, tool, "", f"tools[{i}]")
            continue
        space = string(tool.get("name"), f"tools[{i}].name")
        for k, inner in enumerate(sequence(tool.get("tools"), f"tools[{i}].tools")):
            param = f"tools[{i}].tools[{k}]"
            _one(tools, mapping(inner, param), space, param)


def _one(tools: _Tools, tool: Mapping[str, object], space: str, param: str) -> None:
    """Offer one function or free-form tool; label any other, which only the provider itself could run."""
    kind = string(tool.get("type"), f"{param}.type")
    if kind not in ("function", "custom"):
        known = client_tools.responses_tool(kind, tool, param)
        if known is None or known.name in tools.taken:
            tools.dropped.append(("dropped_tool", kind))
            return
        tools.taken.add(known.name)
        tools.offered.append(known)
        tools.names[known.name] = json_text({"type": kind})
        return
    name = string(tool.get("name"), f"{param}.name")
    if not name:
        raise WireError("invalid_request", f"'{param}.name' must not be empty.", f"{param}.name")
    flat = _flat_name(space, name)
    if flat in tools.taken:  # a call could not say which of the two it means
        tools.dropped.append(("dropped_tool", flat))
        return
    tools.taken.add(flat)
    if tool.get("strict"):
        tools.strict.append({"name": flat, "strict": True})
    description = string(tool.get("description"), f"{param}.description")
    if kind == "custom":
        parameters = _FREE_FORM
        shape = mapping(tool.get("format") or {}, f"{param}.format")
        if isinstance(shape.get("definition"), str):
            description = f"{description}\n\nThe input follows this grammar:\n{shape['definition']}".strip()
    else:
        given = tool.get("parameters")
        parameters = json_text({} if given is None else mapping(given, f"{param}.parameters"))
    tools.offered.append(ToolSpec(name=flat, description=description, parameters=parameters))
    if kind == "custom" or space:
        tools.names[flat] = json_text({"type": kind, "name": name, "namespace": space})


def _flat_name(space: str, name: str) -> str:
    """Return the name of a namespaced tool for the model."""
    return f"{space}__{name}" if space else name


# --------------------------------------------------------------------------- items


@dataclass(slots=True)
class _Reader:
    """Reads items in order and gathers adjacent assistant items."""

    messages: list[Message]
    tools: _Tools

    def read(self, item: Mapping[str, object], param: str) -> None:
        kind = string(item.get("type") or "message", f"{param}.type")
        if kind == "message":
            self._message(item, param)
        elif kind == "reasoning":
            self._reasoning(item, param)
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, param)
        elif kind in client_tools.RESPONSES_CALLS:
            self._add_call(client_tools.responses_call(item, param))
        elif kind in ("function_call_output", "custom_tool_call_output", *client_tools.RESPONSES_OUTPUTS):
            output = _output(client_tools.responses_answer(item), f"{param}.output")
            # Clients of the local shell name the call by `id`, as that item's schema has it.
            answers = string(item.get("call_id") or item.get("id"), f"{param}.call_id")
            self.messages.append(Message(role="tool", text=output, tool_call_id=answers))
        elif kind == "agent_message":
            author = string(item.get("author"), f"{param}.author")
            said = _texts(item.get("content"), param, "\n")
            self.messages.append(Message(role="user", text=f"Message from {author}:\n{said}"))
        elif kind == "compaction":
            content = string(item.get("encrypted_content"), f"{param}.encrypted_content")
            self.messages.append(compaction.opened(content, param))
        elif kind == "additional_tools":
            self._additional(item)
        elif kind == "configuration_update":
            self.tools.dropped.append(("dropped_item", kind))
        else:
            raise WireError(
                "invalid_request", f"Items of type {str(kind)[:64]!r} are not supported.", f"{param}.type"
            )

    def _additional(self, item: Mapping[str, object]) -> None:
        """Add later tools as a message, which leaves the root block unchanged."""
        more = _Tools()
        _offer(more, item)
        self.tools.names.update(more.names)
        lines = [
            json_text(
                {"name": t.name, "description": t.description, "parameters": orjson.loads(t.parameters)}
            )
            for t in more.offered
        ]
        self.messages.append(Message(role="system", text="\n".join(["More tools:", *lines])))

    def _message(self, item: Mapping[str, object], param: str) -> None:
        role = ROLES.get(string(item.get("role"), f"{param}.role"))
        if role is None:
            raise WireError("invalid_request", f"'{param}.role' is not a known role.", f"{param}.role")
        if role != "assistant":
            self.messages.append(Message(role=role, text=_texts(item.get("content"), param, "\n")))
            return
        text = _texts(item.get("content"), param, "")
        before = self._before()
        if before is None or before.tool_calls:
            self.messages.append(Message(role="assistant", text=text))
        else:
            self._say(before, text=before.text + text)

    def _reasoning(self, item: Mapping[str, object], param: str) -> None:
        text = _texts(item.get("content"), param, "") or _texts(item.get("summary"), param, "")
        pointer = string(item.get("encrypted_content"), f"{param}.encrypted_content")
        pointers = (pointer,) if pointer else ()
        before = self._before()
        if before is None or before.text or before.tool_calls:
            self.messages.append(Message(role="assistant", reasoning=text, pointers=pointers))
        else:
            self._say(before, reasoning=before.reasoning + text, pointers=before.pointers + pointers)

    def _call(self, item: Mapping[str, object], param: str) -> None:
        name = _flat_name(
            string(item.get("namespace"), f"{param}.namespace"), string(item.get("name"), f"{param}.name")
        )
        if item.get("type") == "custom_tool_call":
            arguments = json_text({"input": string(item.get("input"), f"{param}.input")})
        else:
            arguments = string(item.get("arguments"), f"{param}.arguments")
        self._add_call(
            ToolCall(id=string(item.get("call_id"), f"{param}.call_id"), name=name, arguments=arguments)
        )

    def _add_call(self, call: ToolCall) -> None:
        before = self._before()
        if before is None:
            self.messages.append(Message(role="assistant", tool_calls=(call,)))
        else:
            self._say(before, tool_calls=(*before.tool_calls, call))

    def _before(self) -> Message | None:
        """Return the assistant message that the next item may belong to."""
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last.role == "assistant" else None

    def _say(
        self,
        before: Message,
        *,
        text: str | None = None,
        reasoning: str | None = None,
        tool_calls: tuple[ToolCall, ...] | None = None,
        pointers: tuple[str, ...] | None = None,
    ) -> None:
        self.messages[-1] = Message(
            role="assistant",
            text=before.text if text is None else text,
            reasoning=before.reasoning if reasoning is None else reasoning,
            tool_calls=before.tool_calls if tool_calls is None else tool_calls,
            pointers=before.pointers if pointers is None else pointers,
        )


def _output(value: object, param: str) -> str:
    """Return a tool's answer: text, a part (a screenshot) or a list of parts."""
    return _texts([value] if isinstance(value, dict) else value, param, "\n")


def _texts(value: object, param: str, between: str) -> str:
    """Return the text of a content: string, null, or parts. Raises WireError for parts of unknown types."""
    if not isinstance(value, list):
        return string(value, param)
    texts = []
    for i, raw in enumerate(value):
        part = mapping(raw, f"{param}[{i}]")
        kind = part.get("type")
        medium = media.medium(kind)
        if medium == "file":
            texts.append(media.from_url(medium, part.get("file_data"), f"{param}[{i}].file_data"))
        elif medium:
            texts.append(media.left_out(medium))
        elif kind in _TEXT_PARTS:
            texts.append(string(part.get("refusal" if kind == "refusal" else "text"), f"{param}[{i}]"))
        else:
            raise WireError(
                "invalid_request",
                f"Content of type {str(kind)[:64]!r} is not supported.",
                f"{param}[{i}].type",
            )
    return between.join(texts)
