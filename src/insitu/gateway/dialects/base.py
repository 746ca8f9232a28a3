"""Interface between wire formats and the rest of the gateway.

A Dialect is pure: it parses a decoded JSON body into a ModelRequest, builds the provider's reply from a Reply
and frames it as events; ids and times come in an Envelope. Parsing is per message without look-ahead, so
equal message prefixes give equal ModelRequest prefixes; only adjacent assistant messages are joined, because
clients split and merge them. Unknown fields are tolerated; what cannot be supported is refused with a
WireError in the provider's format.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, Protocol

import orjson

from insitu.errors import GatewayError
from insitu.types import Message, ModelRequest, Reply

Cause = Literal[
    "invalid_request",
    "unauthorized",
    "not_found",
    "method_not_allowed",
    "too_large",
    "unsupported_encoding",
    "context_length_exceeded",
    "rate_limited",
    "session_closed",
    "session_failed",
    "engine_failed",
]

EVENT_STREAM = "text/event-stream; charset=utf-8"

STATUS: Mapping[Cause, int] = {
    "invalid_request": 400,
    "unauthorized": 401,
    "not_found": 404,
    "method_not_allowed": 405,
    "too_large": 413,
    "unsupported_encoding": 415,
    "context_length_exceeded": 400,
    "rate_limited": 429,
    "session_closed": 409,
    "session_failed": 403,
    "engine_failed": 500,
}
"""HTTP status of each cause; the same for every provider."""


class WireError(GatewayError):
    """An error for the agent. Contains no secret, header or prompt text."""

    def __init__(
        self,
        cause: Cause,
        message: str,
        param: str | None = None,
        *,
        used: int = 0,
        limit: int = 0,
        code: str = "",
        unsupported: Sequence[str] = (),
    ) -> None:
        """Create an error.

        `used` and `limit`: tokens, for context_length_exceeded. `code`: the provider's own name of the error,
        where clients act on it; `unsupported`: the features that it names.
        """
        super().__init__(message)
        self.id = secrets.token_hex(12)
        """Names the request in headers and, where the provider has it, in the error."""
        self.cause: Cause = cause
        self.param = param
        self.used = used
        self.limit = limit
        self.code = code
        self.unsupported = tuple(unsupported)

    @property
    def status(self) -> int:
        return STATUS[self.cause]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedBody:
    """A body: the request for the model, options of the answer on the wire, and what identifies it."""

    request: ModelRequest
    include_usage: bool = False
    """The client asked for usage at the end of the stream."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Tool name for the model -> JSON text with which the dialect restores the wire form of its calls
    (namespaces, free-form tools)."""
    content_type: str = EVENT_STREAM
    """Content type of a streamed answer."""
    compaction: bool = False
    """The reply is a summary that becomes a compaction item."""
    history: tuple[str, ...] | None = None
    """JSON texts of the items before the summary, where the answer is a complete new history."""
    kept: tuple[str, ...] | None = None
    """JSON texts of the items that the reply answers, where the client may refer to them by its id later."""
    echo: Mapping[str, object] = field(default_factory=dict)
    """Fields of the body that the reply repeats."""
    place: str = ""
    """Wire format and action that it was sent to. This and what follows is set by the `BodyParser`."""
    raw: bytes = field(default=b"", repr=False)
    digest: bytes = b""
    """Of the place and the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Fields of a reply besides its content."""

    id: str
    """Hex; the dialect adds its provider's prefix. The same whenever the same turn is answered."""
    created: int
    """Unix seconds."""
    model: str
    body: ParsedBody = field(default=ParsedBody(request=ModelRequest(messages=())), repr=False)
    """What is answered."""
    kept_alive: int = 0
    """Number of `keep_alive` frames sent before."""


class Dialect(Protocol):
    """One wire format."""

    @property
    def name(self) -> str: ...

    @property
    def grows(self) -> str:
        """Key of the list that grows from call to call; empty if bodies cannot be cut.

        Its elements after one of the user's side are translated without looking back: `parse` of a body with
        only these returns exactly their messages.
        """

    @property
    def in_band(self) -> frozenset[Cause]:
        """Failures that a streamed call always reports as an event, as the provider's clients expect."""

    def parse(self, body: Mapping[str, object], action: str) -> ParsedBody:
        """Parse a body. Raises WireError.

        `action` is the route after the version prefix with its query, which some providers use for model and
        streaming.
        """

    def reply(self, reply: Reply, envelope: Envelope) -> Mapping[str, object]:
        """Return the body of an unstreamed answer."""

    def events(self, reply: Reply, envelope: Envelope) -> Iterator[bytes]:
        """Yield the frames of a streamed answer; the last one is the terminal event."""

    def keep_alive(self, envelope: Envelope) -> bytes:
        """Return a keep-alive frame; `envelope.kept_alive` frames were sent before it."""

    def error(self, error: WireError) -> Mapping[str, object]:
        """Return the body of an error."""

    def error_event(self, error: WireError, envelope: Envelope) -> bytes:
        """Return the frames of a failure after the headers were sent; they end the stream."""

    def count(self, tokens: int) -> Mapping[str, object]:
        """Return the body of a token count."""

    def models(self, model: str) -> Mapping[str, object]:
        """Return the body of the model list."""

    def model(self, model: str) -> Mapping[str, object]:
        """Return the body of one model's description."""


def mapping(value: object, param: str) -> Mapping[str, object]:
    """Return `value` if it is a JSON object. Raises WireError with `param`."""
    if not isinstance(value, dict):
        raise WireError("invalid_request", f"'{param}' must be an object.", param)
    return value


def sequence(value: object, param: str) -> Sequence[object]:
    """Return `value` if it is a JSON array; null is an empty one. Raises WireError with `param`."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise WireError("invalid_request", f"'{param}' must be an array.", param)
    return value


def string(value: object, param: str) -> str:
    """Return `value` if it is text; null is "". Raises WireError with `param`."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise WireError("invalid_request", f"'{param}' must be a string.", param)
    return value


def positive(value: object, param: str) -> int | None:
    """Return a positive integer, also one written as 10.0, or None. Raises WireError with `param`."""
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise WireError("invalid_request", f"'{param}' must be a positive integer.", param)
    return value


def json_text(value: object) -> str:
    """Return compact JSON with the key order kept and minimal escapes."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # an integer beyond 64 bits, from a reader that keeps them
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


UNPARSED = "unparsed_arguments"
"""Key for arguments that are not a JSON object, where the wire requires an object."""

_MAX_ARGUMENTS_DEPTH = 64


def arguments_object(arguments: str) -> object:
    """Return arguments for a wire field that must be a JSON object, with the sampled digits, on one line.

    Other values are wrapped, so that the agent can report the error; `arguments_text` undoes this.
    """
    try:
        value = orjson.loads(arguments) if arguments.strip() else {}
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict) or set(value) == {UNPARSED} or deeper(value, _MAX_ARGUMENTS_DEPTH):
        return {UNPARSED: arguments}
    if not arguments.strip():
        return {}
    return orjson.Fragment(
        arguments.replace("\n", " ").replace("\r", " ")
    )  # line breaks are only layout here


def arguments_text(value: Mapping[str, object]) -> str:
    """Return the JSON text of arguments that a client sent back."""
    raw = value.get(UNPARSED)
    return raw if isinstance(raw, str) and len(value) == 1 else json_text(value)


def join_assistants(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Join adjacent assistant messages: one turn that the client split.

    Pure in every prefix that does not end between them.
    """
    joined: list[Message] = []
    for message in messages:
        if message.role == "assistant" and joined and joined[-1].role == "assistant":
            before = joined.pop()
            message = Message(
                role="assistant",
                text=before.text + message.text,
                reasoning=before.reasoning + message.reasoning,
                tool_calls=before.tool_calls + message.tool_calls,
                pointers=before.pointers + message.pointers,
            )
        joined.append(message)
    return tuple(joined)


def stop_strings(value: object, param: str) -> tuple[str, ...]:
    """Return one stop string or a list of them; empty ones are dropped. Raises WireError with `param`."""
    given = [value] if isinstance(value, str) else sequence(value, param)
    return tuple(stop for stop in (string(one, param) for one in given) if stop)


_LABELS, _LABEL_CHARS = 64, 512


def labels(given: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return client metadata without repetitions, bounded because labels are stored."""
    cut = dict.fromkeys((name[:_LABEL_CHARS], value[:_LABEL_CHARS]) for name, value in given)
    return tuple(islice(cut, _LABELS))


def deeper(value: object, limit: int, items: int = 1 << 62) -> bool:
    """Return whether a JSON value is nested deeper than `limit` or has more than `items` values."""
    level: list[object] = [value]
    held = 0
    for _ in range(limit):
        following: list[object] = []
        for item in level:
            inside = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            held += len(inside)
            following += [v for v in inside if isinstance(v, dict | list)]
        if held > items:
            return True
        if not following:
            return False
        level = following
    return True


SSE_KEEP_ALIVE = b": keep-alive\n\n"
SSE_DONE = b"data: [DONE]\n\n"

SSE_HEADERS: Mapping[str, str] = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def sse_data(value: Mapping[str, object]) -> bytes:
    """Return one `data:` frame. JSON text has no raw line breaks, so one line is enough."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def sse_event(value: Mapping[str, object]) -> bytes:
    """Return a frame named after the value's `type`, as providers with typed events send them."""
    return f"event: {value['type']}\n".encode() + sse_data(value)
