"""What makes two messages the same: digests of meaning, never raw text.

Agents re-order argument keys, re-dump JSON and drop reasoning. Text is compared exactly: no agent measured
trims it. Numbers compare by value (1.0 is 1, integers are exact), the last of duplicate keys wins, and
arguments that no JSON reader agrees on (malformed, beyond a double) compare as text. A message of a request
costs one digest; no text is kept. Caller: forest, once per request.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import isinf
from typing import NamedTuple, NoReturn

from insitu.capture.message_history import History, MessageDigests, TreeWalk
from insitu.types import Message, ToolCall, ToolSpec

SIZE = 16
"""Bytes of one digest."""


class MessageDigest(NamedTuple):
    """Meaning of one message; reasoning stands apart because an echo may leave it out."""

    said: bytes
    """Digest of role, text, tool names, canonical arguments and of the call that a tool message answers."""
    reasoning: bytes
    """Digest of it, empty when the message carries none."""


class PartDigests(NamedTuple):
    """Digests of an assistant message part by part, so that a difference can be named."""

    reasoning: bytes
    text: bytes
    names: tuple[str, ...]
    """Tool names in call order."""
    arguments: tuple[bytes, ...]
    """Digest of each call's canonical arguments."""


@dataclass(frozen=True, slots=True)
class DigestRun:
    """Consecutive messages as a context node holds them."""

    said: bytes = field(repr=False)
    """`Meaning.said` of each, joined."""
    reasoning: Mapping[int, bytes] | None = field(default=None, repr=False)
    """Digest by index of each message that carries any; None when no assistant message is among them."""

    def __len__(self) -> int:
        return len(self.said) // SIZE


class DigestedMessages:
    """Meanings of the messages of one request."""

    __slots__ = ("_echoes", "_questions", "_reasoning", "_said", "_size", "messages", "reader")

    def __init__(
        self,
        messages: Sequence[Message],
        said: bytes,
        reasoning: Mapping[int, bytes],
        echoes: Mapping[int, Message],
        questions: Sequence[int],
        reader: MessageHasher,
    ) -> None:
        """`questions`: index of each message that makes the family drop the reasoning before it."""
        self.reader = reader
        self._questions = questions
        self.messages = messages
        self._said = said
        self._size = len(said) // SIZE
        self._reasoning = reasoning
        self._echoes = echoes

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> MessageDigest:
        return MessageDigest(self._said[index * SIZE : (index + 1) * SIZE], self._reasoning.get(index, b""))

    @property
    def question(self) -> int:
        """Index of the last message before which reasoning is dropped; -1 = all of it is kept."""
        return self._questions[-1] if self._questions else -1

    def echo(self, index: int) -> Message:
        """What names the turn that this assistant message echoes: its call ids and pointers, nothing else."""
        return self._echoes[index]

    def rest(self, start: int) -> DigestedMessages:
        """The messages from `start` on."""
        messages = self.messages[start:]
        at = range(start, start + len(messages))
        reasoning = {i - start: self._reasoning[i] for i in at if i in self._reasoning}
        echoes = {i - start: self._echoes[i] for i in at if i in self._echoes}
        questions = [i - start for i in self._questions if i >= start]
        said = self._said[start * SIZE :]
        return DigestedMessages(messages, said, reasoning, echoes, questions, self.reader)

    def told(self, system: bytes, tools: bytes, lead: int, walk: TreeWalk | None) -> MessageDigests:
        """What a later request that begins with these messages need not read again."""
        return MessageDigests(
            walk=walk,
            system=system,
            tools=tools,
            lead=lead,
            said=self._said,
            reasoning=tuple(self._reasoning.items()),
            echoes=tuple(self._echoes.items()),
            questions=tuple(self._questions),
        )

    def run(self) -> DigestRun:
        """All of it, without the messages."""
        spoken = any(message.role == "assistant" for message in self.messages)
        return DigestRun(self._said, dict(self._reasoning) if spoken else None)

    def holds(self, run: DigestRun, start: int) -> bool:
        """True when the messages at `start` mean what `run` means, each by the rule of `same_meaning`."""
        at = start * SIZE
        if self._said[at : at + len(run.said)] != run.said:
            return False
        if run.reasoning is None:
            return True
        echoed = ((i, self._reasoning.get(start + i)) for i in range(len(run)))
        return all(got is None or got == run.reasoning.get(i) for i, got in echoed)

    def says(self, index: int, held: MessageDigest) -> bool:
        """`same(held, self[index])`, without making the latter."""
        if self._said[index * SIZE : (index + 1) * SIZE] != held[0]:
            return False
        got = self._reasoning.get(index)
        return got is None or got == held[1]


def same_meaning(held: MessageDigest, got: MessageDigest) -> bool:
    """True when `got` (from a request) means what `held` means. Reasoning that is not echoed equals any."""
    return held[0] == got[0] and (not got[1] or held[1] == got[1])


def digest(*parts: str | bytes) -> bytes:
    """16 bytes over length-prefixed parts: no two different lists of parts run together."""
    raws = [part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass") for part in parts]
    whole = b"".join([piece for raw in raws for piece in (len(raw).to_bytes(8, "big"), raw)])
    return hashlib.blake2b(whole, digest_size=SIZE).digest()


def system_digest(system: Sequence[Message]) -> bytes:
    """Of the leading system messages."""
    return digest(*(message.text for message in system))


def tools_digest(tools: Sequence[ToolSpec]) -> bytes:
    """Of the offered tools; order counts, for it is rendered."""
    return digest(*(part for tool in tools for part in (tool.name, tool.description, tool.parameters)))


@lru_cache(256)
def root_key(fingerprint: str, system: bytes, tools: bytes) -> str:
    """Hex SHA-256 over family, leading system messages and tools."""
    return hashlib.sha256(digest(fingerprint, system, tools)).hexdigest()


def leading_system(messages: Sequence[Message]) -> int:
    """How many system messages stand before anything else: they belong to the root."""
    for index, message in enumerate(messages):
        if message.role != "system":
            return index
    return len(messages)


def _number(text: str) -> int | float:
    """JavaScript agents write 1.0 as 1, so whole floats are the same as ints."""
    value = float(text)
    if isinf(value):
        raise ValueError(f"{text} is beyond a double")
    return int(value) if value.is_integer() else value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_READ = json.JSONDecoder(parse_float=_number, parse_constant=_refuse)
_WRITE = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def read_arguments(text: str) -> object:
    """The JSON value that `text` spells; empty and null mean none. Raises ValueError, RecursionError."""
    value = _READ.decode(text) if text.strip() else {}
    return {} if value is None else value


def canonical_json(value: object) -> str:
    """One spelling for all JSON texts of the same value."""
    return _WRITE.encode(value)


Defaults = Mapping[str, str]
"""Argument -> canonical JSON of the value that the tool's own schema declares for its absence."""


def declared_defaults(tools: Sequence[ToolSpec]) -> Mapping[str, Defaults]:
    """By tool; tools without any are left out. Agents validate calls and echo these values filled in."""
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
    """One spelling for all JSON texts of the same value, arguments at their default left out; text that is
    not JSON stands for itself."""
    try:
        value = read_arguments(text)
        if defaults and isinstance(value, dict):
            value = {name: v for name, v in value.items() if defaults.get(name) != canonical_json(v)}
        return "json:" + canonical_json(value)
    except (ValueError, RecursionError):  # malformed, over-long numbers, absurd depth
        return "text:" + text


class _Owners:
    """Which call a tool message answers: the newest with its id. Most answer one of the last turn's few
    calls; the others are looked up only when there is one that does not."""

    _FEW = 8

    def __init__(self, turns: list[Sequence[ToolCall]]) -> None:
        """`turns`: the calls of each assistant message so far; taken over."""
        self._unread = turns
        self._newest = turns[-1] if turns else ()
        self._turns = 0
        """Those in `_by_id`."""
        self._by_id: dict[str, tuple[int, int]] = {}

    def add(self, calls: Sequence[ToolCall]) -> None:
        """The calls of the next assistant message."""
        self._unread.append(calls)
        self._newest = calls

    def head(self, message: Message) -> str:
        """How the meaning of a message that is no assistant's begins."""
        if message.role != "tool":
            return message.role
        wanted = message.tool_call_id
        if len(self._newest) <= self._FEW:
            for ordinal in range(len(self._newest) - 1, -1, -1):
                if self._newest[ordinal].id == wanted:
                    return f"tool 0.{ordinal}"
        for calls in self._unread:
            self._turns += 1
            for ordinal, call in enumerate(calls):
                self._by_id[call.id] = (self._turns, ordinal)
        self._unread = []
        if wanted not in self._by_id:
            return "tool"
        turn, ordinal = self._by_id[wanted]
        return f"tool {self._turns - turn}.{ordinal}"


class MessageHasher:
    """Reads requests; remembers which spellings of tool calls mean what, so that each is parsed once."""

    _KEPT = 1 << 14
    """Spellings remembered; past that, all are forgotten."""

    def __init__(
        self, defaults: Mapping[str, Defaults] | None = None, asking: frozenset[str] = frozenset()
    ) -> None:
        """`defaults` of the tools that these requests offer; `asking` as in `Forest`."""
        self.defaults = defaults or {}
        self._asking = asking
        self._spelled: dict[bytes, bytes] = {}

    def meaning(self, message: Message) -> MessageDigest:
        """Of one assistant message."""
        reasoning = digest(message.reasoning) if message.reasoning else b""
        return MessageDigest(self._assistant(message.text, message.tool_calls), reasoning)

    def parts(self, message: Message) -> PartDigests:
        """Of one assistant message."""
        return self.both(message)[1]

    def both(self, message: Message) -> tuple[MessageDigest, PartDigests]:
        """Meaning and parts of one assistant message, its arguments read once."""
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

    def conversation(self, messages: Sequence[Message]) -> DigestedMessages:
        """Meanings of `messages`; known ones of a History are taken from there. A tool message is tied to its
        call by position (assistant turns back, ordinal), so an agent that invents new ids consistently still
        matches."""
        known, fresh, before = 0, messages, None
        if isinstance(messages, History) and messages.before is not None:
            known, fresh, before = messages.known, messages.fresh, messages.before
        said = [] if before is None else [before.said[: known * SIZE]]
        reasoning, echoes = ({}, {}) if before is None else before.first(known)
        questions = [] if before is None else [i for i in before.questions if i < known]
        owners = _Owners([echo.tool_calls for echo in echoes.values()])
        for index, message in enumerate(fresh, known):
            role = message.role
            if role == "assistant":
                echoes[index] = _echo(message)
                owners.add(message.tool_calls)
                if message.reasoning:
                    reasoning[index] = digest(message.reasoning)
                said.append(self._assistant(message.text, message.tool_calls))
                continue
            if role in self._asking:
                questions.append(index)
            said.append(_hash(f"{owners.head(message)}\0{message.text}"))
        return DigestedMessages(messages, b"".join(said), reasoning, echoes, questions, self)

    def _assistant(
        self, text: str, calls: Sequence[ToolCall], canonical: Sequence[str] | None = None
    ) -> bytes:
        """Digest of what was said; `canonical` are the calls' arguments, where they were read already."""
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
    """The names in an assistant message, without anything it says."""
    calls = tuple(ToolCall(id=call.id, name="", arguments="") for call in message.tool_calls)
    return Message(role="assistant", tool_calls=calls, pointers=message.pointers)


def _hash(text: str) -> bytes:
    """SHA-256 cut short: processors do it in hardware, and this is the one pass over every request's text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:SIZE]


def wire_digest(messages: Sequence[Message]) -> bytes:
    """Digest of everything a family may render of `messages`, spelling and ids included."""
    parts: list[str] = []
    for message in messages:
        parts += [message.role, message.text, message.reasoning, message.tool_call_id]
        parts.append(str(len(message.tool_calls)))
        for call in message.tool_calls:
            parts += [call.id, call.name, call.arguments]
    # The lengths keep them apart, at a fifth of the cost of a part each in the digest.
    return digest(",".join(map(str, map(len, parts))), "".join(parts))
