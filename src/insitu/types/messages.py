"""The wire's meaning: messages, tool calls, one model call and its reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from insitu.types.generation import Finish

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as the wire carries it: `id` minted by the gateway, `arguments` raw JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation in insitu's own form; dialects translate to and from it."""

    role: Role
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """For role `tool`: which call this answers."""
    pointers: tuple[str, ...] = ()
    """For role `assistant`: opaque fields the agent echoes (thinking signatures, encrypted reasoning); they
    may hold a signed node pointer of the gateway. A hint only: never part of a message's meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool the agent offers. `parameters` is the JSON schema as canonical JSON text."""

    name: str
    description: str
    parameters: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One model call as the agent asked for it; sampling wishes are advisory."""

    messages: Sequence[Message]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice_none: bool = False
    """Tools were sent, but none may be called (`tool_choice` none), so `tools` is empty."""
    stream: bool = False
    max_tokens: int | None = None
    """May only shorten the trainer's own limit."""
    stop: tuple[str, ...] = ()
    advisory: tuple[tuple[str, str], ...] = ()
    """Wishes that insitu records and does not follow, as (name, JSON text that may be cut short), and the
    names of fields that it does not know."""
    hints: tuple[tuple[str, str], ...] = ()
    """What the agent says of itself on the wire (sub-agent id, window id), as (name, value): labels, never
    keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the model said, parsed from sampled ids."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish: Finish = "stop"
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    pointer: str = ""
    """Signed node pointer for the opaque field of the wire format, empty for a synthetic reply."""
    stop: str = ""
    """The stop string of the agent that ended it, if one did; it is not part of `text`."""
