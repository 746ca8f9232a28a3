"""Gemini generateContent, streamed or not; pure.

Parts of a model content are joined directly, text parts of others by a line break. A user content becomes one
`tool` message per function response and one `user` message per run of text between them. A response without
an id answers the first open call of its name. Model and streaming are in the path; without `alt=sse` a stream
is one JSON array.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import orjson

from insitu.gateway.dialects import gemini_input
from insitu.gateway.dialects.base import (
    EVENT_STREAM,
    Cause,
    Envelope,
    ParsedBody,
    WireError,
    arguments_object,
    sse_data,
)
from insitu.types import Reply

_STATUS: Mapping[Cause, str] = {
    "unauthorized": "UNAUTHENTICATED",
    "not_found": "NOT_FOUND",
    "rate_limited": "RESOURCE_EXHAUSTED",
    "session_closed": "FAILED_PRECONDITION",
    "session_failed": "PERMISSION_DENIED",
    "engine_failed": "INTERNAL",
}

_BREAK = b"\r\n"


class GeminiDialect:
    """Implements `Dialect`."""

    name = "gemini"
    grows = ""
    in_band: frozenset[Cause] = frozenset()

    def parse(self, body: Mapping[str, object], action: str) -> ParsedBody:
        return gemini_input.parse(body, action)

    def reply(self, reply: Reply, envelope: Envelope) -> Mapping[str, object]:
        return _chunk(_parts(reply), reply, envelope, last=True)

    def events(self, reply: Reply, envelope: Envelope) -> Iterator[bytes]:
        parts = _parts(reply)
        chunks = [_chunk([part], reply, envelope, last=i == len(parts) - 1) for i, part in enumerate(parts)]
        if envelope.body.content_type == EVENT_STREAM:
            for chunk in chunks:
                yield sse_data(chunk)
            return
        for i, chunk in enumerate(chunks):
            yield (b"," + _BREAK if i else b"[") + orjson.dumps(chunk)
        yield b"]" + _BREAK

    def keep_alive(self, envelope: Envelope) -> bytes:
        """Return empty lines: clients would parse a comment as JSON."""
        return _BREAK + _BREAK

    def error(self, error: WireError) -> Mapping[str, object]:
        message = str(error)
        if error.cause == "context_length_exceeded":
            message = (
                f"The input token count ({error.used}) exceeds the maximum number of tokens allowed "
                f"({error.limit})."
            )
        status = _STATUS.get(error.cause, "INVALID_ARGUMENT")
        return {"error": {"code": error.status, "message": message, "status": status}}

    def error_event(self, error: WireError, envelope: Envelope) -> bytes:
        """Bare JSON also in a stream of events: that is how the clients tell a failure from a chunk."""
        body = orjson.dumps(self.error(error))
        return (body if envelope.body.content_type == EVENT_STREAM else b"[" + body + b"]") + _BREAK

    def count(self, tokens: int) -> Mapping[str, object]:
        return {"totalTokens": tokens}

    def models(self, model: str) -> Mapping[str, object]:
        return {"models": [self.model(model)]}

    def model(self, model: str) -> Mapping[str, object]:
        return {
            "name": f"models/{model}",
            "version": "1",
            "displayName": model,
            "supportedGenerationMethods": ["generateContent", "countTokens"],
        }


def _parts(reply: Reply) -> list[dict[str, object]]:
    """At least one part; the pointer goes with the first one that clients keep."""
    parts: list[dict[str, object]] = []
    if reply.text:
        parts.append({"text": reply.text})
    for call in reply.tool_calls:
        function = {"id": call.id, "name": call.name, "args": arguments_object(call.arguments)}
        parts.append({"functionCall": function})
    if not parts:
        parts.append({"text": ""})
    if reply.pointer:
        parts[0]["thoughtSignature"] = gemini_input.sealed(reply.pointer)
    if reply.reasoning:
        parts.insert(0, {"text": reply.reasoning, "thought": True})
    return parts


def _chunk(
    parts: list[dict[str, object]], reply: Reply, envelope: Envelope, *, last: bool
) -> dict[str, object]:
    candidate: dict[str, object] = {"content": {"role": "model", "parts": parts}, "index": 0}
    usage = {"promptTokenCount": reply.prompt_tokens, "totalTokenCount": reply.prompt_tokens}
    if last:
        candidate["finishReason"] = (
            "MAX_TOKENS" if reply.finish == "length" and not reply.tool_calls else "STOP"
        )
        usage["candidatesTokenCount"] = reply.sampled_tokens
        usage["totalTokenCount"] += reply.sampled_tokens
    return {
        "candidates": [candidate],
        "usageMetadata": usage,
        "modelVersion": envelope.model,
        "responseId": envelope.id,
    }
