"""Every parameter of the official clients' calls is read, recorded or refused."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anthropic
import google.genai.models as genai_models
import pytest
from anthropic.resources.beta.messages import Messages as BetaMessages
from anthropic.resources.messages import Messages
from gateway_rig import ASK, Rig, call
from openai.resources.chat.completions import Completions
from openai.resources.responses import Responses
from openai.resources.responses.input_tokens import InputTokens
from pydantic import BaseModel
from wire_lab import PLAIN, SAY, anthropic_client, gemini_client, openai_client

from insitu.chat.template import TemplateRenderer
from insitu.gateway.dialects import anthropic as messages_format
from insitu.gateway.dialects import chat, gemini_input, responses_input
from insitu.gateway.dialects.base import WireError
from insitu.gateway.dialects.fields import Fields
from insitu.gateway.server import DIALECTS
from insitu.types import Message

IN_HEADERS = {"betas", "user_profile_id", "workspace_id"}
"""Parameters that the Anthropic client sends as headers."""
OF_THE_CALL = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}


def parameters(call: Callable[..., object]) -> set[str]:
    return set(inspect.signature(call).parameters) - OF_THE_CALL - IN_HEADERS


def listed(fields: Fields) -> set[str]:
    return set(fields.read) | set(fields.advisory) | set(fields.refused)


CALLS: Mapping[str, tuple[Callable[..., object], Fields]] = {
    "messages": (Messages.create, messages_format._FIELDS),
    "messages stream": (Messages.stream, messages_format._FIELDS),
    "beta messages": (BetaMessages.create, messages_format._FIELDS),
    "messages count": (Messages.count_tokens, messages_format._FIELDS),
    "beta messages count": (BetaMessages.count_tokens, messages_format._FIELDS),
    "chat": (Completions.create, chat._FIELDS),
    "responses": (Responses.create, responses_input._FIELDS),
    "responses compact": (Responses.compact, responses_input._FIELDS),
    "responses count": (InputTokens.count, responses_input._FIELDS),
}


@pytest.mark.case(49, 50)
@pytest.mark.parametrize("name", CALLS)
def test_every_parameter_of_a_client_is_listed(name: str) -> None:
    create, fields = CALLS[name]
    assert sorted(parameters(create) - listed(fields)) == []


@pytest.mark.case(49, 50)
def test_every_field_that_the_gemini_client_writes_is_listed() -> None:
    """Read from the client's own writer: its options are not all fields of a body."""
    source = inspect.getsource(genai_models._GenerateContentConfig_to_mldev)
    written = re.findall(r"setv\(\s*(to_object|parent_object),\s*\['(\w+)'", source)
    held = {"parent_object": gemini_input._FIELDS, "to_object": gemini_input._CONFIG}
    assert len(written) > 25
    assert [name for where, name in written if name not in listed(held[where])] == []


REFUSED: Sequence[tuple[str, Mapping[str, Any]]] = [
    ("anthropic", {"thread": {"type": "create"}}),
    ("anthropic", {"compaction": {"type": "summary"}}),
    ("anthropic", {"container": "c_1"}),
    ("anthropic", {"mcp_servers": [{"type": "url"}]}),
    ("responses", {"conversation": "conv_1"}),
    ("responses", {"prompt": {"id": "p_1"}}),
    ("gemini", {"cachedContent": "c"}),
    ("gemini", {"cached_content": "c"}),
    ("gemini", {"continuationToken": "dG9rZW4="}),
    ("gemini", {"continuation_token": "dG9rZW4="}),
    *((name, {"previous_turn_id": "x"}) for name in PLAIN),
    *((name, {"resumeToken": "x"}) for name in PLAIN),
    *((name, {"dialogue": {"type": "continue", "previous_message_id": "m"}}) for name in PLAIN),
    *((name, {"session_state": {"messages": [{"role": "user"}]}}) for name in PLAIN),
    ("gemini", {"generationConfig": {"resumptionHandle": "x"}}),
]
"""What refers to something that the provider keeps, listed fields and others."""


@pytest.mark.case(50)
@pytest.mark.parametrize(("name", "more"), REFUSED, ids=str)
def test_a_field_that_refers_to_state_is_refused(name: str, more: Mapping[str, Any]) -> None:
    dialect = DIALECTS[name]
    with pytest.raises(WireError) as refused:
        dialect.parse({**PLAIN[name], **more}, "models/m:generateContent")
    assert refused.value.status == 400
    nothing = dict.fromkeys(more)
    assert dialect.parse({**PLAIN[name], **nothing}, "models/m:generateContent").request.messages


TAGS: Mapping[str, Any] = {
    "conversation_id": "c_1",
    "thread_id": "t_1",
    "session_state": {"mode": "fast"},
    "memory": {"scope": "user"},
    "history_enabled": True,
}


@pytest.mark.case(50)
@pytest.mark.parametrize("name", PLAIN)
def test_a_field_that_only_tags_a_request_is_recorded(name: str) -> None:
    """Clients of many frameworks send them beside the whole history."""
    ignored_params = dict(
        DIALECTS[name].parse({**PLAIN[name], **TAGS}, "models/m:generateContent").request.advisory
    )
    assert set(json.loads(ignored_params["unknown_fields"])) == set(TAGS)


def test_a_chat_that_is_to_be_stored_is_answered() -> None:
    """The provider would list it for the operator; no later request can refer to it."""
    wire = DIALECTS["chat"].parse({**PLAIN["chat"], "store": True}, "")
    assert ("store", "true") in wire.request.advisory


@pytest.mark.case(50)
async def test_the_tool_runner_of_anthropic_sends_the_whole_history(renderer: TemplateRenderer) -> None:
    """From the second turn on it continues a thread, unless the provider says that it holds none."""
    first = Message(role="assistant", text="I look.", tool_calls=(call("read", '{"path": "a"}'),))

    @anthropic.beta_async_tool
    async def read(path: str) -> str:
        """Read a file."""
        return f"content of {path}"

    async with Rig(renderer, [first, first, SAY]) as rig, anthropic_client(rig) as api:
        runner = api.beta.messages.tool_runner(
            model="m", max_tokens=99, tools=[read], messages=[{"role": "user", "content": "Fix f."}]
        )
        answer = await runner.until_done()
        assert answer.content[0].text == SAY.text
        last = renderer.decode(rig.engine.sent[-1].ids)
        assert "Fix f." in last
        assert last.count("content of a") == 2
        trajectory = await rig.sealed()
        assert [turn.parent for turn in trajectory.turns] == [-1, 0, 1]
        assert trajectory.ledger.excluded == {}


async def test_the_refusal_of_a_thread_names_what_the_client_looks_for(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [SAY]) as rig:
        body = {"model": "m", "max_tokens": 9, "messages": ASK[1:]}
        thread = {"type": "continue", "previous_message_id": "msg_1"}
        async with rig.http.post(
            f"{rig.base}/messages", json={**body, "thread": thread}, headers=rig.auth
        ) as answer:
            assert answer.status == 400
            error = (await answer.json())["error"]
        assert error["type"] == "invalid_request_error"
        assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert rig.engine.sent == []


# --------------------------------------------------------------------------- formats of the answer

SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
FORMATS: Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]] = {
    "chat": [
        ("response_format", {"response_format": {"type": "json_object"}}),
        (
            "response_format",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        ),
    ],
    "anthropic": [
        ("output_config", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        ("output_format", {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
    ],
    "responses": [
        ("text", {"text": {"format": {"type": "json_object"}}}),
        ("text", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
    ],
    "gemini": [
        ("responseMimeType", {"generationConfig": {"responseMimeType": "application/json"}}),
        ("responseSchema", {"generationConfig": {"response_schema": SCHEMA}}),
        ("responseJsonSchema", {"generationConfig": {"responseJsonSchema": SCHEMA}}),
        (
            "responseFormat",
            {
                "generationConfig": {
                    "responseFormat": {"text": {"mimeType": "application/json", "schema": SCHEMA}}
                }
            },
        ),
    ],
}
FORMAT_CASES = [(name, field, more) for name, cases in FORMATS.items() for field, more in cases]


@pytest.mark.case(49)
@pytest.mark.parametrize(("name", "field", "more"), FORMAT_CASES, ids=str)
def test_a_format_of_the_answer_is_asked_for_and_recorded(
    name: str, field: str, more: Mapping[str, Any]
) -> None:
    """In the system prompt, since sampling is not constrained: below the agent's own, once."""
    parse = DIALECTS[name].parse
    plain = parse(PLAIN[name], "models/m:generateContent").request
    asked = parse({**PLAIN[name], **more}, "models/m:generateContent").request
    system = asked.messages[0]
    assert system.role == "system"
    held = plain.messages[0].text if plain.messages[0].role == "system" else ""
    assert system.text.startswith(held)
    added = system.text.removeprefix(held)
    assert "JSON" in added
    assert ('"required":["answer"]' in added) == ("schema" in str(more).lower())
    rest = plain.messages[1:] if held else plain.messages
    assert tuple(asked.messages[1:]) == tuple(rest)
    assert field in dict(asked.advisory)


@pytest.mark.slow
async def test_parse_of_the_openai_client_gets_an_object(renderer: TemplateRenderer) -> None:
    class Answer(BaseModel):
        answer: int

    said = Message(role="assistant", text='{"answer": 7}')
    async with Rig(renderer, [said]) as rig, openai_client(rig) as api:
        chatted = await api.chat.completions.parse(model="m", messages=ASK, response_format=Answer)
        assert chatted.choices[0].message.parsed == Answer(answer=7)
        responded = await api.responses.parse(model="m", input="Hi", text_format=Answer)
        assert responded.output_parsed == Answer(answer=7)
        async with anthropic_client(rig) as claude:
            parsed = await claude.beta.messages.parse(
                model="m", max_tokens=99, messages=[{"role": "user", "content": "Hi"}], output_format=Answer
            )
            assert parsed.parsed_output == Answer(answer=7)
        async with gemini_client(rig) as google:
            content = await google.models.generate_content(
                model="m",
                contents="Hi",
                config={"response_mime_type": "application/json", "response_schema": Answer},
            )
            assert content.parsed == Answer(answer=7)


async def test_turns_with_a_format_continue_each_other(renderer: TemplateRenderer) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    async with Rig(renderer, [Message(role="assistant", text='{"answer": 1}'), SAY]) as rig:
        ask = {"messages": ASK, "response_format": shape}
        _, body = await rig.post(ask)
        reported = [*ASK, body["choices"][0]["message"], {"role": "user", "content": "Again."}]
        await rig.post({**ask, "messages": reported})
        trajectory = await rig.sealed()
    assert [turn.parent for turn in trajectory.turns] == [-1, 0]
    assert trajectory.ledger.excluded == {}
