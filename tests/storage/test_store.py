"""The store gives back what was put, commits steps once and survives kill -9 and a full disk."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers_record import make_rollout, same

from insitu.errors import RecordError
from insitu.storage.pass_at_k import wilson_interval
from insitu.storage.store import Score, Store, add_ledgers
from insitu.types import CallTimes, DriftNote, FailingCheck, Ledger, Rollout, Status


def commit(store: Store, step: int, *rollouts: Rollout) -> None:
    """Train these rollouts, which are graded."""
    ids = [rollout.id for rollout in rollouts]
    store.assign(step, ids)
    account = add_ledgers([rollout.trajectory.ledger for rollout in rollouts])
    store.commit_step(step, {}, f"c{step}", "h", account, trained=ids)


def test_rollouts_come_back_equal_in_slot_order(tmp_path: Path) -> None:
    put = [make_rollout(f"train/3/{g}/{s}", seed=10 * g + s) for g in range(2) for s in range(2)]
    with Store(tmp_path / "run.sqlite") as store:
        for i in (3, 0, 2, 1):
            store.put_rollout("train", 3, i // 2, i % 2, put[i])
        store.put_rollout("eval", 3, 0, 0, make_rollout("eval/3/0/0", reward=None))
    with Store(tmp_path / "run.sqlite", readonly=True) as store:
        got = store.rollouts("train", 3)
        assert all(same(a, b) for a, b in zip(put, got, strict=True))
        assert same(store.rollout("eval/3/0/0"), make_rollout("eval/3/0/0", reward=None))
        assert store.rollouts("train", 4) == []
        assert store.places("train", 3)[1, 0] == "train/3/1/0"
        assert store.phases() == {("train", 3): 4, ("eval", 3): 1}


def test_drifts_and_hints_come_back_and_go_with_their_rollout(tmp_path: Path) -> None:
    plain = make_rollout("a")
    first, *others = plain.trajectory.turns
    fork = DriftNote(kind="fork", cause="rewind")
    note = DriftNote(kind="edited", cause="text", request=1, turn=0, token=2, tokens=3, detail="é")
    cold, none = (("temperature", "0"), ("seed", "7")), ()
    wished = [cold, cold, none, cold, *(cold for _ in others)]
    turns = (
        dataclasses.replace(first, hints=(("agent", "sub-1"), ("window", "2")), advisory=cold),
        *(dataclasses.replace(t, advisory=w) for t, w in zip(others, wished[1:], strict=False)),
    )
    trajectory = dataclasses.replace(plain.trajectory, turns=turns, drifts=(note, fork))
    noted = dataclasses.replace(plain, trajectory=trajectory)
    with Store(tmp_path / "s") as store:
        store.put_rollout("train", 0, 0, 0, noted)
        store.put_rollout("train", 0, 0, 1, make_rollout("b"))
        assert same(store.rollout("a"), noted)
        assert same(store.rollout("b"), make_rollout("b"))
        assert store.drifts() == [note, fork]


def test_equality_helper_can_fail() -> None:
    a = make_rollout("x")
    turn = dataclasses.replace(a.trajectory.turns[0], logprobs=a.trajectory.turns[0].logprobs * 2)
    b = dataclasses.replace(a, trajectory=dataclasses.replace(a.trajectory, turns=(turn,)))
    assert not same(a, b)
    assert not same(a, dataclasses.replace(a, reward=1))


def test_a_rollout_is_stored_once(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        store.put_rollout("train", 1, 0, 0, make_rollout("a"))
        with pytest.raises(RecordError, match="rollout a is stored already"):
            store.put_rollout("train", 1, 0, 1, make_rollout("a"))
        with pytest.raises(RecordError, match="UNIQUE"):
            store.put_rollout("train", 1, 0, 0, make_rollout("b"))
        assert len(store.rollouts("train", 1)) == 1


def test_values_outside_the_mask_are_refused(tmp_path: Path) -> None:
    good = make_rollout("a")
    segment = good.trajectory.segments[0]
    bad = dataclasses.replace(segment, mask=np.zeros_like(segment.mask))
    rollout = dataclasses.replace(good, trajectory=dataclasses.replace(good.trajectory, segments=(bad,)))
    with Store(tmp_path / "s") as store:
        with pytest.raises(RecordError, match="outside its mask"):
            store.put_rollout("train", 1, 0, 0, rollout)
        assert store.places("train", 1) == {}
        store.put_rollout("train", 1, 0, 0, good)


def test_wrong_dtype_is_refused_not_rounded(tmp_path: Path) -> None:
    good = make_rollout("a")
    turn = dataclasses.replace(good.trajectory.turns[0], ids=good.trajectory.turns[0].ids.astype(np.int64))
    rollout = dataclasses.replace(good, trajectory=dataclasses.replace(good.trajectory, turns=(turn,)))
    with Store(tmp_path / "s") as store, pytest.raises(TypeError):
        store.put_rollout("train", 1, 0, 0, rollout)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused_and_not_kept_as_ungraded(
    tmp_path: Path, reward: float
) -> None:
    """SQLite would store a NaN as NULL."""
    good = make_rollout("a")
    assert good.verdict is not None
    with Store(tmp_path / "s") as store:
        with pytest.raises(RecordError, match=f"rollout a has reward {reward}, which is not a finite number"):
            store.put_rollout("train", 1, 0, 0, dataclasses.replace(good, reward=reward))
        assert store.phases() == {}
        store.put_rollout("train", 1, 0, 0, good)
        with pytest.raises(RecordError, match="which is not a finite number"):
            store.put_reward(dataclasses.replace(good, reward=reward))
        assert store.rollout("a").reward == good.reward


def test_scores_by_family_leave_out_infrastructure_failures(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        for slot, (reward, category) in enumerate([(1.0, "a"), (0.0, "a"), (None, "a"), (1.0, "b")]):
            rollout = make_rollout(f"e/{slot}", reward=reward, category=category)
            store.put_rollout("eval", 0, 0, slot, rollout)
        scores = store.scores("eval", 0)
    counts = {name: (score.solved, score.total) for name, score in scores.items()}
    assert counts == {"": (2, 3), "a": (1, 2), "b": (1, 1)}


def test_an_evaluation_scores_tasks_whatever_was_graded_of_each(tmp_path: Path) -> None:
    """One of two tasks is solved, also where one of its four rollouts alone was graded."""
    with Store(tmp_path / "s") as store:
        for phase in ("eval_before", "train"):
            for group in (0, 1):
                for slot in range(4):
                    reward = None if group and slot else float(group)
                    rollout = make_rollout(f"{phase}/{group}/{slot}", task_id=f"t{group}", reward=reward)
                    store.put_rollout(phase, 0, group, slot, rollout)
        held, trained = store.scores("eval_before", 0)[""], store.scores("train", 0)[""]
    assert (held.solved, held.total, held.rate, held.reward_mean) == (1, 5, 0.5, 0.5)
    assert (held.low, held.high) == wilson_interval(0.5, 2)
    assert trained == Score.of([0.0, 0.0, 0.0, 0.0, 1.0])


def test_rewards_between_0_and_1_are_in_the_score(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        for slot, reward in enumerate([0.5, 0.25, None, 1.0]):
            store.put_rollout("eval", 0, 0, slot, make_rollout(f"e/{slot}", reward=reward, category="a"))
        found = store.scores("eval", 0)[""]
    assert (found.solved, found.total, found.reward_mean) == (1, 3, 1.75 / 3)
    assert found.partial
    assert not Score.of([1.0, 0.0]).partial


def test_attempts_are_kept_beside_the_final_one(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        store.put_attempt(attempt_of("a", 1, reward=None))
        store.put_rollout("train", 1, 0, 0, make_rollout("a"))
        assert store.attempts("a") == [(1, Status.INFRA_FAILED, "sandbox vanished"), (2, Status.OK, "")]


def attempt_of(name: str, number: int, *, reward: float | None = 1.0) -> Rollout:
    """A try with an account as attempt.py makes it: nothing is trained when the infrastructure failed."""
    made = make_rollout(name, seed=number, reward=reward)
    ledger = made.trajectory.ledger
    if reward is None:
        ledger = Ledger(captured=ledger.captured, excluded={"infra": ledger.captured})
    kept = dataclasses.replace(made.trajectory, ledger=ledger)
    return dataclasses.replace(made, attempt=number, trajectory=kept)


def test_what_the_infrastructure_decided_is_replaced_until_its_step_is_trained(tmp_path: Path) -> None:
    lost, found = attempt_of("train/1/0/0", 3, reward=None), attempt_of("train/1/0/0", 4)
    with Store(tmp_path / "s") as store:
        store.put_rollout("train", 1, 0, 0, lost)
        assert store.still_open("train", 1)
        store.put_rollout("train", 1, 0, 0, found)
        assert same(store.rollout("train/1/0/0"), found)
        assert store.attempts("train/1/0/0") == [(3, Status.INFRA_FAILED, lost.error), (4, Status.OK, "")]
        assert store.tried("train/1/") == {"train/1/0/0": 4}
        assert store.tried("train/2/") == {}
        with pytest.raises(RecordError, match="stored already"):
            store.put_rollout("train", 1, 0, 0, found)
        late = attempt_of("train/2/0/0", 1, reward=None)
        store.put_rollout("train", 2, 0, 0, late)
        store.commit_step(2, {}, "c", "h", late.trajectory.ledger, discarded={late.id: "infra"})
        assert not store.still_open("train", 2)
        with pytest.raises(RecordError, match="discarded .infra. by step 2"):
            store.put_rollout("train", 2, 0, 0, attempt_of("train/2/0/0", 2))


def test_an_evaluation_is_open_while_its_weights_are_the_newest(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        assert store.still_open("eval_before", 0)
        store.commit_step(1, {}, "c", "h", Ledger())
        assert not store.still_open("eval_before", 0)
        assert store.still_open("eval_during", 1)


def test_the_ledger_of_the_run_holds_every_captured_token(tmp_path: Path) -> None:
    """Trained steps, all evaluations, tries that were repeated, and a try whose slot was never decided."""
    with Store(tmp_path / "s") as store:
        trained = attempt_of("train/00001/000/00", 2)
        tries = [attempt_of("train/00001/000/00", 1, reward=None), attempt_of("train/1/9", 1, reward=None)]
        phases = ("eval_before", "eval_during", "eval_after")
        evaluated = [attempt_of(phase, 5 + i) for i, phase in enumerate(phases)]
        for rollout in tries:
            store.put_attempt(rollout)
        store.put_rollout("train", 1, 0, 0, trained)
        for slot, rollout in enumerate(evaluated):
            store.put_rollout(rollout.id, 1, 0, slot, rollout)
        with pytest.raises(RecordError, match="does not balance"):
            store.ledger()  # the step is not committed: its tokens are in no account
        commit(store, 1, trained)
        total = store.ledger()
        everything = [r.trajectory.ledger for r in (trained, *tries, *evaluated)]
        assert total.captured == sum(ledger.captured for ledger in everything)
        assert total.excluded["infra"] == sum(r.trajectory.ledger.captured for r in tries)
        assert total.balanced


def test_facts_are_committed_with_their_step(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        store.commit_step(1, {}, "c", "h", Ledger(), meta={"wall_s": "12.5"})
        with pytest.raises(RecordError, match="trained twice"):
            store.commit_step(1, {}, "c", "h", Ledger(), meta={"wall_s": "99"})
        assert store.meta()["wall_s"] == "12.5"


def test_steps_commit_once_and_in_order(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        assert store.last_step() is None
        rollout = make_rollout("train/1/0/0")
        store.put_rollout("train", 1, 0, 0, rollout)
        store.assign(1, [rollout.id])
        account = rollout.trajectory.ledger
        metrics = {"loss": 0.5, "name": "x"}
        store.commit_step(1, metrics, "checkpoints/1", "h1", account, trained=[rollout.id])
        with pytest.raises(RecordError, match="trained twice"):
            store.commit_step(1, {}, "checkpoints/1", "h1", account, trained=[rollout.id])
        unbalanced = Ledger(captured=1)
        with pytest.raises(RecordError, match="does not balance"):
            store.commit_step(2, {}, "checkpoints/2", "h2", unbalanced)
        store.commit_step(2, {"loss": 0.25}, "checkpoints/2", "h2", Ledger())
        first, last = store.steps()
        assert first.metrics == {"loss": 0.5, "name": "x"}
        assert first.ledger == account
        assert store.last_step() == last
        assert last.checkpoint == "checkpoints/2"


def test_threads_may_write_at_the_same_time(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:

        def work(slot: int) -> None:
            for step in range(10):
                store.put_rollout("train", step, 0, slot, make_rollout(f"{step}/{slot}", seed=slot))

        threads = [threading.Thread(target=work, args=(slot,)) for slot in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert sum(store.phases().values()) == 40


def test_full_disk_is_one_clear_line_and_keeps_what_was_stored(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        pages = store._db.execute("PRAGMA page_count").fetchone()[0]
        store._db.execute(f"PRAGMA max_page_count = {pages + 10}")
        stored = 0
        with pytest.raises(RecordError, match="disk full while writing .*/s: free some space"):
            for stored in range(1000):
                store.put_rollout("train", 0, 0, stored, make_rollout(f"r{stored}", seed=stored))
        assert len(store.rollouts("train", 0)) == stored > 0


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"hello" * 1000)
    for readonly in (False, True):
        with pytest.raises(RecordError, match="^cannot read .*/s: file is not a database$"):
            Store(tmp_path / "s", readonly=readonly)


def test_a_damaged_page_is_said_to_be_unreadable(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        for slot in range(40):
            store.put_rollout("train", 1, 0, slot, make_rollout(f"r{slot}", seed=slot))
    whole = (tmp_path / "s").read_bytes()
    (tmp_path / "s").write_bytes(whole[: len(whole) // 2] + bytes(len(whole) // 2))
    with (
        pytest.raises(RecordError, match="^cannot read .*malformed"),
        Store(tmp_path / "s", readonly=True) as store,
    ):
        store.rollouts("train", 1)


def test_readonly_cannot_write(tmp_path: Path) -> None:
    Store(tmp_path / "s").close()
    with Store(tmp_path / "s", readonly=True) as store, pytest.raises(RecordError, match="readonly"):
        store.put_rollout("train", 0, 0, 0, make_rollout("a"))


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from helpers_record import make_rollout
from insitu.storage.store import Store, add_ledgers
store = Store(Path(sys.argv[1]))
store.recover()
last = store.last_step()
step = 1 if last is None else last.step + 1
while True:
    for slot in range(3):
        name = f"{step}/{slot}"
        if (0, slot) in store.places("train", step):
            continue
        store.put_rollout("train", step, 0, slot, make_rollout(name, seed=step * 3 + slot))
        print("rollout", name, flush=True)
    made = store.rollouts("train", step)
    store.assign(step, [rollout.id for rollout in made])
    account = add_ledgers([rollout.trajectory.ledger for rollout in made])
    store.commit_step(step, {"n": step}, f"c{step}", "h", account, trained=[rollout.id for rollout in made])
    print("step", step, flush=True)
    step += 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 4, 11])
def test_kill_nine_loses_nothing_that_returned_and_repeats_nothing(tmp_path: Path, lines: int) -> None:
    """A writer is killed three times in the middle of writes; each time a fresh one goes on."""
    path = tmp_path / "run.sqlite"
    claimed: list[str] = []
    for _ in range(3):
        argv = [sys.executable, "-c", WRITER, str(path), str(Path(__file__).parent)]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, env=dict(os.environ))
        assert child.stdout is not None
        claimed += [child.stdout.readline().decode().strip() for _ in range(lines)]
        child.send_signal(signal.SIGKILL)
        claimed += child.stdout.read().decode().splitlines()
        child.stdout.close()
        assert child.wait(timeout=10) == -signal.SIGKILL
        with Store(path, readonly=True) as store:
            for line in filter(None, claimed):
                kind, name = line.split()
                if kind == "rollout":
                    step, slot = map(int, name.split("/"))
                    assert same(store.rollout(name), make_rollout(name, seed=step * 3 + slot))
            steps = [record.step for record in store.steps()]
            assert steps == list(range(1, len(steps) + 1))
            assert len(steps) >= sum(line.startswith("step") for line in claimed)
            assert all(len(store.rollouts("train", step)) == 3 for step in steps)
            assert store.check_balance().states.get("trained", 0) == 3 * len(steps)


def test_optional_additions_are_read_back(tmp_path: Path) -> None:
    plain = make_rollout("train/00000/000/00")
    first, *others = plain.trajectory.turns
    times = CallTimes(began_s=10.0, first_s=10.5, ended_s=11.0, cached=4)
    first = dataclasses.replace(first, spans=(("system", 0, 2, ""), ("tool", 2, 3, "bash")), times=times)
    check = FailingCheck(name="case 0", outcome="wrong", expected="2", got="1", tail="é")
    assert plain.verdict is not None
    rollout = dataclasses.replace(
        plain,
        trajectory=dataclasses.replace(plain.trajectory, turns=(first, *others)),
        verdict=dataclasses.replace(plain.verdict, evidence=(check,)),
        began_s=9.0,
        diff="--- a/x\n+++ b/x\n",
    )
    with Store(tmp_path / "run.sqlite") as store:
        store.put_rollout("train", 0, 0, 0, rollout)
        assert same(store.rollout(rollout.id), rollout)
