"""What a stored turn has beside tokens: which ids are which message, and when the call took place."""

from __future__ import annotations

import time
from itertools import pairwise

from gateway_rig import ASK, TOOLS, Rig, call, said

from insitu.chat.template import TemplateRenderer
from insitu.types import Message, Turn


def pieces(renderer: TemplateRenderer, turn: Turn) -> list[tuple[str, str, str]]:
    return [(r, n, renderer.decode(turn.context_ids[start:stop])) for r, start, stop, n in turn.spans]


async def test_spans_name_every_message_of_a_prompt(renderer: TemplateRenderer) -> None:
    calls = Message(
        role="assistant", tool_calls=(call("read", '{"path": "a"}'), call("read", '{"path": "b"}'))
    )
    async with Rig(renderer, [calls, said("done")]) as rig:
        messages = [*ASK, {"role": "user", "content": "And g."}]
        began_s = time.time()
        _, answer = await rig.post({"messages": messages, "tools": TOOLS})
        reply = answer["choices"][0]["message"]
        answers = [
            {"role": "tool", "tool_call_id": one["id"], "content": text}
            for one, text in zip(reply["tool_calls"], ("first", "second"), strict=True)
        ]
        await rig.post({"messages": [*messages, reply, *answers], "tools": TOOLS})
        trajectory = await rig.sealed()
    first, second = trajectory.turns
    texts = pieces(renderer, first)
    assert [(role, name) for role, name, _ in texts] == [("system", ""), ("user", ""), ("user", "")]
    assert "You fix code." in texts[0][2]
    assert "Fix f." in texts[1][2]
    assert "And g." not in texts[1][2]
    assert "And g." in texts[2][2]
    texts = pieces(renderer, second)
    assert [(role, name) for role, name, _ in texts] == [("tool", "read"), ("tool", "read")]
    assert "first" in texts[0][2]
    assert "second" not in texts[0][2]
    assert "second" in texts[1][2]
    for turn in (first, second):
        assert all(a[2] == b[1] for a, b in pairwise(turn.spans))
        assert turn.spans[-1][2] <= len(turn.context_ids)
        times = turn.times
        assert times.began_s is not None
        assert times.ended_s is not None
        assert began_s <= times.began_s <= times.ended_s <= time.time()
