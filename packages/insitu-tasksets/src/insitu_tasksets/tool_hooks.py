"""The user's hook on tool calls: it sees each call of a reply and each new result of a request.

    hook(event: ToolEvent) -> None | {"block": text} | {"result": text} | {"remind": text}

A blocked call reaches the agent as one of the tool `BLOCKED`, which no agent has, and the text takes the
place of what the agent says to that; the sampled ids stay. A result that is rewritten is context. What the
hook said to a call or a text is kept, so an unchanged conversation is rendered to unchanged ids. A client
that gives calls other ids is matched by the names and arguments of its echo.
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
"""Most characters of a text in the record."""
SPARE_RESULTS, RESULTS_PER_CALL = 1000, 4
"""Most different results that the hook sees in a session: the first number, and the second for each call."""
TOO_MANY = "This result was not read: the session has too many results for its calls."
"""What the model reads in place of further ones."""
_Ids = tuple[str, ...]


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
        """Minted id -> the call as sampled."""
        self._given: dict[bytes, list[_Ids]] = {}
        """Names and arguments of a reply's calls as the agent got them -> minted ids, of each such reply."""
        self._open: set[_Ids] = set()
        """Minted ids of replies that no request has contained yet."""
        self._minted: dict[str, str] = {}
        """Id that a client gave a call instead -> minted id."""
        self._blocked: dict[str, str] = {}
        self._reminders: dict[str, str] = {}
        self._texts: dict[tuple[str, bytes], str | None] = {}
        """Id and digest of a result -> what the model reads in its place; None = the result."""
        self._did: dict[str, str] = {}
        """Id -> what was done to its newest result."""
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
        if given:
            ids = tuple(call.id for call in given)
            self._given.setdefault(_content(given), []).append(ids)
            self._open.add(ids)
        return tuple(given)

    async def read(self, request: ModelRequest) -> ModelRequest:
        """Return the request with the results that the model reads."""
        history = History.of(request.messages)
        async with self._reading:
            self._match([m.tool_calls for m in history.fresh if m.role == "assistant" and m.tool_calls])
            for message in history.fresh:
                if message.role == "tool" and (key := self._key(message)) not in self._texts:
                    text = await self._result(key[0], message.text)
                    self._texts[key] = None if text == message.text else text
        return replace(request, messages=history.changed(self._changed))

    def hints(self, messages: Sequence[Message]) -> list[tuple[str, str]]:
        """Return the hints of the turn whose new messages these are."""
        ids = [self._id(message) for message in messages]
        return [(HOOK, self._did[id]) for id in ids if id in self._did]

    def _match(self, echoes: Sequence[Sequence[ToolCall]]) -> None:
        """Find the replies that a client's echoes of calls are, and keep the ids that it gave them.

        Of equal replies the last echo is the newest that no request contained, and another one what it was.
        """
        for calls in reversed(echoes):
            wire = tuple(call.id for call in calls)
            if not self._events.keys() >= {*wire} and len({*wire}) == len(wire):
                alike = self._given.get(_content(calls), [])
                new = [ids for ids in alike if ids in self._open] if calls is echoes[-1] else []
                before = [ids for ids in alike if ids == tuple(map(self._minted.get, wire))]
                for ids in (new or before or alike)[-1:]:
                    self._minted.update(zip(wire, ids, strict=True))
            self._open.discard(tuple(self._minted.get(id, id) for id in wire))

    def _id(self, message: Message) -> str:
        return self._minted.get(message.tool_call_id, message.tool_call_id)

    def _key(self, message: Message) -> tuple[str, bytes]:
        text = message.text.encode("utf-8", "surrogatepass")
        return self._id(message), hashlib.blake2b(text, digest_size=16).digest()

    def _changed(self, message: Message) -> Message:
        text = self._texts.get(self._key(message)) if message.role == "tool" else None
        return message if text is None else replace(message, text=text)

    async def _result(self, id: str, text: str) -> str:
        """Return what the model reads of a result."""
        if id in self._blocked:
            self._did[id] = f"blocked {self._events[id].name}"
            return self._blocked[id]
        if len(self._texts) >= SPARE_RESULTS + RESULTS_PER_CALL * len(self._events):
            return TOO_MANY
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
        said = {"did": did, "turn": event.turn, "call_id": event.call_id, "text": text[:_KEPT_CHARS]}
        said |= {"was": event.text[:_KEPT_CHARS]} if event.kind == "result" else {"was": event.arguments}
        self._tools.keep(event.name or "unknown", json_text(said), "hook")
        return did


def _content(calls: Sequence[ToolCall]) -> bytes:
    """Return the digest of the names and arguments of calls, however the arguments are written."""
    named = [(call.name, _decoded(call.arguments)) for call in calls]
    return hashlib.blake2b(json_text(named).encode("utf-8", "surrogatepass"), digest_size=16).digest()


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
