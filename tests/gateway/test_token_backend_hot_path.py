"""What a call costs depends on what is new in it, not on how long the conversation is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gateway_rig import TOOLS, Rig, call

from insitu.chat.template import TemplateRenderer
from insitu.types import IntArray, Limits, Message

pytestmark = pytest.mark.slow

TURNS = 200
ROOMY = Limits(max_calls=10**6, max_session_tokens=10**7, max_context_tokens=10**7)
SCAFFOLD = 60
"""Characters a template puts around one tool message and before the next reply, at most."""


class Counting:
    """A tokenizer that counts what it is given."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.characters = 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self._inner.encode_batch_fast(texts, **options)


def prepared(renderer: TemplateRenderer) -> IntArray:
    return renderer.render_reply(
        Message(role="assistant", text="I read on.", tool_calls=(call("read", '{"path": "app.py"}'),))
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_over_two_hundred_turns_only_new_text_is_encoded_and_parsed(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    ids = prepared(renderer)
    tokenizer = Counting(renderer.codec._plain)
    monkeypatch.setattr(renderer.codec, "_plain", tokenizer)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You fix code. " * 200},
        {"role": "user", "content": "Fix f."},
    ]
    async with Rig(renderer, [ids], limits=ROOMY) as rig:
        encoded, parsed = [], []
        for turn in range(TURNS):
            before = tokenizer.characters, rig.session.bodies.parsed_bytes
            body = {"model": "m", "messages": messages, "tools": TOOLS, "stream": stream}
            if stream:
                await rig.stream(body)
                minted = "unknown"
            else:
                _, reply = await rig.post(body)
                minted = reply["choices"][0]["message"]["tool_calls"][0]["id"]
            encoded.append(tokenizer.characters - before[0])
            parsed.append(rig.session.bodies.parsed_bytes - before[1])
            function = {"name": "read", "arguments": '{"path":"app.py"}'}
            tool_call = {"id": minted if minted != "unknown" else f"c{turn}", "type": "function"}
            messages.append(
                {
                    "role": "assistant",
                    "content": "I read on.",
                    "tool_calls": [{**tool_call, "function": function}],
                }
            )
            messages.append(
                {"role": "tool", "tool_call_id": tool_call["id"], "content": f"line {turn}\n" * 40}
            )
        new = [len(f"line {turn}\n" * 40) for turn in range(TURNS - 1)]
        assert all(count <= text + SCAFFOLD for count, text in zip(encoded[1:], new, strict=True))
        assert sum(encoded[1:]) >= sum(new), "what was counted is not the tokenizer's work"
        assert max(parsed[1:]) < 1500, "a known part of a body was parsed again"
        assert rig.session.stats.edited == rig.session.stats.forks == 0
        trajectory = await rig.session.seal(5.0)
        assert trajectory.ledger.captured == TURNS * len(ids)
        assert trajectory.ledger.trained == trajectory.ledger.captured
        longest = max(trajectory.segments, key=lambda segment: len(segment.ids))
        assert np.array_equal(longest.ids[: len(rig.engine.sent[-1].ids)], rig.engine.sent[-1].ids)
