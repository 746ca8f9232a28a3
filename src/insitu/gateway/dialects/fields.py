"""What becomes of the top-level fields of a request body; pure. Callers: the dialects.

A field is read, recorded beside the turn (`advisory`) or refused; each dialect lists all that its provider's
clients can send. A field that is not listed is recorded by its name, unless its name says that a part of the
conversation is kept elsewhere: a request must not be answered as if it were all of it. Names that only tag a
request (`conversation_id`, `thread_id`, `session_state`) are recorded: their clients send the whole history.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from insitu.gateway.dialects.base import WireError, json_text
from insitu.types import Message

_WISH_CHARS, _NAMED, _NAME_CHARS = 512, 16, 64

_STATE = re.compile(
    r"previous|continu|resum|checkpoint|histor|snapshot|cached|^(conversation|thread|container|messages)$"
)
"""Names of fields by which providers refer to what they keep, in snake case."""
_CAMEL = re.compile(r"(?<=[a-z0-9])[A-Z]")


def refuse(param: str, why: str = "is not supported with this value by this model") -> WireError:
    """The refusal of a field that would need another kind of answer than one neutral sample."""
    return WireError("invalid_request", f"'{param}' {why}.", param)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The top-level fields of one wire format by what becomes of them."""

    read: frozenset[str]
    """Followed, kept as labels, marks of the wire only, or refused for some of their values."""
    advisory: tuple[str, ...]
    """Recorded, in this order."""
    refused: frozenset[str] = frozenset()
    """Refused with any value that asks for something."""

    def check(self, body: Mapping[str, object], within: str = "") -> None:
        """Raises WireError for a field that is refused, and for an unlisted one that refers to state."""
        for name, value in body.items():
            if not value or name in self.read or name in self.advisory:
                continue
            if name in self.refused or refers_to_state(name, value):
                raise refuse(within + name[:_NAME_CHARS])

    def ignored_params(self, body: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
        """What the body wishes and insitu does not follow, as (name, JSON text, cut short): advisory fields,
        and under `unknown_fields` the names of those that are not listed."""
        told = [(n, json_text(body[n])[:_WISH_CHARS]) for n in self.advisory if body.get(n) is not None]
        strange = self.unlisted(body)
        if strange:
            told.append(unknown_fields(strange))
        return tuple(told)

    def unlisted(self, body: Mapping[str, object]) -> list[str]:
        """Names of fields that say something and are not listed."""
        listed = self.read | self.refused
        return [n for n in body if n not in listed and n not in self.advisory and body[n] is not None]


def unknown_fields(names: Sequence[str]) -> tuple[str, str]:
    """The wish that records fields by their names."""
    return "unknown_fields", json_text([name[:_NAME_CHARS] for name in names[:_NAMED]])


def refers_to_state(name: str, value: object) -> bool:
    """Whether a field that no dialect knows refers to something kept at the provider: by its name, or by the
    names within it. A switch or a number refers to nothing."""
    if isinstance(value, (bool, int, float)):
        return False
    names = [name, *(value if isinstance(value, dict) else ())][: _NAMED + 1]
    return any(_STATE.search(_CAMEL.sub(lambda upper: "_" + upper[0], n).lower()) for n in names)


def strict_tools(tools: Sequence[object], inner: str = "") -> tuple[tuple[str, str], ...]:
    """As a wish: the tools whose arguments should be held to their schema; `inner`: the key below which a
    tool stands."""
    bare = [tool.get(inner) if inner else tool for tool in tools if isinstance(tool, dict)]
    names = [
        str(tool.get("name"))[:_NAME_CHARS] for tool in bare if isinstance(tool, dict) and tool.get("strict")
    ]
    return (("tools.strict", json_text(names)[:_WISH_CHARS]),) if names else ()


# --------------------------------------------------------------------------- formats of the answer

PLAIN_TEXT = (None, "", "text", "text/plain")
"""Names of the format that every answer has."""
_JSON_OBJECT = "Write the final answer as one JSON object and nothing else."
_MATCHES = "Write the final answer as JSON that matches this JSON schema, and as nothing else:\n"
_LISTED = "Write the final answer as one of the values that this schema lists, and as nothing else:\n"
_OTHER = "Write the final answer in this format, and as nothing else:\n"


def format_request(kind: object, schema: object, whole: object) -> str:
    """What the model is asked where a client wants its answer in a format: sampling is not constrained, so
    the wish goes into the prompt. Empty for plain text. `whole`: the format as it was sent."""
    if kind in PLAIN_TEXT and not schema:
        return ""
    if kind == "text/x.enum" and schema:
        return _LISTED + json_text(schema)
    if schema:
        return _MATCHES + json_text(schema)
    if kind in ("json_object", "json_schema", "application/json"):
        return _JSON_OBJECT
    return _OTHER + json_text(whole)


def with_format(messages: Sequence[Message], asked: str) -> tuple[Message, ...]:
    """`messages` with the request for a format below the system prompt. It stands there, and not with the
    newest message, so that later prompts go on from earlier ones."""
    if not asked:
        return tuple(messages)
    if messages and messages[0].role == "system":
        first = messages[0]
        return (Message(role="system", text=f"{first.text}\n\n{asked}"), *messages[1:])
    return (Message(role="system", text=asked), *messages)
