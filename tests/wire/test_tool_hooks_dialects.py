"""A hook on tool calls under the official clients of the four wire formats, streamed and not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from gateway_rig import Rig, call, said
from google.genai import types
from wire_lab import SCHEMA, anthropic_client, continued, gemini_client, openai_client, plain

from insitu.chat.template import TemplateRenderer
from insitu.gateway.request import GatewayConfig
from insitu.gateway.tool_hooks import BLOCKED
from insitu.types import Message, ToolEvent
from insitu_tasksets.tool_hooks import UserHook

# The client of OpenAI asks the system for its name at its first call.
pytestmark = pytest.mark.slow

TWO = Message(
    role="assistant",
    text="I look.",
    tool_calls=(call("read", '{"path": "secret"}'), call("read", '{"path": "a"}')),
)
ANSWERS = {BLOCKED: "no such tool", "read": "token sk-1"}


def hook(event: ToolEvent) -> Mapping[str, str] | None:
    if event.kind == "call":
        return {"block": "That file is closed."} if event.arguments["path"] == "secret" else None
    return {"result": event.text.replace("sk-1", "***")}


def rig_of(renderer: TemplateRenderer) -> Rig:
    return Rig(renderer, [TWO, said("Done.")], config=GatewayConfig(hook=UserHook("h", hook)))


async def chat(rig: Rig, stream: bool) -> list[str]:
    async with openai_client(rig) as client:
        ask: list[Any] = [{"role": "user", "content": "Go."}]
        tool: Any = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}

        async def reply() -> Any:
            options: Any = {"model": "m", "messages": ask, "tools": [tool]}
            if not stream:
                return (await client.chat.completions.create(**options)).choices[0].message
            async with client.chat.completions.stream(**options) as events:
                return (await events.get_final_completion()).choices[0].message

        made = await reply()
        ask.append({"role": "assistant", "content": made.content, "tool_calls": [
            {"id": c.id, "type": "function", "function": {
                "name": c.function.name, "arguments": c.function.arguments}}
            for c in made.tool_calls
        ]})  # fmt: skip
        names = [c.function.name for c in made.tool_calls]
        for c in made.tool_calls:
            ask.append({"role": "tool", "tool_call_id": c.id, "content": ANSWERS[c.function.name]})
        await reply()
        return names


async def anthropic(rig: Rig, stream: bool) -> list[str]:
    async with anthropic_client(rig) as client:
        ask: list[Any] = [{"role": "user", "content": "Go."}]
        tools: Any = [{"name": "read", "input_schema": SCHEMA}]

        async def reply() -> Any:
            options: Any = {"model": "m", "max_tokens": 99, "messages": ask, "tools": tools}
            if not stream:
                return await client.messages.create(**options)
            async with client.messages.stream(**options) as events:
                return await events.get_final_message()

        made = await reply()
        uses = [block for block in made.content if block.type == "tool_use"]
        ask.append({"role": "assistant", "content": [plain(block) for block in made.content]})
        results = [{"type": "tool_result", "tool_use_id": u.id, "content": ANSWERS[u.name]} for u in uses]
        ask.append({"role": "user", "content": results})
        await reply()
        return [use.name for use in uses]


async def responses(rig: Rig, stream: bool) -> list[str]:
    async with openai_client(rig) as client:
        ask: list[Any] = [{"role": "user", "content": "Go."}]
        tools: Any = [{"type": "function", "name": "read", "parameters": SCHEMA, "strict": False}]

        async def reply() -> Any:
            options: Any = {"model": "m", "input": ask, "tools": tools}
            if not stream:
                return await client.responses.create(**options)
            async with client.responses.stream(**options) as events:
                return await events.get_final_response()

        made = await reply()
        calls = [item for item in made.output if item.type == "function_call"]
        for item in made.output:
            one = plain(item)
            one.pop("parsed_arguments", None)
            ask.append(one)
        ask += [
            {"type": "function_call_output", "call_id": c.call_id, "output": ANSWERS[c.name]} for c in calls
        ]
        await reply()
        return [c.name for c in calls]


async def gemini(rig: Rig, stream: bool) -> list[str]:
    async with gemini_client(rig) as client:
        declared = types.FunctionDeclaration(name="read", parameters_json_schema=SCHEMA)
        config = types.GenerateContentConfig(tools=[types.Tool(function_declarations=[declared])])
        ask: list[Any] = [types.Content(role="user", parts=[types.Part(text="Go.")])]

        async def reply() -> list[types.Part]:
            options: Any = {"model": "m", "contents": ask, "config": config}
            if not stream:
                done = await client.models.generate_content(**options)
                return list(done.candidates[0].content.parts)  # type: ignore[index,union-attr,arg-type]
            parts: list[types.Part] = []
            async for chunk in await client.models.generate_content_stream(**options):
                parts += chunk.candidates[0].content.parts or []  # type: ignore[index,union-attr]
            return parts

        made = await reply()
        calls = [part.function_call for part in made if part.function_call]
        ask.append(types.Content(role="model", parts=made))
        answers = [
            types.FunctionResponse(id=c.id, name=c.name, response={"output": ANSWERS[str(c.name)]})
            for c in calls
        ]
        ask.append(types.Content(role="user", parts=[types.Part(function_response=a) for a in answers]))
        await reply()
        return [str(c.name) for c in calls]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("client", [chat, anthropic, responses, gemini])
async def test_each_client_gets_another_call_and_the_model_reads_what_the_hook_says(
    renderer: TemplateRenderer, client: Any, stream: bool
) -> None:
    async with rig_of(renderer) as rig:
        assert await client(rig, stream) == [BLOCKED, "read"]
        read = renderer.decode(rig.engine.sent[1].ids)
        assert '"path": "secret"' in read
        assert "That file is closed." in read
        assert "***" in read
        assert "sk-1" not in read
        assert "no such tool" not in read
        await continued(rig, 2)
