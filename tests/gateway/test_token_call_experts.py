"""The experts that an engine chose for each token, from its replies to segments, log and store."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gateway_rig import ASK, TOOLS, Rig, call, said
from helpers_record import make_rollout
from test_server_engines import lab

from insitu.chat.template import TemplateRenderer
from insitu.engines.http import HttpOptions
from insitu.engines.vllm import open_vllm
from insitu.errors import CaptureError, EngineError
from insitu.gateway.request import GatewayConfig
from insitu.storage.session_log import recover
from insitu.storage.store import Store
from insitu.types import (
    ExpertArray,
    Generation,
    IntArray,
    Message,
    RequestKey,
    SamplingParams,
    Segment,
)
from insitu.types.codec import VALUES
from insitu_train.channel.calls import read_request
from insitu_train.demo.scripted import ScriptedEngine
from tests.fakes.vllm import chosen_experts, npy, serve_vllm

KEY = RequestKey(seed=1, rollout_id="r/0", turn=0)
PROMPT: IntArray = np.arange(1, 9, dtype=np.int32)


def of(ids: IntArray) -> ExpertArray:
    return chosen_experts(ids.tolist()).astype(np.int16)


def whole(row: Segment) -> bool:
    """Whether every token has the experts that the engine chose for it; it computed all but the last."""
    assert row.experts is not None
    return np.array_equal(row.experts[:-1], of(row.ids)[:-1]) and bool((row.experts[-1] == -1).all())


class Routed(ScriptedEngine):
    """A scripted engine with experts, as it were."""

    def _answer(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        made = super()._answer(ids, params, key)
        made = replace(made, experts=of(np.concatenate([ids, made.ids]))[params.experts_from : -1])
        self.answers[key] = made
        return made


async def test_a_server_gives_what_was_not_known_yet() -> None:
    async with serve_vllm(97, experts=True) as fake:
        async with open_vllm(HttpOptions(url=fake.url, experts=True)) as engine:
            for start in (0, 5):
                params = SamplingParams(max_tokens=6, experts_from=start)
                made = await engine.generate(PROMPT, params, KEY)
                assert made.experts is not None
                assert made.experts.dtype == np.int16
                assert np.array_equal(made.experts, of(np.concatenate([PROMPT, made.ids]))[start:-1])
        async with open_vllm(HttpOptions(url=fake.url)) as engine:
            assert (await engine.generate(PROMPT, SamplingParams(max_tokens=6), KEY)).experts is None


FAULTS = {
    "needs: start it with --enable-return-routed-experts": lambda a: a["choices"][0].update(
        routed_experts=None
    ),
    "no array": lambda a: a["choices"][0].update(routed_experts="bm90IG9uZQ=="),
    "experts of 12 tokens where 13": lambda a: a["choices"][0].update(
        routed_experts=npy(np.zeros((12, 3, 2), np.int16))
    ),
    "no array of tokens, layers and choices": lambda a: a["choices"][0].update(
        routed_experts=npy(np.zeros((13, 3), np.int16))
    ),
    "none of an expert": lambda a: a["choices"][0].update(
        routed_experts=npy(np.full((13, 3, 2), -1, np.int16))
    ),
}


@pytest.mark.parametrize("line", FAULTS)
async def test_a_reply_without_them_is_an_engine_error(line: str) -> None:
    def corrupt(answer: dict[str, object]) -> object:
        FAULTS[line](answer)
        return answer

    async with (
        serve_vllm(97, experts=True) as fake,
        open_vllm(HttpOptions(url=fake.url, experts=True)) as engine,
    ):
        fake.corrupt = corrupt
        with pytest.raises(EngineError, match=line):
            await engine.generate(PROMPT, SamplingParams(max_tokens=6), KEY)


async def test_a_server_that_cannot_return_them_is_refused() -> None:
    async with serve_vllm(97, scale_out=False) as fake:
        with pytest.raises(EngineError, match="replay_experts needs vLLM 0.32 with --enable-scale-out"):
            async with open_vllm(HttpOptions(url=fake.url, experts=True)):
                pass


def test_a_request_carries_its_place_to_a_node() -> None:
    params = SamplingParams(max_tokens=6, experts_from=5)
    assert read_request(VALUES.pack((PROMPT, params, KEY)))[1:] == (params, KEY)


SCRIPT = [
    Message(role="assistant", text="I look.", tool_calls=(call("read", '{"path": "a"}'),)),
    said("Done and over."),
]


async def test_segments_have_the_experts_of_every_token(
    renderer: TemplateRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_rig.ScriptedEngine", Routed)
    async with Rig(renderer, SCRIPT, config=GatewayConfig(log_dir=tmp_path)) as rig:
        _, body = await rig.post({"messages": ASK, "tools": TOOLS})
        echo = body["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": echo["tool_calls"][0]["id"], "content": "x = 1"}
        await rig.post({"messages": [*ASK, echo, result], "tools": TOOLS, "stop": "and"})
        trajectory = await rig.session.seal(1.0)
        first, second = (rig.engine.sent[turn].params.experts_from for turn in (0, 1))
        answer = rig.engine.answers[rig.engine.sent[0].key]
        assert (first, second) == (0, len(rig.engine.sent[0].ids) + len(answer.ids) - 1)
        file = tmp_path / f"{rig.session.public_id}.log"
    assert trajectory.ledger.excluded["after_stop"] > 0
    (row,) = trajectory.segments
    assert whole(row)
    (again,) = recover(file).forest.trajectory().segments
    assert np.array_equal(row.experts, again.experts)


async def test_a_turn_without_them_leaves_its_tokens_to_the_router(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(Routed):
        def _answer(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
            made = super()._answer(ids, params, key)
            return replace(made, experts=None) if key.turn == 0 else made

    monkeypatch.setattr("gateway_rig.ScriptedEngine", Forgetful)
    async with Rig(renderer, SCRIPT) as rig:
        _, body = await rig.post({"messages": ASK, "tools": TOOLS})
        echo = body["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": echo["tool_calls"][0]["id"], "content": "x = 1"}
        await rig.post({"messages": [*ASK, echo, result], "tools": TOOLS})
        (row,) = (await rig.session.seal(1.0)).segments
        start = rig.engine.sent[1].params.experts_from
    assert row.experts is not None
    assert (row.experts[:start] == -1).all()
    assert np.array_equal(row.experts[start:-1], of(row.ids)[start:-1])


async def test_experts_of_another_length_break_an_invariant(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TooMany(Routed):
        def _answer(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
            made = super()._answer(ids, params, key)
            assert made.experts is not None
            return replace(made, experts=np.concatenate([made.experts, made.experts]))

    monkeypatch.setattr("gateway_rig.ScriptedEngine", TooMany)
    async with Rig(renderer, SCRIPT) as rig:
        await rig.post({"messages": ASK, "tools": TOOLS})
        with pytest.raises(CaptureError, match="do not fit a path"):
            await rig.session.seal(1.0)


async def test_what_a_server_returns_unasked_is_not_kept(renderer: TemplateRenderer) -> None:
    async with lab(renderer, experts=True) as it:
        await it.post()
        (row,) = (await it.session.seal(1.0)).segments
        assert row.experts is None


def test_the_store_keeps_them(tmp_path: Path) -> None:
    rollout = make_rollout("train/00001/000/00")
    (row,) = rollout.trajectory.segments
    experts = np.random.default_rng(0).integers(-1, 128, (len(row.ids), 4, 8)).astype(np.int16)
    trajectory = replace(rollout.trajectory, segments=(replace(row, experts=experts),))
    with Store(tmp_path / "run.sqlite") as store:
        store.put_rollout("train", 1, 0, 0, replace(rollout, trajectory=trajectory))
    with Store(tmp_path / "run.sqlite", readonly=True) as store:
        (back,) = store.rollout(rollout.id).trajectory.segments
    assert back.experts is not None
    assert back.experts.dtype == np.int16
    assert np.array_equal(back.experts, experts)
    with closing(sqlite3.connect(tmp_path / "run.sqlite")) as db:
        assert len(db.execute("SELECT experts FROM segments").fetchone()[0]) < 0.7 * experts.nbytes
