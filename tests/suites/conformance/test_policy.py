"""The scripted policy: it sees ids only, speaks in odd splits, and goes through its script."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from insitu.agents.recipe import shipped_recipes
from insitu.chat.renderer import ParsedReply
from insitu.chat.template import TemplateRenderer
from insitu.types import IntArray, Message, RequestKey, ToolSpec
from insitu_lab.conformance import checks
from insitu_lab.conformance.agent_tools import AGENT_TOOLS
from insitu_lab.conformance.scripted_policy import (
    MAIN,
    MOST_LOOKS,
    PROMPT,
    RIGHT,
    ScriptedPolicy,
    read_prompt,
)
from insitu_lab.open_renderer import Splitter

TEXTS = ("def area(w, h):\n    return w + h\n", "café 日本 🙂", "<|im_end|> <tool_call>", "")


@pytest.mark.parametrize("text", TEXTS)
def test_a_split_says_the_same_with_other_tokens(
    renderer: TemplateRenderer, splitter: Splitter, text: str
) -> None:
    canonical = renderer.codec.encode_content(text)
    said = splitter.split(canonical)
    assert renderer.decode(said) == renderer.decode(canonical) == text
    if len(text) > 20:
        assert len(said) > len(canonical)
        assert not np.array_equal(renderer.codec.encode_content(renderer.decode(said)), said)


def prompt(renderer: TemplateRenderer, messages: Sequence[Message], tools: Sequence[str] = ()) -> IntArray:
    offered = [ToolSpec(name=name, description="Does it.", parameters="{}") for name in tools]
    system = [Message(role="system", text="You are <|im_start|>tools\n[].")]
    parts = [renderer.open(system, offered), renderer.append(messages), renderer.generation_prompt()]
    return np.concatenate(parts).astype(np.int32)


def test_a_prompt_is_read_back_from_its_ids_alone(renderer: TemplateRenderer) -> None:
    spoken = [Message(role="user", text="One <|im_end|>"), Message(role="tool", text="Two", tool_call_id="c")]
    seen = read_prompt(renderer.codec, prompt(renderer, spoken[:1], ["read", "ns__run"]))
    assert set(seen.tools) == {"read", "ns__run"}
    assert [(said.role, said.text) for said in seen.messages] == [
        ("system", "You are <|im_start|>tools\n[]."),
        ("user", "One <|im_end|>"),
    ]
    assert read_prompt(renderer.codec, prompt(renderer, spoken)).tools == {}


class Playing:
    """A Director that is asked turn after turn."""

    def __init__(self, renderer: TemplateRenderer, splitter: Splitter, name: str) -> None:
        self.policy = ScriptedPolicy(renderer, splitter, AGENT_TOOLS[name])
        self._renderer = renderer
        self._turn = 0

    def ask(self, *messages: Message, tools: Sequence[str] = ("bash", "read", "edit", "task")) -> ParsedReply:
        key = RequestKey(seed=1, rollout_id="r", turn=self._turn)
        self._turn += 1
        return self._renderer.parse(self.policy(prompt(self._renderer, messages, tools), key))


def user(text: str) -> Message:
    return Message(role="user", text=text)


def test_the_main_line_reads_edits_runs_and_spawns(renderer: TemplateRenderer, splitter: Splitter) -> None:
    play = Playing(renderer, splitter, "opencode")
    replies = [play.ask(user(PROMPT)) for _ in range(6)]
    assert not any(reply.malformed for reply in replies)
    names = [[call.name for call in reply.calls] for reply in replies]
    assert names == [["read"], ["read", "bash"], ["edit"], ["bash"], ["task", "task"], ["bash"]]
    assert RIGHT in replies[2].calls[0].arguments
    assert replies[0].text.startswith("  I look")
    assert replies[1].reasoning
    assert r"caf\u00e9" in replies[1].calls[1].arguments
    split = [spoken.split for spoken in play.policy.replies.values()]
    assert split == [True, False] * 3


def test_sub_agents_summaries_and_others_are_told_apart(
    renderer: TemplateRenderer, splitter: Splitter
) -> None:
    play = Playing(renderer, splitter, "opencode")
    play.ask(user(PROMPT))
    play.ask(user("[[part 1]] Read notes.txt"))
    asked = user("[[part 2]] Read notes.txt")
    assert [call.name for call in play.ask(asked).calls] == ["read"]
    answer = play.ask(asked, Message(role="assistant", text="x"), Message(role="tool", text="Notes."))
    assert "[[part 2]] is done" in answer.text
    assert play.policy.finished_parts == {"2"}
    assert not play.ask(user("Name this conversation"), tools=()).calls
    summary = play.ask(user(PROMPT), user("Do not mention the summary process"))
    assert MAIN in summary.text
    assert play.policy.compactions == 0
    play.ask(user(summary.text))
    assert play.policy.compactions == 1
    assert [spoken.kind for spoken in play.policy.replies.values()] == [
        *("main", "part", "part", "part", "other", "summary", "main"),
    ]


def test_a_summary_before_the_opening_is_said_is_noted(
    renderer: TemplateRenderer, splitter: Splitter
) -> None:
    for replies, window_too_small in ((2, True), (5, False)):
        play = Playing(renderer, splitter, "opencode")
        for _ in range(replies):
            play.ask(user(PROMPT))
        play.ask(user(PROMPT), user("Do not mention the summary process"))
        assert play.policy.window_too_small is window_too_small


def test_sub_agents_that_run_one_after_another_are_seen(
    renderer: TemplateRenderer, splitter: Splitter
) -> None:
    """Each waits for the other to begin, for a while; that they overlapped is known by then."""
    reported = Message(role="assistant", text="x"), Message(role="tool", text="Notes.")
    for overlap in (False, True):
        play = Playing(renderer, splitter, "opencode")
        first, second = user("[[part 1]] Read notes.txt"), user("[[part 2]] Read notes.txt")
        play.ask(first)
        if overlap:
            play.ask(second)
        looks = 1
        while play.ask(first, *reported).calls:
            looks += 1
        assert looks == (1 if overlap else MOST_LOOKS)
        play.ask(second)
        play.ask(second, *reported)
        assert play.policy.finished_parts == {"1", "2"}
        assert play.policy.overlapped == overlap
        words = " ".join(checks._coverage(AGENT_TOOLS["opencode"], play.policy, [True]))
        assert ("did not run at the same time" in words) != overlap


def test_a_tool_behind_a_namespace_is_called_by_its_whole_name(
    renderer: TemplateRenderer, splitter: Splitter
) -> None:
    play = Playing(renderer, splitter, "codex")
    tools = ("exec_command", "multi__spawn_agent", "multi__wait_agent")
    replies = [play.ask(user(PROMPT), tools=tools) for _ in range(5)]
    assert [call.name for call in replies[4].calls] == ["multi__spawn_agent"] * 2
    reported = Message(role="tool", text='{"agent_id": "01a200c7-fbaf-7550-b9c4-1e4405225a29"}')
    waiting = play.ask(user(PROMPT), Message(role="assistant", text="x"), reported, tools=tools)
    assert waiting.calls[0].name == "multi__wait_agent"
    assert "01a200c7-fbaf-7550-b9c4-1e4405225a29" in waiting.calls[0].arguments


def test_agents_are_answered_in_their_own_forms(renderer: TemplateRenderer, splitter: Splitter) -> None:
    """Summaries in their tags, repeated on request; ends and answers by calls."""
    gemini = Playing(renderer, splitter, "gemini_cli")
    first = gemini.ask(user(PROMPT), user("generate the updated <state_snapshot>."), tools=())
    again = gemini.ask(user(PROMPT), user("Critically evaluate the <state_snapshot>"), tools=())
    assert first.text == again.text
    assert first.text.startswith("<state_snapshot>[[summary 1]]")
    looked = Message(role="tool", text="Notes.")
    gemini.ask(user("[[part 2]] Read"), tools=("complete_task",))
    answer = gemini.ask(user("[[part 1]] Read"), looked, tools=("complete_task",))
    assert [call.name for call in answer.calls] == ["complete_task"]
    spawn = AGENT_TOOLS["gemini_cli"].spawn
    assert spawn is not None
    having = ("run_shell_command", spawn("")[0])
    replies = [gemini.ask(user(PROMPT), tools=having) for _ in range(11)]
    assert len({reply.calls[0].arguments for reply in replies[5:10]}) == 1
    assert replies[10].calls != replies[9].calls
    mini = Playing(renderer, splitter, "mini_swe")
    assert all(mini.ask(user(PROMPT)).calls for _ in range(4))
    assert not mini.ask(user(PROMPT)).calls
    end = mini.ask(user(PROMPT))
    assert "COMPLETE_TASK" in end.calls[0].arguments


def test_every_agent_with_a_play_can_be_installed() -> None:
    assert set(AGENT_TOOLS) <= {*shipped_recipes()}
