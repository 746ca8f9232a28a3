"""Where each rollout stands: moves that are allowed, what a crash leaves, and the balance."""

from __future__ import annotations

import dataclasses
import re
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import get_args

import pytest
from helpers_record import make_rollout

from insitu import failpoint
from insitu.collect.options import Slot
from insitu.collect.store_sink import StoreSink
from insitu.errors import RecordError
from insitu.storage.attempts import ENDS
from insitu.storage.lifecycle import REASONS, STATES, Reason
from insitu.storage.store import Score, Store, add_ledgers
from insitu.types import EXCLUSIONS, Ledger, Rollout, Status
from insitu_train.alarms import InfraFailureRate


def slots(step: int = 1, group: int = 0, count: int = 4) -> list[Slot]:
    return [Slot(phase="train", step=step, group=group, slot=i) for i in range(count)]


def graded(slot: Slot, *, attempt: int = 1, reward: float | None = 1.0) -> Rollout:
    made = dataclasses.replace(make_rollout(slot.rollout_id, seed=slot.slot, reward=reward), attempt=attempt)
    if made.status is Status.INFRA_FAILED:
        account = Ledger(
            captured=made.trajectory.ledger.captured, excluded={"infra": made.trajectory.ledger.captured}
        )
        made = dataclasses.replace(made, trajectory=dataclasses.replace(made.trajectory, ledger=account))
    return made


def put(store: Store, places: Sequence[Slot], **said: float | None) -> list[str]:
    """Make these rollouts from plan to grade."""
    store.plan(places, "t", 3)
    for place in places:
        store.start(place.rollout_id, 1, 3)
        store.put_rollout(
            place.phase, place.step, place.group, place.slot, graded(place, reward=said.get("reward", 1.0))
        )
    return [place.rollout_id for place in places]


def account(store: Store, ids: Sequence[str]) -> Ledger:
    return add_ledgers([store.rollout(name).trajectory.ledger for name in ids])


def test_a_reason_to_discard_is_a_reason_to_exclude() -> None:
    assert REASONS <= EXCLUSIONS
    assert set(get_args(Reason)) == REASONS


def test_a_rollout_passes_through_every_state(tmp_path: Path) -> None:
    (slot, *_) = slots()
    name = slot.rollout_id
    with Store(tmp_path / "s") as store:
        assert store.state(name) is None
        seen = []

        def look() -> None:
            found = store.state(name)
            assert found is not None
            seen.append((found.state, found.attempt, found.version, found.account))

        store.plan([slot], "t", 3)
        look()
        store.start(name, 1, 4)
        look()
        store.put_rollout("train", 1, 0, 0, graded(slot))
        look()
        store.score([name])
        look()
        store.assign(7, [name])
        look()
        store.commit_step(7, {}, "c", "h", account(store, [name]), trained=[name])
        look()
        assert seen == [
            ("planned", 0, 3, None),
            ("running", 1, 4, None),
            ("graded", 1, 4, None),
            ("scored", 1, 4, None),
            ("assigned", 1, 4, 7),
            ("trained", 1, 4, 7),
        ]
        assert store.states() == dict.fromkeys(STATES, 0) | {"trained": 1}
        assert [r.id for r in store.step_rollouts(7)] == [name]
        assert store.step_rollouts(1) == []
        assert store.step_score(7) == Score.of([1.0])
        assert store.check_balance().tokens == account(store, [name])


def test_what_cannot_be_had_again_is_synced_and_the_rest_with_it(tmp_path: Path) -> None:
    (slot, *_) = slots()
    modes: dict[str, int] = {}
    with Store(tmp_path / "s") as store:

        def after(name: str) -> None:
            modes[name] = store._db.execute("PRAGMA synchronous").fetchone()[0]

        store.plan([slot], "t", 0)
        after("plan")
        store.start(slot.rollout_id, 1, 0)
        after("start")
        store.put_rollout("train", 1, 0, 0, graded(slot))
        after("graded")
        store.close_group("train", 1, 0)
        after("score")
        store.discard([slot.rollout_id], "unused")
        after("discard")
    normal, full = 1, 2
    assert modes == {"plan": normal, "start": normal, "graded": full, "score": normal, "discard": full}


@pytest.mark.parametrize("query", ["WHERE s.account = 7", "WHERE state = 'assigned' AND account = 7"])
def test_the_rollouts_of_a_step_are_found_by_an_index(tmp_path: Path, query: str) -> None:
    with Store(tmp_path / "s"), closing(sqlite3.connect(tmp_path / "s")) as db:
        (plan,) = db.execute(f"EXPLAIN QUERY PLAN SELECT rollout_id FROM states s {query}").fetchall()
    assert "USING INDEX states_by_account" in plan[-1]


def test_the_oldest_version_of_a_graded_rollout_is_that_of_its_trainable_tokens(tmp_path: Path) -> None:
    (slot, *_) = slots()
    with Store(tmp_path / "s") as store:
        put(store, [slot])
        found, rollout = store.state(slot.rollout_id), store.rollout(slot.rollout_id)
        assert found is not None
        assert found.oldest == min(int(s.versions[s.mask].min()) for s in rollout.trajectory.segments)


def test_every_try_that_was_begun_has_an_end_also_those_that_a_kill_cut_short(tmp_path: Path) -> None:
    first, second, third, fourth = slots()
    none = dict.fromkeys(ENDS, 0)
    with Store(tmp_path / "s") as store:
        assert store.attempts_by_end() == none
        sink = StoreSink(store, InfraFailureRate(0.0))
        sink.plan(slots(), "t", 0)
        sink.start(first.rollout_id, 1, 0)
        sink.attempted(first, graded(first, reward=None))
        for place, attempt in ((first, 2), (second, 1), (third, 1)):
            sink.start(place.rollout_id, attempt, 0)
        sink.put(second, graded(second))
        sink.cancelled(third, graded(third), "unused")
        assert store.attempts_by_end() == none | {"failed": 1, "running": 1, "decided": 1, "cancelled": 1}
    with Store(tmp_path / "s") as store:
        for _ in range(2):  # a kill of the process that resumes it changes nothing
            store.recover()
            assert store.attempts_by_end() == none | {
                "failed": 1,
                "interrupted": 1,
                "decided": 1,
                "cancelled": 1,
            }
        assert store.attempts(first.rollout_id)[1] == (
            2, Status.INFRA_FAILED, "interrupted: the process that ran it ended first",
        )  # fmt: skip
        assert store.tried("train/") == {first.rollout_id: 2, second.rollout_id: 1, third.rollout_id: 1}
        sink = StoreSink(store, InfraFailureRate(0.0))
        sink.start(first.rollout_id, 3, 0)
        sink.put(first, graded(first, attempt=3))
        sink.put(fourth, graded(fourth, reward=None))
        reported = store.check_balance().attempts
        assert reported == none | {"failed": 2, "interrupted": 1, "decided": 2, "cancelled": 1}


def test_what_a_crash_leaves_is_planned_again_or_still_to_be_trained(tmp_path: Path) -> None:
    places = slots()
    ids = [place.rollout_id for place in places]
    with Store(tmp_path / "s") as store:
        store.plan(places, "t", 0)
        for name in ids[1:]:
            store.start(name, 2, 0)
        for place in places[2:]:
            store.put_rollout("train", 1, 0, place.slot, graded(place, attempt=2))
        store.assign(1, ids[3:])
    with Store(tmp_path / "s") as store:
        assert store.recover() == {"running": 1, "assigned": 1}
        assert [(s.rollout_id, s.state, s.attempt) for s in store.open_rollouts()] == [
            (ids[0], "planned", 0),
            (ids[1], "planned", 2),
        ]
        assert [(s.rollout_id, s.state) for s in store.unused_graded()] == [
            (ids[2], "graded"),
            (ids[3], "scored"),
        ]
        store.start(ids[1], 3, 0)
        assert store.last_place("train") == (1, 0)
        assert store.last_place("eval_before") is None
        assert [s.rollout_id for s in store.group_states("train", 1, 0)] == ids


REFUSED: dict[str, tuple[Callable[[Store, str], object], str]] = {
    "start of a trained one": (
        lambda store, name: store.start(name, 9, 9),
        "cannot be started: it is trained by",
    ),
    "start of an unknown one": (lambda store, name: store.start("x", 1, 1), "it is not in this run"),
    "storing it again": (
        lambda store, name: store.put_rollout("train", 1, 0, 0, make_rollout(name)),
        "stored already",
    ),
    "training it again": (
        lambda store, name: store.assign(2, [name]),
        "is not graded or scored: it is trained",
    ),
    "discarding it": (lambda store, name: store.discard([name], "stale"), "it is trained by step 1"),
    "a step that was not given it": (
        lambda store, name: store.commit_step(2, {}, "c", "h", Ledger(), trained=[name]),
        "is not assigned: it is trained by step 1",
    ),
    "another reason": (
        lambda store, name: store.discard([], "bored"),  # type: ignore[arg-type]
        "no such reason",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_nothing_is_trained_twice_or_forgotten(tmp_path: Path, what: str) -> None:
    act, said = REFUSED[what]
    with Store(tmp_path / "s") as store:
        (name,) = put(store, slots(count=1))
        store.assign(1, [name])
        store.commit_step(1, {}, "c", "h", account(store, [name]), trained=[name])
        before = store.states()
        with pytest.raises(RecordError, match=said):
            act(store, name)
        assert store.states() == before
        assert [step.step for step in store.steps()] == [1]


def test_a_step_is_committed_with_all_of_its_rollouts_or_not_at_all(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        ids = put(store, slots())
        store.assign(1, ids[:3])
        whole = account(store, ids[:3])
        wrong = [
            (ids[:3], {}, Ledger(), "its rollouts hold"),
            (ids[:2], {}, whole, f"{ids[2]} is neither trained nor discarded"),
            (ids[:2], {ids[2]: "bored"}, whole, "no such reason"),
            (ids, {}, whole, f"{ids[3]} is not assigned: it is graded"),
            (ids[:2], {ids[2]: "stale"}, account(store, ids), "its rollouts hold"),
        ]
        for trained, discarded, ledger, said in wrong:
            with pytest.raises(RecordError, match=said):
                store.commit_step(1, {}, "c", "h", ledger, trained=trained, discarded=discarded)
            assert store.states()["assigned"] == 3
            assert store.steps() == []
        part = account(store, ids[:2])
        held = account(store, ids[2:3])
        excluded = {"degenerate": held.captured}
        ledger = add_ledgers([part, Ledger(captured=held.captured, excluded=excluded)])
        store.commit_step(1, {}, "c", "h", ledger, trained=ids[:2], discarded={ids[2]: "degenerate"})
        assert store.discards() == {"degenerate": 1}
        balance = store.check_balance()
        assert balance.states == {"trained": 2, "discarded": 1, "graded": 1}
        assert balance.pending == account(store, ids[3:]).captured
        with pytest.raises(RecordError, match="the fate of .* stored tokens is open"):
            store.ledger()


def test_what_is_discarded_without_a_step_is_in_the_ledger_of_the_run(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        ids = put(store, slots())
        more = slots(step=2)
        store.plan(more, "t", 0)
        store.discard([place.rollout_id for place in more], "deadline")
        store.discard(ids[:3], "stale")
        store.discard(ids, "unused")
        assert store.discards() == {"deadline": 4, "stale": 3, "unused": 1}
        whole, ledger = account(store, ids), store.ledger()
        assert (ledger.captured, ledger.trained) == (whole.captured, 0)
        sealed = account(store, ids[:3])
        assert ledger.excluded["stale"] == sealed.trained + sealed.excluded.get("stale", 0)
        late = dataclasses.replace(more[0])
        with pytest.raises(RecordError, match=r"cannot be stored: it is discarded \(deadline\)"):
            store.put_rollout("train", 2, 0, 0, graded(late))


def test_what_failed_of_the_infrastructure_may_be_made_again_until_a_step_counts_on_it(
    tmp_path: Path,
) -> None:
    (slot, *_) = slots()
    with Store(tmp_path / "s") as store:
        put(store, [slot], reward=None)
        assert store.discards() == {"infra": 1}
        store.start(slot.rollout_id, 2, 0)
        assert store.check_balance().pending == 0
        store.put_rollout("train", 1, 0, 0, graded(slot, attempt=2))
        assert store.states()["graded"] == 1
        (lost,) = slots(step=2, count=1)
        put(store, [lost], reward=None)
        store.commit_step(
            2, {}, "c", "h", account(store, [lost.rollout_id]), discarded={lost.rollout_id: "infra"}
        )
        with pytest.raises(RecordError, match=r"it is discarded \(infra\) by step 2"):
            store.start(lost.rollout_id, 3, 0)


def test_evaluations_are_never_to_be_trained(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        store.put_rollout("eval_before", 0, 0, 0, make_rollout("eval_before/0"))
        assert store.discards() == {"evaluation": 1}
        assert store.unused_graded() == []


DAMAGE = {
    "DELETE FROM states WHERE slot = 0": "is stored without a matching state",
    "DELETE FROM rollouts WHERE slot = 1": "is graded but not stored",
    "UPDATE states SET account = 9 WHERE slot = 0": "is trained but not by a committed step",
    "UPDATE states SET state = 'assigned' WHERE slot = 0": "is assigned to a step that is already committed",
    "UPDATE states SET account = NULL, state = 'discarded', reason = 'stale' WHERE slot = 0": "step 1 counts",
    "UPDATE ledger SET tokens = tokens + 1": "step 1 counts",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_account_that_is_wrong_is_found(tmp_path: Path, damage: str) -> None:
    with Store(tmp_path / "s") as store:
        ids = put(store, slots())
        store.assign(1, ids)
        store.commit_step(1, {}, "c", "h", account(store, ids), trained=ids)
        assert store.check_balance().states == {"trained": 4}
    with closing(sqlite3.connect(tmp_path / "s")) as db:
        db.execute(damage)
        db.commit()
    with Store(tmp_path / "s", readonly=True) as store, pytest.raises(RecordError, match=DAMAGE[damage]):
        store.check_balance()


MOVES: dict[str, Callable[[Store], object]] = {
    "plan": lambda store: store.plan(slots(step=2), "t", 0),
    "start": lambda store: store.start(slots()[0].rollout_id, 1, 0),
    "attempt": lambda store: store.put_attempt(graded(slots()[0], reward=None)),
    "graded": lambda store: store.put_rollout("train", 1, 0, 0, graded(slots()[0])),
    "score": lambda store: store.score([slots()[1].rollout_id]),
    "assign": lambda store: store.assign(2, [slots()[1].rollout_id]),
    "discard": lambda store: store.discard([slots()[1].rollout_id], "stale"),
    "step": lambda store: store.commit_step(
        1, {}, "c", "h", account(store, [slots()[2].rollout_id]), trained=[slots()[2].rollout_id]
    ),
    "recover": lambda store: store.recover(),
    "meta": lambda store: store.set_meta("host", "here"),
    "verdict": lambda store: store.put_reward(graded(slots()[1], reward=0.0)),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_commit_is_whole_or_not_there_wherever_the_process_ends(tmp_path: Path, move: str) -> None:
    """Ended before a commit nothing of it is there, and after it all of it; the balance holds at both."""
    first, second, third, _ = slots()
    with Store(tmp_path / "s") as store:
        store.plan(slots(), "t", 0)
        put(store, [second, third])
        store.assign(1, [third.rollout_id])

    def look() -> tuple[object, ...]:
        with Store(tmp_path / "s", readonly=True) as store:
            everywhere = [store.state(place.rollout_id) for place in (*slots(), *slots(step=2))]
            store.check_balance()
            rewards = [rollout.reward for rollout in store.rollouts("train", 1)]
            return everywhere, store.attempts(first.rollout_id), store.steps(), store.meta(), rewards

    before = look()
    for moment in ("before", "after"):
        store = Store(tmp_path / "s")
        with failpoint.armed(f"{move}.{moment}"), pytest.raises(failpoint.FailpointHit):
            MOVES[move](store)
        store.close()
        assert (look() == before) == (moment == "before")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_store_whose_first_process_ends_while_it_is_made_is_made_by_the_next(
    tmp_path: Path, moment: str
) -> None:
    with failpoint.armed(f"schema.{moment}"), pytest.raises(failpoint.FailpointHit):
        Store(tmp_path / "s")
    with Store(tmp_path / "s") as store:
        put(store, slots())
        assert store.states()["graded"] == 4


def test_every_failpoint_is_somewhere_and_every_place_is_a_failpoint() -> None:
    assert {*MOVES, "schema"} == set(failpoint.COMMITS)
    source = Path(failpoint.__file__).parent
    folders = [source, *(source.parents[1] / "packages").glob("*/src")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    text = "\n".join(path.read_text() for path in files if path.name != "failpoint.py")
    commits = set(re.findall(r'_(?:writing|move)\("(\w+)"', text))
    places = set(re.findall(r'failpoint\.hit\("([\w.]+)"\)', text))
    assert commits == set(failpoint.COMMITS)
    assert places | {f"{name}.{when}" for name in commits for when in ("before", "after")} == set(
        failpoint.POINTS
    )
    assert set(re.findall(r'failpoint\.fails\("([\w.]+)"\)', text)) == set(failpoint.FAILURES)
    with pytest.raises(ValueError, match="no such failpoint"), failpoint.armed("nowhere"):
        pass


def test_tries_that_were_begun_count_although_they_never_ended(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        store.plan(slots(), "t", 0)
        store.plan(slots(step=2), "t", 0)
        first, second, *_ = (place.rollout_id for place in slots())
        store.start(first, 2, 0)
        store.put_attempt(graded(slots()[1], attempt=3, reward=None))
        assert store.tried("train/00001/") == {first: 2, second: 3}
        assert store.tried("train/00001/000/00") == {first: 2}
        assert store.tried("train/00002/") == {}


def test_a_failed_rollout_is_made_again_whatever_was_trained_of_its_place_step(tmp_path: Path) -> None:
    """Ahead of the trainer, groups of one place step are trained by different steps."""
    with Store(tmp_path / "s") as store:
        done, other = put(store, slots(group=0, count=2)), slots(group=1, count=2)
        put(store, other, reward=None)
        store.assign(1, done)
        store.commit_step(1, {}, "c", "h", account(store, done), trained=done)
    with Store(tmp_path / "s") as store:
        store.recover()
        store.start(other[0].rollout_id, 2, 1)
        store.put_rollout("train", 1, 1, 0, graded(other[0], attempt=2))
        assert store.rollout(other[0].rollout_id).attempt == 2
        store.assign(2, [other[0].rollout_id])
        fates = {other[1].rollout_id: "infra"}
        counted = account(store, [other[0].rollout_id, other[1].rollout_id])
        store.commit_step(2, {}, "c", "h", counted, trained=[other[0].rollout_id], discarded=fates)
        with pytest.raises(RecordError, match="stored"):
            store.put_rollout("train", 1, 1, 1, graded(other[1], attempt=2))


def test_a_group_is_scored_when_the_last_of_it_is_decided(tmp_path: Path) -> None:
    masks, evals = InfraFailureRate(0.0), InfraFailureRate(0.0)
    with Store(tmp_path / "s") as store:
        sink, beside = StoreSink(store, masks), StoreSink(store, evals)
        first, second, third = slots(count=3)
        sink.plan([first, second, third], "t", 0)
        for place in (first, second):
            sink.start(place.rollout_id, 1, 0)
            sink.put(place, graded(place, reward=None if place is second else 1.0))
        assert store.states()["scored"] == 0
        sink.discard([third.rollout_id], "deadline")
        assert store.states()["scored"] == 1
        shown = dataclasses.replace(first, phase="eval_during")
        beside.plan([shown], "t", 0)
        beside.put(shown, graded(shown))
        beside.attempted(shown, graded(shown, reward=None))
        assert [(m.tries, m.masked) for m in (evals.close_step(), masks.close_step())] == [(2, 1), (1, 0)]
