"""What the verdicts of steps make of a task's reward."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from insitu.grading.steps import StepGrades
from insitu.types import FailingCheck, GradingPlan, Outcome, Task, TaskStep, Verdict

ONE = Verdict(outcome=Outcome.RESOLVED, reward=1.0, trust="weak", reason="the tests gave 1", duration_s=2.0)
HALF = replace(ONE, outcome=Outcome.UNRESOLVED, reward=0.5, reason="the tests gave 0.5")
LOST = replace(ONE, outcome=Outcome.INFRA, reward=None, reason="the host")


def task(*least: float | None, how: Literal["mean", "final"] = "mean") -> Task:
    steps = tuple(
        TaskStep(name=f"s{number}", task=Task(id=f"t/s{number}", prompt="x", files={}), min_reward=one)
        for number, one in enumerate(least, 1)
    )
    return Task(
        id="t", prompt="x", files={}, steps=steps, grading=GradingPlan(steps=how), content_hash="whole"
    )


def graded(whole: Task, *verdicts: Verdict) -> tuple[StepGrades, list[bool]]:
    grades = StepGrades(whole)
    return grades, [grades.add(verdict) for verdict in verdicts]


def test_the_mean_of_all_steps_is_the_reward() -> None:
    failed = replace(HALF, evidence=(FailingCheck(name="test.sh", outcome="wrong"),), dropped_paths=("a",))
    grades, more = graded(task(None, None), failed, ONE)
    verdict = grades.verdict
    assert more == [True, False]
    assert (verdict.reward, verdict.outcome, verdict.passed, verdict.total) == (
        0.75, Outcome.UNRESOLVED, 1, 2,
    )  # fmt: skip
    assert verdict.reason == "s1 0.5, s2 1; s1: the tests gave 0.5"
    assert (verdict.task_hash, verdict.duration_s, verdict.dropped_paths) == ("whole", 4.0, ("a",))
    assert verdict.evidence is not None
    assert [check.name for check in verdict.evidence] == ["s1: test.sh"]
    assert grades.parts == {"s1": 0.5, "s2": 1.0}
    assert graded(task(None, None), ONE, ONE)[0].verdict.outcome is Outcome.RESOLVED


@pytest.mark.parametrize(("how", "reward"), [("mean", 0.5), ("final", 0.0)])
def test_after_a_step_below_its_least_reward_no_other_earns_anything(
    how: Literal["mean", "final"], reward: float
) -> None:
    grades, more = graded(task(None, 0.75, None, how=how), ONE, HALF)
    assert more == [True, False]
    assert (grades.verdict.reward, grades.parts) == (reward, {"s1": 1.0, "s2": 0.5, "s3": 0.0})
    assert "s2 is below its min_reward 0.75" in grades.verdict.reason


@pytest.mark.parametrize(("how", "reward"), [("mean", 0.5), ("final", 0.0)])
def test_a_step_that_could_not_start_counts_as_nothing(how: Literal["mean", "final"], reward: float) -> None:
    grades, _ = graded(task(None, None, how=how), ONE)
    assert (grades.verdict.reward, grades.verdict.outcome) == (reward, Outcome.UNRESOLVED)
    assert grades.verdict.reason == "s1 1, s2 0; s2 could not start"


def test_the_host_is_to_blame_for_the_whole() -> None:
    grades, more = graded(task(None, None), LOST)
    assert more == [False]
    assert (grades.verdict.reward, grades.verdict.outcome) == (None, Outcome.INFRA)
    assert grades.verdict.reason == "step s1: the host"


def test_the_last_step_decides_a_task_that_says_so() -> None:
    verdict = graded(task(None, None, how="final"), HALF, ONE)[0].verdict
    assert (verdict.reward, verdict.outcome, verdict.passed) == (1.0, Outcome.RESOLVED, 1)


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.TAMPERED])
def test_a_step_that_was_refused_decides_outcome_and_reward_wherever_it_stands(outcome: Outcome) -> None:
    bad = replace(HALF, outcome=outcome, reward=0.0)
    for verdicts in ((HALF, bad), (bad, HALF), (ONE, bad), (bad, ONE)):
        for how in ("mean", "final"):
            verdict = graded(task(None, None, how=how), *verdicts)[0].verdict
            assert (verdict.outcome, verdict.reward) == (outcome, 0.0)


def test_parts_have_the_same_names_in_every_rollout_of_a_group() -> None:
    early = graded(task(1.0, None), HALF)[0]
    through = graded(task(1.0, None), ONE, HALF)[0]
    assert {*early.parts} == {*through.parts} == {"s1", "s2"}
