"""What agents may wish for: followed, recorded or refused, and never in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from gateway_rig import ASK, TOOLS, Rig, call, said
from wire_lab import CALLS, PLAIN, SAY, anthropic_client, gemini_client, openai_client

from insitu.chat.template import TemplateRenderer
from insitu.gateway.dialects.chat import ChatDialect
from insitu.gateway.reply_checks import cut_at_stop
from insitu.gateway.server import DIALECTS
from insitu.types import Generation, IntArray, Limits, Message, ModelRequest

STORY = "One fish, two fish. Human: red fish"


@pytest.mark.case(17)
@pytest.mark.parametrize("stop", ["two f", "h", "Human:", STORY, "fish. Hu"])
async def test_a_stop_string_cuts_text_and_tokens_alike(renderer: TemplateRenderer, stop: str) -> None:
    """Also inside a token; the next turn continues the cut one."""
    whole = renderer.render_reply(said(STORY))
    async with Rig(renderer, [said(STORY), SAY]) as rig, anthropic_client(rig) as api:
        ask: dict[str, Any] = {"model": "m", "max_tokens": 999}
        first: list[Any] = [{"role": "user", "content": "Tell."}]
        answer = await api.messages.create(messages=first, stop_sequences=["never", stop], **ask)
        before = STORY[: STORY.index(stop)]
        assert "".join(block.text for block in answer.content) == before
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
        assert answer.usage.output_tokens < len(whole)
        echo = {"role": "assistant", "content": before}
        again = await api.messages.create(messages=[*first, echo, {"role": "user", "content": "On."}], **ask)
        assert again.stop_reason == "end_turn"
        turns = (await rig.sealed()).turns
    kept = turns[0].ids
    assert kept.tolist() == whole[: len(kept)].tolist()
    assert stop in renderer.parse(kept).text
    assert stop not in renderer.parse(kept[:-1]).text
    assert len(turns[0].logprobs) == len(kept)
    assert [turn.parent for turn in turns] == [-1, 0]
    assert rig.session.stats.edited == 0


def ends_twice(renderer: TemplateRenderer, tail: str) -> IntArray:
    """Ids of a reply whose call holds END in its arguments, with `tail` behind the call."""
    looked = Message(
        role="assistant", text="Look.", reasoning="END?", tool_calls=(call("read", '{"path": "END"}'),)
    )
    # Without the ids that end the turn: the text goes on.
    body = renderer.render_reply(looked)[:-1]
    return np.concatenate([body, renderer.render_reply(said(tail))]).astype(np.int32)


@pytest.mark.case(17)
@pytest.mark.parametrize(
    "tail", ["\nEND of it", " Done. END, and much more text behind it. END END", "x" * 90 + "END."]
)
async def test_a_stop_string_never_cuts_a_call_or_reasoning(renderer: TemplateRenderer, tail: str) -> None:
    """The string in the call's arguments and in the reasoning is not the agent's to stop at."""
    whole = ends_twice(renderer, tail)
    ask = {"messages": ASK, "tools": TOOLS, "stop": ["END"]}
    async with Rig(renderer, [whole]) as rig:
        _, body = await rig.post(ask)
        trajectory = await rig.sealed()
    message = body["choices"][0]["message"]
    assert [made["function"]["arguments"] for made in message["tool_calls"]] == ['{"path": "END"}']
    assert message["content"].startswith("Look.")
    assert "END" not in message["content"]
    assert "tool_call" not in message["content"]
    kept = trajectory.turns[0].ids
    assert kept.tolist() == whole[: len(kept)].tolist()
    assert "END" in renderer.parse(kept).text
    assert "END" not in renderer.parse(kept[:-1]).text
    assert rig.session.stats.malformed == 0


@pytest.mark.case(17)
async def test_a_stop_string_before_a_call_ends_the_reply_there(renderer: TemplateRenderer) -> None:
    first = Message(role="assistant", text="Now END.", tool_calls=(call("read", '{"path": "END"}'),))
    async with Rig(renderer, [first]) as rig:
        _, body = await rig.post({"messages": ASK, "tools": TOOLS, "stop": ["END"]})
    message = body["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == ("Now ", None)


async def test_an_open_call_that_spells_the_text_behind_it_is_not_cut(renderer: TemplateRenderer) -> None:
    """The marker typed with ordinary tokens is text, the control token is a call."""
    made = '\n{"name": "read", "arguments": {"path": "END"}}'
    opened = renderer.render_reply(Message(role="assistant", tool_calls=(call("read", '{"path": "END"}'),)))[
        :-1
    ]
    ids = np.concatenate([opened, renderer.render_reply(said(f"<tool_call>{made} more"))]).astype(np.int32)
    assert renderer.parse(ids).calls
    done = Generation(ids=ids, logprobs=None, finish="stop", version_runs=((0, 0),))
    kept, parsed, stop = cut_at_stop(renderer, done, ["END"])
    assert (len(parsed.calls), parsed.malformed, stop) == (1, False, "END")
    assert len(opened) < len(kept.ids) < len(ids)


@pytest.mark.case(17)
async def test_tokens_behind_a_stop_string_are_booked_and_budgeted(renderer: TemplateRenderer) -> None:
    whole = renderer.render_reply(said(STORY))
    limits = Limits(max_context_tokens=100_000, max_session_tokens=len(whole))
    async with Rig(renderer, [said(STORY)], limits=limits) as rig:
        _, body = await rig.post({"messages": ASK, "stop": "two"})
        _, again = await rig.post({"messages": ASK, "stop": "two"})
        stats = rig.session.stats
        trajectory = await rig.sealed()
    assert body["choices"][0]["message"]["content"] == "One fish, "
    assert (stats.sampled_tokens, stats.budget_stop) == (len(whole), "tokens")
    assert "budget" in again["choices"][0]["message"]["content"]
    kept = len(trajectory.turns[0].ids)
    assert body["usage"]["completion_tokens"] == kept < len(whole)
    ledger = trajectory.ledger
    assert (ledger.captured, ledger.trained) == (len(whole), kept)
    assert ledger.excluded == {"after_stop": len(whole) - kept}


@pytest.mark.slow
@pytest.mark.case(17)
async def test_stop_strings_end_replies_of_the_other_formats_too(renderer: TemplateRenderer) -> None:
    async with (
        Rig(renderer, [said(STORY)]) as rig,
        openai_client(rig) as api,
        gemini_client(rig) as google,
    ):
        chat = await api.chat.completions.create(model="m", messages=ASK, stop=" two")
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("One fish,", "stop")
        answer = await google.models.generate_content(
            model="m", contents="Tell.", config={"stop_sequences": [" two"]}
        )
        assert answer.text == "One fish,"


@pytest.mark.slow
@pytest.mark.case(54)
async def test_sampling_stays_neutral_whatever_is_asked_for(renderer: TemplateRenderer) -> None:
    odd: dict[str, Any] = {"model": "gpt-9", "temperature": 0, "top_p": 0.1}
    async with (
        Rig(renderer, [SAY]) as rig,
        openai_client(rig) as api,
        anthropic_client(rig) as claude,
        gemini_client(rig) as google,
    ):
        chat = await api.chat.completions.create(
            messages=ASK, logit_bias={"5": 100}, max_tokens=10**9, seed=1, frequency_penalty=2, **odd
        )
        replies = await api.responses.create(input="Hi", max_output_tokens=10**9, **odd)
        message = await claude.messages.create(
            model="m",
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=10**9,
            stream=False,
            timeout=60,
            extra_body={"top_k": 1, **odd},
        )
        content = await google.models.generate_content(
            model="gemini-9", contents="Hi", config={"temperature": 0, "top_k": 1, "max_output_tokens": 10**9}
        )
        assert {chat.model, replies.model, message.model, content.model_version} == {"policy"}
        limit = rig._limits.max_call_tokens
        assert {(s.params.temperature, s.params.max_tokens) for s in rig.engine.sent} == {(1.0, limit)}


@pytest.mark.slow
@pytest.mark.case(49)
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "read"}}])
async def test_a_tool_choice_is_advice(renderer: TemplateRenderer, choice: Any) -> None:
    """Sampling is not constrained, so a forced call cannot be promised; the tools stay offered."""
    async with Rig(renderer, [CALLS]) as rig, openai_client(rig) as api:
        answer = await api.chat.completions.create(model="m", messages=ASK, tools=TOOLS, tool_choice=choice)
        assert answer.choices[0].finish_reason == "tool_calls"
        assert '"name": "read"' in renderer.decode(rig.engine.sent[0].ids)


@pytest.mark.slow
@pytest.mark.case(49)
async def test_no_tool_is_offered_where_none_is_wanted(renderer: TemplateRenderer) -> None:
    async with (
        Rig(renderer, [SAY]) as rig,
        openai_client(rig) as api,
        anthropic_client(rig) as claude,
        gemini_client(rig) as google,
    ):
        await api.chat.completions.create(model="m", messages=ASK, tools=TOOLS, tool_choice="none")
        flat = {"type": "function", **TOOLS[0]["function"], "strict": False}
        await api.responses.create(model="m", input="Hi", tools=[flat], tool_choice="none")
        spec = {"name": "read", "input_schema": {"type": "object"}}
        await claude.messages.create(
            model="m",
            max_tokens=99,
            messages=[{"role": "user", "content": "Hi"}],
            tools=[spec],
            tool_choice={"type": "none"},
        )
        off = {"function_calling_config": {"mode": "NONE"}}
        tools = [{"function_declarations": [{"name": "read"}]}]
        await google.models.generate_content(
            model="m", contents="Hi", config={"tools": tools, "tool_config": off}
        )
        assert len(rig.engine.sent) == 4
        assert not any("read" in renderer.decode(sent.ids) for sent in rig.engine.sent)


OFF: Mapping[str, Any] = {
    "chat": {"tools": TOOLS, "tool_choice": "none"},
    "anthropic": {
        "tools": [{"name": "read", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "none"},
    },
    "responses": {"tools": [{"type": "function", "name": "read"}], "tool_choice": "none"},
    "gemini": {
        "tools": [{"functionDeclarations": [{"name": "read"}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "NONE"}},
    },
}
"""Tools that are sent and not to be called."""


@pytest.mark.case(49)
@pytest.mark.parametrize("name", OFF)
def test_tools_that_are_barred_are_known_from_none(name: str) -> None:
    def asked(**more: Any) -> ModelRequest:
        return DIALECTS[name].parse({**PLAIN[name], **more}, "").request

    assert not asked().tool_choice_none
    assert (asked(**OFF[name]).tools, asked(**OFF[name]).tool_choice_none) == ((), True)
    assert not asked(**{**OFF[name], "tools": []}).tool_choice_none


@pytest.mark.case(49)
async def test_a_final_answer_without_a_call_is_trained(renderer: TemplateRenderer) -> None:
    """Agents bar the tools when they want the answer at last: that is main line, not a side call."""
    async with Rig(renderer, [CALLS, SAY]) as rig:
        _, body = await rig.post({"messages": ASK, "tools": TOOLS})
        said = body["choices"][0]["message"]
        answers = [{"role": "tool", "tool_call_id": c["id"], "content": "x"} for c in said["tool_calls"]]
        status, _ = await rig.post({"messages": [*ASK, said, *answers], **OFF["chat"]})
        assert status == 200
        trajectory = await rig.sealed()
        assert trajectory.ledger.excluded == {}
        assert [segment.label for segment in trajectory.segments] == ["wipe", "final"]


@pytest.mark.slow
@pytest.mark.case(49)
@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"logprobs": True},
        {"top_logprobs": 3},
        {"modalities": ["audio"]},
        {"functions": [{"name": "f"}]},
    ],
    ids=lambda more: next(iter(more)),
)
async def test_chat_refuses_what_one_neutral_sample_cannot_answer(
    renderer: TemplateRenderer, more: dict[str, Any]
) -> None:
    async with Rig(renderer, [SAY]) as rig, openai_client(rig) as api:
        with pytest.raises(openai.BadRequestError) as refused:
            await api.chat.completions.create(model="m", messages=ASK, **more)
        assert refused.value.param == next(iter(more))
        answer = await api.chat.completions.create(model="m", messages=ASK)
        assert answer.choices[0].message.content == SAY.text


@pytest.mark.case(49, 50)
@pytest.mark.parametrize(
    "more",
    [
        {"extra_body": {"mcp_servers": [{"type": "url", "url": "http://10.0.0.1", "name": "x"}]}},
        {"extra_body": {"container": "c_1"}},
    ],
    ids=["mcp", "container"],
)
async def test_messages_refuse_what_needs_a_fetch_or_a_store(
    renderer: TemplateRenderer, more: dict[str, Any]
) -> None:
    given = {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "Hi"}]}
    async with Rig(renderer, [SAY]) as rig, anthropic_client(rig) as api:
        with pytest.raises(anthropic.BadRequestError):
            await api.messages.create(**{**given, **more})
        assert (await api.messages.create(**given)).content[0].text == SAY.text


@pytest.mark.parametrize("field", ["function_call", "name", "audio"])
def test_fields_of_messages_that_no_family_writes_are_labelled(field: str) -> None:
    said: list[dict[str, Any]] = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "A"}]
    said += [{"role": "user", "content": "On."}]
    assert ChatDialect().parse({"messages": said}, "").request.hints == ()
    said[1][field] = "x"
    assert ChatDialect().parse({"messages": said * 2}, "").request.hints == (("dropped_field", field),)
    named = {"role": "tool", "tool_call_id": "c", "name": "f", "content": "out"}
    assert ChatDialect().parse({"messages": [said[0], named]}, "").request.hints == ()
