"""Handling of the top-level fields of request bodies; pure.

A field is read, recorded with the turn (`advisory`) or refused; each dialect lists all fields that its
provider's clients can send. An unlisted field is recorded by its name, unless its name shows that part of the
conversation is stored elsewhere: such a request is incomplete. Names that only tag a request
(`conversation_id`, `thread_id`, `session_state`) are recorded: their clients send the whole history.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from insitu.gateway.dialects.base import WireError, json_text
from insitu.types import Message

_VALUE_CHARS, _NAMED, _NAME_CHARS = 512, 16, 64

_STATE = re.compile(
    r"previous|continu|resum|checkpoint|histor|snapshot|cached|^(conversation|thread|container|messages)$"
)
"""Names, in snake case, of fields that refer to data stored at a provider."""
_CAMEL = re.compile(r"(?<=[a-z0-9])[A-Z]")


def refuse(param: str) -> WireError:
    """Return the error for a field that needs more than one neutral sample."""
    message = f"'{param}' is not supported with this value by this model."
    return WireError("invalid_request", message, param)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The top-level fields of one wire format by their handling."""

    read: frozenset[str]
    """Followed, kept as labels, relevant only to the wire, or refused for some values."""
    advisory: tuple[str, ...]
    """Recorded, in this order."""
    refused: frozenset[str] = frozenset()
    """Refused with any true value."""

    def check(self, body: Mapping[str, object], within: str = "") -> None:
        """Raise WireError for a refused field, and for an unlisted one that refers to stored state."""
        for name, value in body.items():
            if not value or name in self.read or name in self.advisory:
                continue
            if name in self.refused or _refers_to_state(name, value):
                raise refuse(within + name[:_NAME_CHARS])

    def ignored_params(self, body: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
        """Return the parameters of a body that are not followed, as (name, JSON text, cut short).

        These are the advisory fields and, as `unknown_fields`, the names of unlisted ones.
        """
        ignored = [(n, json_text(body[n])[:_VALUE_CHARS]) for n in self.advisory if body.get(n) is not None]
        unlisted = self.unlisted(body)
        if unlisted:
            ignored.append(unknown_fields(unlisted))
        return tuple(ignored)

    def unlisted(self, body: Mapping[str, object]) -> list[str]:
        """Return the names of unlisted fields that are not null."""
        listed = self.read | self.refused
        return [n for n in body if n not in listed and n not in self.advisory and body[n] is not None]


def unknown_fields(names: Sequence[str]) -> tuple[str, str]:
    """Return the entry that records fields by name."""
    return "unknown_fields", json_text([name[:_NAME_CHARS] for name in names[:_NAMED]])


def _refers_to_state(name: str, value: object) -> bool:
    """Return whether an unlisted field refers to data stored at the provider.

    Decided by its name and the names within it. A boolean or a number refers to nothing.
    """
    if isinstance(value, (bool, int, float)):
        return False
    names = [name, *(value if isinstance(value, dict) else ())][: _NAMED + 1]
    return any(_STATE.search(_CAMEL.sub(lambda upper: "_" + upper[0], n).lower()) for n in names)


def strict_tools(tools: Sequence[object], inner: str = "") -> tuple[tuple[str, str], ...]:
    """Return the entry that records tools with `strict`; `inner`: the key below which a tool is."""
    bare = [tool.get(inner) if inner else tool for tool in tools if isinstance(tool, dict)]
    names = [
        str(tool.get("name"))[:_NAME_CHARS] for tool in bare if isinstance(tool, dict) and tool.get("strict")
    ]
    return (("tools.strict", json_text(names)[:_VALUE_CHARS]),) if names else ()


# --------------------------------------------------------------------------- formats of the answer

PLAIN_TEXT = (None, "", "text", "text/plain")
"""Names of the format that every answer has."""
_JSON_OBJECT = "Write the final answer as one JSON object and nothing else."
_MATCHES = "Write the final answer as JSON that matches this JSON schema, and as nothing else:\n"
_LISTED = "Write the final answer as one of the values that this schema lists, and as nothing else:\n"
_OTHER = "Write the final answer in this format, and as nothing else:\n"


def format_request(kind: object, schema: object, whole: object) -> str:
    """Return the instruction for an answer format; empty for plain text. `whole`: the format as sent.

    Sampling is not constrained, so the format is requested in the prompt.
    """
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
    """Return `messages` with a format instruction in the system prompt.

    In the newest message it would change the prefix of later prompts.
    """
    if not asked:
        return tuple(messages)
    if messages and messages[0].role == "system":
        first = messages[0]
        return (Message(role="system", text=f"{first.text}\n\n{asked}"), *messages[1:])
    return (Message(role="system", text=asked), *messages)
