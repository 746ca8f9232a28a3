"""What the chaos benchmark calls lost, balanced and equal; whole runs are killed in tests/full."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks._chaos_run import Run, StuckError
from benchmarks._engine_process import served
from benchmarks.chaos import AHEAD, AHEAD_POINTS, SYNCHRONOUS, VERDICT, Chaos, main
from insitu import failpoint
from insitu.attempt import AttemptSpec
from insitu.collect.options import Slot
from insitu.config import load_config
from insitu.engines.http import HttpOptions
from insitu.engines.vllm import open_vllm
from insitu.storage.run_dir import RunDir
from insitu.tasks.toy import ToySource
from insitu.types import Ledger, Limits, RequestKey, SamplingParams
from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.model import Qwen3, initialise, save_model
from tests.fakes.attempts import fake_rollout
from tests.fakes.vllm import listening

pytestmark = pytest.mark.slow

(TASK,) = ToySource(Limits()).tasks("train", 0, 1)


def run_of(folder: Path, *, rewards: tuple[float, ...] = (0.0, 1.0)) -> Run:
    """A finished run of one step with two rollouts, seen after a death."""
    slots = [Slot(phase="train", step=1, group=0, slot=i) for i in range(2)]
    with RunDir.create(load_config(None, [f"run.dir={folder}"])) as held, held.store() as store:
        store.plan(slots, TASK.id, 0)
        for slot, reward in zip(slots, rewards, strict=True):
            store.start(slot.rollout_id, 1, 0)
            made = fake_rollout(AttemptSpec(rollout_id=slot.rollout_id, task=TASK, seed=0), reward)
            store.put_rollout("train", 1, 0, slot.slot, made)
        ids = [slot.rollout_id for slot in slots]
        store.assign(1, ids)
        store.commit_step(1, {"weights": "w"}, "c", "h", Ledger(), trained=ids)
    run = Run(folder=folder, config=folder / "config.toml", overrides=())
    run._look()
    return run


def test_a_run_that_lost_nothing(tmp_path: Path) -> None:
    run, same = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    assert (run.lost(), run.trained_twice(), run.balanced(), run.wrong) == ([], 0, True, [])
    assert len(run.seen) == 2
    assert run.bits() == same.bits()
    assert run.bits() != run_of(tmp_path / "c", rewards=(1.0, 0.0)).bits()


HARM = {
    "UPDATE rollouts SET reward = 0.5 WHERE slot = 0": (1, True),
    "DELETE FROM rollouts WHERE slot = 0": (1, False),
    "DELETE FROM states WHERE slot = 0": (1, False),
    "UPDATE states SET state = 'graded', account = NULL WHERE slot = 0": (1, True),
    "UPDATE states SET state = 'running', account = NULL WHERE slot = 0": (1, False),
}


@pytest.mark.parametrize("harm", HARM)
def test_what_is_gone_or_changed_or_without_a_fate_is_lost(tmp_path: Path, harm: str) -> None:
    run = run_of(tmp_path / "r")
    with closing(sqlite3.connect(tmp_path / "r" / "run.sqlite")) as db:
        db.execute(harm)
        db.commit()
    lost, balanced = HARM[harm]
    assert (len(run.lost()), run.balanced()) == (lost, balanced)


def test_in_a_synchronous_run_only_the_planner_drops_what_was_graded(tmp_path: Path) -> None:
    run = run_of(tmp_path / "r")
    with closing(sqlite3.connect(tmp_path / "r" / "run.sqlite")) as db:
        db.execute("UPDATE states SET state = 'discarded', reason = 'stale' WHERE slot = 0")
        db.execute("UPDATE states SET state = 'discarded', reason = 'degenerate' WHERE slot = 1")
        db.commit()
    assert len(run.lost()) == 1
    run.synchronous = False
    assert run.lost() == []


@pytest.mark.parametrize("reason", ["few_groups", "unused", "infra"])
@pytest.mark.parametrize("synchronous", [True, False])
def test_a_reason_that_means_loss_is_no_fate_of_what_was_graded(
    tmp_path: Path, reason: str, synchronous: bool
) -> None:
    run = run_of(tmp_path / "r")
    with closing(sqlite3.connect(tmp_path / "r" / "run.sqlite")) as db:
        db.execute("UPDATE states SET state = 'discarded', reason = ? WHERE slot = 0", (reason,))
        db.commit()
    run.synchronous = synchronous
    assert len(run.lost()) == 1


def small_model(folder: Path, seed: int) -> Qwen3:
    shape = ModelConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, intermediate_size=64, head_dim=8)
    model = initialise(shape, seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0 if p.ndim == 2 else 1.0)
    save_model(model, folder)
    return model


async def test_the_engine_that_is_killed_samples_as_its_weights_say(tmp_path: Path) -> None:
    """Before and after other weights were loaded, with the log-probabilities that a trainer finds."""
    models = [small_model(tmp_path / str(version), version) for version in (0, 1)]
    ids, params = np.arange(3, 30, dtype=np.int32), SamplingParams(max_tokens=9, temperature=0.7)
    key, found = RequestKey(seed=1, rollout_id="r", turn=0), []
    fake, sampler = served(tmp_path / "0")
    driving = asyncio.create_task(sampler.drive())
    async with listening(fake.app()) as url, open_vllm(HttpOptions(url=url)) as engine:
        for version, model in enumerate(models):
            if version:
                await engine.load(tmp_path / "1", version, mode="keep")
            made = await engine.generate(ids, params, key)
            assert made.version_runs == ((0, version),)
            row = torch.from_numpy(np.concatenate([ids, made.ids]).astype(np.int64))
            logits = model.logits(model.hidden(row[:0], row[None, :-1]))[0] / 0.7
            reported = torch.log_softmax(logits, -1).gather(1, row[1:, None])[len(ids) - 1 :, 0]
            assert made.logprobs is not None
            assert np.abs(reported.detach().numpy() - made.logprobs).max() < 1e-4
            found.append(made.ids.tolist())
    driving.cancel()
    assert found[0] != found[1]


class Lives:
    """Stands in for a run's process: dies at the first armed place that it comes to."""

    def __init__(self, comes_to: Sequence[str]) -> None:
        self.comes_to = comes_to

    def __call__(self, run: Run, armed: Sequence[str] = (), **_: object) -> bool:
        place = next((point for point in self.comes_to if point in armed), None)
        if place is not None:
            run.points.append(place)
        return place is None


def test_every_failpoint_is_armed_until_it_was_passed_and_none_is_excused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "life", lambda run, armed=(): Lives(failpoint.POINTS)(run, armed))
    chaos = Chaos(tmp_path, 0, 6)
    (run,) = chaos.at_failpoints("f", SYNCHRONOUS)
    assert sorted(run.points) == sorted(SYNCHRONOUS)
    (ahead,) = chaos.at_failpoints("a", AHEAD_POINTS, AHEAD)
    assert (run.synchronous, ahead.synchronous, chaos.missed) == (True, False, [])
    assert {*SYNCHRONOUS, *AHEAD_POINTS, *VERDICT} == set(failpoint.POINTS)
    rare = [point for point in failpoint.POINTS if point != "attempt.after"]
    monkeypatch.setattr(Run, "life", lambda run, armed=(): Lives(rare)(run, armed))
    assert len(chaos.at_failpoints("g", SYNCHRONOUS)) == 2
    assert chaos.missed == ["attempt.after"]


def test_a_try_may_fail_in_every_life_and_a_place_kills_once(tmp_path: Path) -> None:
    """The two deaths around the record of a failed try need two of them."""
    run = Run(folder=tmp_path / "r", config=tmp_path / "c", overrides=())
    _, first = run._arm(["try.lost", "attempt.before"])
    run.points.append("attempt.before")
    _, second = run._arm(["try.lost", "attempt.before"])
    assert first["try.lost"] != second["try.lost"]
    assert first["attempt.before"] == second["attempt.before"]


def test_a_run_that_is_stuck_still_prints_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stuck(run: Run, *_: object, **__: object) -> bool:
        raise StuckError("it did not end")

    monkeypatch.setattr(Run, "life", stuck)
    assert main(["--kills", "0", "--json"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "wrong: it did not end"
    assert set(json.loads(lines[-1])) == {
        "kills",
        "lost",
        "trained_twice",
        "ledger_balanced",
        "bit_identical",
    }
