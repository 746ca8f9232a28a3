"""Messages of a request whose first ones are known from an earlier request.

An agent sends its whole history with every call. The gateway proves by bytes how much of it an earlier
request of the session contained; only the rest is parsed and hashed, and the forest takes the digests of the
known messages from `DigestCache`. Digests and ids are kept, no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import overload

from insitu.types import Message


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDigests:
    """Digests of a request's messages; immutable, so that requests may share it."""

    system: bytes
    """Digest of the leading system messages."""
    tools: bytes
    """Digest of the offered tools, on whose schemas the meaning of arguments depends."""
    lead: int
    """Number of leading system messages; the other fields do not count them."""
    content: bytes = field(repr=False)
    reasoning: tuple[tuple[int, bytes], ...] = field(repr=False)
    echoes: tuple[tuple[int, Message], ...] = field(repr=False)
    """(index, call ids and turn references only) of each assistant message."""
    resets: tuple[int, ...] = field(repr=False)
    """Index of each message before which reasoning is dropped."""
    walk: TreeWalk | None = field(repr=False)

    def first(self, known: int) -> tuple[dict[int, bytes], dict[int, Message]]:
        """Return reasoning and assistant messages of the first `known` messages."""
        reasoning, echoes = dict(self.reasoning), dict(self.echoes)
        if echoes and self.echoes[-1][0] >= known:
            echoes = {i: echo for i, echo in self.echoes if i < known}
            reasoning = {i: digest for i, digest in self.reasoning if i < known}
        return reasoning, echoes


class DigestCache:
    """Holds the digests of a request for a later one."""

    __slots__ = ("digests",)

    def __init__(self) -> None:
        self.digests: MessageDigests | None = None


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
        memory: DigestCache,
        *,
        known: int = 0,
        before: MessageDigests | None = None,
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
