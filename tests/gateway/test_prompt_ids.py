"""Edits over the wire: the session's drifts say which turn, why, and from which sampled token on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from gateway_rig import ASK, TOOLS, Rig, call, said

from insitu.chat.template import TemplateRenderer
from insitu.types import Message

SAMPLED = Message(
    role="assistant",
    text="I look. ",
    reasoning="Hm.",
    tool_calls=(call("read", '{"path": "é.py", "limit": 3}'),),
)


def repaired(message: dict[str, Any], arguments: str) -> None:
    message["tool_calls"][0]["function"]["arguments"] = arguments


@pytest.mark.case(18, 20, 21, 22, 23)
@pytest.mark.parametrize(
    ("edit", "cause", "detail", "from_text"),
    [
        (lambda m: repaired(m, '{"path":"é.py","limit":3,"all":false}'), "default added", "read all", "}"),
        (lambda m: repaired(m, '{"path":"é.py","limit":"3"}'), "type coerced", "read limit", " 3"),
        (lambda m: repaired(m, '{"limit":3}'), "argument dropped", "read path", ""),
        (lambda m: m.update(content="I look."), "text trimmed", "", " "),
        (lambda m: m.pop("tool_calls"), "call missing", "", ""),
        (lambda m: m.update(reasoning_content="Ha."), "reasoning", "", "m"),
        (lambda m: (m.clear(), m.update(role="user", content="No call.")), "missing", "", ""),
    ],
)
async def test_an_edit_is_explained_from_the_held_ids(
    renderer: TemplateRenderer, edit: Any, cause: str, detail: str, from_text: str
) -> None:
    async with Rig(renderer, [SAMPLED, said("Done.")]) as rig:
        body: dict[str, Any] = {"messages": list(ASK), "tools": TOOLS}
        _, first = await rig.post(body)
        echo = copy.deepcopy(first["choices"][0]["message"])
        result = {"role": "tool", "tool_call_id": echo["tool_calls"][0]["id"], "content": "x"}
        edit(echo)
        answered = [result] if echo.get("tool_calls") else [{"role": "user", "content": "Go on."}]
        status, _ = await rig.post({**body, "messages": [*ASK, echo, *answered]})
        assert status == 200
        trajectory = await rig.session.seal(5.0)
        (note,) = trajectory.drifts
        assert (note.kind, note.cause, note.detail) == ("edited", cause, detail)
        assert (note.turn, note.request) == (0, 1)
        held = trajectory.turns[0].ids
        assert note.tokens == len(held) - note.token
        shared = renderer.decode(held[: note.token])
        assert renderer.decode(held[note.token :]).startswith(from_text)
        if cause == "text trimmed":
            assert shared.endswith("I look.")


@pytest.mark.case(18)
async def test_another_spelling_is_no_edit(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [SAMPLED, said("Done.")]) as rig:
        body: dict[str, Any] = {"messages": list(ASK), "tools": TOOLS}
        _, first = await rig.post(body)
        echo = copy.deepcopy(first["choices"][0]["message"])
        repaired(echo, '{"limit":3.0,"path":"\\u00e9.py"}')
        del echo["reasoning_content"]
        result = {"role": "tool", "tool_call_id": echo["tool_calls"][0]["id"], "content": "x"}
        await rig.post({**body, "messages": [*ASK, echo, result]})
        trajectory = await rig.session.seal(5.0)
        assert trajectory.drifts == ()
        assert [turn.parent for turn in trajectory.turns] == [-1, 0]


@pytest.mark.case(25)
@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("", [None, "", [], [{"type": "text", "text": ""}], "left out"]),
        ("I look.", ["I look.", [{"type": "text", "text": "I look."}]]),
        ("I look.", [[{"type": "text", "text": "I "}, {"type": "text", "text": "look."}]]),
    ],
)
async def test_content_means_the_same_however_it_is_spelled(
    renderer: TemplateRenderer, text: str, spelled: list[Any]
) -> None:
    reply = Message(role="assistant", text=text, tool_calls=SAMPLED.tool_calls)
    for content in spelled:
        async with Rig(renderer, [reply, said("Done.")]) as rig:
            body: dict[str, Any] = {"messages": list(ASK), "tools": TOOLS}
            _, first = await rig.post(body)
            echo = {**first["choices"][0]["message"], "content": content}
            if content == "left out":
                del echo["content"]
            result = {"role": "tool", "tool_call_id": echo["tool_calls"][0]["id"], "content": "x"}
            status, _ = await rig.post({**body, "messages": [*ASK, echo, result]})
            assert status == 200
            trajectory = await rig.session.seal(5.0)
            assert trajectory.drifts == ()
            assert [turn.parent for turn in trajectory.turns] == [-1, 0]
