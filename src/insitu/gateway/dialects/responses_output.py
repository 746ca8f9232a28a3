"""Bodies and events of the Responses format, in the official order; pure.

A stream that has to wait begins with its first keep-alive: `response.created`, then a `response.in_progress`
for each further one, because some clients count time between events, not bytes.
OpenAI Responses: adjacent items of the model (reasoning, message, calls) are one assistant message; a
reasoning item, and a message after a call, open the next one. `instructions`, `developer` and `system` are
system messages. Tools of a namespace are offered as `namespace__tool`, free-form tools as a function with one
string argument; their calls are converted back. The encrypted content of a reasoning item is the gateway's
turn reference, that of a compaction item the summary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import orjson

from insitu.gateway.dialects import client_tools, compaction, responses_input
from insitu.gateway.dialects.base import Cause, Envelope, ParsedBody, WireError, sse_event
from insitu.gateway.dialects.openai import OpenAIDialect
from insitu.types import Reply, ToolCall

_Json = dict[str, object]


def _frame(event: Mapping[str, object], number: int) -> bytes:
    return sse_event({**event, "sequence_number": number})


def _opening(envelope: Envelope) -> tuple[_Json, _Json]:
    head = _head(envelope, "in_progress")
    return (
        {"type": "response.created", "response": head},
        {"type": "response.in_progress", "response": head},
    )


def _head(envelope: Envelope, status: str) -> _Json:
    return {
        "id": f"resp_{envelope.id}",
        "object": "response",
        "created_at": envelope.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": envelope.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": envelope.body.kept is not None,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
        **envelope.body.echo,
    }


def _usage(reply: Reply) -> _Json:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
    }


# --------------------------------------------------------------------------- items


def _history(envelope: Envelope) -> Iterator[_Json]:
    """Yield the items before a compaction item, with ids of the gateway."""
    for index, text in enumerate(envelope.body.history or ()):
        yield {"id": f"msg_{envelope.id}_{index}", **orjson.loads(text)}


def _items(reply: Reply, envelope: Envelope) -> list[_Json]:
    if envelope.body.compaction:
        return [compaction.item(reply, envelope)]
    items: list[_Json] = []
    if reply.reasoning:
        items.append(
            {
                "id": f"rs_{envelope.id}",
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": reply.reasoning}],
                "encrypted_content": reply.pointer or envelope.id,
            }
        )
    if reply.text or not reply.tool_calls:
        status = "incomplete" if reply.finish == "length" and not reply.tool_calls else "completed"
        items.append(
            {
                "id": f"msg_{envelope.id}",
                "type": "message",
                "status": status,
                "role": "assistant",
                "content": [_text_part(reply.text)],
            }
        )
    items += [_call(call, f"{envelope.id}_{i}", envelope) for i, call in enumerate(reply.tool_calls)]
    return items


def _text_part(text: str) -> _Json:
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def _call(call: ToolCall, place: str, envelope: Envelope) -> _Json:
    """Return a call in the wire form of its tool."""
    form = orjson.loads(envelope.body.names.get(call.name, "{}"))
    item = client_tools.responses_item(str(form.get("type")), call, place)
    if item is not None:
        return item
    named: _Json = {"call_id": call.id, "name": form.get("name", call.name), "status": "completed"}
    if form.get("namespace"):
        named["namespace"] = form["namespace"]
    if form.get("type") == "custom":
        return {
            "id": f"ctc_{place}",
            "type": "custom_tool_call",
            **named,
            "input": client_tools.free_form_text(call.arguments),
        }
    return {"id": f"fc_{place}", "type": "function_call", **named, "arguments": call.arguments}


def _item_events(item: _Json, index: int) -> Iterator[_Json]:
    """Yield the events of one item."""
    place: _Json = {"item_id": item["id"], "output_index": index}
    opened = {key: value for key, value in item.items() if key != "encrypted_content"}
    if "status" in item:
        opened["status"] = "in_progress"
    filled: Iterator[_Json]
    if item["type"] == "message":
        opened["content"] = []
        filled = _message_events(item, place)
    elif item["type"] == "reasoning":
        opened["summary"] = []
        filled = _reasoning_events(item, place)
    elif item["type"] == "compaction":
        opened["encrypted_content"] = ""
        filled = iter([{"type": "response.compaction.compacting", **place}])
    elif item["type"] in client_tools.RESPONSES_CALLS:
        filled = iter(())
    else:
        key = "arguments" if item["type"] == "function_call" else "input"
        opened[key] = ""
        filled = _call_events(str(item["type"]), key, str(item[key]), place)
    yield {"type": "response.output_item.added", "output_index": index, "item": opened}
    yield from filled
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _message_events(item: _Json, place: _Json) -> Iterator[_Json]:
    content = item["content"]
    parts = content if isinstance(content, list) else []
    for index, part in enumerate(parts):
        at = {**place, "content_index": index}
        yield {"type": "response.content_part.added", **at, "part": _text_part("")}
        if part["text"]:
            yield {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []}
        yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **at, "part": part}


def _reasoning_events(item: _Json, place: _Json) -> Iterator[_Json]:
    summary = item["summary"]
    parts = summary if isinstance(summary, list) else []
    kind = "response.reasoning_summary"
    for index, part in enumerate(parts):
        at = {**place, "summary_index": index}
        yield {"type": f"{kind}_part.added", **at, "part": {"type": "summary_text", "text": ""}}
        yield {"type": f"{kind}_text.delta", **at, "delta": part["text"]}
        yield {"type": f"{kind}_text.done", **at, "text": part["text"]}
        yield {"type": f"{kind}_part.done", **at, "part": part}


def _call_events(kind: str, key: str, text: str, place: _Json) -> Iterator[_Json]:
    name = "response.function_call_arguments" if key == "arguments" else "response.custom_tool_call_input"
    if text:
        yield {"type": f"{name}.delta", **place, "delta": text}
    yield {"type": f"{name}.done", **place, key: text}


class ResponsesDialect(OpenAIDialect):
    """Implements `Dialect`."""

    name = "responses"
    grows = "input"
    in_band: frozenset[Cause] = frozenset({"context_length_exceeded"})

    def parse(self, body: Mapping[str, object], action: str) -> ParsedBody:
        return responses_input.parse(body, compact=action.partition("?")[0] == "responses/compact")

    def reply(self, reply: Reply, envelope: Envelope) -> Mapping[str, object]:
        if envelope.body.history is not None:
            return {
                "id": f"resp_{envelope.id}",
                "object": "response.compaction",
                "created_at": envelope.created,
                "output": [*_history(envelope), compaction.item(reply, envelope)],
                "usage": _usage(reply),
            }
        cut = reply.finish == "length" and not reply.tool_calls and not envelope.body.compaction
        return {
            **_head(envelope, "incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _items(reply, envelope),
            "usage": _usage(reply),
        }

    def events(self, reply: Reply, envelope: Envelope) -> Iterator[bytes]:
        whole = self.reply(reply, envelope)
        number = 0
        if not envelope.kept_alive:
            for event in _opening(envelope):
                yield _frame(event, number)
                number += 1
        else:
            number = envelope.kept_alive + 1
        for index, item in enumerate(_items(reply, envelope)):
            for event in _item_events(item, index):
                yield _frame(event, number)
                number += 1
        yield _frame({"type": f"response.{whole['status']}", "response": whole}, number)

    def keep_alive(self, envelope: Envelope) -> bytes:
        if not envelope.kept_alive:
            return b"".join(_frame(event, number) for number, event in enumerate(_opening(envelope)))
        return _frame(_opening(envelope)[1], envelope.kept_alive + 1)

    def error_event(self, error: WireError, envelope: Envelope) -> bytes:
        """`response.failed`, opened properly before if nothing was sent yet."""
        opening = b"" if envelope.kept_alive else self.keep_alive(envelope)
        message = str(error)
        code = "rate_limit_exceeded" if error.cause == "rate_limited" else "server_error"
        if error.cause == "context_length_exceeded":
            code = "context_length_exceeded"
            message = (
                "Your input exceeds the context window of this model. Please adjust your input and try again."
            )
        elif error.status < 500 and error.cause != "rate_limited":
            code = "invalid_prompt"
        body = {**_head(envelope, "failed"), "error": {"code": code, "message": message}}
        event = {"type": "response.failed", "response": body}
        return opening + _frame(event, max(2, envelope.kept_alive + 1))
