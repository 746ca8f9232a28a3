"""Text -> tool call: what it reads, and that the sampled ids stay what they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest
from gateway_rig import ASK, Rig, call, said
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.chat.template import TemplateRenderer
from insitu.gateway.host_tools import ToolBox
from insitu.gateway.request import GatewayConfig
from insitu.gateway.text_tool_calls import TextShim, translate
from insitu.types import Limits, Message, ModelRequest, ToolCall

BASH = {"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": {}}}


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ('I run {"command": "ls -l"} now', "ls -l"),
        ('{"arguments": {"command": "ls"}}', "ls"),
        ('{"name": "terminal", "arguments": {"command": "a", "final_answer": "b"}}', "a"),
        ('{"broken": {"command": ls}} then {"command": "pwd"}', "pwd"),
        ("Let me see.\n```bash\ncat a.py\nls\n```\nDone.", "cat a.py\nls"),
        ("```\necho hi\n```", "echo hi"),
        ("terminal(command='ls -a')", "ls -a"),
        ('bash("pwd")', "pwd"),
        ("```python\nprint(1)\n```", None),
        ('{"final_answer": "```bash\\nrm x\\n```"}', None),
        ("The answer is 42.", None),
        ("os.system('ls')", None),
        ('{"command": 5}', None),
        ("", None),
    ],
)
def test_forms(text: str, command: str | None) -> None:
    found = translate(TextShim(), text)
    assert (found and json.loads(found.arguments)) == (command and {"command": command})


def test_the_whole_text_where_the_operator_says_so() -> None:
    shim = TextShim(whole_text=True)
    found = translate(shim, " ls -l ")
    assert found is not None
    assert json.loads(found.arguments) == {"command": "ls -l"}
    assert translate(shim, '{"final_answer": "42"}') is None
    assert translate(shim, "  ") is None


@settings(max_examples=300)
@given(st.text(alphabet='{}[]"`:,abcommand()\n \\', max_size=200))
def test_no_text_breaks_it(text: str) -> None:
    found = translate(TextShim(whole_text=True), text)
    assert found is None or isinstance(json.loads(found.arguments)["command"], str)


def test_many_braces_take_no_time() -> None:
    assert translate(TextShim(), "{" * 200_000) is None


async def test_the_sampled_ids_stay_and_the_turn_is_labelled(renderer: TemplateRenderer) -> None:
    text = "I look.\n```bash\nls\n```"
    script = [said(text), said("Done.")]
    async with Rig(renderer, script) as rig:
        limits = Limits(max_context_tokens=100_000)
        session = rig.gateway.open_session("r/shim", seed=7, limits=limits, shim=TextShim())
        rig.session, rig.auth = session, {"Authorization": f"Bearer {session.secret}"}
        rig.base = f"{rig.origin}/v1"
        _, body = await rig.post({"messages": ASK, "tools": [BASH]})
        echo = body["choices"][0]["message"]
        assert echo["content"] == text
        made = echo["tool_calls"][0]
        assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == (
            "bash",
            {"command": "ls"},
        )
        result = {"role": "tool", "tool_call_id": made["id"], "content": "a.py"}
        _, body = await rig.post({"messages": [*ASK, echo, result], "tools": [BASH]})
        assert "tool_calls" not in body["choices"][0]["message"]
        first, second = rig.engine.sent
        sampled = renderer.render_reply(said(text)).tolist()
        assert second.ids.tolist()[: len(first.ids) + len(sampled)] == [*first.ids.tolist(), *sampled]
        assert session.stats.shimmed == [0]
        trajectory = await session.seal(1.0)
        assert ("label", "shim") in trajectory.turns[0].hints
        assert ("label", "shim") not in trajectory.turns[1].hints
        assert [turn.parent for turn in trajectory.turns] == [-1, 0]
        assert trajectory.ledger.trained == trajectory.ledger.captured


class Slow:
    """A hook that answers for the first turn when the second was translated too."""

    def __init__(self) -> None:
        self.both = asyncio.Event()

    def open(self, rollout_id: str, tools: ToolBox) -> Slow:
        return self

    async def called(self, turn: int, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        if turn:
            self.both.set()
        await self.both.wait()
        return tuple(calls)

    async def read(self, request: ModelRequest) -> ModelRequest:
        return request

    def hints(self, messages: Sequence[Message]) -> list[tuple[str, str]]:
        return []

    def close(self) -> None:
        pass


async def test_parallel_calls_that_wait_for_a_hook_are_labelled_each(renderer: TemplateRenderer) -> None:
    config = GatewayConfig(hook=Slow())
    async with Rig(renderer, [said("```bash\nls\n```")], config=config) as rig:
        limits = Limits(max_context_tokens=100_000)
        session = rig.gateway.open_session("r/shim", seed=7, limits=limits, shim=TextShim())
        rig.auth, rig.base = {"Authorization": f"Bearer {session.secret}"}, f"{rig.origin}/v1"
        asks = [ASK, [ASK[0], {"role": "user", "content": "Fix g."}]]
        await asyncio.gather(*(rig.post({"messages": ask, "tools": [BASH]}) for ask in asks))
        assert [turn.labels for turn in (await session.seal(1.0)).turns] == [{"shim"}, {"shim"}]


async def test_off_by_default_and_silent_where_there_is_nothing_to_do(renderer: TemplateRenderer) -> None:
    text = "```bash\nls\n```"
    own = Message(role="assistant", text=text, tool_calls=(call("bash", '{"command": "pwd"}'),))
    async with Rig(renderer, [said(text)]) as rig:
        _, body = await rig.post({"messages": ASK, "tools": [BASH]})
        assert "tool_calls" not in body["choices"][0]["message"]
        limits = Limits(max_context_tokens=100_000)
        session = rig.gateway.open_session("r/shim", seed=7, limits=limits, shim=TextShim())
        rig.auth, rig.base = {"Authorization": f"Bearer {session.secret}"}, f"{rig.origin}/v1"
        _, body = await rig.post({"messages": ASK})
        assert "tool_calls" not in body["choices"][0]["message"]
        rig.script = [own]
        _, body = await rig.post({"messages": ASK, "tools": [BASH]})
        assert len(body["choices"][0]["message"]["tool_calls"]) == 1
        assert session.stats.shimmed == []
