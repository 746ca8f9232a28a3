"""Tools that a provider defines and the client runs: offered, called and answered."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_rig import Rig, call
from openai.types.responses import response_input_item as items
from wire_lab import SAY, anthropic_client, openai_client, plain

from insitu.chat.template import TemplateRenderer
from insitu.gateway.dialects.anthropic import AnthropicDialect
from insitu.types import Message

ASK = [{"role": "user", "content": "Fix f."}]
ANTHROPIC: list[tuple[dict[str, Any], str]] = [
    ({"type": "bash_20241022", "name": "bash"}, '{"command": "ls"}'),
    ({"type": "bash_20250124", "name": "bash"}, '{"restart": true}'),
    (
        {"type": "text_editor_20241022", "name": "str_replace_editor"},
        '{"command": "undo_edit", "path": "/a"}',
    ),
    (
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 10},
        '{"command": "view", "path": "/a", "view_range": [1, 2]}',
    ),
    (
        {"type": "memory_20250818", "name": "memory"},
        '{"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"}',
    ),
    (
        {
            "type": "computer_20250124",
            "name": "computer",
            "display_width_px": 800,
            "display_height_px": 600,
        },
        '{"action": "left_click", "coordinate": [1, 2]}',
    ),
]


def once(name: str, arguments: str) -> Message:
    return Message(role="assistant", text="So.", tool_calls=(call(name, arguments),))


@pytest.mark.parametrize(("tool", "arguments"), ANTHROPIC, ids=lambda value: str(value)[:40])
async def test_anthropic_tools_reach_the_model_and_its_calls_the_client(
    renderer: TemplateRenderer, tool: dict[str, Any], arguments: str
) -> None:
    async with Rig(renderer, [once(tool["name"], arguments), SAY]) as rig, anthropic_client(rig) as api:
        ask: dict[str, Any] = {"model": "m", "max_tokens": 99, "tools": [tool]}
        answer = await api.beta.messages.create(messages=ASK, **ask)
        shown = renderer.decode(rig.engine.sent[0].ids)
        assert f'"name": "{tool["name"]}"' in shown
        for key in json.loads(arguments):
            assert f'"{key}"' in shown
        for option in set(tool) - {"type", "name"}:
            assert option in shown
        used = answer.content[-1]
        assert (used.type, used.name, used.input) == ("tool_use", tool["name"], json.loads(arguments))
        result = {"type": "tool_result", "tool_use_id": used.id, "content": "done"}
        reported = [*ASK, {"role": "assistant", "content": plain(answer)["content"]}]
        await api.beta.messages.create(messages=[*reported, {"role": "user", "content": [result]}], **ask)
        trajectory = await rig.sealed()
    assert [turn.parent for turn in trajectory.turns] == [-1, 0]
    assert trajectory.ledger.excluded == {}
    assert rig.session.stats.edited == 0


def test_tools_that_only_the_provider_runs_are_left_out() -> None:
    for kind in ("web_search_20250305", "code_execution_20250825", "bash_code_execution_20250825", "bash_x"):
        body = {"messages": ASK, "tools": [{"type": kind, "name": "n"}]}
        request = AnthropicDialect().parse(body, "").request
        assert (request.tools, request.hints) == ((), (("dropped_tool", "n"),))


RESPONSES: list[tuple[dict[str, Any], str, Any, dict[str, Any]]] = [
    (
        {"type": "local_shell"},
        '{"command": ["ls", "-l"], "working_directory": "/w"}',
        items.LocalShellCall,
        {"type": "local_shell_call_output", "output": '{"stdout": "out-7"}'},
    ),
    (
        {"type": "shell", "environment": {"type": "local"}},
        '{"commands": ["ls"], "timeout_ms": 5}',
        items.ShellCall,
        {
            "type": "shell_call_output",
            "output": [{"stdout": "out-7", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        },
    ),
    (
        {"type": "apply_patch"},
        '{"type": "update_file", "path": "a", "diff": "@@\\n-a\\n+b"}',
        items.ApplyPatchCall,
        {"type": "apply_patch_call_output", "status": "completed", "output": "out-7"},
    ),
    (
        {"type": "computer"},
        '{"actions": [{"type": "click", "button": "left", "x": 1, "y": 2}]}',
        items.ResponseComputerToolCall,
        {"type": "computer_call_output", "output": "out-7"},
    ),
    (
        {
            "type": "computer_use_preview",
            "display_width": 8,
            "display_height": 6,
            "environment": "linux",
        },
        '{"action": {"type": "click", "button": "left", "x": 1, "y": 2}}',
        items.ResponseComputerToolCall,
        {"type": "computer_call_output", "output": "out-7"},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("tool", "arguments", "kind", "output"), RESPONSES, ids=lambda v: str(v)[:40])
async def test_responses_tools_reach_the_model_and_its_calls_the_client(
    renderer: TemplateRenderer,
    tool: dict[str, Any],
    arguments: str,
    kind: Any,
    output: dict[str, Any],
    stream: bool,
) -> None:
    async with Rig(renderer, [once(tool["type"], arguments), SAY]) as rig, openai_client(rig) as api:
        ask: dict[str, Any] = {"model": "m", "tools": [tool], "store": False}
        if stream:
            events = [event async for event in await api.responses.create(input=ASK, stream=True, **ask)]
            answer = events[-1].response
            added = [event.item for event in events if event.type == "response.output_item.added"]
            assert added[-1].type == answer.output[-1].type
        else:
            answer = await api.responses.create(input=ASK, **ask)
        assert f'"name": "{tool["type"]}"' in renderer.decode(rig.engine.sent[0].ids)
        made = plain(answer.output[-1])
        assert kind.model_validate(made, strict=True).call_id == made["call_id"]
        named = {"id" if tool["type"] == "local_shell" else "call_id": made["call_id"]}
        reported = [*ASK, *plain(answer)["output"], {**named, **output}]
        await api.responses.create(input=reported, **ask)
        assert "out-7" in renderer.decode(rig.engine.sent[1].ids)
        trajectory = await rig.sealed()
    assert [turn.parent for turn in trajectory.turns] == [-1, 0]
    assert trajectory.ledger.excluded == {}
    assert rig.session.stats.edited == 0


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["{}", '{"commands": "ls"}', "[1]", '{"commands": [],'])
async def test_a_call_of_another_shape_still_is_an_item(renderer: TemplateRenderer, arguments: str) -> None:
    async with Rig(renderer, [once("shell", arguments), SAY]) as rig, openai_client(rig) as api:
        answer = await api.responses.create(model="m", input="Hi", tools=[{"type": "shell"}])
        calls = [item for item in answer.output if item.type == "shell_call"]
        assert all(item.action.commands is not None for item in calls)
        assert rig.session.stats.infra_error == ""


CUSTOM = {"type": "custom", "name": "patch"}
ECHOED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"type": "shell"}, arguments)
        for arguments in (
            "{}",
            "not json",
            "[1]",
            '{"command": "ls"}',
            '{"commands": "ls"}',
            '{"commands": null}',
            '{"commands": ["ls"], "timeout_ms": null}',
            '{"commands": ["ls"], "max_output_length": null, "why": "x"}',
        )
    ),
    *(
        ({"type": "local_shell"}, arguments)
        for arguments in (
            "{}",
            "",
            '{"command": "ls"}',
            '{"command": ["ls"], "env": null}',
            '{"command": ["ls"], "env": {}, "type": "exec"}',
            '{"command": ["ls"], "type": null, "user": "a"}',
        )
    ),
    *(
        ({"type": "apply_patch"}, arguments)
        for arguments in (
            "{broken",
            '{"path": "a", "diff": "+x"}',
            '{"type": "delete_file", "path": "a", "diff": null}',
            '{"type": null, "path": null}',
            '{"type": "create_file", "path": "a", "diff": ""}',
        )
    ),
    *(
        ({"type": "computer"}, arguments)
        for arguments in (
            "{}",
            '{"actions": null}',
            '{"action": {"type": "wait"}}',
            '{"type": "x", "id": "y"}',
        )
    ),
    ({"type": "computer_use_preview"}, "{}"),
    ({"type": "computer_use_preview"}, '{"action": null, "status": "z"}'),
    *(
        (CUSTOM, arguments)
        for arguments in ('{"input": "a"}', '{"input": 1}', "{}", "x", '{"input": "a", "b": 1}')
    ),
]


def without_nulls(value: Any) -> Any:
    """What a client sends back that reads items into types of its own."""
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None and key != "why"}
    return value


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize(("tool", "arguments"), ECHOED, ids=lambda value: str(value)[:60])
async def test_an_echoed_call_is_the_sampled_one_whatever_the_model_left_out(
    renderer: TemplateRenderer, tool: dict[str, Any], arguments: str, typed: bool
) -> None:
    name = tool.get("name", tool["type"])
    body: dict[str, Any] = {"input": ASK, "tools": [tool], "store": False}
    async with Rig(renderer, [once(name, arguments), SAY]) as rig:
        said = renderer.render_reply(once(name, arguments))
        for _ in range(2):
            async with rig.http.post(f"{rig.base}/responses", json=body, headers=rig.auth) as response:
                assert response.status == 200
                output = (await response.json())["output"]
            assert len({item["id"] for item in output}) == len(output)
            sent = without_nulls(output) if typed else output
            done = [
                {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"}
                for item in output
                if "call_id" in item
            ]
            body = {**body, "input": [*body["input"], *sent, *done]}
        trajectory = await rig.sealed()
    assert [turn.parent for turn in trajectory.turns] == [-1, 0]
    assert (rig.session.stats.edited, rig.session.stats.forks) == (0, 0)
    assert renderer.decode(said) in renderer.decode(rig.engine.sent[1].ids)


@pytest.mark.slow
async def test_a_shell_in_the_providers_container_is_left_out(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [SAY]) as rig, openai_client(rig) as api:
        hosted = {"type": "shell", "environment": {"type": "container_auto"}}
        await api.responses.create(model="m", input="Hi", tools=[hosted])
        assert "shell" not in renderer.decode(rig.engine.sent[0].ids)
