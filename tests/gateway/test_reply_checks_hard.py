"""Replies that are hard to continue, over every wire format: the next prompt is the last one and its ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from gateway_rig import ASK, TOOLS, Rig, call, said
from test_server_cases import WIRES, send

from insitu.chat.template import TemplateRenderer
from insitu.types import Generation, IntArray, Message, RequestKey, SamplingParams


def _chat(body: Any, reply: Any, text: str) -> list[Any]:
    return [*body, reply["choices"][0]["message"], {"role": "user", "content": text}]


def _anthropic(body: Any, reply: Any, text: str) -> list[Any]:
    said = {"role": "assistant", "content": reply["content"]}
    return [*body, said, {"role": "user", "content": text}]


def _responses(body: Any, reply: Any, text: str) -> list[Any]:
    return [*body, *reply["output"], {"role": "user", "content": text}]


def _gemini(body: Any, reply: Any, text: str) -> list[Any]:
    return [*body, reply["candidates"][0]["content"], {"role": "user", "parts": [{"text": text}]}]


GO_ON: Mapping[str, tuple[str, Callable[[Any, Any, str], list[Any]]]] = {
    "chat": ("messages", _chat),
    "anthropic": ("messages", _anthropic),
    "responses": ("input", _responses),
    "gemini": ("contents", _gemini),
}
"""Key of the conversation, and the conversation after a reply."""


def with_end(renderer: TemplateRenderer, text: str) -> IntArray:
    """`text` as sampled ids, then the end token."""
    return np.concatenate([renderer.codec.encode(text), renderer.end_ids[:1]]).astype(np.int32)


async def talk(rig: Rig, name: str) -> Any:
    """Two calls, the second with the first one's reply. Returns that reply."""
    wire, (key, after) = WIRES[name], GO_ON[name]
    body = wire.body("Fix f.")
    status, reply = await send(rig, wire, body)
    assert status == 200
    status, _ = await send(rig, wire, {**body, key: after(body[key], reply, "Go on.")})
    assert status == 200
    return reply


async def check(rig: Rig, renderer: TemplateRenderer, ids: IntArray, closed: str = "") -> None:
    """The engine got its own ids again, as they were, and what stands behind them is the template's, after
    `closed`, which the policy did not come to say."""
    first, second = rig.engine.sent
    held = np.concatenate([first.ids, ids])
    assert np.array_equal(second.ids[: len(held)], held)
    assert renderer.decode(second.ids[len(held) :]).startswith(f"{closed}\n<|im_start|>user\nGo on.")
    trajectory = await rig.sealed()
    assert [turn.parent for turn in trajectory.turns] == [-1, 0]
    assert trajectory.ledger.excluded == {}
    assert rig.session.stats.edited == 0


@pytest.mark.case(1)
@pytest.mark.parametrize("name", WIRES)
async def test_letters_that_no_tokenizer_would_choose(renderer: TemplateRenderer, name: str) -> None:
    said_so = "The function is mended."
    ids = np.concatenate([renderer.codec.encode(letter) for letter in said_so]).astype(np.int32)
    assert len(ids) > len(renderer.codec.encode(said_so))
    ids = np.concatenate([ids, renderer.end_ids[:1]]).astype(np.int32)
    async with Rig(renderer, [ids, said("On.")]) as rig:
        assert said_so in str(await talk(rig, name))
        await check(rig, renderer, ids)


@pytest.mark.case(2)
@pytest.mark.parametrize("name", WIRES)
async def test_half_a_character_at_the_end(renderer: TemplateRenderer, name: str) -> None:
    emoji = renderer.codec.encode("\U0001f642")
    assert len(emoji) > 1
    ids = np.concatenate([renderer.codec.encode("Done \U0001f642 "), emoji[:-1], renderer.end_ids[:1]])
    async with Rig(renderer, [ids.astype(np.int32), said("On.")]) as rig:
        assert "Done \U0001f642 " in str(await talk(rig, name))
        await check(rig, renderer, ids)


CUTS = {"text": "I think th", "reasoning": "<think>\nLet me s", "call": '<tool_call>\n{"name": "read", "argu'}


@pytest.mark.case(6)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", WIRES)
async def test_a_reply_that_is_cut_goes_on(renderer: TemplateRenderer, name: str, cut: str) -> None:
    ids = renderer.codec.encode(CUTS[cut])
    async with Rig(renderer, [ids, said("On.")]) as rig:
        reply = await talk(rig, name)
        assert any(word in str(reply) for word in ("'length'", "max_tokens", "incomplete", "MAX_TOKENS"))
        assert not any(word in str(reply) for word in ("tool_use", "function_call'", "functionCall"))
        await check(rig, renderer, ids, closed="</think><|im_end|>" if cut == "reasoning" else "<|im_end|>")


@pytest.mark.case(14)
@pytest.mark.parametrize("kept", [(1, 0), (1,), (0,)])
async def test_answers_in_another_order_or_one_missing(
    renderer: TemplateRenderer, kept: tuple[int, ...]
) -> None:
    both = tuple(call("read", json.dumps({"path": path})) for path in "ab")
    async with Rig(renderer, [Message(role="assistant", tool_calls=both), said("On.")]) as rig:
        _, reply = await rig.post({"messages": ASK, "tools": TOOLS})
        echo = reply["choices"][0]["message"]
        ids = [made["id"] for made in echo["tool_calls"]]
        answers = [{"role": "tool", "tool_call_id": ids[i], "content": "x"} for i in kept]
        status, reply = await rig.post({"messages": [*ASK, echo, *answers], "tools": TOOLS})
        assert (status, reply["choices"][0]["message"]["content"]) == (200, "On.")
        assert [turn.parent for turn in (await rig.sealed()).turns] == [-1, 0]


@pytest.mark.case(3, 4)
@pytest.mark.parametrize("space", [" ", "\n", "\n\n", " \t\n "])
@pytest.mark.parametrize("name", WIRES)
async def test_white_space_before_the_end_stays_before_the_scaffolds_line_break(
    renderer: TemplateRenderer, name: str, space: str
) -> None:
    ids = with_end(renderer, f"Done.{space}")
    async with Rig(renderer, [ids, said("On.")]) as rig:
        assert WIRES[name].stops(await talk(rig, name))
        assert renderer.decode(rig.engine.sent[1].ids).count(f"Done.{space}<|im_end|>\n<|im_start|>user") == 1
        await check(rig, renderer, ids)


@pytest.mark.case(7)
@pytest.mark.parametrize("name", WIRES)
async def test_an_end_within_open_reasoning_ends_it(renderer: TemplateRenderer, name: str) -> None:
    ids = with_end(renderer, "<think>\nLet me see, perhaps")
    async with Rig(renderer, [ids, said("On.")]) as rig:
        reply = await talk(rig, name)
        assert "Let me see, perhaps" in str(reply)
        assert "<think>" not in str(reply)
        await check(rig, renderer, ids)


@pytest.mark.case(8)
@pytest.mark.parametrize("name", WIRES)
async def test_a_reply_of_only_the_end_goes_on(renderer: TemplateRenderer, name: str) -> None:
    ids = with_end(renderer, "")
    assert len(ids) == 1
    async with Rig(renderer, [ids, said("On.")]) as rig:
        await talk(rig, name)
        await check(rig, renderer, ids)


@pytest.mark.case(8)
@pytest.mark.parametrize("name", WIRES)
async def test_a_reply_of_no_token_may_be_asked_for_again(renderer: TemplateRenderer, name: str) -> None:
    """The model's end is a token too, so the engine sampled nothing: its failure, not the session's end."""
    wire = WIRES[name]
    async with Rig(renderer, [said("Here.")]) as rig:
        answers = rig.engine.generate

        async def nothing(ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
            empty = np.zeros(0, dtype=np.int32)
            logprobs = np.zeros(0, dtype=np.float32)
            return Generation(ids=empty, logprobs=logprobs, finish="stop", version_runs=((0, 0),))

        rig.engine.generate = nothing  # type: ignore[method-assign]
        status, refused = await send(rig, wire, wire.body("Fix f."))
        assert (status, "error" in refused) == (500, True)
        rig.engine.generate = answers  # type: ignore[method-assign]
        status, reply = await send(rig, wire, wire.body("Fix f."))
        assert status == 200
        assert "Here." in str(reply)
        assert rig.session.stats.infra_error == ""
        trajectory = await rig.sealed()
        assert [turn.index for turn in trajectory.turns] == [1]
        assert trajectory.ledger.trained == trajectory.ledger.captured > 0
