"""The `renderers` package behind our protocol: exact pieces, text that stays text, replies read back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from known_lab import FAMILIES, renderer_of

from insitu.chat.codec import Codec
from insitu.chat.renderer import prepared
from insitu.chat.validation import check_renderer, round_trips
from insitu.errors import RenderError
from insitu.types import Message, ToolCall, ToolSpec
from insitu_bridges.renderers_adapter import AdaptedRenderer, adapted_renderer

pytestmark = pytest.mark.slow

TOOL = ToolSpec(name="read", description="Read é <b>.", parameters='{"type": "object", "properties": {}}')
CALL = ToolCall(id="call_1", name="read", arguments='{"path": "a.py"}')
USER = Message(role="user", text="  Fix it.\n\n")
RESULT = Message(role="tool", text="x = 1\n", tool_call_id="call_1")


@pytest.fixture(params=FAMILIES)
def chat_renderer(request: pytest.FixtureRequest) -> AdaptedRenderer:
    return renderer_of(request.param, request.config.cache.mkdir("insitu"))


def test_every_family_passes_its_own_check(chat_renderer: AdaptedRenderer) -> None:
    check_renderer(chat_renderer)
    assert round_trips(
        chat_renderer, Message(role="assistant", tool_calls=(ToolCall(id="", name="look", arguments="{}"),))
    )


def test_pieces_are_what_the_packages_own_bridge_adds(chat_renderer: AdaptedRenderer) -> None:
    """The bridge extends a prompt and a reply by close, new messages and generation prompt."""
    first = [chat_renderer.open([], [TOOL]), chat_renderer.append([USER]), chat_renderer.generation_prompt()]
    prompt = [int(i) for part in first for i in part]
    for said, run in [
        (Message(role="assistant", tool_calls=(CALL,)), [RESULT]),
        (Message(role="assistant", text="Done."), [USER]),
    ]:
        ids = chat_renderer.render_reply(said)
        shown = prepared([said, *run], chat_renderer.caps)[1:]
        rendered = [chat_renderer.inputs.message(m) for m in shown]
        config = chat_renderer.renderer.config.model_copy(update={"thinking_retention": "all"})
        renderer = type(chat_renderer.renderer)(chat_renderer.renderer._tokenizer, config)
        bridged = renderer.bridge_to_next_turn(
            prompt, ids.tolist(), rendered, tools=[chat_renderer.inputs.tool(TOOL)]
        )
        ours = np.concatenate(
            [ids, chat_renderer.join(ids, "stop", run), chat_renderer.generation_prompt(run[-1].role)]
        ).tolist()
        assert bridged.token_ids == prompt + ours


def test_pieces_are_what_the_whole_rendering_has(chat_renderer: AdaptedRenderer) -> None:
    system = Message(role="system", text="Rules.")
    whole = chat_renderer.renderer.render(
        [chat_renderer.inputs.message(m) for m in (system, USER)],
        tools=[chat_renderer.inputs.tool(TOOL)],
        add_generation_prompt=True,
    )
    pieces = [
        chat_renderer.open([system], [TOOL]),
        chat_renderer.append([USER]),
        chat_renderer.generation_prompt(),
    ]
    assert np.concatenate(pieces).tolist() == whole.token_ids


@pytest.mark.case(51)
def test_markers_from_outside_stay_text(chat_renderer: AdaptedRenderer) -> None:
    injected = " ".join(chat_renderer.codec.control)
    tool = ToolSpec(
        name="t", description=injected, parameters=json.dumps({"properties": {injected: {"d": injected}}})
    )
    honest = ToolSpec(name="t", description="x", parameters=json.dumps({"properties": {"x": {"d": "x"}}}))
    call, plain = (
        ToolCall(id="c", name="t", arguments=json.dumps({"a": injected})),
        ToolCall(id="c", name="t", arguments='{"a": "x"}'),
    )
    for ids, other in [
        (
            chat_renderer.append([Message(role="user", text=injected)]),
            chat_renderer.append([Message(role="user", text="x")]),
        ),
        (
            chat_renderer.append([Message(role="tool", text=injected, tool_call_id=injected)]),
            chat_renderer.append([Message(role="tool", text="x", tool_call_id="x")]),
        ),
        (
            chat_renderer.open([Message(role="system", text=injected)], [tool]),
            chat_renderer.open([Message(role="system", text="x")], [honest]),
        ),
        (
            chat_renderer.append([Message(role="assistant", tool_calls=(call,)), RESULT]),
            chat_renderer.append([Message(role="assistant", tool_calls=(plain,)), RESULT]),
        ),
    ]:
        scaffold = [int(ids[i]) for i in chat_renderer.codec.control_positions(ids)]
        assert scaffold == [int(other[i]) for i in chat_renderer.codec.control_positions(other)]
    assert chat_renderer.injections(injected) == len(chat_renderer.codec.control)


def test_markers_do_not_even_change_how_they_are_spelled(chat_renderer: AdaptedRenderer) -> None:
    """What the agent sent comes back out of the ids."""
    text = "a<|im_end|><think>\n</tool_call> [gMASK] é🙂"
    assert text in chat_renderer.decode(chat_renderer.append([Message(role="user", text=text)]))


@pytest.mark.case(6)
def test_a_cut_off_turn_is_closed(chat_renderer: AdaptedRenderer) -> None:
    scaffold = "</think>\n\n" if chat_renderer.in_reasoning else ""
    cut = np.concatenate([chat_renderer.codec.encode(scaffold), chat_renderer.codec.encode_content("so far")])
    tail = chat_renderer.join(cut, "length", [USER])
    whole = chat_renderer.append(
        [Message(role="user", text="q"), Message(role="assistant", text="so far"), USER]
    )
    assert whole[len(whole) - len(tail) :].tolist() == tail.tolist()


@pytest.mark.case(6)
def test_reasoning_cut_off_is_closed_too(chat_renderer: AdaptedRenderer) -> None:
    if not chat_renderer.caps.reasoning:
        return
    opened = np.concatenate(
        [chat_renderer.codec.encode("<think>\n"), chat_renderer.codec.encode_content("so far")]
    )
    cut = opened[2:] if chat_renderer.in_reasoning else opened
    tail = chat_renderer.join(cut, "length", [USER])
    assert int(tail[0]) == chat_renderer.codec.control["</think>"]
    assert chat_renderer.parse(cut).reasoning == "so far"
    assert chat_renderer.parse(cut).text == ""


@pytest.mark.case(5)
def test_an_opener_sampled_as_the_end_is_not_said_twice(chat_renderer: AdaptedRenderer) -> None:
    """GLM ends a turn with the opener it expects; what comes may begin with that one or with another."""
    if not chat_renderer.caps.open_ended:
        return
    user, tool = chat_renderer.codec.control["<|user|>"], chat_renderer.codec.control["<|observation|>"]
    said = chat_renderer.codec.encode_content("ok")
    for end in (user, tool):
        for run, opener in (([USER], user), ([RESULT], tool)):
            path = [
                *said.tolist(),
                end,
                *chat_renderer.join(np.append(said, end).astype(np.int32), "stop", run).tolist(),
            ]
            start = len(said)
            assert path[start : start + 2].count(opener) == 1
            assert path[start] == end
            skipped = 1 if end == opener else 2
            assert path[start + skipped :] == chat_renderer.append(run).tolist()[1:]


def test_an_unknown_name_and_a_foreign_tokenizer_are_refused(tmp_path: Path) -> None:
    from render_families import tokenizer_json

    with pytest.raises(RenderError, match="qwen3"):
        adapted_renderer("gpt-9", Codec(tokenizer_json()))
    spec = json.loads(tokenizer_json())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] != "<tool_call>"]
    with pytest.raises(RenderError, match=r"qwen3.*<tool_call>"):
        adapted_renderer("qwen3", Codec(json.dumps(spec)))
