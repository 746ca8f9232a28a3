"""A body that continues a known one is parsed for its new elements only, and says what it says whole."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import orjson
import pytest

from insitu.capture.forest import Forest
from insitu.capture.message_history import History
from insitu.gateway.body_parser import CUTS, BodyParser, canonical_digest
from insitu.gateway.dialects.base import Dialect, ParsedBody, WireError
from insitu.gateway.json_offsets import whole_list
from insitu.gateway.server import DIALECTS
from insitu.types import Generation, ModelRequest

Body = dict[str, Any]

GROWING = [dialect for dialect in DIALECTS.values() if dialect.grows]
ACTIONS = {"gemini": "models/m:generateContent"}


def chat(turns: int, say: Callable[[int], str]) -> Body:
    messages: list[Body] = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "Fix it."}]
    for i in range(turns):
        call = {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": '{"a":[1]}'}}
        messages.append({"role": "assistant", "content": say(i), "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": say(1000 + i)})
    tool = {"type": "function", "function": {"name": "f", "description": 'do "]" it', "parameters": {}}}
    return {"model": "m", "messages": messages, "stream": True, "tools": [tool]}


def anthropic(turns: int, say: Callable[[int], str]) -> Body:
    messages: list[Body] = [{"role": "user", "content": "Fix it."}]
    for i in range(turns):
        use = {"type": "tool_use", "id": f"t{i}", "name": "f", "input": {"a": [1]}}
        messages.append({"role": "assistant", "content": [{"type": "text", "text": say(i)}, use]})
        done = {"type": "tool_result", "tool_use_id": f"t{i}", "content": say(1000 + i)}
        messages.append({"role": "user", "content": [done]})
    tool = {"name": "f", "description": "]", "input_schema": {"type": "object"}}
    return {"model": "m", "system": "Rules.", "messages": messages, "max_tokens": 99, "tools": [tool]}


def responses(turns: int, say: Callable[[int], str]) -> Body:
    items: list[Body] = [{"type": "message", "role": "user", "content": "Fix it."}]
    for i in range(turns):
        items.append({"type": "reasoning", "summary": [], "encrypted_content": f"p{i}"})
        items.append(
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": say(i)}]}
        )
        items.append({"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"})
        items.append({"type": "function_call_output", "call_id": f"c{i}", "output": say(1000 + i)})
    return {"model": "m", "instructions": "Rules.", "input": items, "stream": True, "store": False}


def posing(turns: int, say: Callable[[int], str]) -> Body:
    """Items of the model that carry a user's role."""
    body = responses(turns, say)
    for item in body["input"]:
        if item["type"] in ("reasoning", "function_call"):
            item["role"] = "user"
    return body


def posing_anthropic(turns: int, say: Callable[[int], str]) -> Body:
    """Replies that the client split, and that carry the type of an answer."""
    body = anthropic(turns, say)
    split: list[Body] = []
    for message in body["messages"]:
        if message["role"] == "assistant":
            split += [{**message, "content": [b], "type": "function_call_output"} for b in message["content"]]
        else:
            split.append(message)
    return {**body, "messages": split}


def gemini(turns: int, say: Callable[[int], str]) -> Body:
    contents: list[Body] = [{"role": "user", "parts": [{"text": "Fix it."}]}]
    for i in range(turns):
        call = {"functionCall": {"id": f"c{i}", "name": "f", "args": {"a": [1]}}}
        contents.append({"role": "model", "parts": [{"text": say(i)}, call]})
        result = {"functionResponse": {"id": f"c{i}", "name": "f", "response": {"output": say(1000 + i)}}}
        contents.append({"role": "user", "parts": [result]})
    return {"systemInstruction": {"parts": [{"text": "Rules."}]}, "contents": contents}


MAKE: Mapping[str, Callable[[int, Callable[[int], str]], Body]] = {
    "chat": chat,
    "anthropic": anthropic,
    "responses": responses,
    "gemini": gemini,
}


def words(i: int) -> str:
    return f'{i} says: "]}}", é 日本 🙂 \\ \n' * 20


class Lab:
    """One session's bodies, and a forest that reads what they say."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.action = ACTIONS.get(dialect.name, "call")
        self.bodies = BodyParser(128, 1 << 20)
        self.forest = Forest("r/0")

    def parse(self, raw: bytes) -> ParsedBody:
        """Parsed both ways; they must agree, message by message and in what the forest makes of them."""
        wire = self.bodies.parse(self.dialect, raw, self.action)
        whole = self.dialect.parse(json.loads(raw), self.action)
        request = ModelRequest(messages=wire.request.messages, tools=wire.request.tools)
        plan = self.forest.plan(request, "f")
        reported = Forest("r/1").plan(whole.request, "f")
        assert (plan.root_key, plan.digests.run()) == (reported.root_key, reported.digests.run())
        assert len(request.messages) == len(whole.request.messages)
        if isinstance(request.messages, History):  # to iterate over it would parse the body again
            assert request.messages.fresh == tuple(whole.request.messages)[request.messages.known :]
        assert wire.request.hints == whole.request.hints
        assert request.tools == whole.request.tools
        assert wire.names == whole.names
        assert (wire.request.stream, wire.request.max_tokens) == (
            whole.request.stream,
            whole.request.max_tokens,
        )
        return wire

    def known(self, raw: bytes) -> int:
        """How many messages of this body were known."""
        messages = self.parse(raw).request.messages
        return messages.known if isinstance(messages, History) else 0


def dump(body: Body) -> bytes:
    return orjson.dumps(body)


@pytest.mark.parametrize("dialect", GROWING, ids=lambda d: d.name)
@pytest.mark.parametrize(
    "write",
    [dump, lambda b: json.dumps(b).encode(), lambda b: json.dumps(b, indent=2, ensure_ascii=False).encode()],
    ids=["compact", "spaced", "indented"],
)
def test_each_turn_costs_what_is_new(dialect: Dialect, write: Callable[[Body], bytes]) -> None:
    lab = Lab(dialect)
    for turn in range(30):
        raw = write(MAKE[dialect.name](turn, words))
        before = lab.bodies.parsed_bytes
        wire = lab.bodies.parse(dialect, raw, lab.action)
        plan = lab.forest.plan(wire.request, "f")
        parsed = lab.bodies.parsed_bytes - before
        assert parsed < 4 * len(words(0).encode()) + 1500, "the known messages were read again"
        assert plan.drift.kind == "clean"
        assert len(plan.replace) == (1 if turn else len(wire.request.messages) - 1)
        node = lab.forest.extend(plan, np.array([turn], dtype=np.int32))
        following = dialect.parse(orjson.loads(dump(MAKE[dialect.name](turn + 1, words))), lab.action)
        said = [m for m in following.request.messages if m.role == "assistant"][-1]
        answer = Generation(
            ids=np.array([turn], dtype=np.int32), logprobs=None, finish="stop", version_runs=((0, 0),)
        )
        lab.forest.mark_delivered(lab.forest.commit(node, answer, said, turn=turn))


@pytest.mark.parametrize("dialect", GROWING, ids=lambda d: d.name)
@pytest.mark.case(36)
def test_any_history_of_edits_reads_as_it_would_whole(dialect: Dialect) -> None:
    chance = random.Random(7)
    lab, seen, turns = Lab(dialect), 0, 3
    edits: dict[int, str] = {}
    for _ in range(120):
        move = chance.random()
        if move < 0.55:
            turns += 1
        elif move < 0.75:
            turns = max(1, turns - chance.randrange(1, 4))
        elif move < 0.9:
            edits[chance.choice((0, 1000)) + chance.randrange(turns)] = f"edited {chance.random()}"
        else:
            edits.clear()
        body = MAKE[dialect.name](turns, lambda i: edits.get(i, words(i)))
        if chance.random() < 0.1:
            body["user"] = str(turns)
        seen += lab.known(dump(body)) > 0
    assert seen > 60


@pytest.mark.parametrize("make", [posing, posing_anthropic])
def test_a_turn_of_the_model_is_never_cut_whatever_its_parts_call_themselves(
    make: Callable[[int, Callable[[int], str]], Body],
) -> None:
    lab = Lab(DIALECTS["responses" if make is posing else "anthropic"])
    for turn in range(1, 6):
        raw = dump(make(turn, words))
        lab.parse(raw)
        # The same up to the middle of the newest turn.
        for part in (b'"c%d"' % (turn - 1), b'"t%d"' % (turn - 1), b'"%d says' % (turn - 1)):
            lab.parse(raw.replace(part, b'"9' + part[1:]))
            lab.parse(raw)


def test_labels_of_new_elements_are_kept_when_the_rest_is_known() -> None:
    lab = Lab(DIALECTS["chat"])
    body = chat(3, words)
    lab.parse(dump(body))
    call = {"name": "f", "arguments": "{}"}
    body["messages"] += [{"role": "assistant", "content": "x", "function_call": call}]
    body["messages"] += [{"role": "user", "name": "Ann", "content": "y"}]
    wire = lab.parse(dump(body))
    assert isinstance(wire.request.messages, History)
    assert wire.request.messages.known
    assert wire.request.hints == (("dropped_field", "function_call"), ("dropped_field", "name"))


def named(turn: int) -> Body:
    """A message that carries a label of its own."""
    dropped = {"name": "Ann"} if turn % 2 else {"function_call": {"name": "f", "arguments": "{}"}}
    return {"role": "user", "content": "Go on.", **dropped}


def offered(turn: int) -> Body:
    """An item that brings a tool of its own."""
    tool = {"type": "function", "name": "t", "description": "", "parameters": {}}
    space = {"type": "namespace", "name": f"ns{turn}", "tools": [tool]}
    return {"type": "additional_tools", "tools": [space]}


@pytest.mark.parametrize(
    ("make", "brings", "key"), [(chat, named, "messages"), (responses, offered, "input")]
)
@pytest.mark.case(36)
def test_what_elements_brought_goes_with_them(
    make: Callable[[int, Callable[[int], str]], Body], brings: Callable[[int], Body], key: str
) -> None:
    """Elements with labels and tools of their own come, are dropped and come again, some in one call."""
    lab, chance, seen = Lab(DIALECTS["chat" if make is chat else "responses"]), random.Random(3), 0
    for _ in range(60):
        body = make(chance.randrange(2, 5), words)
        for at in sorted(chance.sample(range(2, len(body[key])), chance.randrange(3)), reverse=True):
            body[key].insert(at, brings(at))
        seen += lab.known(dump(body)) > 0
    assert seen > 20


@pytest.mark.case(24)
def test_a_mark_that_moves_to_the_newest_message_costs_its_turn_only() -> None:
    lab = Lab(DIALECTS["anthropic"])
    for turn in range(1, 20):
        body = anthropic(turn, words)
        body["messages"][-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        known = lab.known(dump(body))
        assert known >= len(lab.dialect.parse(body, "call").request.messages) - 7 or turn < 3


@pytest.mark.parametrize("dialect", GROWING, ids=lambda d: d.name)
def test_interleaved_conversations_stay_known(dialect: Dialect) -> None:
    lab = Lab(dialect)
    for turn in range(1, 8):
        for agent in range(4):
            body = MAKE[dialect.name](turn, lambda i, a=agent: f"agent {a} " + words(i))  # type: ignore[misc]
            body["user"] = f"agent {agent}"
            assert lab.known(dump(body)) > 0 or turn == 1


def test_a_list_named_twice_is_never_cut() -> None:
    lab = Lab(DIALECTS["chat"])
    body = dump(chat(3, words))
    twice = b'{"messages":[{"role":"user","content":"other"}],' + body[1:]
    for _ in range(3):
        assert lab.known(twice) == 0


@pytest.mark.parametrize(
    "tail", [b'{"role":"user"', b"1]", b'"x"],"messages":[', b'{"role":"nobody"}', b"[["]
)
def test_what_is_wrong_with_new_elements_is_named_as_when_parsed_whole(tail: bytes) -> None:
    lab = Lab(DIALECTS["chat"])
    raw = dump(chat(3, words))
    lab.parse(raw)
    at = raw.index(b'],"stream"')
    bad = raw[:at] + b"," + tail + raw[at:]
    with pytest.raises(WireError) as reported:
        lab.bodies.parse(lab.dialect, bad, lab.action)
    with pytest.raises(WireError) as fresh:
        BodyParser(128, 1 << 20).parse(lab.dialect, bad, lab.action)
    assert (str(reported.value), reported.value.param) == (str(fresh.value), fresh.value.param)
    assert lab.known(raw) > 0


def test_depth_is_counted_from_the_top_of_the_body() -> None:
    lab = Lab(DIALECTS["chat"])
    body = chat(3, words)
    lab.parse(dump(body))
    deep: Any = 1
    for _ in range(126):
        deep = [deep]
    body["messages"].append({"role": "user", "content": "x", "extra": deep})
    with pytest.raises(WireError, match="deep"):
        lab.bodies.parse(lab.dialect, dump(body), lab.action)


def test_names_of_equal_bodies_are_the_same_however_spelled() -> None:
    bodies = BodyParser(128, 1 << 20)
    dialect = DIALECTS["chat"]
    body = chat(2, words)

    def same(one: bytes, other: bytes, action: str = "call") -> bool:
        parsed = bodies.parse(dialect, one, "call"), bodies.parse(dialect, other, action)
        canonical = {canonical_digest(body) for body in parsed}
        assert (len({body.digest for body in parsed}) == 1) == (one == other and action == "call")
        return len(canonical) == 1

    one = dump(body)
    other = copy.deepcopy(body)
    assert same(one, dump(other))
    assert same(one, json.dumps(dict(reversed(other.items())), indent=1).encode())
    assert not same(one, dump(other), "elsewhere")
    other["messages"][-1]["content"] += "."
    assert not same(one, dump(other))
    assert same(dump(other), json.dumps(other).encode())


def test_few_conversations_and_few_cuts_are_kept() -> None:
    lab = Lab(DIALECTS["chat"])
    for user in range(40):
        lab.parse(dump({**chat(5, words), "user": str(user)}))
    records = lab.bodies._records
    assert len(records) <= 8
    assert all(len(record.cuts) <= CUTS for record in records)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('{"a":1,"m":[1,{"x":"]"},[2]],"b":[]}', 3),
        (' { "m" : [ ] } ', 0),
        ('{"m":[1] , "m":[2]}', None),
        ('{"m":3}', None),
        ('{"n":[1]}', None),
        ("{}", None),
    ],
)
def test_a_list_is_found_by_its_key(text: str, count: int | None) -> None:
    found = whole_list(text, "m")
    assert (None if found is None else len(found.values)) == count
    if found is not None:
        assert text[found.close] == "]"
        assert [
            json.loads(text[text.index("[") + 1 : end].split(",")[-1] or "0") for end in found.ends[:1]
        ] in (
            [],
            [1],
        )


def test_a_half_of_a_surrogate_pair_in_a_known_or_new_part_is_read_as_its_replacement() -> None:
    lab = Lab(DIALECTS["chat"])
    half, whole = b'"half \\ud83d"', '"half \ufffd"'.encode()
    for turn in range(1, 6):
        raw = dump(chat(turn, words)).replace(b'"Fix it."', half)
        wire = lab.bodies.parse(lab.dialect, raw, lab.action)
        lab.forest.plan(wire.request, "f")
        meant = lab.dialect.parse(orjson.loads(raw.replace(half, whole)), lab.action)
        assert tuple(wire.request.messages) == tuple(meant.request.messages)
        assert canonical_digest(wire)
    newest = orjson.dumps(chat(6, words)).replace(b'"Fix it."', half).replace(b"1005 says", b"\\udc00 says")
    wire = lab.bodies.parse(lab.dialect, newest, lab.action)
    assert "\ufffd says" in wire.request.messages[-1].text


@pytest.mark.parametrize("tail", [b".5", b"e5", b"5", b'"', b"x", b" .5"])
def test_what_is_no_json_behind_a_known_body_is_refused(tail: bytes) -> None:
    """It must not become a part of what the reader puts before new elements."""
    lab = Lab(GROWING[0])
    raw = dump(MAKE[GROWING[0].name](3, words))
    lab.bodies.parse(GROWING[0], raw, lab.action)
    plan = lab.forest.plan(lab.bodies.parse(GROWING[0], raw, lab.action).request, "f")
    assert plan.replace
    close = raw.rindex(b"]", 0, raw.index(b'"stream"') if b'"stream"' in raw else None)
    broken = raw[:close] + tail + raw[close:]
    with pytest.raises(WireError) as refused:
        lab.bodies.parse(GROWING[0], broken, lab.action)
    assert refused.value.status == 400
