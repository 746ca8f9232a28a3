"""Host tools: checked, kept in order, acknowledged, and never answered with a result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from gateway_rig import ASK, TOOLS, Rig, call, said
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from insitu.chat.template import TemplateRenderer
from insitu.errors import ConfigError, GradeError
from insitu.gateway.host_tools import RESERVED, HostTool, ToolBox, exposed_names
from insitu.gateway.request import GatewayConfig
from insitu.types import Limits, Message, ModelRequest, ToolCall, ToolSpec

SUBMIT = HostTool(
    name="submit",
    description="Hand in the answer.",
    parameters={
        "type": "object",
        "properties": {"answer": {"type": "string", "maxLength": 20}, "sure": {"type": "boolean"}},
        "required": ["answer"],
        "additionalProperties": False,
    },
)
TOOL = ToolSpec(name="mine", description="", parameters='{"type": "object"}')
NOTE = HostTool(name="note", description="Say something.", parameters={"type": "object"})


class ToolRig(Rig):
    """A rig whose session has host tools."""

    host_tools = (SUBMIT, NOTE)

    async def __aenter__(self) -> ToolRig:
        await super().__aenter__()
        self.session = self.gateway.open_session(
            "r/tools",
            seed=7,
            limits=Limits(max_calls=32, max_context_tokens=100_000),
            tools=self.host_tools,
        )
        self.base = f"{self.origin}/s/{self.session.public_id}/v1"
        self.auth = {"Authorization": f"Bearer {self.session.secret}"}
        self.tool_auth = {"Authorization": f"Bearer {self.session.tool_secret}"}
        self.tool_url = f"{self.origin}/tools/{self.session.public_id}"
        return self

    async def use(self, name: str, arguments: object, **headers: str) -> tuple[int, Any]:
        url = f"{self.tool_url}/{name}"
        async with self.http.post(url, json=arguments, headers=headers or self.tool_auth) as response:
            return response.status, await response.json()

    @asynccontextmanager
    async def mcp(self, secret: str) -> AsyncIterator[Client]:
        headers = {"Authorization": f"Bearer {secret}"}
        async with (
            httpx2.AsyncClient(headers=headers) as http,
            Client(streamable_http_client(f"{self.origin}/mcp", http_client=http)) as client,
        ):
            yield client


async def test_a_call_is_checked_kept_and_acknowledged(renderer: TemplateRenderer) -> None:
    async with ToolRig(renderer, [said("x")]) as rig:
        assert await rig.use("submit", {"answer": "42"}) == (200, {"ok": True})
        status, body = await rig.use("submit", {"answer": 42})
        assert (status, body["ok"]) == (422, False)
        assert "string" in body["error"]
        assert (await rig.use("submit", {"answer": "a", "more": 1}))[0] == 422
        assert (await rig.use("nothing", {}))[0] == 404
        assert await rig.use("note", {"a": [1, {"b": None}]}) == (200, {"ok": True})
        assert [(c.index, c.name, bool(c.error)) for c in rig.session.tools.calls] == [
            (0, "submit", False),
            (1, "submit", True),
            (2, "submit", True),
            (3, "note", False),
        ]
        assert json.loads(rig.session.tools.calls[3].arguments) == {"a": [1, {"b": None}]}
        compat = f"{rig.origin}/rollout/{rig.session.public_id}/v1/tools/submit"
        for body in ({"answer": "7"}, {"arguments": {"answer": "7"}}):  # upstream's clients wrap them
            async with rig.http.post(compat, json=body, headers=rig.tool_auth) as response:
                assert response.status == 200
            assert json.loads(rig.session.tools.calls[-1].arguments) == {"answer": "7"}
        assert (await rig.use("submit", {"arguments": {"answer": 7}}))[0] == 422
        async with rig.http.get(rig.tool_url, headers=rig.tool_auth) as response:
            assert [t["name"] for t in (await response.json())["tools"]] == ["submit", "note"]


def test_a_model_that_wraps_its_arguments_is_told_of_the_schema() -> None:
    """Only clients of the tools' address wrap them: a tool gets what was checked."""
    tools = ToolBox([SUBMIT])
    wrapped = {"arguments": {"answer": "7"}}
    assert tools.call("submit", wrapped, "model")["ok"] is False
    assert tools.call("submit", wrapped)["ok"] is True
    assert [json.loads(call.arguments) for call in tools.calls] == [wrapped, {"answer": "7"}]


@pytest.mark.case(53)
async def test_each_secret_opens_its_own_scope_only(renderer: TemplateRenderer) -> None:
    async with ToolRig(renderer, [said("x")]) as rig:
        assert (await rig.use("submit", {"answer": "a"}, **rig.auth))[0] == 401
        async with rig.http.post(f"{rig.origin}/mcp", json={}, headers=rig.auth) as response:
            assert response.status == 401
        url = f"{rig.base}/chat/completions"
        async with rig.http.post(url, json={"messages": ASK}, headers=rig.tool_auth) as response:
            assert response.status == 401
        other = rig.gateway.open_session("r/other", seed=7, limits=Limits(), tools=(SUBMIT,))
        foreign = {"Authorization": f"Bearer {other.tool_secret}"}
        assert (await rig.use("submit", {"answer": "a"}, **foreign))[0] == 401
        await other.seal(1.0)
        assert (await rig.use("submit", {"answer": "a"}, **foreign))[0] == 409
        assert not rig.session.tools.calls
        assert not rig.engine.sent


async def test_injected_tools_are_part_of_the_root_and_answered_by_the_gateway(
    renderer: TemplateRenderer,
) -> None:
    both = Message(
        role="assistant", tool_calls=(call("submit", '{"answer": "42"}'), call("read", '{"path": "a"}'))
    )
    wrong = Message(role="assistant", tool_calls=(call("submit", '{"answer": 1}'),))
    async with ToolRig(renderer, [both, wrong, said("Done.")]) as rig:
        messages: list[Any] = [*ASK]
        for _ in range(3):
            _, body = await rig.post({"messages": messages, "tools": TOOLS})
            said_ = body["choices"][0]["message"]
            messages.append(said_)
            for made in said_.get("tool_calls", []):
                known = made["function"]["name"] == "read"
                text = "x = 1" if known else f"Tool {made['function']['name']} not found"
                messages.append({"role": "tool", "tool_call_id": made["id"], "content": text})
        first, second, third = (renderer.decode(s.ids) for s in rig.engine.sent)
        assert "Hand in the answer." in first
        assert '{"ok":true}' in second
        assert "x = 1" in second
        assert "not found" not in third
        assert "is not of type" in third
        assert third.startswith(second)
        assert [(c.name, c.source, bool(c.error)) for c in rig.session.tools.calls] == [
            ("submit", "model", False),
            ("submit", "model", True),
        ]
        trajectory = await rig.session.seal(1.0)
        assert len(trajectory.segments) == 1
        assert trajectory.ledger.trained == trajectory.ledger.captured


@pytest.mark.parametrize("source", ["model", "agent"])
async def test_an_accepted_call_of_a_tool_that_ends_is_the_last_the_agent_does(
    renderer: TemplateRenderer, source: str
) -> None:
    class Answers(ToolRig):
        host_tools = (replace(SUBMIT, name="answer", ends=True), NOTE)

    wrong = Message(role="assistant", tool_calls=(call("answer", '{"answer": 1}'),))
    right = Message(role="assistant", tool_calls=(call("answer", '{"answer": "42"}'),))
    script = [wrong, right, said("More.")] if source == "model" else [wrong, said("More.")]
    async with Answers(renderer, script) as rig:
        messages: list[Any] = [*ASK]
        for number in range(3):
            if source == "agent" and number == 1:
                assert (await rig.use("answer", {"answer": "42"}))[0] == 200
            status, body = await rig.post({"messages": messages, "tools": TOOLS})
            assert (status, rig.session.done) == (200, number > 0), body
            messages.append(body["choices"][0]["message"])
            for made in messages[-1].get("tool_calls", []):
                messages.append({"role": "tool", "tool_call_id": made["id"], "content": "not found"})
        assert "The answer was accepted" in messages[-1]["content"]
        assert len(rig.engine.sent) == (2 if source == "model" else 1)
        assert rig.session.stats.budget_stop == ""
        trajectory = await rig.session.seal(1.0)
        assert trajectory.ledger.trained == trajectory.ledger.captured > 0


async def test_after_a_call_of_an_injected_tool_only_what_is_new_is_read(renderer: TemplateRenderer) -> None:
    submit = Message(role="assistant", tool_calls=(call("submit", '{"answer": "42"}'),))
    read = Message(role="assistant", tool_calls=(call("read", '{"path": "a"}'),))
    async with ToolRig(renderer, [submit, *[read] * 8, submit, *[read] * 3, said("Done.")]) as rig:
        messages: list[Any] = [*ASK]
        costs: list[int] = []
        for _ in range(14):
            before = rig.session.bodies.parsed_bytes
            status, body = await rig.post({"messages": messages, "tools": TOOLS})
            assert status == 200
            costs.append(rig.session.bodies.parsed_bytes - before)
            messages.append(body["choices"][0]["message"])
            for made in messages[-1].get("tool_calls", []):
                messages.append({"role": "tool", "tool_call_id": made["id"], "content": "x = 1\n" * 500})
        assert max(costs) < 5000, costs
        last = renderer.decode(rig.engine.sent[-1].ids)
        assert last.count('{"ok":true}') == 2
        assert last.count("x = 1\n" * 500) == 11
        trajectory = await rig.session.seal(1.0)
        assert len(trajectory.segments) == 1
        assert trajectory.ledger.trained == trajectory.ledger.captured


@pytest.mark.parametrize("name", sorted(exposed_names("submit")))
async def test_a_tool_that_the_agent_offers_itself_is_not_injected_again(
    renderer: TemplateRenderer, name: str
) -> None:
    offered = {"type": "function", "function": {"name": name, "description": "Mine.", "parameters": {}}}
    reply = Message(role="assistant", tool_calls=(call(name, '{"answer": "1"}'),))
    async with ToolRig(renderer, [reply]) as rig:
        await rig.post({"messages": ASK, "tools": [*TOOLS, offered]})
        prompt = renderer.decode(rig.engine.sent[0].ids)
        assert "Hand in the answer." not in prompt
        assert "Say something." in prompt
        assert not rig.session.tools.calls


async def test_a_tool_of_an_environment_answers_in_order_once_the_agent_has_the_call(
    renderer: TemplateRenderer,
) -> None:
    taken: list[str] = []

    async def slow(arguments: Mapping[str, object]) -> str:
        await asyncio.sleep(0.05)
        taken.append(f"slow {arguments['at']}")
        return "A long corridor."

    async def quick(arguments: Mapping[str, object]) -> str:
        if arguments["at"] == 9:
            raise GradeError("the environment is gone")
        taken.append(f"quick {arguments['at']}")
        return "A door."

    schema = {"type": "object", "required": ["at"], "properties": {"at": {"type": "integer"}}}
    tools = [
        HostTool(name="walk", description="Walk.", parameters=schema, answer=slow),
        HostTool(name="read", description="Read a sign.", parameters=schema, answer=quick),
    ]
    both = Message(role="assistant", tool_calls=(call("walk", '{"at": 1}'), call("env_read", '{"at": 2}')))
    wrong = Message(role="assistant", tool_calls=(call("walk", '{"at": "x"}'),))
    fatal = Message(role="assistant", tool_calls=(call("env_read", '{"at": 9}'),))
    async with Rig(renderer, [both, wrong, fatal, said("Never.")]) as rig:
        rig.session = rig.gateway.open_session(
            "r/tools", seed=7, limits=Limits(max_calls=32, max_context_tokens=100_000), tools=tools
        )
        rig.base = f"{rig.origin}/s/{rig.session.public_id}/v1"
        rig.auth = {"Authorization": f"Bearer {rig.session.secret}"}
        messages: list[Any] = [*ASK]
        statuses = []
        for _ in range(4):
            status, body = await rig.post({"messages": messages, "tools": TOOLS})
            statuses.append(status)
            if status != 200:
                break
            messages.append(body["choices"][0]["message"])
            for made in messages[-1].get("tool_calls", []):
                messages.append({"role": "tool", "tool_call_id": made["id"], "content": "no such tool"})
        assert statuses == [200, 200, 200, 500]
        second, third = (renderer.decode(sent.ids) for sent in rig.engine.sent[1:])
        assert taken == ["slow 1", "quick 2"]
        assert second.index("A long corridor.") < second.index("A door.")
        assert "no such tool" not in third
        assert "is not of type" in third
        assert rig.session.stats.infra_error == "the environment is gone"
        rig.session.tools.close()


async def test_a_step_of_a_reply_that_was_lost_is_never_taken() -> None:
    taken: list[object] = []

    async def answer(arguments: Mapping[str, object]) -> str:
        taken.append(arguments)
        return "seen"

    tools = ToolBox([replace(NOTE, answer=answer)])
    asked = ModelRequest(messages=(Message(role="user", text="Go."),), tools=(TOOL,))
    asked, injected = tools.prepare(asked)
    for name in ("lost", "read"):
        tools.sampled([ToolCall(id=name, name="note", arguments="{}")], injected)
    result = Message(role="tool", tool_call_id="read", text="unknown tool")
    await tools.answered([*asked.messages, Message(role="assistant"), result])
    assert taken == [{}]
    again, _ = tools.prepare(replace(asked, messages=(*asked.messages, result)))
    assert [message.text for message in again.messages] == ["Go.", "seen"]


async def test_a_request_without_tools_gets_none(renderer: TemplateRenderer) -> None:
    async with ToolRig(renderer, [said("A title")]) as rig:
        await rig.post({"messages": ASK})
        assert "submit" not in renderer.decode(rig.engine.sent[0].ids)


async def test_the_official_mcp_client_lists_and_calls(renderer: TemplateRenderer) -> None:
    async with ToolRig(renderer, [said("x")]) as rig, rig.mcp(rig.session.tool_secret) as client:
        tools = (await client.list_tools()).tools
        assert [t.name for t in tools] == ["submit", "note"]
        assert tools[0].input_schema == SUBMIT.parameters
        result = await client.call_tool("submit", {"answer": "42"})
        assert not result.is_error
        assert result.content[0].text == '{"ok":true}'  # type: ignore[union-attr]
        refused = await client.call_tool("submit", {"answer": 42})
        assert refused.is_error
        assert [(c.name, c.source) for c in rig.session.tools.calls] == [("submit", "agent")] * 2


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"jsonrpc": "2.0", "id": 1, "method": "resources/list"}, -32601),
        ({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "nothing"}}, -32602),
        ({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": []}, None),
        ({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": [1]}, -32602),
        ({"jsonrpc": "2.0", "id": 1, "method": 5}, -32600),
        ({"jsonrpc": "2.0", "id": {}, "method": "ping"}, -32600),
    ],
)
async def test_mcp_errors_are_json_rpc_errors(
    renderer: TemplateRenderer, message: dict[str, Any], code: int | None
) -> None:
    async with ToolRig(renderer, [said("x")]) as rig:
        async with rig.http.post(f"{rig.origin}/mcp", json=message, headers=rig.tool_auth) as response:
            assert response.status == 200
            assert (await response.json())["error"]["code"] == (code or -32602)
        for method, status in (("GET", 405), ("DELETE", 405)):
            async with rig.http.request(method, f"{rig.origin}/mcp", headers=rig.tool_auth) as response:
                assert response.status == status
        notice = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        async with rig.http.post(f"{rig.origin}/mcp", json=notice, headers=rig.tool_auth) as response:
            assert (response.status, await response.read()) == (202, b"")


@pytest.mark.parametrize("name", [*sorted(RESERVED), "", "a b", "x" * 49, "__class__"])
def test_names_that_no_tool_may_have(name: str) -> None:
    with pytest.raises(ConfigError):
        ToolBox([HostTool(name=name, description="", parameters={"type": "object"})])


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": "string"},
        {"type": "object", "properties": 5},
        {"type": "object", "required": "answer"},
        {"type": "object", "$ref": "https://example.org/schema.json"},
    ],
)
def test_schemas_that_cannot_be_checked(parameters: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="host tool 'a'"):
        ToolBox([HostTool(name="a", description="", parameters=parameters)])


async def test_what_is_kept_is_bounded(renderer: TemplateRenderer) -> None:
    sandbox = ToolBox([NOTE], max_calls=2)
    config = GatewayConfig(max_tool_body_bytes=1000)
    async with ToolRig(renderer, [said("x")], config=config) as rig:
        rig.session.tools = sandbox
        statuses = [(await rig.use("note", {}))[0] for _ in range(4)]
        assert statuses == [200, 200, 429, 429]
        assert len(sandbox.calls) == 2
        assert (await rig.use("note", {"a": "x" * 1000}))[0] == 413
