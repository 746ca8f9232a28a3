"""Digests of the meaning of messages, never of raw text.

Agents re-order argument keys, re-dump JSON and drop reasoning. Text is compared exactly: no agent is known to
trim it. Numbers compare by value (1.0 is 1, integers are exact), the last of duplicate keys wins, and
arguments on which JSON parsers disagree (malformed, beyond a double) compare as text. A message of a request
costs one digest; no text is kept.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import isinf
from typing import NamedTuple, NoReturn

from insitu.capture.message_history import SIZE, Digests, History, MessageDigest
from insitu.types import Message, ToolCall, ToolSpec


class PartDigests(NamedTuple):
    """Digests of the parts of an assistant message, to name a difference."""

    reasoning: bytes
    text: bytes
    names: tuple[str, ...]
    """Tool names in call order."""
    arguments: tuple[bytes, ...]
    """Digest of each call's canonical arguments."""


def same_meaning(stored: MessageDigest, got: MessageDigest) -> bool:
    """Return whether `got` (from a request) equals `stored`. Omitted reasoning equals any."""
    return stored[0] == got[0] and (not got[1] or stored[1] == got[1])


def digest(*parts: str | bytes) -> bytes:
    """Return 16 bytes over length-prefixed parts, so that different lists of parts differ."""
    raws = [part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass") for part in parts]
    whole = b"".join([piece for raw in raws for piece in (len(raw).to_bytes(8, "big"), raw)])
    return hashlib.blake2b(whole, digest_size=SIZE).digest()


def system_digest(system: Sequence[Message]) -> bytes:
    """Return the digest of the leading system messages."""
    return digest(*(message.text for message in system))


def tools_digest(tools: Sequence[ToolSpec]) -> bytes:
    """Return the digest of the offered tools; their order counts, because it is rendered."""
    return digest(*(part for tool in tools for part in (tool.name, tool.description, tool.parameters)))


@lru_cache(256)
def root_key(fingerprint: str, system: bytes, tools: bytes) -> str:
    """Return hex SHA-256 over renderer, leading system messages and tools."""
    return hashlib.sha256(digest(fingerprint, system, tools)).hexdigest()


def leading_system(messages: Sequence[Message]) -> int:
    """Return the number of leading system messages, which belong to the root."""
    for index, message in enumerate(messages):
        if message.role != "system":
            return index
    return len(messages)


def _number(text: str) -> int | float:
    """Parse a number; whole floats become ints, because JavaScript agents write 1.0 as 1."""
    value = float(text)
    if isinf(value):
        raise ValueError(f"{text} is beyond a double")
    return int(value) if value.is_integer() else value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_READ = json.JSONDecoder(parse_float=_number, parse_constant=_refuse)
_WRITE = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def read_arguments(text: str) -> object:
    """Return the JSON value of `text`; empty and null are {}. Raises ValueError, RecursionError."""
    value = _READ.decode(text) if text.strip() else {}
    return {} if value is None else value


def canonical_json(value: object) -> str:
    """Return the same text for all spellings of a JSON value."""
    return _WRITE.encode(value)


Defaults = Mapping[str, str]
"""Argument -> canonical JSON of its default in the tool's schema."""


def declared_defaults(tools: Sequence[ToolSpec]) -> Mapping[str, Defaults]:
    """Return the defaults by tool, without tools that have none. Agents fill them into calls."""
    found = {tool.name: _defaults_of(tool.parameters) for tool in tools}
    return {name: defaults for name, defaults in found.items() if defaults}


def _defaults_of(schema: str) -> Defaults:
    try:
        shape = _READ.decode(schema)
        fields = shape.get("properties") if isinstance(shape, dict) else None
        shown = fields.items() if isinstance(fields, dict) else ()
        return {n: canonical_json(f["default"]) for n, f in shown if isinstance(f, dict) and "default" in f}
    except (ValueError, RecursionError):
        return {}


def canonical_arguments(text: str, defaults: Defaults | None = None) -> str:
    """Return the same text for all spellings of the arguments, without those at their default.

    Text that is not JSON is returned unchanged.
    """
    try:
        value = read_arguments(text)
        if defaults and isinstance(value, dict):
            value = {name: v for name, v in value.items() if defaults.get(name) != canonical_json(v)}
        return "json:" + canonical_json(value)
    except (ValueError, RecursionError):  # malformed, over-long numbers, absurd depth
        return "text:" + text


class _CallFinder:
    """Finds the call of a tool message: the newest with its id.

    Most answer one of the last turn's few calls; the index of all calls is built only for others.
    """

    _FEW = 8

    def __init__(self, turns: list[Sequence[ToolCall]]) -> None:
        """Take the calls of each assistant message so far; the list is modified."""
        self._unread = turns
        self._newest = turns[-1] if turns else ()
        self._turns = 0
        """Number of turns in `_by_id`."""
        self._by_id: dict[str, tuple[int, int]] = {}

    def add(self, calls: Sequence[ToolCall]) -> None:
        """Add the calls of the next assistant message."""
        self._unread.append(calls)
        self._newest = calls

    def prefix(self, message: Message) -> str:
        """Return the prefix of the hashed text of a message that is not an assistant's."""
        if message.role != "tool":
            return message.role
        call_id = message.tool_call_id
        if len(self._newest) <= self._FEW:
            for ordinal in range(len(self._newest) - 1, -1, -1):
                if self._newest[ordinal].id == call_id:
                    return f"tool 0.{ordinal}"
        for calls in self._unread:
            self._turns += 1
            for ordinal, call in enumerate(calls):
                self._by_id[call.id] = (self._turns, ordinal)
        self._unread = []
        if call_id not in self._by_id:
            return "tool"
        turn, ordinal = self._by_id[call_id]
        return f"tool {self._turns - turn}.{ordinal}"


class MessageHasher:
    """Hashes messages; caches the digests of tool calls by their text, so that each is parsed once."""

    _KEPT = 1 << 14
    """Size of the cache; when full it is cleared."""

    def __init__(
        self, defaults: Mapping[str, Defaults] | None = None, reset_roles: frozenset[str] = frozenset()
    ) -> None:
        """Take the `defaults` of the tools of these requests; `reset_roles` as in `Forest`."""
        self.defaults = defaults or {}
        self._reset_roles = reset_roles
        self._spelled: dict[bytes, bytes] = {}

    def meaning(self, message: Message) -> MessageDigest:
        """Return the digest of one assistant message."""
        reasoning = digest(message.reasoning) if message.reasoning else b""
        return MessageDigest(self._assistant(message.text, message.tool_calls), reasoning)

    def parts(self, message: Message) -> PartDigests:
        """Return the digests of the parts of one assistant message."""
        return self.both(message)[1]

    def both(self, message: Message) -> tuple[MessageDigest, PartDigests]:
        """Return digest and parts of one assistant message, its arguments parsed once."""
        calls = message.tool_calls
        canonical = [self._canonical(call) for call in calls]
        reasoning = digest(message.reasoning) if message.reasoning else b""
        parts = PartDigests(
            reasoning=reasoning,
            text=digest(message.text),
            names=tuple([sys.intern(call.name) for call in calls]),
            arguments=tuple([digest(text) for text in canonical]),
        )
        return MessageDigest(self._assistant(message.text, calls, canonical), reasoning), parts

    def _canonical(self, call: ToolCall) -> str:
        return canonical_arguments(call.arguments, self.defaults.get(call.name))

    def conversation(self, messages: Sequence[Message]) -> Digests:
        """Return the digests of `messages`; those of known ones are taken from the History.

        A tool message is tied to its call by position (assistant turns back, ordinal), so an agent that
        consistently invents new ids still matches.
        """
        history = History.of(messages)
        before = None if history.before is None else history.before.digests
        known, fresh = (0, messages) if before is None else (history.known, history.fresh)
        content = [] if before is None else [before.content[: known * SIZE]]
        reasoning, echoes = ({}, {}) if before is None else before.first(known)
        resets = [] if before is None else [i for i in before.resets if i < known]
        finder = _CallFinder([echo.tool_calls for echo in echoes.values()])
        for index, message in enumerate(fresh, known):
            role = message.role
            if role == "assistant":
                echoes[index] = _echo(message)
                finder.add(message.tool_calls)
                if message.reasoning:
                    reasoning[index] = digest(message.reasoning)
                content.append(self._assistant(message.text, message.tool_calls))
                continue
            if role in self._reset_roles:
                resets.append(index)
            content.append(_hash(f"{finder.prefix(message)}\0{message.text}"))
        return Digests(b"".join(content), reasoning, echoes, resets)

    def _assistant(
        self, text: str, calls: Sequence[ToolCall], canonical: Sequence[str] | None = None
    ) -> bytes:
        """Return the digest of text and calls; `canonical`: the calls' parsed arguments, if available."""
        if not calls:
            return _hash(f"assistant\0{text}")
        spelled = "".join([f"{len(c.name)} {c.name}{len(c.arguments)} {c.arguments}" for c in calls])
        wire = _hash(f"calls\0{len(spelled)} {spelled}{text}")
        known = self._spelled.get(wire)
        if known is None:
            canonical = [self._canonical(c) for c in calls] if canonical is None else canonical
            named = [part for c, read in zip(calls, canonical, strict=True) for part in (c.name, read)]
            known = digest("calls", text, *named)
            if len(self._spelled) >= self._KEPT:
                self._spelled.clear()
            self._spelled[wire] = known
        return known


def _echo(message: Message) -> Message:
    """Return the call ids and turn references of an assistant message, without its text."""
    calls = tuple(ToolCall(id=call.id, name="", arguments="") for call in message.tool_calls)
    return Message(role="assistant", tool_calls=calls, pointers=message.pointers)


def _hash(text: str) -> bytes:
    """Return truncated SHA-256, which processors compute in hardware: every request is hashed once."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:SIZE]


def wire_digest(messages: Sequence[Message]) -> bytes:
    """Return the digest of everything a renderer may use of `messages`, spelling and ids included."""
    parts: list[str] = []
    for message in messages:
        parts += [message.role, message.text, message.reasoning, message.tool_call_id]
        parts.append(str(len(message.tool_calls)))
        for call in message.tool_calls:
            parts += [call.id, call.name, call.arguments]
    # The lengths keep them apart, at a fifth of the cost of a part each in the digest.
    return digest(",".join(map(str, map(len, parts))), "".join(parts))
