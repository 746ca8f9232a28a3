"""A Family turns messages into tokens and tokens into replies, one message at a time.

Pure: the ids of a message depend on that message alone (and, for `append`, on the run of context messages it
arrives with), never on what stands elsewhere. That is what makes spliced histories exact. Text from
outside is encoded without added tokens, so control markers typed by a user or a tool stay text.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from insitu.errors import ConfigError, RenderError
from insitu.types import Finish, IntArray, Message, Role, ToolCall, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """A tool call as sampled, before the gateway mints its wire id."""

    name: str
    arguments: str
    """Raw JSON text as sampled."""
    id: str = ""
    """The id that the model itself gave the call, where its family has such ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """Meaning of sampled ids. A call that does not parse stays in `text` and sets `malformed`."""

    text: str
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()
    malformed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a family can say natively; found by its checks at load."""

    source: str
    """Whose rules: `template`, or the name of the rules in the `renderers` package."""
    tool_format: str
    """How the policy spells its calls; a key of render/formats.FORMATS."""
    tools: bool
    """False: the rules write no tools into the root block, so the policy never sees what the agent offers."""
    native_system: bool
    """False: a system message in mid-list is told as a user message, in a fixed wrapper."""
    parallel_calls: bool
    """False: a reply can hold one call at most."""
    text_with_calls: bool
    """False: a reply holds text or calls, never both."""
    reasoning: bool
    """Replies can begin with reasoning that is told apart."""
    open_ended: bool = False
    """A turn has no closing token of its own: the next message's opener ends it."""


class ChatRenderer(Protocol):
    """Token rules of one model family."""

    @property
    def caps(self) -> Capabilities:
        """What the family can say."""

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

    def join(self, sampled: IntArray, finish: Finish, messages: Sequence[Message]) -> IntArray:
        """`close` and `append` for a sampled turn and the run that follows it. An opener that was sampled as
        the end of the turn is not said twice."""

    def generation_prompt(self, after: Role = "user") -> IntArray:
        """Ids that open an assistant turn behind a message of role `after`."""

    def parse(self, sampled: IntArray, tools: Sequence[ToolSpec] = ()) -> ParsedReply:
        """Meaning of sampled ids; works on ids, never on decoded markers. `tools` tell the types of arguments
        where a family writes values without quotes."""

    def render_reply(self, message: Message) -> IntArray:
        """Ids the policy would have to sample to say `message`, stop id included.
        For scripted and teacher turns (kind `demonstrated`)."""

    def decode(self, ids: IntArray) -> str:
        """Text of ids, control tokens included, for people and logs only."""

    def injections(self, text: str) -> int:
        """How many control markers occur in `text` as plain text."""


def carry_id(minted: str, own: str) -> str:
    """The wire id of a call that has an id of the model's own: the minted one with the other inside, because
    agents echo wire ids and a tool result must name the call as the model did."""
    if not own:
        return minted
    return f"{minted}-{base64.urlsafe_b64encode(own.encode()).decode().rstrip('=')}"


def own_id(wire: str) -> str:
    """The model's own id inside a wire id; an id from elsewhere as it is."""
    _, dash, carried = wire.partition("-")
    try:
        raw = base64.b64decode(carried + "=" * (-len(carried) % 4), altchars=b"-_", validate=True).decode()
    except (ValueError, UnicodeDecodeError):
        return wire
    return raw if dash and raw else wire


def dropping_roles(renderer: ChatRenderer) -> frozenset[str]:
    """Roles of the messages that make a family's rules leave out the reasoning of every turn before them."""
    call = ToolCall(id="call_a", name="look", arguments="{}")
    said = Message(role="assistant", text="So.", reasoning="Hm.")
    probes = {
        "user": [said, Message(role="user", text="More.")],
        "system": [said, Message(role="system", text="Note.")],
        "tool": [replace(said, tool_calls=(call,)), Message(role="tool", text="x", tool_call_id="call_a")],
    }
    return frozenset(role for role, run in probes.items() if _drops(renderer, run))


def forgotten_before(renderer: ChatRenderer, keep_reasoning: str) -> frozenset[str]:
    """`dropping_roles` for `model.keep_reasoning` template, none for all. Raises ConfigError for a family
    that drops nothing."""
    roles = dropping_roles(renderer) if keep_reasoning == "template" else frozenset[str]()
    if keep_reasoning == "template" and not roles:
        raise ConfigError("retention template changes nothing: this family's rules keep all reasoning")
    return roles


def _drops(renderer: ChatRenderer, run: Sequence[Message]) -> bool:
    try:
        return "Hm." not in renderer.decode(renderer.append([Message(role="user", text="Question."), *run]))
    except RenderError:  # such a run cannot be written at all
        return False


# --------------------------------------------------------------------------- for those who implement it


def joined(close: IntArray, run: IntArray, sampled: IntArray, caps: Capabilities) -> IntArray:
    """What follows a sampled turn; an opener sampled as its end is not repeated."""
    if caps.open_ended and len(run) and len(sampled) and int(run[0]) == int(sampled[-1]):
        run = run[1:]
    return np.concatenate([close, run]).astype(np.int32, copy=False)


def demoted(message: Message) -> Message:
    """A mid-list system message told in the user's place; pure per message, so prefixes stay."""
    if message.role != "system":
        return message
    return Message(role="user", text=f"<system>\n{message.text}\n</system>")
