"""The user's hook on tool calls: it sees each call of a reply and each new result of a request.

    hook(event: ToolEvent) -> None | {"block": text} | {"result": text} | {"remind": text}

A blocked call reaches the agent as one of the tool `BLOCKED`, which no agent has, and the text takes the
place of what the agent says to that; the sampled ids stay. A result that is rewritten is context. What the
hook said to a call or a text is kept, so an unchanged conversation is rendered to unchanged ids.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from insitu.capture.message_history import History
from insitu.gateway.dialects.base import UNPARSED, json_text
from insitu.gateway.host_tools import ToolBox
from insitu.gateway.tool_hooks import BLOCKED
from insitu.tasks.user_functions import BadResult, UserFunction
from insitu.types import Message, ModelRequest, ToolCall, ToolEvent

HOOK = "hook"
"""Name of a turn's hints that say what the hook did to its new results."""
HOOK_S = 60.0
HOOK_CALLS = 32
"""Calls of the hook at a time, over all sessions, and the timeout of each."""
_ANSWERS = {"call": ("block", "remind"), "result": ("result", "remind")}
_KEPT_CHARS = 4000
"""Most characters of a replaced result in the record."""


class UserHook:
    """The user's function with its limits; an insitu.gateway.tool_hooks.ToolHook."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        """Wrap the function that `gateway.tools` names."""
        self._function = UserFunction(
            f"gateway.tools {name}", function, max_concurrent=HOOK_CALLS, timeout_s=HOOK_S
        )

    def open(self, rollout_id: str, tools: ToolBox) -> SessionOfHook:
        return SessionOfHook(self._function, rollout_id, tools)

    def close(self) -> None:
        self._function.close()


class SessionOfHook:
    """What the hook said in one session."""

    def __init__(self, function: UserFunction, rollout_id: str, tools: ToolBox) -> None:
        """Take the function, and the host tools of the session, whose record it shares."""
        self._function, self._rollout_id, self._tools = function, rollout_id, tools
        self._events: dict[str, ToolEvent] = {}
        """Wire id -> the call as sampled."""
        self._blocked: dict[str, str] = {}
        self._reminders: dict[str, str] = {}
        self._texts: dict[tuple[str, bytes], str | None] = {}
        """Wire id and digest of a result -> what the model reads in its place; None = the result."""
        self._did: dict[str, str] = {}
        """Wire id -> what was done to its newest result."""
        self._reading = asyncio.Lock()

    async def called(self, turn: int, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """Return the calls of a reply as the agent gets them."""
        given = []
        for call in calls:
            event = ToolEvent(
                kind="call",
                rollout_id=self._rollout_id,
                turn=turn,
                call_id=call.id,
                name=call.name,
                arguments=_decoded(call.arguments),
            )
            said = await self._asked(event)
            self._events[call.id] = event
            if "block" in said:
                self._blocked[call.id] = said["block"]
                self._done(event, "blocked", said["block"])
                call = replace(call, name=BLOCKED, arguments="{}")
            elif "remind" in said:
                self._reminders[call.id] = said["remind"]
            given.append(call)
        return tuple(given)

    async def read(self, request: ModelRequest) -> ModelRequest:
        """Return the request with the results that the model reads."""
        history = History.of(request.messages)
        async with self._reading:
            for message in history.fresh:
                if message.role == "tool" and _key(message) not in self._texts:
                    text = await self._result(message)
                    self._texts[_key(message)] = None if text == message.text else text
        return replace(request, messages=history.changed(self._changed))

    def hints(self, messages: Sequence[Message]) -> list[tuple[str, str]]:
        """Return the hints of the turn whose new messages these are."""
        return [(HOOK, self._did[m.tool_call_id]) for m in messages if m.tool_call_id in self._did]

    def _changed(self, message: Message) -> Message:
        text = self._texts.get(_key(message)) if message.role == "tool" else None
        return message if text is None else replace(message, text=text)

    async def _result(self, message: Message) -> str:
        id, text = message.tool_call_id, message.text
        if id in self._blocked:
            self._did[id] = f"blocked {self._events[id].name}"
            return self._blocked[id]
        called = self._events.get(id, ToolEvent(rollout_id=self._rollout_id, call_id=id))
        event = replace(called, kind="result", text=text)
        said = await self._asked(event)
        did = []
        if "result" in said:
            text = said["result"]
            did.append(self._done(event, "rewrote", text))
        for reminder in filter(None, (self._reminders.get(id), said.get("remind"))):
            text = f"{text}\n\n{reminder}"
            did.append(self._done(event, "reminded", reminder))
        if did:
            self._did[id] = f"{', '.join(did)} {event.name}".rstrip()
        return text

    async def _asked(self, event: ToolEvent) -> Mapping[str, str]:
        return await self._function.call(lambda function: _parsed(event.kind, function(event)))

    def _done(self, event: ToolEvent, did: str, text: str) -> str:
        """Record what the hook did, and return it."""
        said = {"did": did, "turn": event.turn, "call_id": event.call_id, "text": text}
        said |= {"was": event.text[:_KEPT_CHARS]} if event.kind == "result" else {"was": event.arguments}
        self._tools.keep(event.name or "unknown", json_text(said), "hook")
        return did


def _key(message: Message) -> tuple[str, bytes]:
    text = message.text.encode("utf-8", "surrogatepass")
    return message.tool_call_id, hashlib.blake2b(text, digest_size=16).digest()


def _parsed(kind: str, said: object) -> Mapping[str, str]:
    """Return what a hook said; raise BadResult."""
    if said is None:
        return {}
    known = _ANSWERS[kind]
    if isinstance(said, Mapping) and len(said) == 1:
        ((name, text),) = said.items()
        if name in known and isinstance(text, str) and text.strip():
            return {name: text.encode(errors="replace").decode()}
    forms = " or ".join(f'{{"{name}": text}}' for name in known)
    raise BadResult(f"returned {said!a:.200} for a {kind}, not None, {forms}")


def _decoded(arguments: str) -> Mapping[str, Any]:
    try:
        value = orjson.loads(arguments) if arguments.strip() else {}
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {UNPARSED: arguments}
