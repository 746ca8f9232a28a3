"""Compaction of the Responses format: its route, its trigger, and the item that stands for a history."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import orjson
import pytest
from gateway_rig import Rig, call, said
from wire_lab import CALLS, SCHEMA, openai_client, plain

from insitu.chat.template import TemplateRenderer
from insitu.gateway.dialects import compaction
from insitu.gateway.dialects.base import Envelope
from insitu.gateway.dialects.responses_output import ResponsesDialect
from insitu.types import Limits, Message, Reply

pytestmark = pytest.mark.slow

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "read", "description": "Read.", "strict": False, "parameters": SCHEMA}
]
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix f."}]}
SUMMARY = said("f is mended; é 🙂 \ud83d is <|im_end|> still to be checked.")


def window_of(compacted: Any) -> list[Any]:
    """The new history as it came: the client's types know no user's message in an output, the API does."""
    window: list[Any] = compacted.model_dump(mode="json", exclude_unset=True, warnings=False)["output"]
    return window


async def worked(api: openai.AsyncOpenAI, **more: Any) -> list[Any]:
    """A history of one turn with two calls."""
    answer = await api.responses.create(model="m", input=[USER], tools=TOOLS, instructions="You fix.", **more)
    calls = [item for item in answer.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": c.call_id, "output": "x" * 200} for c in calls]
    return [USER, *plain(answer)["output"], *results]


async def test_the_route_gives_a_new_history_from_which_the_session_goes_on(
    renderer: TemplateRenderer,
) -> None:
    async with Rig(renderer, [CALLS, SUMMARY, CALLS, said("Done.")]) as rig, openai_client(rig) as api:
        history = await worked(api)
        compacted = await api.responses.compact(model="m", input=history, instructions="You fix.")
        assert compacted.object == "response.compaction"
        user, item = compacted.output
        assert (user.type, user.role) == ("message", "user")
        assert window_of(compacted)[0]["content"] == USER["content"]
        assert item.type == "compaction"
        assert SUMMARY.text not in item.encrypted_content
        assert compacted.usage.output_tokens == len(renderer.render_reply(SUMMARY))
        window = window_of(compacted)
        given = {"model": "m", "tools": TOOLS, "instructions": "You fix."}
        first = await api.responses.create(input=window, **given)
        prompt = renderer.decode(rig.engine.sent[2].ids)
        assert "Fix f." in prompt
        assert compaction.OPENING + SUMMARY.text.replace("\ud83d", "\ufffd") in prompt
        assert "x" * 200 not in prompt
        results = [
            {"type": "function_call_output", "call_id": c.call_id, "output": "y"}
            for c in first.output
            if c.type == "function_call"
        ]
        await api.responses.create(input=[*window, *plain(first)["output"], *results], **given)
        trajectory = await rig.sealed()
        # Without tools the summary is a root of its own, a call that cannot act; the new window is another.
        assert [turn.parent for turn in trajectory.turns] == [-1, -1, -1, 2]
        assert [s.label for s in trajectory.segments] == ["wipe", "final"]
        assert [turn.excluded for turn in trajectory.turns] == ["", "auxiliary", "", ""]
        assert [(n.cause, n.request) for n in trajectory.drifts] == [("context", 1), ("missing", 2)]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_trigger_is_answered_by_one_item_and_extends_the_line(
    renderer: TemplateRenderer, stream: bool
) -> None:
    async with Rig(renderer, [CALLS, SUMMARY, said("Done.")]) as rig, openai_client(rig) as api:
        history = await worked(api)
        asked = [*history, {"type": "compaction_trigger"}]
        given = {"model": "m", "tools": TOOLS, "instructions": "You fix."}
        if stream:
            async with await api.responses.create(input=asked, stream=True, **given) as events:
                seen = [event async for event in events]
            kinds = [event.type for event in seen]
            assert kinds[2:] == [
                "response.output_item.added",
                "response.compaction.compacting",
                "response.output_item.done",
                "response.completed",
            ]
            assert [event.sequence_number for event in seen] == list(range(len(seen)))
            answer = seen[-1].response
            assert seen[-2].item == answer.output[0]
        else:
            answer = await api.responses.create(input=asked, **given)
        (item,) = answer.output
        assert (item.type, answer.status) == ("compaction", "completed")
        await api.responses.create(input=[USER, plain(item)], **given)
        assert compaction.REQUEST in renderer.decode(rig.engine.sent[1].ids)
        assert compaction.OPENING + "f is mended; é 🙂" in renderer.decode(rig.engine.sent[2].ids)
        trajectory = await rig.sealed()
        assert [turn.parent for turn in trajectory.turns] == [-1, 0, -1]
        assert [s.label for s in trajectory.segments] == ["wipe", "final"]
        assert np.sum([s.mask.sum() for s in trajectory.segments]) == trajectory.ledger.captured


async def test_a_second_compaction_replaces_the_first(renderer: TemplateRenderer) -> None:
    two = said("Second.")
    async with Rig(renderer, [CALLS, SUMMARY, two]) as rig, openai_client(rig) as api:
        window = window_of(await api.responses.compact(model="m", input=await worked(api)))
        again = await api.responses.compact(model="m", input=window)
        assert [item.type for item in again.output] == ["message", "compaction"]
        assert "f is mended" in renderer.decode(rig.engine.sent[2].ids)
        assert compaction.opened(again.output[1].encrypted_content, "").text == compaction.OPENING + two.text


async def test_a_reply_without_text_or_cut_short_is_still_one_item(renderer: TemplateRenderer) -> None:
    calls = Message(role="assistant", tool_calls=(call("read", '{"path": "a"}'),))
    for reply, text in ((calls, compaction.NOTHING), (said("word " * 60), "word")):
        limits = Limits(max_context_tokens=100_000, max_call_tokens=20)
        async with Rig(renderer, [reply], limits=limits) as rig, openai_client(rig) as api:
            asked = [USER, {"type": "compaction_trigger"}]
            (item,) = (await api.responses.create(model="m", input=asked, tools=TOOLS)).output
            assert compaction.opened(item.encrypted_content, "").text.startswith(compaction.OPENING + text)
            await rig.sealed()


@pytest.mark.parametrize(
    "content", ["gAAAAABpM0Yj", "insitu1.é", "insitu1.####", "insitu1.abc", "insitu1._w==", ""]
)
async def test_what_insitu_did_not_seal_is_refused(renderer: TemplateRenderer, content: str) -> None:
    async with Rig(renderer, [SUMMARY]) as rig, openai_client(rig) as api:
        item = {"type": "compaction", "encrypted_content": content}
        with pytest.raises(openai.BadRequestError, match="could not be verified") as refused:
            await api.responses.create(model="m", input=[USER, item])
        assert refused.value.param == "input[1].encrypted_content"
        assert rig.session.stats.calls == 0


async def test_a_trigger_elsewhere_and_what_is_stored_are_refused(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [SUMMARY]) as rig, openai_client(rig) as api:
        with pytest.raises(openai.BadRequestError, match="'compaction_trigger' are not supported"):
            await api.responses.create(model="m", input=[{"type": "compaction_trigger"}, USER])
        for refused in ({"previous_response_id": "resp_1"}, {"input": []}):
            with pytest.raises(openai.BadRequestError):
                await api.responses.compact(**{"model": "m", "input": [USER], **refused})


async def test_a_known_conversation_can_be_compacted_and_goes_on_unchanged(
    renderer: TemplateRenderer,
) -> None:
    async with Rig(renderer, [CALLS, SUMMARY, SUMMARY, said("On.")]) as rig, openai_client(rig) as api:
        history = await worked(api, store=False)
        given = {"model": "m", "tools": TOOLS, "instructions": "You fix.", "store": False}
        compacted = await api.responses.create(input=[*history, {"type": "compaction_trigger"}], **given)
        assert [item.type for item in compacted.output] == ["compaction"]
        # The client does not use it and asks again without: an ordinary reply.
        said_on = await api.responses.create(input=history, **given)
        assert [item.type for item in said_on.output] == ["message"]
        await api.responses.compact(model="m", input=history)
        assert [turn.parent for turn in (await rig.sealed()).turns] == [-1, 0, 0, -1]


ASSISTANT = {"role": "assistant", "content": "I looked."}
SEALED = compaction.item(Reply(text="Short."), Envelope(id="a", created=0, model="m"))
OLDER = compaction.item(Reply(text="Older."), Envelope(id="b", created=0, model="m"))
RULES = {"role": "developer", "content": "Be brief."}
ON = {"role": "user", "content": "Go on."}


@pytest.mark.parametrize(
    ("items", "texts"),
    [
        ([USER, ASSISTANT, SEALED, ON], ["Short.", "Go on."]),
        ([RULES, USER, ASSISTANT, SEALED, ON], ["Be brief.", "Short.", "Go on."]),
        ([USER, ASSISTANT, OLDER, ON, ASSISTANT, SEALED, ON], ["Short.", "Go on."]),
        ([USER, OLDER, SEALED, ON], ["Short.", "Go on."]),
        # The window of the route.
        ([RULES, USER, ON, SEALED, ON], ["Be brief.", "Fix f.", "Go on.", "Short.", "Go on."]),
        ([SEALED, USER, ASSISTANT, ON], ["Short.", "Fix f.", "I looked.", "Go on."]),
        ([USER, ASSISTANT, SEALED, {"type": "compaction_trigger"}], ["Short.", compaction.REQUEST]),
    ],
)
def test_the_newest_item_stands_for_what_was_before(items: list[Any], texts: list[str]) -> None:
    wire = ResponsesDialect().parse({"input": items}, "")
    assert [m.text.removeprefix(compaction.OPENING) for m in wire.request.messages] == texts
    assert wire.kept is not None
    again = ResponsesDialect().parse({"input": [orjson.loads(text) for text in wire.kept]}, "")
    assert again.request.messages == wire.request.messages[: len(again.request.messages)]


@pytest.mark.parametrize("by_id", [False, True])
async def test_a_client_that_does_not_prune_goes_on_from_the_summary(
    renderer: TemplateRenderer, by_id: bool
) -> None:
    """With the whole array each time, of which the gateway knows the most, or with ids."""
    script = [said("Looked."), SUMMARY, said("A"), said("B"), said("Second."), said("C"), said("D")]
    trigger = {"type": "compaction_trigger"}
    async with Rig(renderer, script) as rig, openai_client(rig) as api:
        given: dict[str, Any] = {"model": "m", "tools": TOOLS, "instructions": "You fix.", "store": by_id}
        items: list[Any] = []
        before: Any = openai.omit
        for new in (USER, trigger, ON, ON, trigger, ON, ON):
            sent = [new] if by_id else [*items, new]
            answer = await api.responses.create(input=sent, previous_response_id=before, **given)
            before = answer.id if by_id else openai.omit
            items += [*([] if new is trigger else [new]), *plain(answer)["output"]]
        trajectory = await rig.sealed()
        prompts = [renderer.decode(sent.ids) for sent in rig.engine.sent]
    assert ["Fix f." in prompt for prompt in prompts] == [True, True, *[False] * 5]
    assert ["f is mended" in prompt for prompt in prompts] == [False, False, True, True, True, False, False]
    assert ["Second." in prompt for prompt in prompts] == [*[False] * 5, True, True]
    assert [turn.parent for turn in trajectory.turns] == [-1, 0, -1, 2, 3, -1, 5]
    assert rig.session.stats.edited == 0


async def test_a_threshold_that_is_not_followed_is_said_once(renderer: TemplateRenderer) -> None:
    lines: list[str] = []
    async with Rig(renderer, [said("A")], log_line=lines.append) as rig, openai_client(rig) as api:
        await api.responses.create(model="m", input=[USER], context_management=[{"type": "other"}])
        assert lines == []
        for _ in range(2):
            asked = [{"type": "compaction", "compact_threshold": 1000}]
            await api.responses.create(model="m", input=[USER], context_management=asked)
        trajectory = await rig.sealed()
    (line,) = lines
    assert "context_management" in line
    assert dict(trajectory.turns[-1].advisory)["context_management"].count("1000") == 1
