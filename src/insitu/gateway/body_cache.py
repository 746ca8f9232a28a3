"""Bodies of one session -> WireCalls, at the cost of what is new in them.

A body whose bytes up to the end of some element of its growing list (`Dialect.grows`) and from that list's
bracket on are those of an earlier body differs from it by list elements only; so only those are parsed, and
the rest is known. The proof is by SHA-256 over the bytes; no text is kept. What does not fit is parsed whole.
Elements are cut only after the user's side has spoken, where dialects translate without looking back.
Caller: server.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import orjson

from insitu.capture.message_history import DigestCache, History
from insitu.gateway.dialects.base import Dialect, WireCall, WireError, deeper, labels
from insitu.gateway.json_offsets import Elements, elements, whole_list
from insitu.gateway.request import crowded, decode, loads, sorted_json
from insitu.gateway.stored_responses import StoredResponses
from insitu.types import Message

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

RECORDS = 8
"""Conversations known at a time: the main line and its sub-agents."""
CUTS = 3
"""Ends per conversation: agents mark their newest messages and unmark them in the next request."""
INLINE_BYTES = 1 << 20
"""A longer body is parsed in a worker thread: the event loop serves other agents meanwhile."""
INLINE_VALUES = 10_000
"""So is one with more to parse than this many JSON values: time goes by values (4 us each), not by bytes."""
PATIENCE = 8
"""Bodies parsed whole in a row before it is tried less often to learn from them."""


class _TooMany(Exception):
    """More is to be parsed than should be on the event loop; nothing was done."""


class BodyName:
    """What a body is called, so that its retry is known: agents mark retries by nothing else.

    Equal bytes are the same body; so are bodies that are equal after parsing, which is looked at only when a
    call waits for its retry.
    """

    __slots__ = ("_canonical", "_place", "_raw", "digest")

    def __init__(self, place: str, digest: bytes, raw: bytes) -> None:
        self.digest = digest
        self._place = place.encode()
        self._raw = raw
        self._canonical = b""

    def same(self, other: BodyName) -> bool:
        return self.digest == other.digest or self.canonical() == other.canonical()

    def canonical(self) -> bytes:
        """Digest that does not depend on the spelling; lets go of the body."""
        if not self._canonical:
            plain = sorted_json(loads(self._raw))
            self._canonical = hashlib.sha256(self._place + b"\0" + plain).digest()
            self._raw = b""
        return self._canonical


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """An element's end at which a later body may go on."""

    end: int
    """Bytes before it."""
    digest: bytes
    messages: int
    """Messages before it."""
    wire: WireCall
    """What the body and the elements before it say, without the messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """One conversation as it last was."""

    rest: bytes
    """Digest of what follows the list."""
    rest_size: int
    memory: DigestCache
    cuts: tuple[_Cut, ...]


class BodyCache:
    """One event loop owns it; `read` lets one body in at a time."""

    def __init__(self, max_depth: int, max_items: int) -> None:
        self._max_depth, self._max_items = max_depth, max_items
        self._records: list[_Record] = []
        """Latest last."""
        self._reading = asyncio.Lock()
        self._misses = 0
        self._pause = 0
        """Whole bodies that are still to be let pass without learning."""
        self.parsed_bytes = 0
        """Of JSON, since the session began."""
        self.stored = StoredResponses()

    async def read(self, dialect: Dialect, raw: bytes, action: str) -> tuple[WireCall, BodyName]:
        """`parse`, off the event loop when the body is long. Raises WireError."""
        async with self._reading:
            if len(raw) <= INLINE_BYTES:
                with contextlib.suppress(_TooMany):
                    return self.parse(dialect, raw, action, most=INLINE_VALUES)
            return await _in_thread(lambda: self.parse(dialect, raw, action))

    def parse(
        self, dialect: Dialect, raw: bytes, action: str, most: int | None = None
    ) -> tuple[WireCall, BodyName]:
        """The call that `raw` asks for, and the body's name. Raises WireError, and _TooMany where more than
        `most` values would have to be parsed."""
        place = f"{dialect.name} {action}"
        marks, digest = self._hash(place, raw)
        name = BodyName(place, digest, raw)
        for record, cut in self._known(marks, raw):
            _few(raw[cut.end : len(raw) - record.rest_size], most)
            wire = self._go_on(dialect, raw, action, record, cut, marks[cut.end])
            if wire is not None:
                self._misses = self._pause = 0
                return wire, name
        _few(raw, most)
        return self._whole(dialect, raw, action, place), name

    # ----------------------------------------------------------------------- known bodies

    def _hash(self, place: str, raw: bytes) -> tuple[dict[int, Hash], bytes]:
        """The running hash at every place where a known body may go on, and over all."""
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
        """Conversations that the body may continue, the longest shared part first."""
        digests = {end: mark.digest() for end, mark in marks.items()}
        found: list[tuple[_Record, _Cut]] = []
        for record in reversed(self._records):
            cuts = [cut for cut in record.cuts if digests.get(cut.end) == cut.digest]
            if cuts and _same_rest(record, raw):
                close = len(raw) - record.rest_size
                found += [(record, cut) for cut in cuts if cut.end <= close]
        return sorted(found, key=lambda pair: -pair[1].end)

    def _go_on(
        self, dialect: Dialect, raw: bytes, action: str, record: _Record, cut: _Cut, mark: Hash
    ) -> WireCall | None:
        """The call of a body that is a known one with other newest elements; None when it is none."""
        close = len(raw) - record.rest_size
        new = raw[cut.end : close]
        # Anything else would become a part of the number that stands before it below.
        if crowded(new, self._max_items) or new.lstrip(b" \t\n\r")[:1] not in (b"", b","):
            return None
        try:
            values = loads(b"[0" + new + b"]")[1:]
            if deeper(values, self._max_depth - 1, self._max_items):
                return None
            said = dialect.parse({dialect.grows: values}, action) if values else cut.wire
        except (orjson.JSONDecodeError, WireError):
            return None  # parsing it whole names what is wrong, or finds that nothing is
        self.parsed_bytes += len(new)
        history = History(
            tuple(said.request.messages),
            DigestCache(),
            known=cut.messages,
            before=record.memory.told,
            parse=lambda: self._all(dialect, raw, action),
            long=lambda: len(raw) > INLINE_BYTES or _crowd(raw) > INLINE_VALUES,
        )
        base = _with(cut.wire, said) if values else cut.wire
        known = tuple(c for c in record.cuts if c.end <= cut.end)
        later = replace(record, memory=history.memory, cuts=known)
        self._records.remove(record)
        stretch = _Stretch(raw, cut.end, mark, len(history), cut.wire, base)
        self._learn(dialect, action, later, stretch, elements(new.decode(), 0))
        return replace(base, request=replace(base.request, messages=history))

    def _all(self, dialect: Dialect, raw: bytes, action: str) -> tuple[Message, ...]:
        """Every message of a body whose newest ones were enough until now."""
        self.parsed_bytes += len(raw)
        return tuple(dialect.parse(decode(raw, self._max_depth, self._max_items), action).request.messages)

    # ----------------------------------------------------------------------- whole bodies

    def _whole(self, dialect: Dialect, raw: bytes, action: str, place: str) -> WireCall:
        """Parse everything, and learn where a later body may go on."""
        self.parsed_bytes += len(raw)
        sent = decode(raw, self._max_depth, self._max_items)
        body = self.stored.expand(sent)
        wire = dialect.parse(body, action)
        more = body is not sent or wire.history is not None or wire.kept is not None
        # What is not in the bytes, or must be handed on as text, cannot go on from known bytes.
        if not dialect.grows or self._pause or more:
            self._pause = max(0, self._pause - 1)
            return wire
        self._misses += 1
        self._pause = min(64, 1 << max(0, self._misses - PATIENCE)) - 1
        text = raw.decode()
        found = whole_list(text, dialect.grows)
        if found is None:
            return wire
        history = History(tuple(wire.request.messages), DigestCache())
        rest = raw[len(text[: found.close].encode()) :]
        record = _Record(
            rest=hashlib.sha256(rest).digest(),
            rest_size=len(rest),
            memory=history.memory,
            cuts=(),
        )
        start = hashlib.sha256(place.encode() + b"\0")
        none = _unsaid(dialect.parse({**body, dialect.grows: [_ASK]}, action))
        stretch = _Stretch(raw, 0, start, len(history), none, _unsaid(wire))
        self._learn(dialect, action, record, stretch, found)
        return replace(wire, request=replace(wire.request, messages=history))

    def _learn(
        self, dialect: Dialect, action: str, record: _Record, stretch: _Stretch, found: Elements
    ) -> None:
        """Keep where the body may be cut: after the last few elements of the user's side."""
        ours = [i for i, value in enumerate(found.values) if _of_user(dialect, value)][-CUTS:]
        running, at = stretch.mark.copy(), stretch.start
        text = stretch.raw[at:].decode() if ours else ""
        cuts = list(record.cuts)
        for i, wire in zip(ours, _wires(dialect, action, stretch, found.values, ours), strict=True):
            end = stretch.start + len(text[: found.ends[i]].encode())
            running.update(stretch.raw[at:end])
            at = end
            after = len(_messages(dialect, found.values[i + 1 :], action))
            digest = running.copy().digest()
            cuts.append(_Cut(end=end, digest=digest, messages=stretch.messages - after, wire=wire))
        if cuts:
            self._records.append(replace(record, cuts=tuple(cuts[-CUTS:])))
            del self._records[:-RECORDS]


async def _in_thread(work: Callable[[], tuple[WireCall, BodyName]]) -> tuple[WireCall, BodyName]:
    """`work` in a worker thread, and not over before it is: a thread cannot be stopped, and one that a client
    left behind must not change what the next one reads."""
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
        running.result()  # nobody is there to be told
    raise left


def _few(raw: bytes, most: int | None) -> None:
    """Raises _TooMany where the text may hold more values than `most`; commas within strings count too."""
    if most is not None and _crowd(raw) > most:
        raise _TooMany


def _crowd(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"{") + raw.count(b"[")


class _Stretch(NamedTuple):
    """The part of a body in which elements were found."""

    raw: bytes
    start: int
    mark: Hash
    """Over all before `start`."""
    messages: int
    """In the whole body."""
    before: WireCall
    """What is said before it, without the messages."""
    wire: WireCall
    """What is said to its end."""


_ASK = {"role": "user", "content": "."}
"""Says nothing but a message, in every dialect whose list grows."""


def _unsaid(wire: WireCall) -> WireCall:
    return replace(wire, request=replace(wire.request, messages=()))


def _wires(
    dialect: Dialect, action: str, stretch: _Stretch, values: list[object], ours: list[int]
) -> list[WireCall]:
    """What is said up to each of the elements `ours`: a body that goes on from there may have dropped the
    later ones. Raises WireError."""
    wire, whole = stretch.before, stretch.wire
    if (wire.names, wire.request.hints) == (whole.names, whole.request.hints):
        return [wire] * len(ours)
    wires: list[WireCall] = []
    at = 0
    for i in ours:
        wire = _with(wire, dialect.parse({dialect.grows: values[at : i + 1]}, action))
        wires.append(wire)
        at = i + 1
    return wires


def _same_rest(record: _Record, raw: bytes) -> bool:
    close = len(raw) - record.rest_size
    if close < 0 or record.memory.told is None:
        return False
    return hashlib.sha256(memoryview(raw)[close:]).digest() == record.rest


def _with(wire: WireCall, said: WireCall) -> WireCall:
    """A conversation's call with what its new elements bring besides messages."""
    if said.names:
        wire = replace(wire, names={**wire.names, **said.names})
    if said.compaction:
        wire = replace(wire, compaction=True)
    hints = labels((*wire.request.hints, *said.request.hints)) if said.request.hints else wire.request.hints
    if hints == wire.request.hints:
        return wire
    return replace(wire, request=replace(wire.request, hints=hints))


def _messages(dialect: Dialect, values: list[object], action: str) -> tuple[Message, ...]:
    """What these list elements alone say. Raises WireError."""
    return tuple(dialect.parse({dialect.grows: values}, action).request.messages) if values else ()


def _of_user(dialect: Dialect, value: object) -> bool:
    """True for an element after which the dialect does not look back. Judged by the field that it reads."""
    if not isinstance(value, dict):
        return False
    if dialect.grows == "input":  # items: the type decides, and `role` is read in messages only
        kind = value.get("type", "message")
        if kind != "message":
            return str(kind).endswith("_call_output")
    return value.get("role") in ("user", "tool")
