"""A longer conversation begins as the shorter one did: parse(body + more) starts with parse(body)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from agent_bodies import BODIES
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.gateway.server import DIALECTS
from insitu.types import ModelRequest

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
LIST = {"chat": "messages", "anthropic": "messages", "responses": "input", "gemini": "contents"}
ACTION = {"gemini": "models/m:streamGenerateContent?alt=sse"}

Turn = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""What the user's side says and what the assistant answers, in elements of the wire's list."""


def chat_turn(texts: list[str], answers: list[str]) -> Turn:
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for i in range(len(answers))
    ]
    user = {"role": "user", "content": [{"type": "text", "text": t} for t in texts]}
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": a} for i, a in enumerate(answers)]
    said = {"role": "assistant", "content": texts[0], "reasoning_content": texts[-1], "tool_calls": calls}
    return [*results, user], [said]


def anthropic_turn(texts: list[str], answers: list[str]) -> Turn:
    results = [
        {"type": "tool_result", "tool_use_id": f"c{i}", "content": a, "is_error": i > 0}
        for i, a in enumerate(answers)
    ]
    user = {"role": "user", "content": [*results, *({"type": "text", "text": t} for t in texts)]}
    uses = [{"type": "tool_use", "id": f"c{i}", "name": "f", "input": {}} for i in range(len(answers))]
    thinking = {"type": "thinking", "thinking": texts[-1], "signature": "s"}
    said = {"role": "assistant", "content": [thinking, {"type": "text", "text": texts[0]}, *uses]}
    return [user, {"role": "system", "content": texts[0]}], [said]


def responses_turn(texts: list[str], answers: list[str]) -> Turn:
    results = [
        {"type": "function_call_output", "call_id": f"c{i}", "output": a} for i, a in enumerate(answers)
    ]
    user = {"role": "user", "content": [{"type": "input_text", "text": t} for t in texts]}
    said: list[dict[str, Any]] = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": texts[-1]}]},
        {"type": "message", "role": "assistant", "content": texts[0]},
        *(
            {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"}
            for i in range(len(answers))
        ),
    ]
    return [*results, user], said


def gemini_turn(texts: list[str], answers: list[str]) -> Turn:
    results = [{"functionResponse": {"name": "f", "response": {"output": a}}} for a in answers]
    calls = [{"functionCall": {"name": "f", "args": {}}} for _ in answers]
    user = {"role": "user", "parts": [*results, *({"text": t} for t in texts)]}
    said = {"role": "model", "parts": [{"text": texts[-1], "thought": True}, {"text": texts[0]}, *calls]}
    return [user], [said]


TURNS = {
    "chat": chat_turn,
    "anthropic": anthropic_turn,
    "responses": responses_turn,
    "gemini": gemini_turn,
}


def parse(name: str, elements: list[dict[str, Any]]) -> ModelRequest:
    body = BODIES[name]()
    body[LIST[name]] = copy.deepcopy(elements)
    return DIALECTS[name].parse(body, ACTION.get(name, "")).request


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=60)
@given(
    drawn=st.lists(
        st.tuples(st.lists(TEXT, min_size=1, max_size=3), st.lists(TEXT, max_size=3)),
        min_size=1,
        max_size=5,
    )
)
def test_every_request_begins_as_the_one_before(name: str, drawn: list[tuple[list[str], list[str]]]) -> None:
    elements: list[dict[str, Any]] = []
    before: ModelRequest | None = None
    for texts, answers in drawn:
        asked, said = TURNS[name](texts, answers)
        elements += asked
        now = parse(name, elements)
        if before is not None:
            assert now.messages[: len(before.messages)] == before.messages
            assert now.messages[len(before.messages)].role == "assistant"
            assert (now.tools, now.hints) == (before.tools, before.hints)
        before = now
        elements += said


@pytest.mark.case(24)
def test_what_claude_code_changes_from_call_to_call_changes_nothing() -> None:
    """Marks for the cache move, the billing block differs, a text becomes a list of one."""
    one, two = BODIES["anthropic"](), BODIES["anthropic"]()
    two["system"][0]["text"] = "x-anthropic-billing-header: cc_version=2.1; cch=ff;"
    del two["system"][1]["cache_control"]
    two["messages"][0]["content"][0]["cache_control"] = {"type": "ephemeral"}
    del two["messages"][4]["content"][1]["cache_control"]
    two["messages"][5]["content"] = [
        {"type": "text", "text": "Done.", "cache_control": {"type": "ephemeral"}}
    ]
    two["messages"][6]["content"] = [{"type": "text", "text": "And g?"}]
    dialect = DIALECTS["anthropic"]
    assert dialect.parse(one, "").request == dialect.parse(two, "").request
    assert "billing" not in repr(dialect.parse(one, "").request.messages)


@pytest.mark.parametrize("name", DIALECTS)
def test_real_bodies_keep_everything_the_model_should_see(name: str) -> None:
    request = DIALECTS[name].parse(BODIES[name](), ACTION.get(name, "")).request
    said = [m for m in request.messages if m.role == "assistant"]
    assert [m.text for m in said][-1] == "Done."
    assert said[0].reasoning == "Which file?"
    assert len(said[0].tool_calls) == 2
    answered = [m.tool_call_id for m in request.messages if m.role == "tool"]
    assert answered == [call.id for call in said[0].tool_calls]
    assert request.messages[0].text == "You fix code."
    assert request.messages[-1].text == "And g?"
    assert request.hints or name == "chat"


@pytest.mark.parametrize("name", ["chat", "anthropic", "responses", "gemini"])
def test_what_an_agent_says_of_itself_is_bounded(name: str) -> None:
    body = BODIES[name]()
    said = {f"key {i} " + "k" * 5000: "v" * 5000 for i in range(500)}
    body |= {"metadata": {**said, "user_id": "u" * 5000}, "client_metadata": said, "labels": said}
    hints = DIALECTS[name].parse(body, ACTION.get(name, "")).request.hints
    assert 0 < len(hints) <= 64
    assert max(len(part) for hint in hints for part in hint) == 512
