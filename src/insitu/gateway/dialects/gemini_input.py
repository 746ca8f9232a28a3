"""Parser of Gemini bodies; pure.

Field names are read in camel case and, like the provider does, in snake case.
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qs

from insitu.gateway.dialects import media
from insitu.gateway.dialects.base import (
    EVENT_STREAM,
    ParsedBody,
    WireError,
    arguments_text,
    join_assistants,
    json_text,
    labels,
    mapping,
    positive,
    sequence,
    stop_strings,
    string,
)
from insitu.gateway.dialects.fields import Fields, format_request, refuse, unknown_fields, with_format
from insitu.types import Message, ModelRequest, ToolCall, ToolSpec

_Json = Mapping[str, object]


def parse(body: _Json, action: str) -> ParsedBody:
    """Parse a body; `action` is `models/{model}:{method}` with its query. Raises WireError."""
    path, _, query = action.partition("?")
    model, _, method = path.removeprefix("models/").rpartition(":")
    inner = _get(body, "generateContentRequest")
    if inner is not None:
        body = mapping(inner, "generateContentRequest")
    config = mapping(_get(body, "generationConfig") or {}, "generationConfig")
    _refuse(body, config)
    contents = sequence(_get(body, "contents"), "contents")
    if not contents:
        raise WireError("invalid_request", "* contents is not specified", "contents")
    tools, dropped = _tools(body)
    off = _no_tool(body)
    limit = _get(config, "maxOutputTokens")
    streamed = method == "streamGenerateContent"
    request = ModelRequest(
        messages=with_format(
            (*_system(_get(body, "systemInstruction")), *_messages(contents)), _format(config)
        ),
        tools=() if off else tools,
        tool_choice_none=off and bool(tools),
        stream=streamed,
        max_tokens=positive(limit, "maxOutputTokens"),
        stop=stop_strings(_get(config, "stopSequences"), "stopSequences"),
        advisory=(("model", json_text(model)), *_advisory(body, config)),
        hints=labels((*_labels(body), *dropped)),
    )
    as_events = not streamed or "sse" in parse_qs(query).get("alt", ())
    return ParsedBody(
        request=request, content_type=EVENT_STREAM if as_events else "application/json; charset=utf-8"
    )


def _get(fields: _Json, name: str) -> object:
    """Return the field `name`, in camel or snake case."""
    value = fields.get(name)
    return fields.get(_snake(name)) if value is None else value


@functools.cache
def _snake(name: str) -> str:
    return re.sub(r"[A-Z]", lambda found: "_" + found[0].lower(), name)


def _refuse(body: _Json, config: _Json) -> None:
    """Raise WireError for parameters that need memory or more than one neutral sample."""
    _FIELDS.check(body)
    _CONFIG.check(config, "generationConfig.")
    if _get(config, "candidateCount") not in (None, 1):
        raise refuse("candidateCount")
    modalities = _get(config, "responseModalities")
    if modalities and modalities != ["TEXT"]:
        raise refuse("responseModalities")


def _format(config: _Json) -> str:
    """Return the instruction for the model if the client wants its answer in a format."""
    whole = _get(config, "responseFormat")
    if whole:
        shape = mapping(mapping(whole, "responseFormat").get("text") or {}, "responseFormat.text")
        return format_request(_get(shape, "mimeType"), shape.get("schema"), whole)
    schema = _get(config, "responseJsonSchema") or _get(config, "responseSchema")
    kind = _get(config, "responseMimeType")
    return format_request(kind, schema, {"responseMimeType": kind})


def _advisory(body: _Json, config: _Json) -> tuple[tuple[str, str], ...]:
    named = {name: _get(config, name) for name in _CONFIG_ADVISORY} | {
        name: _get(body, name) for name in _ADVISORY
    }
    unlisted = _FIELDS.unlisted(body) + [f"generationConfig.{n}" for n in _CONFIG.unlisted(config)]
    return (*_RECORDED.ignored_params(named), *([unknown_fields(unlisted)] if unlisted else ()))


def _labels(body: _Json) -> tuple[tuple[str, str], ...]:
    """Return client metadata from the body."""
    labels = mapping(body.get("labels") or {}, "labels")
    return tuple((f"labels.{name}", value) for name, value in labels.items() if isinstance(value, str))


def _spelled(*names: str) -> frozenset[str]:
    return frozenset({*names, *map(_snake, names)})


_CONFIG_ADVISORY = (
    *("temperature", "topP", "topK", "seed", "presencePenalty", "frequencyPenalty", "maxOutputTokens"),
    *("thinkingConfig", "responseMimeType", "responseSchema", "responseJsonSchema", "responseFormat"),
    *("logprobs", "routingConfig", "modelSelectionConfig", "mediaResolution", "speechConfig", "imageConfig"),
    *("audioTimestamp", "audioTranscriptionConfig", "enableEnhancedCivicAnswers"),
)
_ADVISORY = (
    *("toolConfig", "safetySettings", "serviceTier", "modelArmorConfig", "generationOutputConfig", "store"),
)
_RECORDED = Fields(read=frozenset(), advisory=(*_CONFIG_ADVISORY, *_ADVISORY))
"""Recorded with their names in camel case."""

_FIELDS = Fields(
    read=_spelled(
        *("contents", "systemInstruction", "tools", "generationConfig", "generateContentRequest", "labels"),
        *("model", *_ADVISORY),
    ),
    advisory=(),
    refused=_spelled("cachedContent", "continuationToken"),
)
_CONFIG = Fields(
    read=_spelled("stopSequences", "candidateCount", "responseModalities", *_CONFIG_ADVISORY),
    advisory=(),
    refused=_spelled("responseLogprobs"),
)
"""Fields of the body and of its configuration; recorded ones are listed as read, in both spellings."""


# --------------------------------------------------------------------------- tools


def _tools(body: _Json) -> tuple[tuple[ToolSpec, ...], tuple[tuple[str, str], ...]]:
    """Return the functions for the model, and a label for each tool that only the provider could run."""
    offered: list[ToolSpec] = []
    dropped: list[tuple[str, str]] = []
    for i, raw in enumerate(sequence(body.get("tools"), "tools")):
        tool = mapping(raw, f"tools[{i}]")
        for key in (key for key, given in tool.items() if given is not None):
            if key not in ("functionDeclarations", "function_declarations"):
                dropped.append(("dropped_tool", key))
        declared = sequence(_get(tool, "functionDeclarations"), f"tools[{i}].functionDeclarations")
        for k, function in enumerate(declared):
            param = f"tools[{i}].functionDeclarations[{k}]"
            offered.append(_function(mapping(function, param), param))
    return tuple(offered), tuple(dropped)


def _no_tool(body: _Json) -> bool:
    """Return whether no function may be called."""
    config = mapping(_get(body, "toolConfig") or {}, "toolConfig")
    calling = mapping(_get(config, "functionCallingConfig") or {}, "functionCallingConfig")
    return calling.get("mode") == "NONE"


def _function(fields: _Json, param: str) -> ToolSpec:
    name = string(fields.get("name"), f"{param}.name")
    if not name:
        raise WireError("invalid_request", f"'{param}.name' must not be empty.", f"{param}.name")
    shape = _get(fields, "parametersJsonSchema")
    if shape is None:
        shape = fields.get("parameters")
    return ToolSpec(
        name=name,
        description=string(fields.get("description"), f"{param}.description"),
        parameters=json_text({} if shape is None else mapping(shape, f"{param}.parameters")),
    )


# --------------------------------------------------------------------------- contents


def _system(value: object) -> list[Message]:
    if value is None:
        return []
    if isinstance(value, str):
        text = value
    else:
        text = "\n".join(_texts(mapping(value, "systemInstruction"), "systemInstruction"))
    return [Message(role="system", text=text)] if text else []


def _texts(content: _Json, param: str) -> list[str]:
    parts = sequence(content.get("parts"), f"{param}.parts")
    return [
        _text(mapping(part, f"{param}.parts[{i}]"), f"{param}.parts[{i}]") for i, part in enumerate(parts)
    ]


def _messages(contents: Sequence[object]) -> tuple[Message, ...]:
    messages: list[Message] = []
    waiting: list[ToolCall] = []
    for i, raw in enumerate(contents):
        param = f"contents[{i}]"
        content = mapping(raw, param)
        role = string(content.get("role"), f"{param}.role") or "user"
        parts = sequence(content.get("parts"), f"{param}.parts")
        if role == "model":
            said = _model(parts, param)
            waiting += said.tool_calls
            messages.append(said)
        elif role in ("user", "function", "tool"):
            messages += _user(parts, param, waiting)
        elif role == "system":
            messages.append(Message(role="system", text="\n".join(_texts(content, param))))
        else:
            raise WireError("invalid_request", "Please use a valid role: user, model.", f"{param}.role")
    return join_assistants(messages)


def _model(parts: Sequence[object], param: str) -> Message:
    text = reasoning = ""
    calls: list[ToolCall] = []
    pointers: list[str] = []
    for i, raw in enumerate(parts):
        at = f"{param}.parts[{i}]"
        part = mapping(raw, at)
        signature = string(_get(part, "thoughtSignature"), f"{at}.thoughtSignature")
        pointers += [_unsealed(signature)] if signature else []
        call = _get(part, "functionCall")
        if call is not None:
            fields = mapping(call, f"{at}.functionCall")
            arguments = mapping(fields.get("args") or {}, f"{at}.functionCall.args")
            calls.append(
                ToolCall(
                    id=string(fields.get("id"), f"{at}.functionCall.id") or f"unnamed_{at}",
                    name=string(fields.get("name"), f"{at}.functionCall.name"),
                    arguments=arguments_text(arguments),
                )
            )
        elif part.get("thought") is True:
            reasoning += string(part.get("text"), f"{at}.text")
        else:
            text += _text(part, at)
    return Message(
        role="assistant", text=text, reasoning=reasoning, tool_calls=tuple(calls), pointers=tuple(pointers)
    )


def _user(parts: Sequence[object], param: str, waiting: list[ToolCall]) -> list[Message]:
    """Return the messages of user parts; answered calls are removed from `waiting`."""
    messages: list[Message] = []
    texts: list[str] = []
    for i, raw in enumerate(parts):
        at = f"{param}.parts[{i}]"
        part = mapping(raw, at)
        answer = _get(part, "functionResponse")
        if answer is None:
            texts.append(_text(part, at))
            continue
        if texts:
            messages.append(Message(role="user", text="\n".join(texts)))
            texts = []
        messages.append(_result(mapping(answer, f"{at}.functionResponse"), at, waiting))
    if texts or not messages:
        messages.append(Message(role="user", text="\n".join(texts)))
    return messages


def _result(answer: _Json, param: str, waiting: list[ToolCall]) -> Message:
    id = string(answer.get("id"), f"{param}.functionResponse.id")
    name = string(answer.get("name"), f"{param}.functionResponse.name")
    answered = next((c for c in waiting if (c.id == id if id else c.name == name)), None)
    if answered is not None:
        waiting.remove(answered)
        id = answered.id
    response = mapping(answer.get("response") or {}, f"{param}.functionResponse.response")
    text = "\n".join((_outcome(response), *_texts(answer, f"{param}.functionResponse")))
    return Message(role="tool", text=text, tool_call_id=id)


def _outcome(response: _Json) -> str:
    """Return the text of a function's response if it is one text, else all of it as JSON."""
    if len(response) == 1:
        (key, value), *_ = response.items()
        if isinstance(value, str) and key in ("output", "result", "content"):
            return value
        if isinstance(value, str) and key == "error":
            return value if "error" in value[:80].lower() else f"Error: {value}"
    return json_text(response)


def _text(part: _Json, param: str) -> str:
    """Return the text of a part, which may be empty, or the line in its place. Raises WireError."""
    value = part.get("text")
    for name in ("inlineData", "fileData"):
        data = _get(part, name)
        if data is not None:
            fields = mapping(data, f"{param}.{name}")
            mime = _get(fields, "mimeType")
            return media.from_data(media.medium(mime) or "file", mime, fields.get("data"), f"{param}.{name}")
    if value is None:
        for key in (key for key, given in part.items() if given is not None):
            if key not in ("thought", "thoughtSignature", "thought_signature"):
                raise WireError("invalid_request", f"Parts with {key[:64]!r} are not supported.", param)
    return string(value, f"{param}.text")


# --------------------------------------------------------------------------- pointers


def sealed(pointer: str) -> str:
    """Return a turn reference as a signature: the format requires base64."""
    return base64.b64encode(pointer.encode()).decode()


def _unsealed(signature: str) -> str:
    """Return the turn reference in a signature; a foreign signature is returned unchanged."""
    try:
        plain = signature.replace("-", "+").replace("_", "/")
        return base64.b64decode(plain, validate=True).decode()
    except (binascii.Error, ValueError):
        return signature
