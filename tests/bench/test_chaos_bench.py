"""What the chaos benchmark calls lost, balanced and equal; whole runs are killed in tests/full."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from whet import failpoint
from whet.bench._chaos_run import Run
from whet.bench.chaos import RARE, Chaos, deaths, judge
from whet.collect.dispatcher import Slot
from whet.config import load_config
from whet.record.run import RunDir
from whet.rollout import AttemptSpec
from whet.tasks.toy import ToySource
from whet.testing.fake_attempts import fake_rollout
from whet.types import Ledger, Limits

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


def test_every_failpoint_is_armed_once_and_one_of_the_controller_in_each_life() -> None:
    often = [point for point in failpoint.POINTS if not point.startswith(RARE)]
    lives = deaths(often)
    assert sorted(point for life in lives for point in life) == sorted(often)
    assert all(not life[0].startswith(("learner.", "checkpoint.")) for life in lives)
    assert {point for life in lives for point in life if life[0].startswith(("step.", "loop."))} >= {
        point for point in often if point.startswith(("learner.", "checkpoint."))
    }


def test_the_result_has_the_five_figures(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, 0, 1)
    told = judge(chaos, run_of(tmp_path / "a"), [])
    assert list(told) == ["kills", "lost", "trained_twice", "ledger_balanced", "bit_identical"]
    assert list(told.values()) == [0, 0, 0, True, True]
