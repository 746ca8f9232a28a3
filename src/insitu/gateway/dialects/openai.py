"""What OpenAI's two formats share: errors, models, token counts, client metadata; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from insitu.gateway.dialects.base import Cause, WireError, mapping
from insitu.types import Role

_TYPES: Mapping[Cause, str] = {
    "rate_limited": "rate_limit_error",
    "session_failed": "permission_error",
    "engine_failed": "server_error",
}
_CODES: Mapping[Cause, str | None] = {"invalid_request": None, "unauthorized": "invalid_api_key"}
ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


class OpenAIDialect:
    """Base of the dialects of OpenAI."""

    def error(self, error: WireError) -> Mapping[str, object]:
        return {
            "error": {
                "message": str(error),
                "type": _TYPES.get(error.cause, "invalid_request_error"),
                "param": error.param,
                "code": error.code or _CODES.get(error.cause, error.cause),
            }
        }

    def count(self, tokens: int) -> Mapping[str, object]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def models(self, model: str) -> Mapping[str, object]:
        return {"object": "list", "data": [self.model(model)]}

    def model(self, model: str) -> Mapping[str, object]:
        return {"id": model, "object": "model", "created": 0, "owned_by": "insitu"}


def client_metadata(
    body: Mapping[str, object], names: Sequence[str], tables: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """Return the texts of a body under these names and in these objects."""
    found = [(name, value) for name in names if isinstance(value := body.get(name), str)]
    for table in tables:
        for name, value in mapping(body.get(table) or {}, table).items():
            if isinstance(value, str):
                found.append((f"{table}.{name}", value))
    return tuple(found)
