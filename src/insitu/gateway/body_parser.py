"""Incremental parsing of request bodies: only new messages are parsed.

Two bodies whose bytes are equal up to the end of some element of the growing list (`Dialect.grows`), and from
its closing bracket on, differ in list elements only; so only those are parsed. The comparison is by SHA-256
over the bytes; no text is kept. Other bodies are parsed completely. Bodies are only cut after an element of
the user's side, where dialects translate without looking back.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import orjson

from insitu.capture.message_history import History, RequestMemory
from insitu.gateway.dialects.base import Dialect, ParsedBody, WireError, deeper, labels
from insitu.gateway.dialects.compaction import is_compaction
from insitu.gateway.json_offsets import Elements, elements, whole_list
from insitu.gateway.request import decode, loads, sorted_json, too_many_values
from insitu.gateway.stored_responses import StoredResponses
from insitu.types import Message

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

RECORDS = 8
"""Conversations kept at a time: the main line and its sub-agents."""
CUTS = 3
"""Cuts per conversation: agents mark their newest messages and unmark them in the next request."""
INLINE_BYTES = 1 << 20
"""A longer body is parsed in a worker thread, to keep the event loop free."""
INLINE_VALUES = 10_000
"""So is a body with more JSON values to parse: the time depends on values (4 us each), not bytes."""
MAX_MISSES = 8
"""Completely parsed bodies in a row, after which learning from them becomes rarer."""


class _TooMany(Exception):
    """There are too many values to parse on the event loop; nothing was done."""


def canonical_digest(body: ParsedBody) -> bytes:
    """Return a digest that does not depend on the spelling, to recognise a retry by nothing else.

    Agents do not mark retries. Equal bytes are the same body; so are bodies that are equal after parsing,
    which is compared only while a call waits for its retry.
    """
    return hashlib.sha256(body.place.encode() + b"\0" + sorted_json(loads(body.raw))).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """End of an element from which a later body may continue."""

    end: int
    """Number of bytes before it."""
    digest: bytes
    messages: int
    """Number of messages before it."""
    parsed: ParsedBody
    """The body and the elements before it, parsed, without the messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """The last known state of one conversation."""

    rest: bytes
    """Digest of the bytes after the list."""
    rest_size: int
    memory: RequestMemory
    cuts: tuple[_Cut, ...]


class BodyParser:
    """Parses the bodies of one session on one event loop; `read` handles one body at a time."""

    def __init__(self, max_depth: int, max_items: int) -> None:
        self._max_depth, self._max_items = max_depth, max_items
        self._records: list[_Record] = []
        """Latest last."""
        self._reading = asyncio.Lock()
        self._misses = 0
        self._pause = 0
        """Number of complete bodies that are still to be parsed without learning."""
        self.parsed_bytes = 0
        """Bytes of JSON parsed so far."""
        self.stored = StoredResponses()

    async def read(self, dialect: Dialect, raw: bytes, action: str) -> ParsedBody:
        """Parse a body, in a worker thread when it is long. Raises WireError."""
        async with self._reading:
            if len(raw) <= INLINE_BYTES:
                with contextlib.suppress(_TooMany):
                    return self.parse(dialect, raw, action, most=INLINE_VALUES)
            return await _in_thread(lambda: self.parse(dialect, raw, action))

    def parse(self, dialect: Dialect, raw: bytes, action: str, most: int | None = None) -> ParsedBody:
        """Return the parsed body.

        Raises WireError, and _TooMany where more than `most` values would have to be parsed.
        """
        place = f"{dialect.name} {action}"
        marks, digest = self._hash(place, raw)
        for record, cut in self._known(marks, raw):
            _check_count(raw[cut.end : len(raw) - record.rest_size], most)
            parsed = self._continue(dialect, raw, action, record, cut, marks[cut.end])
            if parsed is not None:
                self._misses = self._pause = 0
                break
        else:
            _check_count(raw, most)
            parsed = self._whole(dialect, raw, action, place)
        return replace(parsed, place=place, raw=raw, digest=digest)

    # ----------------------------------------------------------------------- known bodies

    def _hash(self, place: str, raw: bytes) -> tuple[dict[int, Hash], bytes]:
        """Return the running hash at each known cut, and the digest of all bytes."""
        running = hashlib.sha256(place.encode() + b"\0")
        view, at = memoryview(raw), 0
        marks: dict[int, Hash] = {}
        for end in sorted({cut.end for record in self._records for cut in record.cuts}):
            if end < len(raw):
                running.update(view[at:end])
                marks[end], at = running.copy(), end
        running.update(view[at:])
        return marks, running.digest()

    def _known(self, marks: Mapping[int, Hash], raw: bytes) -> list[tuple[_Record, _Cut]]:
        """Return conversations that the body may continue, the longest shared part first."""
        digests = {end: mark.digest() for end, mark in marks.items()}
        found: list[tuple[_Record, _Cut]] = []
        for record in reversed(self._records):
            cuts = [cut for cut in record.cuts if digests.get(cut.end) == cut.digest]
            if cuts and _same_rest(record, raw):
                close = len(raw) - record.rest_size
                found += [(record, cut) for cut in cuts if cut.end <= close]
        return sorted(found, key=lambda pair: -pair[1].end)

    def _continue(
        self, dialect: Dialect, raw: bytes, action: str, record: _Record, cut: _Cut, mark: Hash
    ) -> ParsedBody | None:
        """Return the call of a body that continues a known one; None when it does not."""
        close = len(raw) - record.rest_size
        new = raw[cut.end : close]
        # Anything else would become a part of the number that stands before it below.
        if too_many_values(new, self._max_items) or new.lstrip(b" \t\n\r")[:1] not in (b"", b","):
            return None
        try:
            values = loads(b"[0" + new + b"]")[1:]
            if deeper(values, self._max_depth - 1, self._max_items) or any(map(is_compaction, values)):
                return None
            said = dialect.parse({dialect.grows: values}, action) if values else cut.parsed
        except (orjson.JSONDecodeError, WireError):
            return None  # parsing it whole names what is wrong, or finds that nothing is
        self.parsed_bytes += len(new)
        history = History(
            tuple(said.request.messages),
            RequestMemory(),
            known=cut.messages,
            before=record.memory,
            parse=lambda: self._all(dialect, raw, action),
            long=lambda: len(raw) > INLINE_BYTES or _count_values(raw) > INLINE_VALUES,
        )
        base = _with(cut.parsed, said) if values else cut.parsed
        known = tuple(c for c in record.cuts if c.end <= cut.end)
        later = replace(record, memory=history.memory, cuts=known)
        self._records.remove(record)
        part = _BodyPart(raw, cut.end, mark, len(history), cut.parsed, base)
        self._learn(dialect, action, later, part, elements(new.decode(), 0))
        return replace(base, request=replace(base.request, messages=history))

    def _all(self, dialect: Dialect, raw: bytes, action: str) -> tuple[Message, ...]:
        """Parse every message of a body of which only the newest were needed so far."""
        self.parsed_bytes += len(raw)
        return tuple(dialect.parse(decode(raw, self._max_depth, self._max_items), action).request.messages)

    # ----------------------------------------------------------------------- whole bodies

    def _whole(self, dialect: Dialect, raw: bytes, action: str, place: str) -> ParsedBody:
        """Parse a complete body and store where a later one may continue."""
        self.parsed_bytes += len(raw)
        sent = decode(raw, self._max_depth, self._max_items)
        body = self.stored.expand(sent)
        whole = dialect.parse(body, action)
        if sent.get("previous_response_id"):
            whole = replace(whole, echo={**whole.echo, "previous_response_id": sent["previous_response_id"]})
        more = body is not sent or whole.history is not None or whole.kept is not None
        # What is not in the bytes, or must be handed on as text, cannot go on from known bytes.
        if not dialect.grows or self._pause or more:
            self._pause = max(0, self._pause - 1)
            return whole
        self._misses += 1
        self._pause = min(64, 1 << max(0, self._misses - MAX_MISSES)) - 1
        text = raw.decode()
        found = whole_list(text, dialect.grows)
        if found is None:
            return whole
        history = History(tuple(whole.request.messages), RequestMemory())
        rest = raw[len(text[: found.close].encode()) :]
        record = _Record(
            rest=hashlib.sha256(rest).digest(),
            rest_size=len(rest),
            memory=history.memory,
            cuts=(),
        )
        start = hashlib.sha256(place.encode() + b"\0")
        none = _without_messages(dialect.parse({**body, dialect.grows: [_ASK]}, action))
        part = _BodyPart(raw, 0, start, len(history), none, _without_messages(whole))
        self._learn(dialect, action, record, part, found)
        return replace(whole, request=replace(whole.request, messages=history))

    def _learn(
        self, dialect: Dialect, action: str, record: _Record, part: _BodyPart, found: Elements
    ) -> None:
        """Store the cuts of a body: after the last few elements of the user's side."""
        newest = max((i for i, value in enumerate(found.values) if is_compaction(value)), default=-1)
        cut_after = [i for i, value in enumerate(found.values) if i > newest and _of_user(dialect, value)]
        cut_after = cut_after[-CUTS:]
        running, at = part.mark.copy(), part.start
        text = part.raw[at:].decode() if cut_after else ""
        cuts = list(record.cuts)
        for i, parsed in zip(
            cut_after, _parsed_until(dialect, action, part, found.values, cut_after), strict=True
        ):
            end = part.start + len(text[: found.ends[i]].encode())
            running.update(part.raw[at:end])
            at = end
            after = len(_messages(dialect, found.values[i + 1 :], action))
            digest = running.copy().digest()
            cuts.append(_Cut(end=end, digest=digest, messages=part.messages - after, parsed=parsed))
        if cuts:
            self._records.append(replace(record, cuts=tuple(cuts[-CUTS:])))
            del self._records[:-RECORDS]


async def _in_thread(work: Callable[[], ParsedBody]) -> ParsedBody:
    """Run `work` in a worker thread; return only when it is done, even if cancelled.

    A thread cannot be stopped, and an abandoned one must not change what the next request reads.
    """
    running = asyncio.create_task(asyncio.to_thread(work))
    left: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            left = error
    if left is None:
        return running.result()
    with contextlib.suppress(Exception, asyncio.CancelledError):
        running.result()  # the client is gone
    raise left


def _check_count(raw: bytes, most: int | None) -> None:
    """Raise _TooMany where the text may have more values than `most`; commas in strings count too."""
    if most is not None and _count_values(raw) > most:
        raise _TooMany


def _count_values(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"{") + raw.count(b"[")


class _BodyPart(NamedTuple):
    """A part of a body and its elements."""

    raw: bytes
    start: int
    mark: Hash
    """Hash of all bytes before `start`."""
    messages: int
    """Number of messages in the whole body."""
    before: ParsedBody
    """The parsed call before it, without the messages."""
    parsed: ParsedBody
    """The parsed call to its end."""


_ASK = {"role": "user", "content": "."}
"""A plain message, in every dialect whose list grows."""


def _without_messages(parsed: ParsedBody) -> ParsedBody:
    return replace(parsed, request=replace(parsed.request, messages=()))


def _parsed_until(
    dialect: Dialect, action: str, part: _BodyPart, values: list[object], cut_after: list[int]
) -> list[ParsedBody]:
    """Return the parsed call up to each of the elements `cut_after`.

    A body that continues from there may lack the later elements. Raises WireError.
    """
    parsed, whole = part.before, part.parsed
    if (parsed.names, parsed.request.hints) == (whole.names, whole.request.hints):
        return [parsed] * len(cut_after)
    found: list[ParsedBody] = []
    at = 0
    for i in cut_after:
        parsed = _with(parsed, dialect.parse({dialect.grows: values[at : i + 1]}, action))
        found.append(parsed)
        at = i + 1
    return found


def _same_rest(record: _Record, raw: bytes) -> bool:
    close = len(raw) - record.rest_size
    if close < 0 or record.memory.digests is None:
        return False
    return hashlib.sha256(memoryview(raw)[close:]).digest() == record.rest


def _with(parsed: ParsedBody, said: ParsedBody) -> ParsedBody:
    """Return a call with the names and labels that new elements add."""
    if said.names:
        parsed = replace(parsed, names={**parsed.names, **said.names})
    if said.compaction:
        parsed = replace(parsed, compaction=True)
    before = parsed.request.hints
    hints = labels((*before, *said.request.hints)) if said.request.hints else before
    if hints == before:
        return parsed
    return replace(parsed, request=replace(parsed.request, hints=hints))


def _messages(dialect: Dialect, values: list[object], action: str) -> tuple[Message, ...]:
    """Return the messages of these list elements alone. Raises WireError."""
    return tuple(dialect.parse({dialect.grows: values}, action).request.messages) if values else ()


def _of_user(dialect: Dialect, value: object) -> bool:
    """Return whether the dialect does not look back beyond this element, by the field that it reads."""
    if not isinstance(value, dict):
        return False
    if dialect.grows == "input":  # items: the type decides, and `role` is read in messages only
        kind = value.get("type") or "message"
        if kind != "message":
            return str(kind).endswith("_call_output")
    return value.get("role") in ("user", "tool")
