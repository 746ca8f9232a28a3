"""`insitu grade RUN`: a stored run is judged again, in real sandboxes, without its agents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from insitu.attempt import NOTHING_SAMPLED
from insitu.cli import main
from insitu.config import load_config
from insitu.evaluate.regrade import describe_difference, find_tasks
from insitu.grading.diff import compare
from insitu.grading.runners.base import RunReport
from insitu.grading.verdict import make_verdict
from insitu.runtime.agents import limits_of
from insitu.storage.run_dir import RunDir, read_store
from insitu.storage.store import add_ledgers
from insitu.tasks.base import Split
from insitu.tasks.toy import ToySource
from insitu.types import FileEntry, Limits, Outcome, Rollout, Status, Task, Timings, Tree, Verdict


def text(content: str) -> FileEntry:
    return FileEntry(content=content.encode())


def rollout(number: int, task: Task, after: Tree, outcome: Outcome, *, of: Task | None = None) -> Rollout:
    diff = compare(task.files, after)
    report = RunReport(outcome=outcome, passed=0, total=10, reason="then")
    verdict: Verdict = make_verdict(
        report, trust="strong", task_hash=(of or task).content_hash, diff=diff, duration_s=0.1
    )
    return Rollout(
        id=f"train/00001/000/{number:02d}", task_id=task.id, category=task.category, status=Status.OK,
        reward=verdict.reward, trajectory=NOTHING_SAMPLED, verdict=verdict, changed=diff.changed,
        deleted=diff.deleted, timings=Timings(),
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of six rollouts: solved, unsolved, one judged wrongly, one refused, one of infrastructure, one
    whose task is another by now."""
    folder = tmp_path / "run"
    with RunDir.create(load_config(None, [f"run.dir={folder}"])) as made, made.store() as store:
        source = ToySource(limits_of(made.config), seed=made.config.run.seed)
        task, other = source.tasks("train", 0, 2)
        gold = {**task.files, **source.oracle(task).gold}
        wrong = {**task.files, "new.py": text("x = 1\n")}
        links = {**task.files, "../up": text("x")}
        rows = [
            rollout(0, task, gold, Outcome.RESOLVED),
            rollout(1, task, wrong, Outcome.UNRESOLVED),
            rollout(2, task, wrong, Outcome.RESOLVED),
            rollout(3, task, links, Outcome.REFUSED),
            rollout(4, task, gold, Outcome.INFRA),
            rollout(5, task, gold, Outcome.RESOLVED, of=other),
        ]
        for slot, row in enumerate(rows):
            store.put_rollout("train", 1, 0, slot, row)
    return folder


@pytest.mark.slow
def test_differences_are_named_and_nothing_is_overwritten(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / "run.sqlite").read_bytes()
    assert main(["grade", str(run), "--json"]) == 1
    *_, beside, last = capsys.readouterr().out.splitlines()
    said, compared = json.loads(last), json.loads(beside)["compared"]
    assert set(said) == {outcome.value for outcome in Outcome}
    assert (compared["skipped"], compared["updated"]) == (2, 0)
    assert {name: said[name] for name in ("resolved", "unresolved", "refused")} == {
        "resolved": 2, "unresolved": 2, "refused": 0,
    }  # fmt: skip
    assert [(d["rollout"][-2:], d["stored"], d["now"]) for d in compared["differences"]] == [
        ("02", "resolved", "unresolved"), ("04", "infra", "resolved"), ("05", "resolved", ""),
    ]  # fmt: skip
    assert (run / "run.sqlite").read_bytes() == before


@pytest.mark.slow
def test_what_differs_is_stored_when_asked_and_then_differs_no_more(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grade", str(run), "--write", "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-2])["compared"]["updated"] == 2
    assert main(["grade", str(run)]) == 1
    assert "05: was resolved, now not graded: task" in capsys.readouterr().out
    with read_store(run) as store:
        again = store.rollout("train/00001/000/02")
        assert again.verdict is not None
        assert (again.reward, again.verdict.outcome) == (0.0, Outcome.UNRESOLVED)


@pytest.mark.slow
def test_what_a_committed_step_was_trained_on_stays(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDir.open(run) as held, held.store() as store:
        ids = [one.id for one in store.rollouts("train", 1)]
        store.assign(1, ids)
        account = add_ledgers([one.trajectory.ledger for one in store.rollouts("train", 1)])
        store.commit_step(1, {}, "checkpoints/1", "hash", account, trained=ids)
    assert main(["grade", str(run), "--write", "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-2])["compared"]["updated"] == 0


def test_a_grade_that_the_host_could_not_give_is_named_first() -> None:
    (task,) = ToySource(Limits(), seed=1).tasks("train", 0, 1)
    stored = rollout(0, task, {**task.files, "a.py": text("")}, Outcome.UNRESOLVED)
    assert stored.verdict is not None
    lost = replace(stored.verdict, outcome=Outcome.INFRA, reason="its files are gone", diff_hash="")
    assert describe_difference(stored, replace(stored, verdict=lost)) == "its files are gone"


def test_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_tasks_of_the_second_split_do_not_wait_for_the_end_of_an_endless_first_one() -> None:
    class Endless(ToySource):
        asked = 0

        def tasks(self, split: Split, start: int, count: int) -> Sequence[Task]:
            self.asked += count
            return super().tasks(split, start, count)

    source = Endless(Limits())
    (one,) = source.tasks("eval", 70, 1)
    assert find_tasks(source, {one.id}) == {one.id: one}
    assert source.asked < 1000
