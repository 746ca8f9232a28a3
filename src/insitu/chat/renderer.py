"""A ChatRenderer turns messages into tokens and tokens into replies, one message at a time.

Pure: the ids of a message depend on that message alone (and, for `append`, on the run of context messages it
arrives with), never on other messages. That keeps spliced histories exact. Outside text is encoded without
added tokens, so control markers typed by a user or a tool stay text.
`RootCache`-like root blocks (system text and tools) are cached: sub-agents, retries and parallel attempts
share them.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from insitu.errors import ConfigError, InsituError, RenderError
from insitu.types import Finish, IntArray, Message, Role, ToolCall, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """A tool call as sampled, before the gateway assigns its wire id."""

    name: str
    arguments: str
    """Raw JSON text as sampled."""
    id: str = ""
    """The call id that the model sampled, where its format has such ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """Parsed reply; a call that does not parse stays in `text` and sets `malformed`."""

    text: str
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()
    malformed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Features that a renderer supports natively, found by its checks at load."""

    source: str
    """`template`, or the name of the rules in the `renderers` package."""
    tool_format: str
    """Format of the policy's tool calls; a key of tool_formats.FORMATS."""
    tools: bool
    """False: the rules write no tools into the root block, so the policy never sees the agent's tools."""
    no_tools: str = ""
    """Why requests with tools are refused: calls cannot be written or read. Empty where they are not."""
    native_system: bool
    """False: a mid-list system message is rendered as a user message in a fixed wrapper."""
    parallel_calls: bool
    """False: a reply contains at most one call."""
    text_with_calls: bool
    """False: a reply contains text or calls, never both."""
    reasoning: bool
    """Replies can begin with a separate reasoning block."""
    open_ended: bool = False
    """A turn has no closing token of its own: the next message's opener ends it."""


_OWN_ID = re.compile(r"(functions\.)?[^\s:]+:\d+")
"""A call id as Kimi writes it."""


class ChatRenderer(Protocol):
    """Token rules of one chat format."""

    @property
    def caps(self) -> Capabilities:
        """Supported features."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of tokenizer, template and arguments: part of every root key."""

    @property
    def vocab_size(self) -> int:
        """Number of ids the model may sample."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a turn, including every token that opens a message."""

    def open(self, system: Sequence[Message], tools: Sequence[ToolSpec]) -> IntArray:
        """Return the ids of the root block: leading system messages and tools."""

    def append(self, messages: Sequence[Message]) -> IntArray:
        """Return the ids of a run of context messages that follow closed content.

        Context messages are user, tool, foreign assistant and mid-list system messages. No generation prompt.
        """

    def close(self, sampled: IntArray, finish: Finish) -> IntArray:
        """Return the scaffold ids that must follow `sampled` before any other message (mask 0).

        Adds a synthetic end of turn when the model was cut off.
        """

    def join(self, sampled: IntArray, finish: Finish, messages: Sequence[Message]) -> IntArray:
        """Return `close` and `append` for a sampled turn and the run that follows it.

        An opener that was sampled as the end of the turn is not repeated.
        """

    def generation_prompt(self, after: Role = "user") -> IntArray:
        """Return the ids that open an assistant turn after a message of role `after`."""

    def parse(self, sampled: IntArray, tools: Sequence[ToolSpec] = ()) -> ParsedReply:
        """Parse sampled ids; works on ids, never on decoded markers.

        `tools` give the types of arguments for formats that write values without quotes.
        """

    def render_reply(self, message: Message) -> IntArray:
        """Return the ids the policy would have to sample to produce `message`, stop id included.

        For scripted and teacher turns (kind `demonstrated`).
        """

    def decode(self, ids: IntArray) -> str:
        """Return the text of ids, control tokens included; for display and logs only."""

    def injections(self, text: str) -> int:
        """Count control markers that occur in `text` as plain text."""


def with_own_ids(messages: Sequence[Message], answered: Sequence[ParsedCall] = ()) -> list[Message]:
    """Return the messages with call ids as Kimi writes them, `functions.NAME:N`; these pass unchanged.

    A call with an id of another origin is numbered by its place in the messages. A result has the id of its
    call; an unknown one that of the next unanswered call of the turn before, `answered`.
    """
    known: dict[str, str] = {}
    waiting = [call.id for call in answered if call.id]
    named, count = [], 0
    for message in messages:
        calls = []
        for call in message.tool_calls:
            is_own = re.fullmatch(rf"(functions\.)?{re.escape(call.name)}:\d+", call.id)
            known[call.id] = call.id if is_own else f"functions.{call.name}:{count}"
            calls.append(replace(call, id=known[call.id]))
            count += 1
        answers = message.tool_call_id
        if message.role == "tool" and answers not in known:
            known[answers] = waiting[0] if waiting and not _OWN_ID.fullmatch(answers) else answers
        answers = known.get(answers, answers)
        waiting = [own for own in waiting if own != answers]
        named.append(replace(message, tool_calls=tuple(calls), tool_call_id=answers))
    return named


def dropping_roles(renderer: ChatRenderer) -> frozenset[str]:
    """Return the roles whose messages make the rules drop the reasoning of all earlier turns."""
    call = ToolCall(id="call_a", name="look", arguments="{}")
    reply = Message(role="assistant", text="So.", reasoning="Hm.")
    probes = {
        "user": [reply, Message(role="user", text="More.")],
        "system": [reply, Message(role="system", text="Note.")],
        "tool": [replace(reply, tool_calls=(call,)), Message(role="tool", text="x", tool_call_id="call_a")],
    }
    return frozenset(role for role, run in probes.items() if _drops(renderer, run))


def forgotten_before(renderer: ChatRenderer, keep_reasoning: str) -> frozenset[str]:
    """Return `dropping_roles` if `model.keep_reasoning` is template, else no roles.

    Raises ConfigError if the setting is template and the renderer never drops reasoning.
    """
    roles = dropping_roles(renderer) if keep_reasoning == "template" else frozenset[str]()
    if keep_reasoning == "template" and not roles:
        raise ConfigError(
            'model.keep_reasoning = "template" has no effect: this renderer keeps all reasoning'
        )
    return roles


def _drops(renderer: ChatRenderer, run: Sequence[Message]) -> bool:
    try:
        return "Hm." not in renderer.decode(renderer.append([Message(role="user", text="Question."), *run]))
    except RenderError:  # such a run cannot be written at all
        return False


# --------------------------------------------------------------------------- helpers for implementations


def check_tools(
    caps: Capabilities, offers: str = "the request offers tools: ", kind: type[InsituError] = RenderError
) -> None:
    """Raise `kind` if the model takes no tools; `offers` begins the message."""
    if caps.no_tools:
        raise kind(
            f"{offers}this model takes none: {caps.no_tools}; use an agent without tools, such as"
            ' single_turn, or model.renderer = "hermes"; see docs/models.md, Tools'
        )


def prepared(messages: Sequence[Message], caps: Capabilities) -> Sequence[Message]:
    """Return the messages in the form that the rules can write; pure per run, so prefixes are stable."""
    if caps.tool_format == "kimi":
        messages = with_own_ids(messages)
    return messages if caps.native_system else [_demoted(message) for message in messages]


def _demoted(message: Message) -> Message:
    """Return a mid-list system message as a user message."""
    if message.role != "system":
        return message
    return Message(role="user", text=f"<system>\n{message.text}\n</system>")


MAX_ROOTS = 128
"""Most root blocks cached per renderer."""
MAX_IDS = 4_000_000
"""Most ids cached per renderer (16 MB)."""


class RootCache:
    """LRU cache of root block ids, keyed by the digest of their source.

    Thread-safe: two concurrent misses both render, to the same ids.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, IntArray] = OrderedDict()
        self._ids = 0
        self._lock = threading.Lock()

    def get(
        self,
        system: Sequence[Message],
        tools: Sequence[ToolSpec],
        make: Callable[[Sequence[Message], Sequence[ToolSpec]], IntArray],
    ) -> IntArray:
        """Return the ids of this root, rendered by `make` on a miss (read-only)."""
        key = _digest(system, tools)
        with self._lock:
            cached = self._blocks.get(key)
            if cached is not None:
                self._blocks.move_to_end(key)
                return cached
        made = make(system, tools)
        made.setflags(write=False)
        with self._lock:
            if key not in self._blocks:
                self._blocks[key] = made
                self._ids += len(made)
            while len(self._blocks) > MAX_ROOTS or (self._ids > MAX_IDS and len(self._blocks) > 1):
                self._ids -= len(self._blocks.popitem(last=False)[1])
        return made


def _digest(system: Sequence[Message], tools: Sequence[ToolSpec]) -> bytes:
    h = hashlib.blake2b(digest_size=16)
    parts = [f"{len(system)}"]
    for message in system:
        parts += [message.role, message.text]
    for tool in tools:
        parts += [tool.name, tool.description, tool.parameters]
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        h.update(len(raw).to_bytes(8, "big"))
        h.update(raw)
    return h.digest()
