"""The official Google client as oracle of the Gemini format."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_rig import Rig
from google import genai
from google.genai import errors, types
from wire_lab import CALLS, ONLY_CALL, SAY, SCHEMA, THINK, continued, gemini_client

from insitu.chat.template import TemplateRenderer
from insitu.errors import EngineError
from insitu.gateway.request import GatewayConfig
from insitu.types import Limits, Message

READ = types.FunctionDeclaration(name="read", description="Read a file.", parameters_json_schema=SCHEMA)
ASK = [types.Content(role="user", parts=[types.Part(text="Fix f.")])]
REPLIES = [SAY, THINK, CALLS, ONLY_CALL]


def config(**more: Any) -> types.GenerateContentConfig:
    return types.GenerateContentConfig(
        system_instruction="You fix code.",
        tools=[types.Tool(function_declarations=[READ]), types.Tool(google_search=types.GoogleSearch())],
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        temperature=0.5,
        **more,
    )


async def ask(api: genai.client.AsyncClient, stream: bool, contents: list[Any], **more: Any) -> Any:
    """(parts, finish reason, usage) of one call; of a streamed one put together."""
    given = {"model": "m", "contents": contents, "config": config(**more)}
    if not stream:
        chunks = [await api.models.generate_content(**given)]
    else:
        chunks = [chunk async for chunk in await api.models.generate_content_stream(**given)]
    parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts]
    reasons = [chunk.candidates[0].finish_reason for chunk in chunks]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    return parts, reasons[-1].value, chunks[-1].usage_metadata


@pytest.mark.case(22)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thoughts", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("reply", REPLIES, ids=["text", "thinking", "calls", "only_call"])
async def test_the_client_reads_every_reply_and_its_echo_continues(
    renderer: TemplateRenderer, reply: Message, stream: bool, thoughts: bool
) -> None:
    """Gemini CLI drops the thought part and keeps the signature of the rest."""
    async with Rig(renderer, [reply, SAY]) as rig, gemini_client(rig) as api:
        parts, reason, usage = await ask(api, stream, ASK)
        assert "".join(p.text or "" for p in parts if not p.thought) == reply.text
        assert "".join(p.text for p in parts if p.thought) == reply.reasoning
        calls = [p.function_call for p in parts if p.function_call]
        assert [c.name for c in calls] == [c.name for c in reply.tool_calls]
        assert reason == "STOP"
        assert usage.candidates_token_count == len(renderer.render_reply(reply))
        assert usage.total_token_count == usage.prompt_token_count + usage.candidates_token_count
        kept = [p for p in parts if thoughts or not p.thought]
        assert kept[0].thought or kept[0].thought_signature
        results = [
            types.Part(
                function_response=types.FunctionResponse(id=c.id, name=c.name, response={"output": "x"})
            )
            for c in calls
        ]
        echo = types.Content(role="model", parts=kept)
        follow = types.Content(role="user", parts=[*results, types.Part(text="Go on.")])
        await ask(api, stream, [*ASK, echo, follow])
        await continued(rig, 2)


async def test_calls_without_ids_are_answered_in_order_of_their_name(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [CALLS, SAY]) as rig, gemini_client(rig) as api:
        parts, _, _ = await ask(api, True, ASK)
        for part in parts:
            if part.function_call:
                part.function_call.id = None
        results = [
            types.Part(function_response=types.FunctionResponse(name="read", response={"output": text}))
            for text in ("x", "y")
        ]
        echo = types.Content(role="model", parts=parts)
        await ask(api, True, [*ASK, echo, types.Content(role="user", parts=results)])
        await continued(rig, 2)


async def test_a_stream_without_events_is_one_json_array(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [CALLS], config=GatewayConfig(hold_headers_s=0.01), delay_s=0.05) as rig:
        url = f"{rig.base}beta/models/m:streamGenerateContent"
        async with rig.http.post(
            url, json={"contents": [{"parts": [{"text": "Hi"}]}]}, headers=rig.auth
        ) as got:
            assert got.content_type == "application/json"
            chunks = [types.GenerateContentResponse.model_validate(c) for c in await got.json()]
        assert len(chunks) == 4
        assert chunks[-1].candidates[0].finish_reason.value == "STOP"


async def test_a_reply_cut_by_length_says_so(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [SAY]) as rig, gemini_client(rig) as api:
        for stream in (False, True):
            assert (await ask(api, stream, ASK, max_output_tokens=3))[1] == "MAX_TOKENS"


async def test_tokens_are_counted_as_they_are_used(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [SAY]) as rig, gemini_client(rig) as api:
        counted = await api.models.count_tokens(model="m", contents=ASK)
        answer = await api.models.generate_content(model="m", contents=ASK)
        assert counted.total_tokens == answer.usage_metadata.prompt_token_count > 0


@pytest.mark.case(49)
@pytest.mark.parametrize(
    "more",
    [
        {"candidate_count": 2},
        {"response_logprobs": True},
        {"cached_content": "cachedContents/1"},
        {"response_modalities": ["IMAGE"]},
    ],
    ids=lambda more: next(iter(more)),
)
async def test_what_one_neutral_sample_cannot_answer_is_refused(
    renderer: TemplateRenderer, more: dict[str, Any]
) -> None:
    async with Rig(renderer, [SAY]) as rig, gemini_client(rig) as api:
        with pytest.raises(errors.ClientError) as refused:
            await ask(api, False, ASK, **more)
        assert (refused.value.code, refused.value.status) == (400, "INVALID_ARGUMENT")
        assert (await ask(api, False, ASK))[1] == "STOP"


async def test_errors_have_the_classes_that_clients_expect(renderer: TemplateRenderer) -> None:
    async with (
        Rig(renderer, [SAY], limits=Limits(max_context_tokens=40)) as rig,
        gemini_client(rig) as api,
        gemini_client(rig, "no") as stranger,
    ):
        with pytest.raises(errors.ClientError) as unknown:
            await ask(stranger, False, ASK)
        assert (unknown.value.code, unknown.value.status) == (401, "UNAUTHENTICATED")
        for stream in (False, True):
            with pytest.raises(errors.ClientError, match=r"input token count \(\d+\) exceeds .* \(40\)"):
                await ask(api, stream, ASK)
        code = types.Part(executable_code=types.ExecutableCode(code="1", language=types.Language.PYTHON))
        with pytest.raises(errors.ClientError, match="executableCode"):
            await ask(api, False, [types.Content(role="user", parts=[code])])
        assert [m.name async for m in await api.models.list()] == ["models/policy"]
        assert (await api.models.get(model="m")).name == "models/policy"


async def test_a_failure_after_the_headers_is_an_error_in_the_stream(renderer: TemplateRenderer) -> None:
    config = GatewayConfig(hold_headers_s=0.01, keep_alive_s=0.01)
    rig_ = Rig(renderer, [SAY], config=config, delay_s=0.1, fail=lambda key: EngineError("gone"))
    async with rig_ as rig, gemini_client(rig) as api:
        with pytest.raises(errors.ServerError, match="The model server failed"):
            await ask(api, True, ASK)
        assert rig.session.stats.infra_error == "gone"


async def test_a_waiting_stream_is_kept_alive(renderer: TemplateRenderer) -> None:
    config = GatewayConfig(hold_headers_s=0.01, keep_alive_s=0.01)
    async with Rig(renderer, [SAY], config=config, delay_s=0.1) as rig, gemini_client(rig) as api:
        assert (await ask(api, True, ASK))[0][0].text == SAY.text
