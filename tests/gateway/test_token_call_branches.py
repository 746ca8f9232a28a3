"""Branching and echoes through the gateway: every answer is one that its provider's own library reads."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from anthropic.types import Message as AnthropicMessage
from gateway_rig import ASK, TOOLS, Rig, call, said
from google.genai.types import GenerateContentResponse
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from test_reply_checks_hard import GO_ON
from test_server_cases import WIRES, send

from insitu.chat.template import TemplateRenderer
from insitu.types import Message

READS: Mapping[str, Callable[[Any], object]] = {
    "chat": ChatCompletion.model_validate,
    "anthropic": AnthropicMessage.model_validate,
    "responses": Response.model_validate,
    "gemini": GenerateContentResponse.model_validate,
}
OFFERS: Mapping[str, Callable[[Any], list[Any]]] = {
    "chat": lambda body: body["tools"],
    "anthropic": lambda body: body["tools"],
    "responses": lambda body: body["tools"],
    "gemini": lambda body: body["tools"][0]["functionDeclarations"],
}
LOOK = Message(role="assistant", tool_calls=(call("read", '{"path": "a"}'),))
THINK = Message(role="assistant", text="So.", reasoning="A thought.")


async def ask(rig: Rig, name: str, body: dict[str, Any]) -> Any:
    """A reply that the provider's library reads."""
    status, reply = await send(rig, WIRES[name], body)
    assert status == 200, reply
    READS[name](reply)
    return reply


def after(name: str, body: dict[str, Any], reply: Any, text: str) -> dict[str, Any]:
    """The body that goes on from a reply."""
    key, follow = GO_ON[name]
    return {**body, key: follow(body[key], reply, text)}


@pytest.mark.case(27)
@pytest.mark.parametrize("name", WIRES)
async def test_turns_that_say_the_same_stay_in_their_places(renderer: TemplateRenderer, name: str) -> None:
    async with Rig(renderer, [said("OK")]) as rig:
        body = WIRES[name].body("Fix f.")
        for step in range(3):
            body = after(name, body, await ask(rig, name, body), f"On {step}.")
        trajectory = await rig.sealed()
        assert [turn.parent for turn in trajectory.turns] == [-1, 0, 1]


@pytest.mark.case(32, 34, 36)
@pytest.mark.parametrize("name", WIRES)
async def test_a_prompt_that_comes_twice_and_two_ways_on_from_it(
    renderer: TemplateRenderer, name: str
) -> None:
    """A sub-agent under exactly the main prompt; a compaction that is asked for again; a step back."""
    async with Rig(renderer, [said("One."), said("Two."), said("Three.")]) as rig:
        body = WIRES[name].body("Fix f.")
        twins = [await ask(rig, name, body) for _ in range(2)]
        for twin in reversed(twins):
            again = after(name, body, twin, "Respond with TEXT ONLY.")
            await ask(rig, name, again)
            await ask(rig, name, again)
        trajectory = await rig.sealed()
        assert [turn.parent for turn in trajectory.turns] == [-1, -1, 1, 1, 0, 0]
        assert trajectory.ledger.excluded == {}


@pytest.mark.case(35, 37)
@pytest.mark.parametrize("name", WIRES)
async def test_other_tools_in_mid_session_and_a_title_before_it(
    renderer: TemplateRenderer, name: str
) -> None:
    async with Rig(renderer, [said("A title"), THINK, said("Done."), said("All.")]) as rig:
        body = WIRES[name].body("Fix f.")
        await ask(rig, name, {key: value for key, value in body.items() if key != "tools"})
        later = after(name, body, await ask(rig, name, body), "On.")
        more = copy.deepcopy(later)
        OFFERS[name](more).insert(0, json.loads(json.dumps(OFFERS[name](more)[0]).replace("read", "edit")))
        last = after(name, more, await ask(rig, name, more), "On.")
        await ask(rig, name, last)
        trajectory = await rig.sealed()
        assert [turn.parent for turn in trajectory.turns] == [-1, -1, -1, 2]
        assert {turn.index: turn.excluded for turn in trajectory.turns if turn.excluded} == {0: "auxiliary"}


@pytest.mark.case(15, 26)
@pytest.mark.parametrize("given", ["same", ""])
async def test_call_ids_that_are_used_again_or_left_out(renderer: TemplateRenderer, given: str) -> None:
    async with Rig(renderer, [LOOK]) as rig:
        messages: list[Any] = list(ASK)
        for _ in range(3):
            reply = await ask(rig, "chat", {"messages": messages, "tools": TOOLS})
            echo = reply["choices"][0]["message"]
            echo["tool_calls"][0]["id"] = given
            messages = [*messages, echo, {"role": "tool", "tool_call_id": given, "content": "x"}]
        trajectory = await rig.sealed()
        assert [turn.parent for turn in trajectory.turns] == [-1, 0, 1]


@pytest.mark.case(28)
@pytest.mark.parametrize("signature", ["", "forged", None])
async def test_a_signature_that_is_removed_forged_or_beside_another_text(
    renderer: TemplateRenderer, signature: str | None
) -> None:
    async with Rig(renderer, [THINK, said("On.")]) as rig:
        body = WIRES["anthropic"].body("Fix f.")
        reply = await ask(rig, "anthropic", body)
        if signature is None:
            reply["content"][1]["text"] = "Something else."
        else:
            reply["content"][0]["signature"] = signature
        await ask(rig, "anthropic", after("anthropic", body, reply, "On."))
        trajectory = await rig.sealed()
        assert [turn.parent for turn in trajectory.turns] == [-1, -1 if signature is None else 0]
        assert rig.session.stats.edited == (signature is None)
