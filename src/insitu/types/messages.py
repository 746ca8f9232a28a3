"""Messages, tool calls, one model call and its reply, independent of any wire format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from insitu.types.generation import Finish

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as sent over the wire: `id` minted by the gateway, `arguments` raw JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEvent:
    """Argument of a hook on tool calls: a call that the model sampled, or its result as the agent sent it."""

    kind: Literal["call", "result"] = "call"
    rollout_id: str
    turn: int = -1
    """Of the call; -1 for a result of a call that was not sampled in this session."""
    call_id: str
    name: str = ""
    """Tool; empty as `turn`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the call; `{"unparsed_arguments": text}` where they are no JSON object."""
    text: str = ""
    """What the agent says; empty for a call."""


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
    """For role `assistant`: opaque fields the agent echoes (thinking signatures, encrypted reasoning).

    They may contain a signed node pointer of the gateway: a hint only, ignored when messages are compared.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool the agent offers; `parameters` is the JSON schema as canonical JSON text."""

    name: str
    description: str
    parameters: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One model call as requested by the agent; its sampling parameters are advisory."""

    messages: Sequence[Message]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice_none: bool = False
    """Tools were sent, but none may be called (`tool_choice` none), so `tools` is empty."""
    stream: bool = False
    max_tokens: int | None = None
    """May only shorten the trainer's own limit."""
    stop: tuple[str, ...] = ()
    advisory: tuple[tuple[str, str], ...] = ()
    """Parameters recorded and ignored, as (name, JSON text, possibly truncated); unknown fields too."""
    hints: tuple[tuple[str, str], ...] = ()
    """Client metadata on the wire (sub-agent id, window id) as (name, value): labels, never keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Model output, parsed from sampled ids."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish: Finish = "stop"
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    pointer: str = ""
    """Signed node pointer for the opaque field of the wire format, empty for a synthetic reply."""
    stop: str = ""
    """The agent's stop string that ended the reply, if any; not part of `text`."""
