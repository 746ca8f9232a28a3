"""OpenAI Responses; pure.

Adjacent items of the model (reasoning, message, calls) are one assistant message; a reasoning item, and a
message after a call, open the next one. `instructions`, `developer` and `system` are system messages. Tools
of a namespace are offered as `namespace__tool`, free-form tools as a function with one string argument; their
calls are converted back. References to earlier replies are resolved before (gateway/stored_responses). The
encrypted content of a reasoning item is the gateway's turn reference, that of a compaction item the summary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from insitu.gateway.dialects import responses_input, responses_output
from insitu.gateway.dialects.base import Cause, Envelope, WireCall, WireError
from insitu.types import Reply

_TYPES: Mapping[Cause, str] = {
    "rate_limited": "rate_limit_error",
    "session_failed": "permission_error",
    "engine_failed": "server_error",
}

_CODES: Mapping[Cause, str | None] = {"invalid_request": None, "unauthorized": "invalid_api_key"}


class ResponsesDialect:
    """Implements `Dialect`."""

    name = "responses"
    grows = "input"
    in_band: frozenset[Cause] = frozenset({"context_length_exceeded"})

    def parse(self, body: Mapping[str, object], action: str) -> WireCall:
        return responses_input.parse(body, compact=action.partition("?")[0] == "responses/compact")

    def reply(self, reply: Reply, envelope: Envelope) -> Mapping[str, object]:
        return responses_output.response(reply, envelope)

    def events(self, reply: Reply, envelope: Envelope) -> Iterator[bytes]:
        return responses_output.events(reply, envelope)

    def keep_alive(self, envelope: Envelope) -> bytes:
        return responses_output.keep_alive(envelope)

    def error(self, error: WireError) -> Mapping[str, object]:
        return {
            "error": {
                "message": str(error),
                "type": _TYPES.get(error.cause, "invalid_request_error"),
                "param": error.param,
                "code": error.code or _CODES.get(error.cause, error.cause),
            }
        }

    def error_event(self, error: WireError, envelope: Envelope) -> bytes:
        return responses_output.failed(error, envelope)

    def count(self, tokens: int) -> Mapping[str, object]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def models(self, model: str) -> Mapping[str, object]:
        return {"object": "list", "data": [self.model(model)]}

    def model(self, model: str) -> Mapping[str, object]:
        return {"id": model, "object": "model", "created": 0, "owned_by": "insitu"}
