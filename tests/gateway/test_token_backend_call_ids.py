"""Call ids on the wire are short, and a model that samples ids of its own reads those."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_rig import ASK, TOOLS, Rig, said
from known_lab import renderer_of

from insitu.types import Message, ToolCall

pytestmark = pytest.mark.slow

CALLS = tuple(ToolCall(id=f"functions.read:{n}", name="read", arguments=f'{{"path": "{n}"}}') for n in (4, 5))


def shortened(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "id": call["id"][-8:]}


def numbered(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "id": f"toolu_{json.loads(call['function']['arguments'])['path']}"}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("change", [dict, shortened, numbered])
async def test_a_result_is_headed_by_the_models_own_id(
    change: Any, order: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    kimi = renderer_of("kimi-k2", request.config.cache.mkdir("insitu"))
    async with Rig(kimi, [Message(role="assistant", text="", tool_calls=CALLS), said("Done.")]) as rig:  # type: ignore[arg-type]
        _, answer = await rig.post({"model": "m", "messages": ASK, "tools": TOOLS})
        message = answer["choices"][0]["message"]
        assert all(len(call["id"]) <= 40 for call in message["tool_calls"])
        assert json.loads(message["tool_calls"][1]["function"]["arguments"]) == {"path": "5"}
        echoed = {**message, "tool_calls": [change(call) for call in message["tool_calls"]]}
        results = [
            {"role": "tool", "tool_call_id": echoed["tool_calls"][n]["id"], "content": f"text {n + 4}"}
            for n in order
        ]
        status, _ = await rig.post({"model": "m", "messages": [*ASK, echoed, *results], "tools": TOOLS})
        assert status == 200
        shown = kimi.decode(rig.engine.sent[-1].ids)
        for n in order:
            assert f"## Return of functions.read:{n + 4}\ntext {n + 4}" in shown
        # An edited history is rendered again, with the ids that the model sampled where they came back.
        edited = {**echoed, "content": "Look."}
        await rig.post({"model": "m", "messages": [*ASK, edited, *results], "tools": TOOLS})
        shown = kimi.decode(rig.engine.sent[-1].ids)
        first = 4 if change is dict else 0
        for n in order:
            assert f"<|tool_call_begin|>functions.read:{first + n}<|tool_call_argument_begin|>" in shown
            assert f"## Return of functions.read:{first + n}\ntext {n + 4}" in shown
        await rig.sealed()
