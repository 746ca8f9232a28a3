"""`insitu.serve` as a library: a session, a call of an agent, its reward and its rows."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import insitu
from insitu.cli import main
from insitu.shutdown import descendants

SMALL = {"limits.max_call_tokens": 8, "model.max_context_tokens": 1024}


def ask(session: insitu.ServedSession) -> dict[str, Any]:
    body = {"model": session.model, "messages": [{"role": "user", "content": "Hello."}]}
    request = urllib.request.Request(
        f"{session.openai_url}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {session.key}"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


@pytest.mark.slow
async def test_sessions_are_sealed_with_a_reward_and_give_rows(tmp_path: Path) -> None:
    before = descendants(os.getpid())
    path = tmp_path / "run"
    with insitu.serve(overrides=SMALL, run={"dir": str(path)}) as server:
        first, second = server.session("first"), server.session()
        reply = ask(first)
        with pytest.raises(insitu.InsituError, match="session first is not sealed"):
            first.rows()
        ledger = first.seal(reward=1.0)
        assert ledger.captured == reply["usage"]["completion_tokens"]
        (row,) = first.rows()
        assert row.mask.sum() == ledger.trained == ledger.captured
        assert row.to_dict()["label"] == row.label
        with pytest.raises(insitu.InsituError, match="first exists already"):
            server.session("first")
        await asyncio.to_thread(ask, second)
    run = insitu.open_run(path)
    assert [(rollout.id, rollout.reward) for rollout in run.rollouts()] == [
        ("first", 1.0),
        ("session-1", None),
    ]
    assert (run.kind, run.ledger.trained, run.ledger.balanced) == ("serve", 0, True)
    with pytest.raises(insitu.InsituError, match="the server does not run"):
        server.session()
    async with insitu.serve(overrides=SMALL, run={"dir": str(tmp_path / "again")}) as server:
        session = server.session()
        await asyncio.to_thread(ask, session)
        assert (await session.seal_async(0.0)).captured > 0
    assert descendants(os.getpid()) == before
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("insitu")]


@pytest.mark.slow
def test_what_cannot_be_stored_loses_no_session(tmp_path: Path) -> None:
    with insitu.serve(overrides=SMALL, run={"dir": str(tmp_path / "run")}) as server:
        session = server.session("a\udc00b", task="half \ud83d name")
        assert (session.id, session.task) == ("a\ufffdb", "half \ufffd name")
        ask(session)
        wrong: Any
        for wrong in (float("nan"), float("inf"), "1", [1.0]):
            with pytest.raises(insitu.InsituError, match="stays open: a reward is a finite number"):
                session.seal(reward=wrong)
        assert session.seal(reward=np.float32(0.5)).trained > 0
    (rollout,) = insitu.open_run(tmp_path / "run").rollouts(task="half \ufffd name")
    assert (rollout.id, rollout.reward) == ("a\ufffdb", 0.5)


@pytest.mark.full
@pytest.mark.slow
def test_served_sessions_are_shown_exported_and_imitated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, copy = tmp_path / "run", tmp_path / "export"
    with insitu.serve(overrides=SMALL, run={"dir": str(source)}) as server:
        for reward in (1.0, 0.0, None):
            session = server.session(task="greet")
            ask(session)
            session.seal(reward=reward)
    assert main(["show", str(source)]) == 0
    shown = capsys.readouterr().out
    assert "3 sessions of 1 tasks, 2 with a reward, 0.500 on average" in shown
    assert "greet: 1 0 -" in shown
    assert main(["export", str(source), "--out", str(copy)]) == 0
    exported = [json.loads(line) for line in (copy / "data" / "rollouts.jsonl").read_text().splitlines()]
    stored = insitu.open_run(source).rollouts(task="greet")
    assert [one["rollout_id"] for one in exported] == [one.id for one in stored]
    assert exported[0]["segments"][0]["ids"] == stored[0].tokens().ids.tolist()
    assert [one["used"] for one in exported] == ["", "", "ungraded"]
    assert [one["advantage"] for one in exported] == [0.5, -0.5, None]
    imitated, back = tmp_path / "imitated", insitu.import_run(copy, tmp_path / "back")
    assert main(["sft", str(back.path), f"run.dir={imitated}", "train.epochs=1", "train.decay=constant"]) == 0
    assert "3 rollouts, 1 chosen; 1 below sft.min_reward; 1 not graded" in " ".join(
        sorted(capsys.readouterr().out.split("\n"))
    )
    assert insitu.open_run(imitated).steps[0].metrics["rollouts"] == 1


@pytest.mark.full
@pytest.mark.slow
def test_rewarded_sessions_are_a_batch_of_training(tmp_path: Path) -> None:
    served = tmp_path / "served"
    with insitu.serve(overrides=SMALL, run={"dir": str(served)}) as server:
        for task, rewards in (("a", (1.0, 0.0)), ("same", (1.0, 1.0)), ("b", (0.0, 0.5, None))):
            for reward in rewards:
                session = server.session(task=task)
                ask(session)
                session.seal(reward=reward)
    more = {"collect.groups_per_step": 1, "train.min_groups": 1}
    run = insitu.train(served, overrides=more, run={"dir": str(tmp_path / "trained")})
    assert run.summary is not None
    assert (run.kind, run.summary["updates"], run.summary["rollouts"]) == ("train", 2, 5)
    assert [step.metrics["reward_mean"] for step in run.steps] == [0.5, 0.25]
    first = run.steps[0]
    assert first.metrics["max_logprob_gap"] < 1e-3, "the trainer agrees with what the server sampled"
    sessions = {one.id: one for one in insitu.open_run(served).rollouts()}
    assert first.ledger.trained == sum(sessions[f"session-{n}"].tokens().mask.sum() for n in (0, 1))
    ungraded = int(sessions["session-6"].tokens().mask.sum())
    assert run.ledger.balanced
    assert run.ledger.excluded["ungraded"] == ungraded
    assert main(["replay", str(run.path)]) == 0
    with pytest.raises(insitu.InsituError, match="holds no group to train"):
        insitu.train(run.path, run={"dir": str(tmp_path / "none")})


def test_a_start_that_fails_raises_and_leaves_nothing(tmp_path: Path) -> None:
    before = descendants(os.getpid())
    with (
        pytest.raises(insitu.InsituError, match=r"127\.0\.0\.1:9"),
        insitu.serve(
            model="http://127.0.0.1:9",
            engine={"kind": "vllm", "start_timeout_s": 0},
            run={"dir": str(tmp_path / "r")},
        ),
    ):
        pass
    assert descendants(os.getpid()) == before
