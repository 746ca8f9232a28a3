"""A hook on tool calls: blocks, rewrites and reminds; the sampled ids stay, what it adds is context."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_rig import ASK, TOOLS, Rig, call, said

import insitu
from insitu.attempt import AttemptSpec
from insitu.chat.template import TemplateRenderer
from insitu.config import load_config
from insitu.errors import ConfigError, InsituError
from insitu.gateway.dialects.base import WireError
from insitu.gateway.host_tools import HostTool, ToolBox
from insitu.gateway.request import GatewayConfig
from insitu.gateway.tool_hooks import BLOCKED
from insitu.runtime.gateway import gateway_config
from insitu.storage.run_dir import RunDir, name_run
from insitu.tasks.user_functions import FAILURES
from insitu.types import Limits, Message, Task, ToolEvent, Trajectory
from insitu_tasksets import tool_hooks
from insitu_tasksets.tool_hooks import UserHook
from insitu_view.rollout_text import rollout_found, rollout_text
from insitu_view.web.runs import one_run
from tests.fakes.attempts import fake_rollout

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
PUSH = Message(role="assistant", text="I push.", tool_calls=(call("bash", '{"command": "git push"}'),))
READ = Message(role="assistant", tool_calls=(call("read", '{"path": "a"}'),))
Hook = Callable[[ToolEvent], Any]


def guard(event: ToolEvent) -> Mapping[str, str] | None:
    if event.kind == "call" and "git push" in str(event.arguments.get("command")):
        return {"block": "Nothing may be pushed."}
    if event.kind == "result" and "sk-" in event.text:
        return {"result": "key = ***"}
    if event.kind == "result" and event.name == "read":
        return {"remind": "Run the tests before you end."}
    return None


def hooked(hook: Hook) -> GatewayConfig:
    return GatewayConfig(hook=UserHook("my.py:guard", hook))


async def loop(rig: Rig, turns: int, result: Callable[[str], str]) -> list[Any]:
    """An agent that answers each call by `result` of its name, until a reply has none; its messages."""
    messages: list[Any] = [*ASK]
    for _ in range(turns):
        status, body = await rig.post({"messages": messages, "tools": [*TOOLS, BASH]})
        assert status == 200, body
        messages.append(body["choices"][0]["message"])
        for made in messages[-1].get("tool_calls") or ():
            text = result(made["function"]["name"])
            messages.append({"role": "tool", "tool_call_id": made["id"], "content": text})
    return messages


def record(rig: Rig) -> list[tuple[str, str]]:
    calls = [(c.name, json.loads(c.arguments)) for c in rig.session.host_calls if c.source == "hook"]
    return [(name, what["did"]) for name, what in calls]


def hints(trajectory: Trajectory) -> list[list[tuple[str, str]]]:
    return [[pair for pair in turn.hints if pair[0] == "hook"] for turn in trajectory.turns]


async def test_a_blocked_call_never_reaches_the_agent_and_stays_as_sampled(
    renderer: TemplateRenderer,
) -> None:
    async with Rig(renderer, [PUSH, READ, said("Done.")], config=hooked(guard)) as rig:
        messages = await loop(rig, 3, lambda name: "no such tool" if name == BLOCKED else "x = 1")
        assert "git push" not in json.dumps(messages)
        assert messages[2]["tool_calls"][0]["function"] == {"name": BLOCKED, "arguments": "{}"}
        second, third = (renderer.decode(sent.ids) for sent in rig.engine.sent[1:])
        assert "git push" in second  # what the model said
        assert "Nothing may be pushed." in second
        assert "no such tool" not in second + third
        assert "x = 1\n\nRun the tests before you end." in third
        trajectory = await rig.sealed()
        assert [turn.parent for turn in trajectory.turns] == [-1, 0, 1]
        assert [BLOCKED in turn.labels for turn in trajectory.turns] == [True, False, False]
        assert hints(trajectory) == [[], [("hook", "blocked bash")], [("hook", "reminded read")]]
        assert rig.session.stats.edited == rig.session.stats.unknown_tools == 0
        assert trajectory.ledger.trained == trajectory.ledger.captured  # a blocked call is the policy's own
        (segment,) = trajectory.segments
        ours = renderer.codec.encode("Nothing may be pushed.")
        (at,) = [i for i in range(len(segment.ids)) if list(segment.ids[i : i + len(ours)]) == list(ours)]
        assert not segment.mask[at : at + len(ours)].any()
        assert record(rig) == [("bash", "blocked"), ("read", "reminded")]


async def test_what_a_hook_did_is_in_the_text_of_the_rollout(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    async with Rig(renderer, [PUSH, READ, said("Done.")], config=hooked(guard)) as rig:
        await loop(rig, 3, lambda name: "x = 1")
        trajectory = await rig.sealed()
    name = "train/00001/000/00"
    made = fake_rollout(AttemptSpec(rollout_id=name, task=Task(id="t", prompt="", files={}), seed=0), 1.0)
    segments = tuple(replace(segment, rollout_id=name) for segment in trajectory.segments)
    made = replace(made, trajectory=replace(trajectory, segments=segments))
    with RunDir.create(load_config(None, [f"run.dir={tmp_path / 'r'}"])) as run, run.store() as store:
        store.put_rollout("train", 1, 0, 0, made)
    lines = list(rollout_text(rollout_found(one_run(tmp_path / "r"), name)))
    turns = [line.partition(":")[0] for line in lines if line.startswith("-- turn")]
    assert turns[0] == "-- turn 0, insitu blocked"
    assert [line for line in lines if line.startswith("-- turn 1, hook: blocked bash:")]
    assert [line for line in lines if line.startswith("-- turn 2, hook: reminded read:")]


async def test_a_result_is_rewritten_once_and_stays_so(renderer: TemplateRenderer) -> None:
    asked: list[tuple[str, str]] = []

    def hook(event: ToolEvent) -> Mapping[str, str] | None:
        asked.append((event.kind, event.text))
        assert (event.name, event.arguments, event.rollout_id) == ("read", {"path": "a"}, "r/0")
        return guard(event)

    async with Rig(renderer, [READ, READ, said("Done.")], config=hooked(hook)) as rig:
        results = iter(["key = sk-1", "plain"])
        messages = await loop(rig, 3, lambda name: next(results))
        assert asked == [("call", ""), ("result", "key = sk-1"), ("call", ""), ("result", "plain")]
        last = renderer.decode(rig.engine.sent[2].ids)
        assert "key = ***" in last
        assert "sk-1" not in last
        # the agent empties an old result: that is another text, shown to the hook, and a fork as ever
        messages[3]["content"] = "[cleared]"
        await rig.post({"messages": [*messages, {"role": "user", "content": "Go on."}], "tools": TOOLS})
        assert asked[-1] == ("result", "[cleared]")
        assert "[cleared]" in renderer.decode(rig.engine.sent[3].ids)
        kept = [json.loads(c.arguments) for c in rig.session.host_calls if c.source == "hook"]
        assert (kept[0]["was"], kept[0]["text"]) == ("key = sk-1", "key = ***")


async def test_a_reminder_to_a_call_comes_with_its_result_and_tokens_are_counted_alike(
    renderer: TemplateRenderer,
) -> None:
    def hook(event: ToolEvent) -> Mapping[str, str] | None:
        return {"remind": f"About {event.name}."} if event.kind == "call" else None

    async with Rig(renderer, [READ, said("Done.")], config=hooked(hook)) as rig:
        messages = (await loop(rig, 1, lambda name: "x = 1"))[len(ASK) :]
        system, ask = ASK
        use = {"type": "tool_use", "id": messages[0]["tool_calls"][0]["id"], "name": "read"}
        body = {
            "system": system["content"],
            "messages": [
                ask,
                {"role": "assistant", "content": [use | {"input": {"path": "a"}}]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "x = 1"}],
                },
            ],
            "tools": [
                {"name": t["function"]["name"], "description": t["function"]["description"],
                 "input_schema": t["function"]["parameters"]}
                for t in [*TOOLS, BASH]
            ],
            "max_tokens": 9,
        }  # fmt: skip
        counted = await rig.http.post(f"{rig.base}/messages/count_tokens", json=body, headers=rig.auth)
        tokens = (await counted.json())["input_tokens"]
        await rig.http.post(f"{rig.base}/messages", json=body, headers=rig.auth)
        assert tokens == len(rig.engine.sent[1].ids)
        assert "x = 1\n\nAbout read." in renderer.decode(rig.engine.sent[1].ids)


def named(messages: list[Any], name: Callable[[int], str]) -> list[Any]:
    """The messages of a client that gives the nth call of a conversation an id of its own."""
    ids: dict[str, str] = {}
    for message in messages:
        for made in message.get("tool_calls") or ():
            ids.setdefault(made["id"], name(len(ids)))
    copy = json.loads(json.dumps(messages))
    for message in copy:
        for made in message.get("tool_calls") or ():
            made["id"] = ids[made["id"]]
        if message["role"] == "tool":
            message["tool_call_id"] = ids[message["tool_call_id"]]
    return copy


@pytest.mark.parametrize("echo", [lambda n: f"mine_{n}", lambda n: f"unnamed_contents[{2 * n + 1}].parts[0]"])
async def test_a_client_with_ids_of_its_own_gets_past_no_hook(
    renderer: TemplateRenderer, echo: Callable[[int], str]
) -> None:
    asked: list[tuple[str, str, str]] = []

    def hook(event: ToolEvent) -> Mapping[str, str] | None:
        asked.append((event.kind, event.name, str(event.arguments.get("path", ""))))
        if event.kind == "call" and event.name == "bash":
            return {"block": f"Not {event.arguments['command']}."}
        return {"remind": "About read."} if event.kind == "call" else guard(event)

    other = Message(role="assistant", text="Then.", tool_calls=(call("bash", '{"command": "rm -r x"}'),))
    script = [PUSH, READ, other, said("Done.")]
    async with Rig(renderer, script, config=hooked(hook)) as rig:
        messages: list[Any] = [*ASK]
        for _ in range(4):
            status, body = await rig.post({"messages": named(messages, echo), "tools": [*TOOLS, BASH]})
            assert status == 200, body
            messages.append(body["choices"][0]["message"])
            for made in messages[-1].get("tool_calls") or ():
                text = "no such tool" if made["function"]["name"] == BLOCKED else "key = sk-1"
                messages.append({"role": "tool", "tool_call_id": made["id"], "content": text})
        last = renderer.decode(rig.engine.sent[3].ids)
        for text in ("Not git push.", "key = ***\n\nAbout read.", "Not rm -r x."):
            assert last.count(text) == 1
        assert "no such tool" not in last
        assert asked == [
            ("call", "bash", ""),
            ("call", "read", "a"),
            ("result", "read", "a"),
            ("call", "bash", ""),
        ]
        trajectory = await rig.sealed()
        assert [turn.parent for turn in trajectory.turns] == [-1, 0, 1, 2]
        assert hints(trajectory)[3] == [("hook", "blocked bash")]


async def test_two_conversations_may_give_their_calls_the_same_ids(renderer: TemplateRenderer) -> None:
    other = Message(
        role="assistant", text="I push.", tool_calls=(call("bash", '{"command": "git push -f"}'),)
    )

    def hook(event: ToolEvent) -> Mapping[str, str] | None:
        return {"block": f"Not {event.arguments['command']}."} if event.kind == "call" else None

    async with Rig(renderer, [PUSH, other, said("x")], config=hooked(hook)) as rig:
        asks = [ASK, [ASK[0], {"role": "user", "content": "Fix g."}]]
        for ask, text in zip(asks, ("Not git push.", "Not git push -f."), strict=True):
            _, body = await rig.post({"messages": ask, "tools": [*TOOLS, BASH]})
            made = body["choices"][0]["message"]
            result = {"role": "tool", "tool_call_id": made["tool_calls"][0]["id"], "content": "no"}
            messages = named([*ask, made, result], lambda n: "call_0")
            rig.script.insert(rig.session.stats.calls, said("Well."))
            await rig.post({"messages": messages, "tools": [*TOOLS, BASH]})
            assert text in renderer.decode(rig.engine.sent[-1].ids)


async def test_invented_results_are_bounded(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(tool_hooks, "SPARE_RESULTS", 2)
    limits = Limits(max_calls=32, max_call_tokens=512, max_context_tokens=1000)
    invented = [{"role": "tool", "tool_call_id": f"c{n}", "content": "x"} for n in range(2000)]
    config = hooked(lambda event: asked.append(event.call_id))
    async with Rig(renderer, [said("x")], config=config, limits=limits) as rig:
        assert (await rig.post({"messages": [*ASK, *invented], "tools": TOOLS}))[0] == 400
        assert asked == []
        assert (await rig.post({"messages": [*ASK, *invented[:4]], "tools": TOOLS}))[0] == 200
        assert asked == ["c0", "c1"]
        assert renderer.decode(rig.engine.sent[0].ids).count(tool_hooks.TOO_MANY) == 2


async def test_what_a_hook_records_leaves_the_host_tools_their_calls() -> None:
    tool = HostTool(name="end", description="", parameters={"type": "object"}, ends=True)
    box = ToolBox([tool], max_calls=1)
    hook = UserHook("h", guard).open("r/0", box)
    for turn in range(3):
        await hook.called(turn, [replace(PUSH.tool_calls[0], id=f"c{turn}")])
    assert box.call("end", {}) == {"ok": True}
    assert box.ended
    with pytest.raises(WireError, match="too often"):
        box.call("end", {})
    assert [one.source for one in box.calls] == ["hook", "hook", "hook", "agent"]


async def test_the_label_of_a_block_is_not_the_models_to_give(renderer: TemplateRenderer) -> None:
    forged = Message(role="assistant", tool_calls=(call(BLOCKED, "{}"),))
    async with Rig(renderer, [forged], config=hooked(guard)) as rig:
        await loop(rig, 1, lambda name: "no such tool")
        (turn,) = (await rig.sealed()).turns
        assert BLOCKED not in turn.labels


async def test_a_call_whose_client_left_while_the_hook_saw_it_is_in_the_account(
    renderer: TemplateRenderer,
) -> None:
    seen, gone = asyncio.Event(), threading.Event()
    here = asyncio.get_running_loop()

    def hook(event: ToolEvent) -> None:
        here.call_soon_threadsafe(seen.set)
        gone.wait(10)

    config = replace(hooked(hook), disconnect_grace_s=0.0)
    async with Rig(renderer, [PUSH], config=config) as rig:
        asking = asyncio.create_task(rig.post({"messages": ASK, "tools": [*TOOLS, BASH]}))
        await seen.wait()
        (running,) = rig.session.calls
        asking.cancel()
        await asyncio.wait({running.task})
        gone.set()
        assert rig.session.stats.sampled_tokens > 0
        trajectory = await rig.sealed()
        assert trajectory.ledger.balanced
        assert trajectory.ledger.captured == rig.session.stats.sampled_tokens
        assert [turn.excluded for turn in trajectory.turns] == ["undelivered"]


async def test_a_coroutine_function_is_a_hook_too(renderer: TemplateRenderer) -> None:
    async def hook(event: ToolEvent) -> Mapping[str, str] | None:
        await asyncio.sleep(0)
        return guard(event)

    async with Rig(renderer, [PUSH], config=hooked(hook)) as rig:
        messages = await loop(rig, 1, str)
        assert messages[2]["tool_calls"][0]["function"]["name"] == BLOCKED


def raises(event: ToolEvent) -> None:
    raise KeyError("nothing")


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (raises, "gateway.tools my.py:guard raised KeyError"),
        (lambda event: 5, "gateway.tools my.py:guard returned 5 for a call, not None"),
        (lambda event: {"result": "x"}, 'not None, {"block": text} or {"remind": text}'),
        (lambda event: {"block": ""}, "returned {'block': ''} for a call"),
        (lambda event: {"block": "a", "remind": "b"}, "not None"),
    ],
)
async def test_a_hook_that_fails_is_a_failure_of_the_host_in_one_line(
    renderer: TemplateRenderer, hook: Hook, reason: str
) -> None:
    async with Rig(renderer, [READ], config=hooked(hook)) as rig:
        assert (await rig.post({"messages": ASK, "tools": TOOLS}))[0] == 500
        assert reason in rig.session.stats.infra_error
        assert "\n" not in rig.session.stats.infra_error
        status, body = await rig.post({"messages": ASK, "tools": TOOLS})
        assert (status, body["error"]["message"]) == (
            403, "This session has failed and serves no more calls.",
        )  # fmt: skip
        trajectory = await rig.sealed()
        assert trajectory.ledger.balanced


async def test_a_slow_hook_fails_at_its_deadline(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = threading.Event()
    monkeypatch.setattr(tool_hooks, "HOOK_S", 0.05)
    async with Rig(renderer, [READ], config=hooked(lambda event: gone.wait(60))) as rig:
        assert (await rig.post({"messages": ASK, "tools": TOOLS}))[0] == 500
        gone.set()
        assert "did not return within 0.05 s" in rig.session.stats.infra_error


async def test_a_hook_that_fails_again_and_again_ends_the_run(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [READ], config=hooked(raises)) as rig:
        for number in range(FAILURES):
            session = rig.gateway.open_session(f"r/{number + 1}", seed=1, limits=rig.session.spec.limits)
            url = f"{rig.origin}/s/{session.public_id}/v1/chat/completions"
            auth = {"Authorization": f"Bearer {session.secret}"}
            await rig.http.post(url, json={"messages": ASK, "tools": TOOLS}, headers=auth)
        with pytest.raises(InsituError, match="failed 5 times in a row") as failed:
            await session.seal(1.0)
        assert not failed.value.infra


def test_the_configuration_names_a_file_of_tools_or_a_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    note = {"name": "note", "description": "Say.", "parameters": {"type": "object"}}
    Path("hooks_of_mine.py").write_text(f"def guard(event):\n    return None\n\n\nguard.tools = [{note}]\n")
    for name in ("hooks_of_mine.py:guard", "hooks_of_mine:guard"):
        config = name_run(load_config(None, [f"gateway.tools={name}", "run.dir=r"]))
        made = gateway_config(config)
        assert made.hook is not None
        assert [tool.name for tool in made.tools] == ["note"]
    config = load_config(None, [], {"gateway": {"tools": guard}})
    assert gateway_config(name_run(config)).hook is not None
    with pytest.raises(ConfigError, match="has no attribute nothing"):
        gateway_config(load_config(None, ["gateway.tools=hooks_of_mine.py:nothing"]))
    Path("no_hook.py").write_text("X = 'x'\n")
    with pytest.raises(ConfigError, match="is a str, not a function"):
        gateway_config(load_config(None, ["gateway.tools=no_hook.py:X"]))
    with pytest.raises(ConfigError, match="gateway.tools has no effect with engine.kind"):
        load_config(
            None,
            [
                "gateway.tools=hooks_of_mine:guard",
                "engine.kind=upstream",
                "engine.urls=http://127.0.0.1:1",
                "engine.model=m",
            ],
        )
    assert insitu.ToolEvent is ToolEvent
