"""The seam between wire formats and everything behind them.

A Dialect is pure: it parses a decoded JSON body into a ModelRequest, builds the provider's reply from a
Reply and frames it as events. It knows no session, no token and no clock; ids and times come in an Envelope.
Parsing is per message without look-ahead, so equal message prefixes give equal ModelRequest prefixes. Unknown
fields are tolerated; what whet cannot honour is refused with a WireError, which each dialect clothes as its
provider would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import orjson

from whet.errors import GatewayError
from whet.types import ModelRequest, Reply

Cause = Literal[
    "invalid_request",
    "unauthorized",
    "not_found",
    "method_not_allowed",
    "too_large",
    "context_length_exceeded",
    "rate_limited",
    "session_closed",
    "session_failed",
    "engine_failed",
]

STATUS: Mapping[Cause, int] = {
    "invalid_request": 400,
    "unauthorized": 401,
    "not_found": 404,
    "method_not_allowed": 405,
    "too_large": 413,
    "context_length_exceeded": 400,
    "rate_limited": 429,
    "session_closed": 409,
    "session_failed": 403,
    "engine_failed": 500,
}
"""HTTP status of each cause; the same for every provider whet imitates."""


class WireError(GatewayError):
    """A refusal that the agent sees. Holds no secret, no header and no prompt text."""

    def __init__(self, cause: Cause, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.cause: Cause = cause
        self.param = param

    @property
    def status(self) -> int:
        return STATUS[self.cause]


@dataclass(frozen=True, slots=True, kw_only=True)
class WireCall:
    """A parsed body: what goes to the model, and what only shapes the answer on the wire."""

    request: ModelRequest
    include_usage: bool = False
    """The client asked for usage at the end of the stream."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Tool name as the model sees it -> JSON text that lets the dialect put the call back into its wire form
    (namespaces, free-form tools)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What a reply carries besides its content."""

    id: str
    """Unique within a run and the same when the run is repeated; each dialect puts its own prefix."""
    created: int
    """Unix seconds."""
    model: str
    include_usage: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    """`WireCall.names` of the request."""


class Dialect(Protocol):
    """One wire format."""

    @property
    def name(self) -> str: ...

    def parse(self, body: Mapping[str, object], action: str) -> WireCall:
        """`action` is the route behind the version prefix, which some providers use for model and streaming.
        Raises WireError."""

    def reply(self, reply: Reply, envelope: Envelope) -> Mapping[str, object]:
        """Body of an unstreamed answer."""

    def events(self, reply: Reply, envelope: Envelope) -> Iterator[bytes]:
        """SSE frames of a streamed answer; the last one is the terminal event."""

    def error(self, error: WireError) -> Mapping[str, object]:
        """Error body."""

    def error_event(self, error: WireError) -> bytes:
        """SSE frame of a failure after the headers went out; it ends the stream."""

    def models(self, model: str) -> Mapping[str, object]:
        """Body of the model list."""

    def model(self, model: str) -> Mapping[str, object]:
        """Body of one model's description."""

    def count(self, tokens: int) -> Mapping[str, object]:
        """Body of a token count."""

    @property
    def keep_alive(self) -> bytes:
        """Frame for a stream whose reply is not there yet; every client must read over it."""


def mapping(value: object, param: str) -> Mapping[str, object]:
    """`value` as a JSON object. Raises WireError naming `param`."""
    if not isinstance(value, dict):
        raise WireError("invalid_request", f"'{param}' must be an object.", param)
    return value


def sequence(value: object, param: str) -> Sequence[object]:
    """`value` as a JSON array, null as an empty one. Raises WireError naming `param`."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise WireError("invalid_request", f"'{param}' must be an array.", param)
    return value


def string(value: object, param: str) -> str:
    """`value` as text, null as "". Raises WireError naming `param`."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise WireError("invalid_request", f"'{param}' must be a string.", param)
    return value


def positive(value: object, param: str) -> int | None:
    """`value` as a positive integer or None. Raises WireError naming `param`."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise WireError("invalid_request", f"'{param}' must be a positive integer.", param)
    return value


def json_text(value: object) -> str:
    """Compact JSON, key order kept, nothing escaped that need not be."""
    return orjson.dumps(value).decode()
