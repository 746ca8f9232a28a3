"""When a circuit opens, how long for, and what closes it."""

from __future__ import annotations

import pytest

from insitu.sandbox.circuit_breaker import Circuit, CircuitOptions


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def circuit(clock: Clock) -> Circuit:
    options = CircuitOptions(threshold=3, window_s=10, cooldown_s=5, most_cooldown_s=15)
    return Circuit(options, clock)


def trip(circuit: Circuit) -> None:
    for number in range(3):
        circuit.fail(f"cause {number}")


def test_only_failures_within_the_window_open_it(circuit: Circuit, clock: Clock) -> None:
    for _ in range(6):
        circuit.fail("now and then")
        clock.now += 5.1
    assert circuit.state == "closed"
    trip(circuit)
    assert (circuit.state, circuit.cause, circuit.trips) == ("open", "cause 2", 1)


def test_a_success_forgets_the_failures(circuit: Circuit) -> None:
    for _ in range(10):
        circuit.fail("a")
        circuit.fail("b")
        circuit.succeed()
    assert circuit.state == "closed"


def test_one_trial_after_the_cool_down_and_only_one(circuit: Circuit, clock: Clock) -> None:
    trip(circuit)
    clock.now += 4.9
    assert not circuit.try_again()
    clock.now += 0.2
    assert circuit.try_again()
    assert circuit.state == "half_open"
    assert not circuit.try_again()
    circuit.succeed()
    assert circuit.state == "closed"
    circuit.fail("one is not enough again")
    assert circuit.state == "closed"


def test_each_failed_trial_doubles_the_cool_down_up_to_the_limit(circuit: Circuit, clock: Clock) -> None:
    trip(circuit)
    waits = []
    for _ in range(4):
        waits.append(circuit.cooled_in_s)
        clock.now += circuit.cooled_in_s
        assert circuit.try_again()
        circuit.fail("still broken")
    assert waits == [5, 10, 15, 15]
    clock.now += 15
    assert circuit.try_again()
    circuit.succeed()
    trip(circuit)
    assert circuit.cooled_in_s == 5


def test_late_news_does_not_prolong_an_open_circuit(circuit: Circuit, clock: Clock) -> None:
    trip(circuit)
    clock.now += 4
    circuit.fail("began before")
    assert circuit.cooled_in_s == 1
    assert circuit.trips == 1
