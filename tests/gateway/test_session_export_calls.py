"""What is recorded beside tokens: which ids are which message, when calls took place, gauges of the run."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path

import pytest
from gateway_rig import ASK, TOOLS, Rig, call, said

from insitu.chat.template import TemplateRenderer
from insitu.storage.metrics import read_metrics
from insitu.storage.store import Store
from insitu.storage.timeline import TIMELINE, Timeline
from insitu.types import Message, Turn
from insitu_train.gauges import write_gauges


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


async def test_gauges_follow_a_run_and_never_end_it(renderer: TemplateRenderer, tmp_path: Path) -> None:
    path = tmp_path / TIMELINE
    with Store(tmp_path / "run.sqlite") as store:
        async with Rig(renderer, [said("done")]) as rig:
            async with write_gauges(Timeline(path), store, rig.gateway.open_sessions, interval_s=0.01):
                await rig.post({"messages": ASK})
                await asyncio.sleep(0.3)
            lines = list(read_metrics(path))
            assert any(line.get("tokens_per_s", 0) > 0 for line in lines)
            doing = {line.get("doing") for line in lines if line["event"] == "agent"}
            assert "call 1: done" in doing
            assert (lines[0]["event"], lines[0]["agents"], lines[0]["rollouts_running"]) == ("gauges", 1, 0)
            lost = Timeline(tmp_path / "gone" / TIMELINE)
            async with write_gauges(lost, store, rig.gateway.open_sessions, interval_s=0.01):
                await asyncio.sleep(0.05)


def test_a_timeline_that_cannot_be_written_is_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timeline = Timeline(tmp_path / "gone" / TIMELINE)
    for step in range(3):
        with timeline.phase("train", step):
            pass
    assert len(caplog.records) == 1
