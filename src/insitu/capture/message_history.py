"""The messages of a request of which the first ones are known from an earlier request.

An agent sends its whole history with every call. The gateway proves by bytes how much of it an earlier
request of the session held; only the rest is parsed and hashed, and the forest takes what it made of
the earlier request from `DigestCache`. A Memory holds digests and ids, no text. Callers: gateway/bodies,
forest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import overload

from insitu.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeWalk:
    """How far a request went down a tree where no two ways were open: one that begins with the same messages
    goes the same way, while the forest has no new fork."""

    root_key: str
    base: int
    """The sampled node reached."""
    start: int
    """Messages that it accounts for, behind the leading system messages."""
    depends: int
    """How many of the messages must be the same."""
    forks: int
    """`Nodes.forks` at the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDigests:
    """What the forest keeps of a request's messages; immutable, so that requests may share it."""

    system: bytes
    """Digest of the leading system messages."""
    tools: bytes
    """Digest of the offered tools: what arguments mean depends on their schemas."""
    lead: int
    """How many those are; the rest of this counts from there."""
    said: bytes = field(repr=False)
    reasoning: tuple[tuple[int, bytes], ...] = field(repr=False)
    echoes: tuple[tuple[int, Message], ...] = field(repr=False)
    """(index, what names a turn: call ids and pointers only) of each assistant message."""
    questions: tuple[int, ...] = field(repr=False)
    """Index of each message before which reasoning is dropped."""
    walk: TreeWalk | None = field(repr=False)

    def first(self, known: int) -> tuple[dict[int, bytes], dict[int, Message]]:
        """Reasoning and echoes of the first `known` messages."""
        reasoning, echoes = dict(self.reasoning), dict(self.echoes)
        if echoes and self.echoes[-1][0] >= known:
            echoes = {i: echo for i, echo in self.echoes if i < known}
            reasoning = {i: digest for i, digest in self.reasoning if i < known}
        return reasoning, echoes


class DigestCache:
    """Where the forest leaves what a later request can use."""

    __slots__ = ("told",)

    def __init__(self) -> None:
        self.told: MessageDigests | None = None


class Unread(Exception):
    """Known messages are wanted that it takes long to parse again; nothing was done."""

    def __init__(self, history: History) -> None:
        super().__init__()
        self.read = history.read


class History(Sequence[Message]):
    """Messages of one request; known ones are parsed only when somebody looks at them."""

    __slots__ = ("_fresh", "_long", "_origin", "_parse", "_spared", "_whole", "before", "known", "memory")

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
        """The first `known` messages are the first of those that `before` was made of; `parse` gives all
        messages again, for whoever looks at one of them; `long` says whether that takes long. `origin`: what
        `parse` looks at, where that is a history too."""
        self.memory = memory
        self.known = known
        self.before = before
        self._fresh = fresh
        self._parse = parse
        self._long = long
        self._origin: History = self if origin is None else origin
        self._spared = False
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
        """The messages from `start` on, the known ones among them still unparsed."""
        if start >= self.known:
            return History(self[start:], self.memory)
        rest = (lambda: self._all()[start:]) if self._parse is not None else None
        known = self.known - start
        return History(
            self._fresh, self.memory, known=known, before=self.before, parse=rest, origin=self._origin
        )

    def changed(self, change: Callable[[Message], Message]) -> History:
        """The same with `change` made to each message, which must be what it was when the known ones came."""
        parse = None if self._parse is None else (lambda: tuple(map(change, self._all())))
        fresh = tuple(map(change, self._fresh))
        return History(
            fresh, self.memory, known=self.known, before=self.before, parse=parse, origin=self._origin
        )

    @property
    def fresh(self) -> tuple[Message, ...]:
        """The messages after the known ones."""
        return self._fresh

    def read(self) -> None:
        """Parse the known messages now. Raises what parsing raises."""
        self._all()

    @contextmanager
    def spared(self) -> Iterator[None]:
        """Within it, looking at known messages raises Unread where parsing them takes long."""
        origin = self._origin
        origin._spared = True
        try:
            yield
        finally:
            origin._spared = False

    def _all(self) -> tuple[Message, ...]:
        if not self._whole and self._parse is not None:
            if self._spared and self._long():
                raise Unread(self)
            self._whole = self._parse()
        return self._whole
