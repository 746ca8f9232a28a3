"""The official OpenAI client as oracle of the Responses format."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from gateway_rig import Rig, call
from wire_lab import CALLS, ONLY_CALL, SAY, SCHEMA, THINK, continued, openai_client, plain

from insitu.chat.template import TemplateRenderer
from insitu.errors import EngineError
from insitu.gateway.request import GatewayConfig
from insitu.types import Limits, Message

pytestmark = pytest.mark.slow

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "read", "description": "Read.", "strict": False, "parameters": SCHEMA}
]
ASK = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix f."}]},
]
REPLIES = [SAY, THINK, CALLS, ONLY_CALL]


async def ask(api: openai.AsyncOpenAI, stream: bool, items: list[Any], **more: Any) -> Any:
    """One call; of a streamed one the response of its last event."""
    given = {"model": "m", "input": items, "tools": TOOLS, "store": False, "instructions": "You fix.", **more}
    if not stream:
        return await api.responses.create(**given)
    numbers = []
    async with await api.responses.create(**given, stream=True) as events:
        async for event in events:
            numbers.append(event.sequence_number)
    assert numbers == list(range(len(numbers)))
    return event.response


async def test_the_clients_own_accumulator_reads_a_stream(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [CALLS]) as rig, openai_client(rig) as api:
        async with api.responses.stream(model="m", input="Fix f.", tools=TOOLS) as events:
            whole = await events.get_final_response()
        assert whole.output_text == CALLS.text
        assert [i.type for i in whole.output] == ["reasoning", "message", "function_call", "function_call"]


@pytest.mark.case(22)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reply", REPLIES, ids=["text", "reasoning", "calls", "only_call"])
async def test_the_client_reads_every_reply_and_its_echo_continues(
    renderer: TemplateRenderer, reply: Message, stream: bool
) -> None:
    async with Rig(renderer, [reply, SAY]) as rig, openai_client(rig) as api:
        answer = await ask(api, stream, ASK)
        assert answer.status == "completed"
        assert answer.output_text == reply.text
        calls = [i for i in answer.output if i.type == "function_call"]
        sampled = renderer.parse(renderer.render_reply(reply))
        assert [c.arguments for c in calls] == [c.arguments for c in sampled.calls]
        thought = [i.summary[0].text for i in answer.output if i.type == "reasoning"]
        assert thought == ([reply.reasoning] if reply.reasoning else [])
        assert answer.usage.output_tokens == len(renderer.render_reply(reply))
        results = [{"type": "function_call_output", "call_id": c.call_id, "output": "x"} for c in calls]
        more = [] if calls else [{"role": "user", "content": "Go on."}]
        await ask(api, stream, [*ASK, *plain(answer)["output"], *results, *more])
        await continued(rig, 2)


async def test_namespaces_and_free_form_tools_come_back_in_their_own_form(renderer: TemplateRenderer) -> None:
    patch = '*** Begin Patch\n"x" é\n*** End Patch'
    reply = Message(
        role="assistant",
        tool_calls=(
            call("multi_agent_v1__spawn", '{"task": "t"}'),
            call("apply_patch", '{"input": "*** Begin Patch\\n\\"x\\" \\u00e9\\n*** End Patch"}'),
            call("read", '{"path": "a"}'),
        ),
    )
    spawn = {"type": "function", "name": "spawn", "description": "", "parameters": {}, "strict": False}
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    tools = [
        *TOOLS,
        {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [spawn]},
        {"type": "custom", "name": "apply_patch", "description": "Patch files.", "format": grammar},
        {"type": "web_search", "external_web_access": False},
    ]
    async with Rig(renderer, [reply, SAY]) as rig, openai_client(rig) as api:
        answer = await ask(api, True, ASK, tools=tools)
        one, two, three = answer.output
        assert (one.type, one.namespace, one.name) == ("function_call", "multi_agent_v1", "spawn")
        assert (two.type, two.name, two.input) == ("custom_tool_call", "apply_patch", patch)
        assert (three.type, three.name, three.namespace) == ("function_call", "read", None)
        results: list[dict[str, Any]] = [
            {"type": "function_call_output", "call_id": one.call_id, "output": "ok"},
            {"type": "custom_tool_call_output", "call_id": two.call_id, "output": "ok"},
            {
                "type": "function_call_output",
                "call_id": three.call_id,
                "output": [{"type": "input_text", "text": "ok"}],
            },
        ]
        await ask(api, True, [*ASK, *plain(answer)["output"], *results], tools=tools)
        await continued(rig, 2)
        prompt = renderer.decode(rig.engine.sent[0].ids)
        assert "web_search" not in prompt
        assert "start: /.+/" in prompt


async def test_of_two_tools_with_one_name_the_first_is_offered(renderer: TemplateRenderer) -> None:
    inner = {"type": "function", "name": "read", "description": "B.", "parameters": {}, "strict": False}
    twins = [
        {"type": "namespace", "name": "fs", "description": "", "tools": [inner]},
        {**inner, "name": "fs__read", "description": "Second."},
    ]
    reply = Message(role="assistant", tool_calls=(call("fs__read", "{}"),))
    async with Rig(renderer, [reply]) as rig, openai_client(rig) as api:
        (one,) = (await ask(api, False, ASK, tools=twins)).output
        assert (one.name, one.namespace) == ("read", "fs")
        assert "Second." not in renderer.decode(rig.engine.sent[0].ids)


async def test_items_of_several_agents_and_later_tools_are_told_to_the_model(
    renderer: TemplateRenderer,
) -> None:
    reply = Message(role="assistant", tool_calls=(call("ns__late", "{}"),))
    late = {"type": "function", "name": "late", "description": "Late.", "parameters": {}, "strict": False}
    space = {"type": "namespace", "name": "ns", "description": "", "tools": [late]}
    items = [
        *ASK,
        {"type": "agent_message", "author": "/root/a", "content": [{"type": "input_text", "text": "Found."}]},
        {"type": "configuration_update", "x": 1},
        {"type": "additional_tools", "role": "developer", "tools": [space]},
    ]
    async with Rig(renderer, [reply]) as rig, openai_client(rig) as api:
        answer = await ask(api, True, items)
        assert (answer.output[0].name, answer.output[0].namespace) == ("late", "ns")
        prompt = renderer.decode(rig.engine.sent[0].ids)
        assert "Message from /root/a:\nFound." in prompt
        assert "ns__late" in prompt


async def test_tools_that_come_up_later_are_known_to_the_calls_after(renderer: TemplateRenderer) -> None:
    late = {"type": "function", "name": "late", "description": "Late.", "parameters": {}, "strict": False}
    space = {"type": "namespace", "name": "ns", "description": "", "tools": [late]}
    reply = Message(role="assistant", tool_calls=(call("ns__late", "{}"),))
    async with Rig(renderer, [SAY, SAY, reply, reply]) as rig, openai_client(rig) as api:
        items: list[Any] = list(ASK)
        for turn in range(4):
            answer = await ask(api, True, items)
            items += plain(answer)["output"]
            if turn == 1:
                items.append({"type": "additional_tools", "role": "developer", "tools": [space]})
            for one in answer.output:
                if one.type == "function_call":
                    assert (one.name, one.namespace) == ("late", "ns")
                    items.append({"type": "function_call_output", "call_id": one.call_id, "output": "ok"})
            items.append({"role": "user", "content": "On."})
        assert [one.type for one in answer.output] == ["function_call"]
        await continued(rig, 4)


async def test_a_reply_cut_by_length_is_incomplete(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [SAY]) as rig, openai_client(rig) as api:
        for stream in (False, True):
            answer = await ask(api, stream, ASK, max_output_tokens=16)
            assert answer.status == "incomplete"
            assert answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.case(50)
@pytest.mark.parametrize(
    "more",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"conversation": "conv_1"},
        {"prompt": {"id": "pmpt_1"}},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
    ],
    ids=str,
)
async def test_what_needs_a_store_or_a_fetch_is_refused(
    renderer: TemplateRenderer, more: dict[str, Any]
) -> None:
    async with Rig(renderer, [SAY]) as rig, openai_client(rig) as api:
        with pytest.raises(openai.BadRequestError):
            await api.responses.create(**{"model": "m", "input": "Hi", **more})
        assert (await api.responses.create(model="m", input="Hi")).output_text == SAY.text


@pytest.mark.parametrize("kind", ["mcp_call", "web_search_call", "code_interpreter_call"])
async def test_calls_that_a_provider_answered_itself_are_refused_by_name(
    renderer: TemplateRenderer, kind: str
) -> None:
    """A history of another provider: the session goes on without it."""
    parts = [{"type": "input_text", "text": text} for text in ("one", "two")]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    answer = {"type": "function_call_output", "call_id": "c", "output": parts}
    history: list[Any] = [{"role": "user", "content": "Hi"}, call, answer]
    refused = f"Items of type '{kind}' are not supported"
    async with Rig(renderer, [SAY]) as rig, openai_client(rig) as api:
        with pytest.raises(openai.BadRequestError, match=refused):
            await api.responses.create(model="m", input=[*history, {"type": kind, "id": "x"}])
        assert (await api.responses.create(model="m", input=history)).output_text == SAY.text
        assert "one\ntwo" in renderer.decode(rig.engine.sent[-1].ids)


async def test_errors_have_the_classes_that_clients_expect(renderer: TemplateRenderer) -> None:
    limits = Limits(max_context_tokens=40)
    async with (
        Rig(renderer, [SAY], limits=limits) as rig,
        openai_client(rig) as api,
        openai_client(rig, "sk-no") as stranger,
    ):
        with pytest.raises(openai.AuthenticationError):
            await ask(stranger, False, ASK)
        with pytest.raises(openai.BadRequestError) as overflow:
            await ask(api, False, ASK)
        assert overflow.value.code == "context_length_exceeded"
        failed = await ask(api, True, ASK)
        assert (failed.status, failed.error.code) == ("failed", "context_length_exceeded")


async def test_a_failure_after_the_headers_is_an_event(renderer: TemplateRenderer) -> None:
    config = GatewayConfig(hold_headers_s=0.01, keep_alive_s=0.01)
    rig_ = Rig(renderer, [SAY], config=config, delay_s=0.1, fail=lambda key: EngineError("gone"))
    async with rig_ as rig, openai_client(rig) as api:
        failed = await ask(api, True, ASK)
        assert (failed.status, failed.error.message) == ("failed", "The model server failed.")
        assert rig.session.stats.infra_error == "gone"


async def test_a_waiting_stream_is_kept_alive_by_events(renderer: TemplateRenderer) -> None:
    config = GatewayConfig(hold_headers_s=0.01, keep_alive_s=0.01)
    async with Rig(renderer, [SAY], config=config, delay_s=0.1) as rig, openai_client(rig) as api:
        assert (await ask(api, True, ASK)).output_text == SAY.text
