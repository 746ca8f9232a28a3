"""A Family turns messages into tokens and tokens into replies, one message at a time.

Pure: the ids of a message depend on that message alone (and, for `append`, on the run of context messages it
arrives with), never on what stands elsewhere. That is what makes spliced histories exact. Text from
outside is encoded without added tokens, so control markers typed by a user or a tool stay text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from whet.types import Finish, IntArray, Message, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """A tool call as sampled, before the gateway mints its wire id."""

    name: str
    arguments: str
    """Raw JSON text as sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """Meaning of sampled ids. A call that does not parse stays in `text` and sets `malformed`."""

    text: str
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()
    malformed: bool = False


class Family(Protocol):
    """Token rules of one model family."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of tokenizer, template and arguments: part of every root key."""

    @property
    def vocab_size(self) -> int:
        """Number of ids the model may sample."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a turn, every token that opens a message included."""

    def open(self, system: Sequence[Message], tools: Sequence[ToolSpec]) -> IntArray:
        """Ids of the root block: leading system messages and tools."""

    def append(self, messages: Sequence[Message]) -> IntArray:
        """Ids of a run of context messages (user, tool, foreign assistant, mid-list system)
        that follow closed content. Does not include a generation prompt."""

    def close(self, sampled: IntArray, finish: Finish) -> IntArray:
        """Scaffold ids that must follow `sampled` before anything else may come (mask 0).
        Adds a synthetic end of turn when the model was cut off."""

    def generation_prompt(self) -> IntArray:
        """Ids that open an assistant turn."""

    def parse(self, sampled: IntArray) -> ParsedReply:
        """Meaning of sampled ids; works on ids, never on decoded markers."""

    def render_reply(self, message: Message) -> IntArray:
        """Ids the policy would have to sample to say `message`, stop id included.
        For scripted and teacher turns (kind `demonstrated`)."""

    def decode(self, ids: IntArray) -> str:
        """Text of ids, control tokens included, for people and logs only."""

    def injections(self, text: str) -> int:
        """How many control markers occur in `text` as plain text."""
