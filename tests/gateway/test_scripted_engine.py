"""The shipped fake: what it promises to tests and to demonstrations."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from gateway_rig import ASK, TOOLS, Rig, call, said

from insitu.chat.template import TemplateRenderer
from insitu.errors import EngineError
from insitu.types import Message, RequestKey, SamplingParams
from insitu_lab.exactness import training_faults
from insitu_train.demo.scripted import ScriptedEngine

KEY = RequestKey(seed=0, rollout_id="r", turn=0)
PROMPT = np.array([1, 2], dtype=np.int32)


def params(renderer: TemplateRenderer, max_tokens: int = 100) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, stop_ids=renderer.stop_ids)


async def test_replies_are_whole_cut_or_ended_at_the_first_stop(renderer: TemplateRenderer) -> None:
    whole = renderer.render_reply(said("abc"))
    engine = ScriptedEngine(renderer, lambda ids, key: np.concatenate([whole, whole]), sampled=True)
    got = await engine.generate(PROMPT, params(renderer), KEY)
    assert (got.ids.tolist(), got.finish) == (whole.tolist(), "stop")
    assert got.logprobs is not None
    assert np.all((got.logprobs < 0) & np.isfinite(got.logprobs))
    assert len(set(got.logprobs.tolist())) == len(whole)
    again = await engine.generate(PROMPT, params(renderer), RequestKey(seed=0, rollout_id="r", turn=1))
    assert not np.isin(again.logprobs, got.logprobs).any()
    got = await engine.generate(PROMPT, params(renderer, len(whole) - 1), KEY)
    assert (got.ids.tolist(), got.finish) == (whole[:-1].tolist(), "length")
    assert [s.ids.tolist() for s in engine.sent] == [[1, 2]] * 3


async def test_pause_waits_for_what_is_in_flight_and_holds_new_requests(renderer: TemplateRenderer) -> None:
    engine = ScriptedEngine(renderer, lambda ids, key: said("x"), delay_s=0.02)
    first = asyncio.create_task(engine.generate(PROMPT, params(renderer), KEY))
    await asyncio.sleep(0)
    await engine.pause()
    assert first.done()
    second = asyncio.create_task(engine.generate(PROMPT, params(renderer), KEY))
    await asyncio.sleep(0.05)
    assert len(engine.sent) == 1
    await engine.resume()
    assert (await second).finish == "stop"


async def test_failures_are_injected_by_key(renderer: TemplateRenderer) -> None:
    engine = ScriptedEngine(
        renderer, lambda i, k: said("x"), fail=lambda k: EngineError("no") if k.turn else None
    )
    await engine.generate(PROMPT, params(renderer), KEY)
    with pytest.raises(EngineError):
        await engine.generate(PROMPT, params(renderer), RequestKey(seed=0, rollout_id="r", turn=1))
    assert engine.in_flight == 0


async def test_a_demonstration_through_the_gateway_gives_the_rendered_ids(renderer: TemplateRenderer) -> None:
    """What is recorded through the gateway equals what the family renders of the same conversation."""
    first = Message(role="assistant", text="I look.", tool_calls=(call("read", '{"path": "a"}'),))
    async with Rig(renderer, [first, said("Done.")], sampled=False) as rig:
        _, body = await rig.post({"messages": ASK, "tools": TOOLS})
        echo = body["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": echo["tool_calls"][0]["id"], "content": "x = 1"}
        await rig.post({"messages": [*ASK, echo, result], "tools": TOOLS})
        sent = rig.engine.sent[1].ids
        trajectory = await rig.sealed()
    assert [s.kind for s in trajectory.segments] == ["demonstrated"]
    segment = trajectory.segments[0]
    sampled = [renderer.render_reply(m) for m in (first, said("Done."))]
    pieces = [
        rig.engine.sent[0].ids,
        sampled[0],
        renderer.close(sampled[0], "stop"),
        renderer.append([Message(role="tool", text="x = 1", tool_call_id="any")]),
        renderer.generation_prompt(),
        sampled[1],
    ]
    assert segment.ids.tolist() == np.concatenate(pieces).tolist()
    assert segment.ids.tolist()[: len(sent)] == sent.tolist()
    assert segment.ids[segment.mask].tolist() == np.concatenate(sampled).tolist()
    assert trajectory.ledger.balanced


@pytest.mark.parametrize("fault", ["none", "shifted", "sliced", "mask", "ids", "swapped"])
async def test_rows_that_are_not_what_the_engine_gave_are_seen(
    renderer: TemplateRenderer, fault: str
) -> None:
    async with Rig(renderer, [said("Long and equal."), said("Long and equal.")]) as rig:
        for text in ("One", "Two"):
            await rig.post({"messages": [*ASK, {"role": "user", "content": text}]})
        trajectory = await rig.sealed()
        answers = {key.turn: answer for key, answer in rig.engine.answers.items()}
    row = trajectory.segments[0]
    ids, mask, logprobs = row.ids.copy(), row.mask.copy(), row.logprobs.copy()
    places = np.flatnonzero(mask)
    if fault == "shifted":
        logprobs[places] = np.roll(logprobs[places], 1)
    elif fault == "sliced":
        logprobs[places[-1]] = 0.0
    elif fault == "mask":
        mask[places[0]], logprobs[places[0]] = False, 0.0
    elif fault == "ids":
        ids[places[1]] += 1
    elif fault == "swapped":
        other = trajectory.segments[1]
        logprobs[places] = other.logprobs[other.mask]
    changed = replace(row, ids=ids, mask=mask, logprobs=logprobs)
    reported = list(training_faults(replace(trajectory, segments=(changed, trajectory.segments[1])), answers))
    assert bool(reported) == (fault != "none")


async def test_an_edited_turn_is_counted_and_starts_a_branch(renderer: TemplateRenderer) -> None:
    first = Message(role="assistant", tool_calls=(call("read", '{"path": "a"}'),))
    async with Rig(renderer, [first, said("Done.")]) as rig:
        _, body = await rig.post({"messages": ASK, "tools": TOOLS})
        echo = body["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": echo["tool_calls"][0]["id"], "content": "x"}
        echo["tool_calls"][0]["function"]["arguments"] = '{"path": "b"}'
        await rig.post({"messages": [*ASK, echo, result], "tools": TOOLS})
        assert rig.session.stats.edited == 1
        assert '{"path": "b"}' in renderer.decode(rig.engine.sent[1].ids)
        trajectory = await rig.sealed()
        assert [t.parent for t in trajectory.turns] == [-1, -1]
        assert trajectory.ledger.balanced
