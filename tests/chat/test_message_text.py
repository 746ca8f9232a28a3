"""How a rollout without a change ended, from its stored tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from insitu.chat.load import load_renderer
from insitu.chat.message_text import MessageText
from insitu.config import WARM_START
from insitu.types import Message, Turn

_renderer = load_renderer(WARM_START)


def turn(reply: str, result: str = "") -> Turn:
    context = _renderer.append([Message(role="tool", text=result)]) if result else np.empty(0, np.int32)
    ids = np.array(_renderer.codec.encode(reply), dtype=np.int32)
    spans = (("tool", 0, len(context), "bash"),) if result else ()
    return Turn(
        index=0, parent=-1, context_ids=context, ids=ids, logprobs=None, finish="stop", version_runs=(),
        spans=spans,
    )  # fmt: skip


CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("turns", "ending"),
    [
        ([turn(CALL), turn("Done.", "1 failed\nin a.py")], "the last failed call of bash: 1 failed"),
        ([turn(CALL, "No such file"), turn(CALL, "ok")], "the last failed call of bash: No such file"),
        ([turn("<tool_call>\n{half")], "the last call could not be parsed"),
        ([turn(CALL), turn("Done.", "ok")], "the agent said that it was done without an edit"),
        ([turn(CALL, "ok")], ""),
        ([], ""),
    ],
)
def test_the_last_turns_say_how_it_ended(turns: list[Turn], ending: str) -> None:
    text = MessageText(_renderer)
    assert text.ending(turns) == ending
    assert text.ending([replace(one, spans=()) for one in turns]) == ending.replace(" of bash", "")
