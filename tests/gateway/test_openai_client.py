"""The official client as oracle of the wire format."""

from __future__ import annotations

import openai
import pytest
from gateway_rig import ASK, TOOLS, Rig, call, said

from insitu.chat.template import TemplateRenderer
from insitu.errors import EngineError
from insitu.types import Limits, Message

pytestmark = pytest.mark.slow

REPLY = Message(
    role="assistant",
    text="I look.",
    tool_calls=(call("read", '{"path": "a"}'), call("read", '{"path": "b"}')),
)


def client(rig: Rig, key: str | None = None) -> object:
    return openai.AsyncOpenAI(base_url=rig.base, api_key=key or rig.session.secret, max_retries=0)


async def test_whole_reply_with_parallel_calls(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [REPLY]) as rig, client(rig) as api:
        answer = await api.chat.completions.create(model="m", messages=ASK, tools=TOOLS)
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        assert [c.function.arguments for c in choice.message.tool_calls] == ['{"path": "a"}', '{"path": "b"}']
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_streamed_reply_and_the_next_turn(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [REPLY, said("Done.")]) as rig, client(rig) as api:
        async with api.chat.completions.stream(
            model="m", messages=ASK, tools=TOOLS, stream_options={"include_usage": True}
        ) as stream:
            answer = await stream.get_final_completion()
        message = answer.choices[0].message
        assert [c.function.name for c in message.tool_calls] == ["read", "read"]
        assert answer.usage.completion_tokens == len(renderer.render_reply(REPLY))
        results = [{"role": "tool", "tool_call_id": c.id, "content": "x"} for c in message.tool_calls]
        echo = message.model_dump(exclude_none=True)
        answer = await api.chat.completions.create(model="m", messages=[*ASK, echo, *results], tools=TOOLS)
        assert answer.choices[0].message.content == "Done."
        assert [t.parent for t in (await rig.session.seal(1.0)).turns] == [-1, 0]


async def test_errors_have_the_classes_that_clients_expect(renderer: TemplateRenderer) -> None:
    limits = Limits(max_context_tokens=40)
    async with (
        Rig(renderer, [REPLY], limits=limits) as rig,
        client(rig) as api,
        client(rig, "sk-no") as stranger,
    ):
        with pytest.raises(openai.AuthenticationError):
            await stranger.chat.completions.create(model="m", messages=ASK)
        with pytest.raises(openai.BadRequestError) as refused:
            await api.chat.completions.create(model="m", messages=ASK, n=2)
        assert refused.value.param == "n"
        with pytest.raises(openai.BadRequestError) as overflow:
            await api.chat.completions.create(model="m", messages=ASK, tools=TOOLS)
        assert overflow.value.code == "context_length_exceeded"
        assert [m.id async for m in api.models.list()] == ["policy"]


async def test_a_failure_after_the_headers_is_an_error_in_the_stream(renderer: TemplateRenderer) -> None:
    from insitu.gateway.request import GatewayConfig

    config = GatewayConfig(hold_headers_s=0.01, keep_alive_s=0.01)
    rig_ = Rig(renderer, [REPLY], config=config, delay_s=0.1, fail=lambda key: EngineError("gone"))
    async with rig_ as rig, client(rig) as api:
        stream = await api.chat.completions.create(model="m", messages=ASK, stream=True)
        with pytest.raises(openai.APIError, match="The model server failed"):
            async for _ in stream:
                pass
        assert rig.session.stats.infra_error == "gone"
