"""Parse the request and reply of one call of a text log.

Every wire format lets a client repeat the model's reply in its next request, and the dialects parse those. So
a reply is converted into such a message and parsed with its request; pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from insitu.gateway.dialects.base import WireError
from insitu.gateway.routes import parse_path
from insitu.gateway.server import DIALECTS
from insitu.types import Message, ModelRequest

Values = Sequence[Mapping[str, Any]]
"""The JSON objects of a reply: the reply itself, or its events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One answered call."""

    request: ModelRequest
    reply: Message
    cut: bool
    """The provider stopped at a token limit."""


@dataclass(slots=True)
class _Echo:
    """A reply as elements of the list that grows from call to call."""

    elements: list[Any]
    cut: bool = False


def parse_recorded_call(action: str, request: Mapping[str, Any], reply: object) -> RecordedCall | None:
    """Return the parsed call; None for what is no model call.

    `action`: the route after the version; `request` and `reply` as in the log, events as text. Raises
    WireError for what cannot be parsed.
    """
    version = "v1beta" if ":" in action else "v1"
    route = parse_path(f"/{version}/{action}")
    if route is None or route.kind != "call":
        return None
    read, close = _READERS[route.dialect]
    echo = read(_values(reply))
    dialect = DIALECTS[route.dialect]
    grows = "contents" if route.dialect == "gemini" else dialect.grows
    body = _self_contained(request, grows)
    asked = dialect.parse(body, action).request
    whole = dialect.parse({**body, grows: [*body[grows], *echo.elements, close]}, action).request
    said = whole.messages[len(asked.messages) :]
    if len(said) != 2 or said[0].role != "assistant":
        raise WireError("invalid_request", f"the reply to {action} cannot be parsed")
    return RecordedCall(request=asked, reply=said[0], cut=echo.cut)


def _self_contained(request: Mapping[str, Any], grows: str) -> dict[str, Any]:
    """Return the body without storage options, its list as a list."""
    body = {name: value for name, value in request.items() if name != "store"}
    given = body.get(grows)
    if isinstance(given, str):
        body[grows] = [{"role": "user", "content": given}]
    elif not isinstance(given, list):
        raise WireError("invalid_request", f"'{grows}' must be an array.", grows)
    return body


def _values(reply: object) -> Values:
    if isinstance(reply, str):
        lines = reply.replace("\r\n", "\n").split("\n")
        found = [_loads(line[5:]) for line in lines if line.startswith("data:")]
    else:
        found = reply if isinstance(reply, list) else [reply]
    return [value for value in found if isinstance(value, dict)]


def _loads(text: str) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None  # the mark at the end of a stream


# --------------------------------------------------------------------------- by wire format


def _chat(values: Values) -> _Echo:
    said: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    cut = False
    for value in values:
        for choice in (value.get("choices") or ())[:1]:
            piece = choice.get("message") or choice.get("delta") or {}
            cut |= choice.get("finish_reason") == "length"
            said["content"] += _chat_text(piece.get("content"))
            said["reasoning_content"] += piece.get("reasoning_content") or piece.get("reasoning") or ""
            for at, call in enumerate(piece.get("tool_calls") or ()):
                _grow_call(calls.setdefault(call.get("index", at), {}), call)
    if calls:
        said["tool_calls"] = [calls[at] for at in sorted(calls)]
    return _Echo([said], cut)


def _chat_text(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _grow_call(held: dict[str, Any], piece: Mapping[str, Any]) -> None:
    function = held.setdefault("function", {"name": "", "arguments": ""})
    held["type"] = "function"
    held["id"] = held.get("id") or piece.get("id") or ""
    for name in function:
        function[name] += (piece.get("function") or {}).get(name) or ""


def _anthropic(values: Values) -> _Echo:
    blocks: dict[int, dict[str, Any]] = {}
    arguments: dict[int, str] = {}
    cut = False
    for value in values:
        ending = value.get("delta") if value.get("type") == "message_delta" else value
        cut |= isinstance(ending, dict) and ending.get("stop_reason") == "max_tokens"
        if value.get("type") == "message":
            blocks |= dict(enumerate(value.get("content") or ()))
        elif value.get("type") == "content_block_start":
            blocks[value["index"]] = dict(value["content_block"])
        elif value.get("type") == "content_block_delta":
            at, delta = value.get("index", 0), value["delta"]
            block = blocks.setdefault(at, {"type": "text"})
            if "partial_json" in delta:
                arguments[at] = arguments.get(at, "") + delta["partial_json"]
            for name in ("text", "thinking", "signature"):
                if isinstance(delta.get(name), str):
                    block[name] = (block.get(name) or "") + delta[name]
    for at, text in arguments.items():
        blocks[at]["input"] = _loads(text) if text.strip() else {}
    return _Echo([{"role": "assistant", "content": [blocks[at] for at in sorted(blocks)]}], cut)


def _responses(values: Values) -> _Echo:
    done = [value["item"] for value in values if value.get("type") == "response.output_item.done"]
    items: list[Any] = []
    cut = False
    for value in values:
        whole = value.get("response") or value
        items = whole.get("output") or items
        cut |= whole.get("status") == "incomplete"
    return _Echo(items or done, cut)


def _gemini(values: Values) -> _Echo:
    parts: list[Any] = []
    cut = False
    for value in values:
        for candidate in (value.get("candidates") or ())[:1]:
            parts += (candidate.get("content") or {}).get("parts") or ()
            cut |= candidate.get("finishReason") == "MAX_TOKENS"
    return _Echo([{"role": "model", "parts": parts}], cut)


_USER = {"role": "user", "content": "."}
_READERS: Mapping[str, tuple[Callable[[Values], _Echo], Mapping[str, Any]]] = {
    "chat": (_chat, _USER),
    "anthropic": (_anthropic, _USER),
    "responses": (_responses, _USER),
    "gemini": (_gemini, {"role": "user", "parts": [{"text": "."}]}),
}
"""By dialect: parser of a reply, and a following user message, because the last message cannot be an
assistant's."""
