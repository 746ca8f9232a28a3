"""Check that a forwarded request goes to the configured origin and requests the configured model."""

from __future__ import annotations

import asyncio
import json
import re

from insitu.gateway.body_cache import INLINE_BYTES
from insitu.gateway.dialects.base import WireError
from insitu.gateway.request import too_many_values
from insitu.gateway.routes import Route

_ACTION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")


def plain(action: str) -> bool:
    """Return whether the path stays below the version: no dot segment, no query, nothing to decode."""
    return _ACTION.fullmatch(action) is not None and not any(p in (".", "..") for p in action.split("/"))


async def checked_model(route: Route, body: bytes, model: str, max_items: int) -> None:
    """Run `_check_model`, in a worker thread when the body is long.

    Raises WireError, also for a body with more than `max_items` values.
    """

    def check() -> None:
        if too_many_values(body, max_items):
            raise WireError("invalid_request", "The request body has too many items.")
        _check_model(route, body, model)

    if len(body) <= INLINE_BYTES:
        check()
    else:
        await asyncio.to_thread(check)


def _check_model(route: Route, body: bytes, model: str) -> None:
    """Raise WireError unless the request names the configured model, once, and no other.

    Names of top-level fields are compared without case, and a repeated one is refused: parsers differ in
    which they take. `models` is the list of fallback models of routing providers.
    """
    if route.dialect == "gemini":
        named: list[object] = [route.action.removeprefix("models/").rpartition(":")[0]]
        named += [str(value).removeprefix("models/") for value in _named(body)]
    else:
        named = _named(body)
        if len(named) != 1:
            raise WireError("invalid_request", f"model must be named once, as {model}.", "model")
    if any(name != model for name in named):
        raise WireError("not_found", f"The model does not exist here; ask for {model}.", "model")


def _named(body: bytes) -> list[object]:
    """Return the values of every top-level field that names a model. Raises WireError."""
    try:
        text = body.decode("utf-8")
        pairs = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise WireError("invalid_request", "The body is not JSON.") from error
    # An object became a list of pairs; only a body that is an object begins with a brace.
    if not text.lstrip().startswith("{"):
        raise WireError("invalid_request", "The body must be a JSON object.")
    return [value for name, value in pairs if name.casefold() in ("model", "models")]
