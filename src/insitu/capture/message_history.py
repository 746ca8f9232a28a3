"""Messages of a request whose first ones are known from an earlier request.

An agent sends its whole history with every call. The gateway proves by bytes how much of it an earlier
request of the session contained; only the rest is parsed and hashed, and the forest takes the digests of the
known messages from `RequestMemory`. Digests and ids are kept, no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, overload

from insitu.types import Message

SIZE = 16
"""Bytes of one digest."""


class MessageDigest(NamedTuple):
    """Digest of one message; reasoning is separate because clients may omit it."""

    content: bytes
    """Digest of role, text, tool names, canonical arguments and of the call that a tool message answers."""
    reasoning: bytes
    """Digest of the reasoning, empty without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeWalk:
    """Path of a request down a tree without a choice.

    A request that begins with the same messages takes the same path while the forest has no new fork.
    """

    root_key: str
    base: int
    """The last sampled node."""
    start: int
    """Number of messages on the path, after the leading system messages."""
    depends: int
    """Number of messages that must be the same."""
    forks: int
    """`Nodes.forks` at that time."""


@dataclass(frozen=True, slots=True)
class DigestRun:
    """Consecutive messages of a context node."""

    content: bytes = field(repr=False)
    """`MessageDigest.content` of each, joined."""
    reasoning: Mapping[int, bytes] | None = field(default=None, repr=False)
    """Digest by index of each message with reasoning; None without assistant messages."""

    def __len__(self) -> int:
        return len(self.content) // SIZE


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of the messages of a request, or of its last ones; without text.

    Immutable, so that later requests may share it.
    """

    content: bytes = field(repr=False)
    """`MessageDigest.content` of each, joined."""
    reasoning: dict[int, bytes] = field(repr=False)
    """Digest by index of each message with reasoning."""
    echoes: dict[int, Message] = field(repr=False)
    """Call ids and turn references by index of each assistant message."""
    resets: Sequence[int] = field(repr=False)
    """Index of each message before which reasoning is dropped."""

    def __len__(self) -> int:
        return len(self.content) // SIZE

    def __getitem__(self, index: int) -> MessageDigest:
        content = self.content[index * SIZE : (index + 1) * SIZE]
        return MessageDigest(content, self.reasoning.get(index, b""))

    @property
    def reset_at(self) -> int:
        """Index of the last message before which reasoning is dropped; -1 = all of it is kept."""
        return self.resets[-1] if self.resets else -1

    def first(self, known: int) -> tuple[dict[int, bytes], dict[int, Message]]:
        """Return reasoning and assistant messages of the first `known` messages."""
        if self.echoes and next(reversed(self.echoes)) >= known:
            echoes = {i: echo for i, echo in self.echoes.items() if i < known}
            return {i: digest for i, digest in self.reasoning.items() if i < known}, echoes
        return dict(self.reasoning), dict(self.echoes)

    def rest(self, start: int) -> Digests:
        """Return those from `start` on."""
        at = range(start, len(self))
        reasoning = {i - start: self.reasoning[i] for i in at if i in self.reasoning}
        echoes = {i - start: self.echoes[i] for i in at if i in self.echoes}
        resets = [i - start for i in self.resets if i >= start]
        return Digests(self.content[start * SIZE :], reasoning, echoes, resets)

    def run(self) -> DigestRun:
        """Return what a context node with these messages keeps."""
        return DigestRun(self.content, dict(self.reasoning) if self.echoes else None)

    def contains(self, run: DigestRun, start: int) -> bool:
        """Return whether the messages at `start` equal `run`, each by the rule of `same_meaning`."""
        at = start * SIZE
        if self.content[at : at + len(run.content)] != run.content:
            return False
        if run.reasoning is None:
            return True
        echoed = ((i, self.reasoning.get(start + i)) for i in range(len(run)))
        return all(got is None or got == run.reasoning.get(i) for i, got in echoed)

    def matches(self, index: int, stored: MessageDigest) -> bool:
        """Return `same_meaning(stored, self[index])` without creating the latter."""
        if self.content[index * SIZE : (index + 1) * SIZE] != stored[0]:
            return False
        got = self.reasoning.get(index)
        return got is None or got == stored[1]


@dataclass(slots=True)
class RequestMemory:
    """What the forest found of a request, for a later one that begins with its messages."""

    digests: Digests | None = None
    """Those after the leading system messages; None until the request is planned."""
    system: bytes = b""
    """Digest of the leading system messages."""
    lead: int = 0
    """Number of leading system messages; digests and walk do not count them."""
    tools: bytes = b""
    """Digest of the offered tools, on whose schemas the meaning of arguments depends."""
    walk: TreeWalk | None = None


class Unread(Exception):
    """Known messages are needed that take long to parse again; nothing was done."""

    def __init__(self, history: History) -> None:
        super().__init__()
        self.read = history.read


class History(Sequence[Message]):
    """Messages of one request; known ones are parsed only on access."""

    __slots__ = ("_fresh", "_long", "_no_parsing", "_origin", "_parse", "_whole", "before", "known", "memory")

    def __init__(
        self,
        fresh: tuple[Message, ...],
        memory: RequestMemory,
        *,
        known: int = 0,
        before: RequestMemory | None = None,
        parse: Callable[[], tuple[Message, ...]] | None = None,
        long: Callable[[], bool] = lambda: False,
        origin: History | None = None,
    ) -> None:
        """Create a history whose first `known` messages are the first of `before`.

        `parse` returns all messages, for access to known ones; `long` returns whether that takes long.
        `origin`: the history that `parse` reads, if any.
        """
        self.memory = memory
        self.known = known
        self.before = before
        self._fresh = fresh
        self._parse = parse
        self._long = long
        self._origin: History = self if origin is None else origin
        self._no_parsing = False
        self._whole = fresh if parse is None else ()

    @staticmethod
    def of(messages: Sequence[Message]) -> History:
        """Return the messages of a request as a history; no message of another sequence is known."""
        return messages if isinstance(messages, History) else History(tuple(messages), RequestMemory())

    def __len__(self) -> int:
        return self.known + len(self._fresh)

    @overload
    def __getitem__(self, index: int) -> Message: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Message, ...]: ...

    def __getitem__(self, index: int | slice) -> Message | tuple[Message, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if start >= self.known and step == 1:
                return self._fresh[start - self.known : max(start, stop) - self.known]
            return self._all()[index]
        at = index + len(self) if index < 0 else index
        if self.known <= at < len(self):
            return self._fresh[at - self.known]
        return self._all()[index]

    def __iter__(self) -> Iterator[Message]:
        return iter(self._all())

    def after(self, start: int) -> History:
        """Return the messages from `start` on, the known ones still unparsed."""
        if start >= self.known:
            return History(self[start:], self.memory)
        rest = (lambda: self._all()[start:]) if self._parse is not None else None
        known = self.known - start
        return History(
            self._fresh, self.memory, known=known, before=self.before, parse=rest, origin=self._origin
        )

    def changed(self, change: Callable[[Message], Message]) -> History:
        """Return the history with `change` applied to each message; known messages must be unaffected."""
        parse = None if self._parse is None else (lambda: tuple(map(change, self._all())))
        fresh = tuple(map(change, self._fresh))
        return History(
            fresh, self.memory, known=self.known, before=self.before, parse=parse, origin=self._origin
        )

    @property
    def fresh(self) -> tuple[Message, ...]:
        """Messages after the known ones."""
        return self._fresh

    def read(self) -> None:
        """Parse the known messages now. Raises what parsing raises."""
        self._all()

    @contextmanager
    def without_parsing(self) -> Iterator[None]:
        """Raise Unread inside the context on access to known messages that take long to parse."""
        origin = self._origin
        origin._no_parsing = True
        try:
            yield
        finally:
            origin._no_parsing = False

    def _all(self) -> tuple[Message, ...]:
        if not self._whole and self._parse is not None:
            if self._no_parsing and self._long():
                raise Unread(self)
            self._whole = self._parse()
        return self._whole
