"""What the Vercel AI SDK and the OpenAI client refer to by id within a session (Responses format)."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from gateway_rig import Rig, call
from wire_lab import CALLS, SAY, SCHEMA, anthropic_client, openai_client, plain

from insitu.chat.template import TemplateRenderer
from insitu.gateway.dialects.base import WireError
from insitu.gateway.stored_responses import StoredResponses
from insitu.types import Message

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "read", "description": "Read.", "strict": False, "parameters": SCHEMA}
]
ASK = [{"role": "user", "content": [{"type": "input_text", "text": "Fix f."}]}]
ONE_CALL = Message(
    role="assistant", text="I look.", reasoning="Hm.", tool_calls=(call("read", '{"path": "a"}'),)
)


async def answer_of(rig: Rig, **body: Any) -> dict[str, Any]:
    given = {"model": "gpt-5", "tools": TOOLS, **body}
    async with rig.http.post(f"{rig.base}/responses", json=given, headers=rig.auth) as answer:
        reported: dict[str, Any] = await answer.json()
        assert answer.status == 200, reported
        return reported


def results(answer: dict[str, Any]) -> list[dict[str, Any]]:
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": c["call_id"], "output": "x"} for c in calls]


@pytest.mark.case(50)
async def test_the_second_step_of_ai_sdk_openai_names_items_by_id(renderer: TemplateRenderer) -> None:
    """As `@ai-sdk/openai` sends it by default: every item of ours as an `item_reference`."""
    async with Rig(renderer, [ONE_CALL, CALLS, SAY]) as rig:
        items: list[dict[str, Any]] = list(ASK)
        for step in range(3):
            answer = await answer_of(rig, input=items)
            assert answer["store"] is True
            items += [{"type": "item_reference", "id": item["id"]} for item in answer["output"]]
            items += results(answer)
            assert len(rig.engine.sent) == step + 1
        trajectory = await rig.sealed()
    assert [turn.parent for turn in trajectory.turns] == [-1, 0, 1]
    assert trajectory.ledger.excluded == {}
    assert rig.session.stats.edited == 0


@pytest.mark.slow
@pytest.mark.case(50)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_from_previous_response_id(
    renderer: TemplateRenderer, stream: bool
) -> None:
    """With the official client, which sends only what is new; `instructions` come with each request."""
    async with Rig(renderer, [ONE_CALL, SAY, SAY]) as rig, openai_client(rig) as api:
        ask: dict[str, Any] = {"model": "m", "tools": TOOLS, "instructions": "You fix."}

        async def send(items: Any, before: Any) -> Any:
            given = {**ask, "input": items, "previous_response_id": before}
            if not stream:
                return await api.responses.create(**given)
            async with api.responses.stream(**{k: v for k, v in given.items() if v is not None}) as events:
                return await events.get_final_response()

        first = await send("Fix f.", None)
        second = await send(results(plain(first)), first.id)
        third = await send("And g.", second.id)
        again = await api.responses.input_tokens.count(
            model="m", tools=TOOLS, instructions="You fix.", input="And g.", previous_response_id=second.id
        )
        assert again.input_tokens == third.usage.input_tokens
        trajectory = await rig.sealed()
    assert [turn.parent for turn in trajectory.turns] == [-1, 0, 1]
    assert trajectory.ledger.excluded == {}


@pytest.mark.slow
@pytest.mark.case(50)
async def test_ids_that_are_not_stored_are_refused_as_the_provider_does(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [SAY]) as rig, openai_client(rig) as api:
        unstored = await api.responses.create(model="m", input="Hi", store=False)
        assert unstored.store is False
        with pytest.raises(openai.BadRequestError) as refused:
            await api.responses.create(model="m", input="Hi", previous_response_id=unstored.id)
        assert (refused.value.code, refused.value.param) == (
            "previous_response_not_found",
            "previous_response_id",
        )
        reference = {"type": "item_reference", "id": unstored.output[0].id}
        with pytest.raises(openai.BadRequestError, match="not found"):
            await api.responses.create(model="m", input=[reference])
        other = rig.gateway.open_session("r/1", seed=1, limits=rig._limits)
        stored = await api.responses.create(model="m", input="Hi")
        url = f"{rig.origin}/s/{other.public_id}/v1/responses"
        key = {"Authorization": f"Bearer {other.secret}"}
        body = {"model": "m", "input": "On.", "previous_response_id": stored.id}
        async with rig.http.post(url, json=body, headers=key) as answer:
            assert answer.status == 400
        await other.seal(0.0)


def test_texts_are_kept_once_and_within_bounds() -> None:
    stored = StoredResponses(max_bytes=2000)
    history: list[str] = []
    for turn in range(20):
        output = {"type": "message", "id": f"msg_{turn}", "content": "y" * 20}
        stored.keep(history, {"id": f"resp_{turn}", "output": [output]})
        history.append(f'{{"turn":{turn}}}')
    assert stored.expand({"input": [], "previous_response_id": "resp_19"})["input"][3] == {"turn": 3}
    assert stored._size < 2000
    for turn in range(20, 80):
        output = {"type": "message", "id": f"msg_{turn}", "content": "y" * 100}
        stored.keep(history, {"id": f"resp_{turn}", "output": [output]})
        assert stored._size <= 2000
        # The newest ones stay, and so does what their conversations hold.
        for near in (turn, turn - 3):
            whole = stored.expand({"input": [], "previous_response_id": f"resp_{near}"})["input"]
            assert [item.get("turn") for item in whole] == [*range(min(near, 20)), None]
    assert len(stored._items) == len(stored._responses)
    with pytest.raises(WireError, match="not found"):
        stored.expand({"input": [], "previous_response_id": "resp_3"})
    assert stored.expand({"input": [{"type": "item_reference", "id": "msg_79"}]})["input"][0]["content"]


def test_the_newest_response_is_kept_however_long_it_is() -> None:
    stored = StoredResponses(max_bytes=100)
    for turn in range(3):
        output = {"type": "message", "id": f"msg_{turn}", "content": "y" * 500}
        stored.keep(['{"turn":0}'], {"id": f"resp_{turn}", "output": [output]})
    assert list(stored._responses) == ["resp_2"]
    assert stored.expand({"input": [{"type": "item_reference", "id": "msg_2"}]})["input"][0]["content"]


@pytest.mark.case(50)
async def test_an_unstored_call_that_goes_on_from_a_stored_one_is_read_again(
    renderer: TemplateRenderer,
) -> None:
    """The second such body is known by its bytes, which do not hold the stored part of the conversation."""
    async with Rig(renderer, [SAY]) as rig:
        url = f"{rig.base}/responses"

        async def post(**body: Any) -> tuple[int, Any]:
            async with rig.http.post(url, json={"model": "m", **body}, headers=rig.auth) as answer:
                return answer.status, await answer.json()

        _, first = await post(input="Fix f.")
        on = [{"role": "user", "content": "On."}]
        after = {"store": False, "previous_response_id": first["id"]}
        _, second = await post(input=on, **after)
        grown = [*on, *second["output"], {"role": "user", "content": "More."}]
        assert (await post(input=grown, **after))[0] == 200
        # Known messages are looked at where the agent changed what was said.
        edited = [*on, {"role": "assistant", "content": "Other."}, {"role": "user", "content": "More."}]
        assert (await post(input=edited, **after))[0] == 200
        assert (await post(input=on, **after, tools=[], instructions="Else."))[0] == 200
        assert "Fix f." in renderer.decode(rig.engine.sent[-1].ids)


async def test_text_blocks_carry_no_null_citations(renderer: TemplateRenderer) -> None:
    """`@ai-sdk/anthropic` takes `citations` as an array or not at all."""
    async with Rig(renderer, [SAY]) as rig, anthropic_client(rig) as api:
        answer = await api.messages.create(
            model="m", max_tokens=99, messages=[{"role": "user", "content": "Hi"}]
        )
        assert answer.content[0].citations is None
        assert set(plain(answer)["content"][0]) == {"type", "text"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_repeats_instructions_metadata_and_the_id_that_it_continues(
    renderer: TemplateRenderer, stream: bool
) -> None:
    async with Rig(renderer, [SAY]) as rig, openai_client(rig) as api:
        ask: dict[str, Any] = {"model": "m", "instructions": "Be brief.", "metadata": {"a": "b"}}
        before: Any = openai.omit
        for _ in range(2):
            answer = await api.responses.create(input="Hi", previous_response_id=before, stream=stream, **ask)
            heads = (
                [e.response for e in [e async for e in answer] if hasattr(e, "response")]
                if stream
                else [answer]
            )
            for head in heads:
                assert (head.instructions, head.metadata) == ("Be brief.", {"a": "b"})
                assert head.previous_response_id == (before or None)
            before = heads[-1].id
        plain_answer = await api.responses.create(model="m", input="Hi", metadata=None)
        assert (plain_answer.instructions, plain_answer.metadata) == (None, {})
        assert plain_answer.previous_response_id is None
