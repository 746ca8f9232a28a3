"""Recordings of real agents: reading them, what was said in them, and playing them again.

A recording is written by `insitu conformance --record`: a head, then every HTTP exchange in order of arrival.
Replayed, each request goes through the real gateway, and a scripted engine says in each turn what was said
then. Tool-call ids are functions of seed, rollout and turn, so echoes fit; signed pointers are of a session's
own key, so those of the recording are replaced by those of the replay.
"""

from __future__ import annotations

import lzma
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from insitu.chat.template import TemplateRenderer
from insitu.gateway.dialects.base import ParsedBody
from insitu.gateway.routes import parse_path
from insitu.gateway.server import DIALECTS, Gateway
from insitu.gateway.session import Session
from insitu.gateway.token_backend import TokenBackend
from insitu.types import IntArray, Limits, Message, ModelRequest, RequestKey, ToolCall, Trajectory
from insitu_lab.open_renderer import Splitter
from insitu_train.demo.scripted import ScriptedEngine

FOLDER = Path(__file__).parent / "recordings"
POINTER = re.compile(r"insitu[0-9a-f]{42}|aW5zaXR1[0-9A-Za-z+/]{56}")
"""As it is, and in base64 where the format wants bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request with its reply."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    status: int
    reply: str = field(repr=False)

    @property
    def dialect(self) -> str:
        route = parse_path(self.path.split("?")[0])
        return route.dialect if route is not None and route.kind == "call" else ""

    def wire(self) -> ParsedBody:
        """The body, parsed by its dialect."""
        route = parse_path(self.path.split("?")[0])
        assert route is not None
        return DIALECTS[route.dialect].parse(self.body, route.action)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One agent's session."""

    agent: str
    version: str
    rollout: str
    seed: int
    limits: Limits
    books: Mapping[str, Any]
    """What was found then."""
    exchanges: Sequence[Exchange] = field(repr=False)

    @property
    def calls(self) -> list[Exchange]:
        """Answered model calls; the n-th is turn n."""
        return [each for each in self.exchanges if each.dialect and each.status == 200]


@cache
def read(path: Path) -> Recording:
    head, *lines = (orjson.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines())
    keys = ("method", "path", "headers", "body", "status", "reply")
    exchanges = [Exchange(**{key: line[key] for key in keys}) for line in lines]
    return Recording(
        agent=head["agent"],
        version=head["version"],
        rollout=head["rollout"],
        seed=head["seed"],
        limits=Limits(**head["limits"]),
        books=head["books"],
        exchanges=exchanges,
    )


def said(call: Exchange) -> Message:
    """The reply of a call, taken from the wire; tools by the names that the model knows them by."""
    names = {known: name for name, known in _wire_names(call).items()}
    return _READERS[call.dialect](_events(call.reply), names)


def _wire_names(call: Exchange) -> dict[str, tuple[str, str]]:
    """Name for the model -> (namespace, name) on the wire, where they differ."""
    forms = {name: orjson.loads(form) for name, form in call.wire().names.items()}
    return {name: (form.get("namespace") or "", form["name"]) for name, form in forms.items()}


def _events(reply: str) -> list[dict[str, Any]]:
    """JSON of all events of a stream; of an answer in one piece, that."""
    if reply.lstrip().startswith("{"):
        return [orjson.loads(reply)]
    data = (line[5:].strip() for line in reply.splitlines() if line.startswith("data:"))
    return [orjson.loads(text) for text in data if text and text != "[DONE]"]


Names = Mapping[tuple[str, str], str]


def _chat(events: Sequence[dict[str, Any]], names: Names) -> Message:
    text, reasoning = "", ""
    calls: dict[int, dict[str, str]] = {}
    for event in events:
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or choice.get("message") or {}
            text += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for at, part in enumerate(delta.get("tool_calls") or ()):
                call = calls.setdefault(part.get("index", at), {"id": "", "name": "", "arguments": ""})
                call["id"] += part.get("id") or ""
                for key in ("name", "arguments"):
                    call[key] += part.get("function", {}).get(key) or ""
    made = tuple(ToolCall(**call) for _, call in sorted(calls.items()))
    return Message(role="assistant", text=text, reasoning=reasoning, tool_calls=made)


def _anthropic(events: Sequence[dict[str, Any]], names: Names) -> Message:
    blocks: dict[int, dict[str, str]] = {}
    for event in events:
        if event.get("type") == "message":
            for at, block in enumerate(event["content"]):
                blocks[at] = block | {"json": orjson.dumps(block.get("input", {})).decode()}
        elif event.get("type") == "content_block_start":
            blocks[event["index"]] = {"json": "", "thinking": "", "text": ""} | event["content_block"]
        elif event.get("type") == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            for key, part in (("text", "text"), ("thinking", "thinking"), ("json", "partial_json")):
                block[key] = block.get(key, "") + (delta.get(part) or "")
    ordered = [block for _, block in sorted(blocks.items())]
    calls = [block for block in ordered if block["type"] == "tool_use"]
    return Message(
        role="assistant",
        text="".join(block["text"] for block in ordered if block["type"] == "text"),
        reasoning="".join(block["thinking"] for block in ordered if block["type"] == "thinking"),
        tool_calls=tuple(ToolCall(id=c["id"], name=c["name"], arguments=c["json"]) for c in calls),
    )


def _responses(events: Sequence[dict[str, Any]], names: Names) -> Message:
    done = events[-1].get("response", events[-1])
    text, reasoning, calls = "", "", []
    for item in done["output"]:
        if item["type"] == "message":
            text += "".join(part["text"] for part in item["content"])
        elif item["type"] == "reasoning":
            reasoning += "".join(part["text"] for part in item.get("content") or item["summary"])
        else:
            arguments = item.get("arguments") or orjson.dumps({"input": item.get("input")}).decode()
            name = names.get((item.get("namespace") or "", item["name"]), item["name"])
            calls.append(ToolCall(id=item["call_id"], name=name, arguments=arguments))
    return Message(role="assistant", text=text, reasoning=reasoning, tool_calls=tuple(calls))


def _gemini(events: Sequence[dict[str, Any]], names: Names) -> Message:
    parts = [part for event in events for part in event["candidates"][0]["content"]["parts"]]
    calls = [part["functionCall"] for part in parts if "functionCall" in part]
    return Message(
        role="assistant",
        text="".join(part["text"] for part in parts if "text" in part and not part.get("thought")),
        reasoning="".join(part["text"] for part in parts if part.get("thought")),
        tool_calls=tuple(
            ToolCall(id=call["id"], name=call["name"], arguments=orjson.dumps(call["args"]).decode())
            for call in calls
        ),
    )


_READERS: Mapping[str, Callable[[Sequence[dict[str, Any]], Names], Message]] = {
    "chat": _chat,
    "anthropic": _anthropic,
    "responses": _responses,
    "gemini": _gemini,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """An assistant message of a request, beside the reply that it is the echo of."""

    turn: int
    said: Message
    got: Message


def echoes(recording: Recording) -> Iterator[Echo]:
    """Echoes of replies with calls, known by their call ids; each time they are sent."""
    replies = [said(call) for call in recording.calls]
    minted = {call.id: turn for turn, reply in enumerate(replies) for call in reply.tool_calls}
    for call in recording.calls:
        for message in call.wire().request.messages:
            turn = minted.get(message.tool_calls[0].id) if message.tool_calls else None
            if turn is not None:
                yield Echo(turn=turn, said=replies[turn], got=message)


def requests(recording: Recording) -> list[ModelRequest]:
    """The request of every turn."""
    return [call.wire().request for call in recording.calls]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What came of a recording played again."""

    statuses: Sequence[int]
    replies: Sequence[Message]
    """Of the answered model calls."""
    session: Session
    engine: ScriptedEngine
    trajectory: Trajectory


def sampled(renderer: TemplateRenderer, message: Message) -> IntArray:
    """Ids that say `message` with its arguments spelled as they are."""
    text = f"<think>\n{message.reasoning}\n</think>\n\n" if message.reasoning else ""
    text += message.text
    for at, call in enumerate(message.tool_calls):
        between = "\n" if at or message.text else ""
        inside = f'{{"name": {orjson.dumps(call.name).decode()}, "arguments": {call.arguments}}}'
        text += f"{between}<tool_call>\n{inside}\n</tool_call>"
    end = np.array([renderer.end_ids[0]], dtype=np.int32)
    return np.concatenate([renderer.codec.encode(text), end]).astype(np.int32)


async def replay(recording: Recording, renderer: TemplateRenderer, splitter: Splitter) -> Replay:
    """Every request again, one after the other."""
    answers = [said(call) for call in recording.calls]

    def policy(ids: IntArray, key: RequestKey) -> IntArray:
        spoken = sampled(renderer, answers[key.turn])
        return splitter.split(spoken) if key.turn % 2 else spoken

    engine = ScriptedEngine(renderer, policy, sampled=True)
    pointers: dict[str, str] = {}
    statuses, replies = [], []
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(Gateway(TokenBackend(engine, renderer)))
        listener = await stack.enter_async_context(gateway.listen_tcp())
        http = await stack.enter_async_context(aiohttp.ClientSession())
        # Prompts without other people's prose have more tokens than they had.
        limits = recording.limits.changed(max_context_tokens=1 << 20)
        session = gateway.open_session(recording.rollout, seed=recording.seed, limits=limits)
        base = f"http://127.0.0.1:{listener.port}/s/{session.public_id}"
        for exchange in recording.exchanges:
            body = orjson.dumps(exchange.body).decode() if exchange.body is not None else None
            if body is not None:
                body = POINTER.sub(lambda found: pointers.get(found[0], found[0]), body)
            headers = {**exchange.headers, "Authorization": f"Bearer {session.secret}"}
            url = base + exchange.path
            async with http.request(exchange.method, url, data=body, headers=headers) as response:
                text = await response.text()
            statuses.append(response.status)
            if exchange.dialect and response.status == 200:
                replies.append(said(Exchange(**_fields(exchange) | {"reply": text})))
                pointers.update(zip(POINTER.findall(exchange.reply), POINTER.findall(text), strict=False))
        trajectory = await session.seal(5.0)
    return Replay(statuses=statuses, replies=replies, session=session, engine=engine, trajectory=trajectory)


def _fields(exchange: Exchange) -> dict[str, Any]:
    keys = ("method", "path", "headers", "body", "status", "reply")
    return {key: getattr(exchange, key) for key in keys}


def paths(trajectory: Trajectory) -> dict[int, tuple[IntArray, IntArray]]:
    """Turn -> (prompt ids, ids with what was sampled), rebuilt from the deltas."""
    whole: dict[int, IntArray] = {-1: np.zeros(0, dtype=np.int32)}
    found = {}
    for turn in trajectory.turns:
        prompt = np.concatenate([whole[turn.parent], turn.context_ids])
        whole[turn.index] = np.concatenate([prompt, turn.ids])
        found[turn.index] = (prompt, whole[turn.index])
    return found
