"""What a session asks of the hook of the user on tool calls, which the package tasksets has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from insitu.gateway.host_tools import ToolBox
from insitu.types import Message, ModelRequest, ToolCall

BLOCKED = "insitu_blocked"
"""Name of the tool that a blocked call is delivered as, which no agent has; label of its turn."""


class SessionHook(Protocol):
    """The hook in one session; its errors are those of `UserFunction.call`."""

    async def called(self, turn: int, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """Return the calls of a reply as the agent gets them."""

    async def read(self, request: ModelRequest) -> ModelRequest:
        """Return the request with the results that the model reads; the same for what it has read before."""

    def hints(self, messages: Sequence[Message]) -> list[tuple[str, str]]:
        """Return the hints of a turn whose new messages these are: what was done to results."""


class ToolHook(Protocol):
    """The configured hook."""

    def open(self, rollout_id: str, tools: ToolBox) -> SessionHook:
        """Return the hook for a session; its actions are recorded with the calls of `tools`."""

    def close(self) -> None: ...
