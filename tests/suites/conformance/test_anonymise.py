"""What a recording keeps of a request: everything but other people's prose."""

from __future__ import annotations

import json

import pytest

from insitu_lab.conformance.anonymise import masked

PROSE = "You are Some Agent. Be kind to 3 users, always."
TOOL = {
    "name": "read_file",
    "description": PROSE,
    "input_schema": {
        "type": "object",
        "properties": {"path": {"type": "string", "description": PROSE}},
        "required": ["path"],
    },
}
SAID = {"role": "assistant", "content": [{"type": "text", "text": PROSE}, {"type": "tool_use", "id": "c1"}]}
BODIES = [
    {"system": [{"type": "text", "text": PROSE, "cache_control": {"type": "ephemeral"}}], "tools": [TOOL]},
    {"instructions": PROSE, "input": PROSE},
    {"input": [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": PROSE}]}]},
    {"systemInstruction": {"role": "user", "parts": [{"text": PROSE}]}},
    {"contents": [{"role": "user", "parts": [{"text": PROSE}, {"functionResponse": {"name": "read_file"}}]}]},
    {"messages": [{"role": "system", "content": PROSE}, {"role": "user", "content": [{"text": PROSE}]}]},
    {"tools": [{"functionDeclarations": [{"name": "read_file", "description": PROSE}]}]},
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_prose_goes_and_all_else_stays(body: dict[str, object]) -> None:
    before, after = json.dumps(body), json.dumps(masked(body))
    assert "Agent" in before
    assert "Agent" not in after
    assert "kind" not in after
    assert len(before) == len(after)
    assert "3" in after
    kept = (
        "read_file",
        "cache_control",
        "ephemeral",
        "required",
        "functionResponse",
        "developer",
        "input_text",
    )
    assert [word for word in kept if (word in before) != (word in after)] == []
    assert masked(body) == masked(json.loads(before))


def test_what_the_policy_and_its_tools_said_stays() -> None:
    reported = {"role": "tool", "tool_call_id": "c1", "content": PROSE}
    output = {"type": "function_call_output", "call_id": "c1", "output": PROSE}
    model = {"role": "model", "parts": [{"text": PROSE}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": PROSE}]}
    assert masked({"messages": [SAID, reported, result]}) == {"messages": [SAID, reported, result]}
    assert masked({"input": [output], "contents": [model]}) == {"input": [output], "contents": [model]}


def test_equal_words_stay_equal_and_others_differ() -> None:
    one, two = (
        str(masked({"instructions": text})["instructions"]) for text in ("the cat the dog", "the Cat")
    )
    words = one.split()
    assert words[0] == words[2]
    assert len(set(words)) == 3
    assert two.split()[0] == words[0]
    assert two.split()[1] != words[1]
