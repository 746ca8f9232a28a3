"""Masked tries are counted per step and task, and too many of them are said aloud."""

from __future__ import annotations

from dataclasses import replace

from insitu.attempt import AttemptSpec
from insitu.tasks.user_functions import CHECKER_FAILED
from insitu.types import Ledger, Outcome, Rollout, Task, Verdict
from insitu_train.alarms import InfraFailureRate
from tests.fakes.attempts import fake_rollout


def rollout(task: str, fate: float | str, sampled: int = 3) -> Rollout:
    spec = AttemptSpec(rollout_id="train/00001/000/00", task=Task(id=task, prompt="", files={}), seed=1)
    made = fake_rollout(spec, fate)
    return replace(made, trajectory=replace(made.trajectory, ledger=Ledger(captured=sampled)))


def filled(rate: InfraFailureRate, task: str, scored: int, masked: int) -> None:
    for _ in range(scored):
        rate.decided(rollout(task, 0.0))
    for _ in range(masked):
        rate.failed(rollout(task, "sandbox lost"))


def test_a_quiet_step_has_a_rate_and_no_alarm() -> None:
    rate = InfraFailureRate(0.1)
    filled(rate, "a", 19, 1)
    account = rate.close_step()
    assert (account.tries, account.masked, account.rate, account.alarm) == (20, 1, 0.05, False)
    assert account.lines == ["1 of 20 attempts failed of the infrastructure; last error: sandbox lost"]


def test_a_slot_that_stayed_masked_is_counted_once() -> None:
    rate = InfraFailureRate(0.1)
    last = rollout("a", "sandbox lost")
    rate.failed(last)
    rate.decided(last)
    assert rate.close_step().tries == 1


def test_many_masked_tries_raise_an_alarm_and_the_next_step_begins_anew() -> None:
    rate = InfraFailureRate(0.1)
    filled(rate, "a", 18, 2)
    account = rate.close_step()
    assert account.alarm
    assert account.lines[0].endswith(
        "failed of the infrastructure (run.alarms.infra_failure = 0.1); last error: sandbox lost"
    )
    filled(rate, "a", 8, 0)
    account = rate.close_step()
    assert (account.lines, account.alarm) == ([], False)


def test_one_task_that_is_nearly_always_masked_is_named_among_many_that_are_not() -> None:
    rate = InfraFailureRate(0.5)
    filled(rate, "good", 100, 0)
    filled(rate, "crasher", 1, 3)
    account = rate.close_step()
    assert account.alarm
    assert "; most of task crasher (3 of 4); last error: " in account.lines[0]


def test_few_tries_say_nothing_and_zero_turns_it_off() -> None:
    rate = InfraFailureRate(0.1)
    filled(rate, "a", 1, 1)
    assert not rate.close_step().alarm
    off = InfraFailureRate(0.0)
    filled(off, "a", 0, 20)
    assert not off.close_step().alarm


def test_a_step_without_tries_has_rate_zero() -> None:
    assert InfraFailureRate(0.1).close_step().rate == 0.0


def test_rollouts_that_sampled_nothing_are_noted_with_their_error() -> None:
    rate = InfraFailureRate(0.1)
    filled(rate, "a", 2, 0)
    rate.decided(replace(rollout("b", 0.0, sampled=0), error="exit code 1: the context is 128 tokens"))
    counts = rate.close_step()
    assert (counts.tries, counts.alarm) == (3, False)
    assert counts.lines == [
        "1 of 3 rollouts sampled no token; last error: exit code 1: the context is 128 tokens"
    ]
    rate.decided(rollout("b", 0.0, sampled=0))
    [line] = rate.close_step().lines
    assert line.endswith("last error: the agent ended without a reply of the model")
    assert rate.close_step().lines == []


def test_failures_of_the_users_functions_are_counted_by_task() -> None:
    rate = InfraFailureRate(0.1)
    for task in ("a", "a", "b"):
        rate.failed(rollout(task, "reward.function mine:score raised KeyError('x') (mine.py line 3)"))
    rate.failed(rollout("c", "sandbox lost"))
    grouped = replace(rollout("b", 0.0), reward=None, error="reward.function mine:score returned 'x'")
    rate.decided(grouped)
    assert rate.close_step().lines[0] == "functions of yours failed 4 times: task a (2), b (2)"
    rate.failed(rollout("a", "sandbox lost"))
    assert "functions" not in rate.close_step().lines[0]


def test_outputs_on_which_a_checker_fails_are_counted_by_task() -> None:
    failed = Verdict(
        outcome=Outcome.UNRESOLVED, reward=0.0, trust="strong", controls=f"{CHECKER_FAILED} on 1 outputs"
    )
    rate = InfraFailureRate(0.1)
    for task in ("a", "b", "a"):
        rate.decided(replace(rollout(task, 0.0), verdict=failed))
    rate.decided(rollout("c", 0.0))
    account = rate.close_step()
    assert account.misjudged == 3
    assert account.lines == ["tasks.checker failed on outputs, which count as wrong: task a (2), b (1)"]
    assert (rate.close_step().lines, rate.close_step().misjudged) == ([], 0)
