"""A field that is null is a field that is absent, in every wire format and at every level of a body."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gateway_rig import Rig
from wire_lab import CALLS, PLAIN, SAY

from insitu.chat.template import TemplateRenderer
from insitu.gateway.dialects import anthropic, chat, gemini_input, responses_input
from insitu.gateway.dialects.base import WireError
from insitu.gateway.server import DIALECTS
from insitu.types import ModelRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
ARGUMENTS = {"a": "b"}
ROUTES = {
    "chat": ("chat/completions", "chat/completions"),
    "anthropic": ("messages", "messages"),
    "responses": ("responses", "responses"),
    "gemini": ("../v1beta/models/m:generateContent", "models/m:generateContent"),
}
"""Path below /v1, and what of it the dialect reads."""

CHAT_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "S", "name": "n"},
        {"role": "user", "content": [{"type": "text", "text": "U"}, {"type": "image_url", "image_url": {}}]},
        {
            "role": "assistant",
            "content": "A",
            "reasoning_content": "R",
            "refusal": "",
            "audio": {},
            "tool_calls": [CHAT_CALL],
        },
        {"role": "tool", "tool_call_id": "c", "content": "T", "name": "f"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "f", "description": "D", "parameters": SCHEMA, "strict": True},
        }
    ],
    "tool_choice": "required",
    "stop": ["x"],
    "n": 1,
    "stream": False,
    "stream_options": {"include_usage": True},
    "metadata": {"k": "v"},
    "max_tokens": 5,
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
}
BLOCKS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "R", "signature": "p"},
    {"type": "text", "text": "A", "citations": [], "cache_control": {"type": "ephemeral"}},
    {"type": "tool_use", "id": "c", "name": "f", "input": ARGUMENTS},
]
RESULT = {
    "type": "tool_result",
    "tool_use_id": "c",
    "is_error": False,
    "content": [{"type": "text", "text": "T"}],
}
ANTHROPIC: dict[str, Any] = {
    "system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": BLOCKS},
        {"role": "user", "content": [RESULT, {"type": "document", "source": {"type": "text", "data": "D"}}]},
    ],
    "tools": [{"type": "custom", "name": "f", "description": "D", "input_schema": SCHEMA, "strict": True}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
    "thinking": {"type": "enabled", "budget_tokens": 1},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"},
    "max_tokens": 5,
    "stream": False,
}
RESPONSES: dict[str, Any] = {
    "instructions": "S",
    "input": [
        {"type": "message", "role": "user", "id": "i", "content": [{"type": "input_text", "text": "U"}]},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [{"type": "summary_text", "text": "R"}],
            "content": [{"type": "reasoning_text", "text": "R"}],
            "encrypted_content": "p",
            "status": "completed",
        },
        {"type": "function_call", "call_id": "c", "name": "f", "namespace": "s", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "T", "status": "completed"},
        {"type": "shell_call", "call_id": "d", "action": {"commands": ["ls"], "timeout_ms": 1}},
        {"type": "shell_call_output", "call_id": "d", "output": "T"},
    ],
    "tools": [
        {"type": "function", "name": "f", "description": "D", "parameters": SCHEMA, "strict": True},
        {"type": "custom", "name": "g", "description": "D", "format": {"type": "grammar", "definition": "G"}},
        {"type": "namespace", "name": "s", "tools": [{"type": "function", "name": "f"}]},
        {"type": "shell", "environment": {"type": "local"}},
    ],
    "tool_choice": "auto",
    "include": ["reasoning.encrypted_content"],
    "metadata": {"k": "v"},
    "text": {"format": {"type": "json_object"}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "max_output_tokens": 16,
    "store": False,
    "stream": False,
}
GEMINI: dict[str, Any] = {
    "systemInstruction": {"role": "user", "parts": [{"text": "S"}]},
    "contents": [
        {"role": "user", "parts": [{"text": "U"}, {"inlineData": {"mimeType": "image/png", "data": "AA=="}}]},
        {
            "role": "model",
            "parts": [
                {"text": "R", "thought": True, "thoughtSignature": "cA=="},
                {"functionCall": {"id": "c", "name": "f", "args": ARGUMENTS}, "thoughtSignature": "cA=="},
            ],
        },
        {
            "role": "user",
            "parts": [{"functionResponse": {"id": "c", "name": "f", "response": ARGUMENTS, "parts": []}}],
        },
    ],
    "tools": [
        {"functionDeclarations": [{"name": "f", "description": "D", "parametersJsonSchema": SCHEMA}]},
        {"googleSearch": {}},
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "generationConfig": {
        "maxOutputTokens": 5,
        "stopSequences": ["x"],
        "candidateCount": 1,
        "responseModalities": ["TEXT"],
        "responseMimeType": "application/json",
        "responseSchema": {"type": "object"},
        "thinkingConfig": {"includeThoughts": True},
    },
    "labels": {"k": "v"},
}
BODIES = {"chat": CHAT, "anthropic": ANTHROPIC, "responses": RESPONSES, "gemini": GEMINI}
FREE = (
    "parameters",
    "input_schema",
    "parametersJsonSchema",
    "responseSchema",
    "schema",
    "input",
    "args",
    "response",
)
"""Fields whose content is the user's own; in Responses `input` is the conversation."""


def fields_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every field of every object in a body."""
    if isinstance(value, list):
        for i, one in enumerate(value):
            yield from fields_of(one, (*path, i))
    if isinstance(value, dict):
        for key, one in value.items():
            yield (*path, key)
            if key not in FREE or (key == "input" and not path):
                yield from fields_of(one, (*path, key))


def changed(body: dict[str, Any], path: tuple[Any, ...], *, null: bool) -> dict[str, Any]:
    made = copy.deepcopy(body)
    inside: Any = made
    for step in path[:-1]:
        inside = inside[step]
    if null:
        inside[path[-1]] = None
    else:
        del inside[path[-1]]
    return made


def outcome(name: str, body: dict[str, Any], *, recorded: bool) -> ModelRequest | str | None:
    """The request, or the field that is refused; `recorded`: with what is only recorded, as it was sent."""
    try:
        request = DIALECTS[name].parse(body, ROUTES[name][1]).request
    except WireError as error:
        return error.param
    return request if recorded else replace(request, advisory=())


@pytest.mark.parametrize(
    ("name", "path"), [(name, path) for name, body in BODIES.items() for path in fields_of(body)]
)
def test_null_is_absent(name: str, path: tuple[Any, ...]) -> None:
    null, absent = (changed(BODIES[name], path, null=null) for null in (True, False))
    recorded = len(path) == 1 or (path[0] == "generationConfig" and len(path) == 2)
    assert outcome(name, null, recorded=recorded) == outcome(name, absent, recorded=recorded)


KNOWN = {
    "chat": chat._FIELDS,
    "anthropic": anthropic._FIELDS,
    "responses": responses_input._FIELDS,
    "gemini": gemini_input._FIELDS,
}
ASKED = ("logprobs", "top_logprobs", "metadata", "tools", "tool_choice", "stop", "stream_options")
ASKED += ("response_format", "parallel_tool_calls", "n", "previous_response_id", "conversation", "audio")


@pytest.mark.parametrize("name", KNOWN)
async def test_a_body_with_every_known_field_null_is_answered_and_trained(
    renderer: TemplateRenderer, name: str
) -> None:
    fields = KNOWN[name]
    nulls = dict.fromkeys(sorted({*fields.read, *fields.advisory, *fields.refused, *ASKED}))
    if name == "gemini":
        nulls["generationConfig"] = dict.fromkeys(
            sorted({*gemini_input._CONFIG.read, *gemini_input._CONFIG.refused})
        )
    async with Rig(renderer, [SAY]) as rig:
        url = f"{rig.base}/{ROUTES[name][0]}"
        async with rig.http.post(url, json={**nulls, **PLAIN[name]}, headers=rig.auth) as response:
            assert response.status == 200, await response.text()
        trajectory = await rig.sealed()
    (turn,) = trajectory.turns
    assert turn.logprobs is not None
    assert np.isfinite(turn.logprobs).all()
    assert trajectory.ledger.trained == len(turn.ids) > 0
    assert turn.advisory == DIALECTS[name].parse(PLAIN[name], ROUTES[name][1]).request.advisory


@pytest.mark.parametrize("choice", ["required", "auto", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("tools", [None, []])
async def test_a_choice_among_no_tools_is_recorded(
    renderer: TemplateRenderer, choice: Any, tools: list[Any] | None
) -> None:
    async with Rig(renderer, [CALLS]) as rig:
        status, _ = await rig.post({**PLAIN["chat"], "tools": tools, "tool_choice": choice})
        assert status == 200
        trajectory = await rig.sealed()
    assert [key for key, _ in trajectory.turns[0].advisory] == ["tool_choice"]
