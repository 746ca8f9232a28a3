"""Stalls of the machine are counted, and deadlines leave them out."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from insitu import stalls
from insitu.stalls import STALL_S, TICK_S, awake_s, awake_timeout


class Machine:
    """Stands for the ticker: says how long it stood still."""

    stalled = 0.0

    def stalled_s(self) -> float:
        return self.stalled


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(stalls, "_ticker", machine)
    return machine


def test_late_ticks_are_stalls_and_the_first_reader_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(stalls, "time", SimpleNamespace(monotonic=lambda: clock.now))
    ticker = stalls._Ticker()
    ticker._thread, ticker._last = threading.current_thread(), clock.now
    for step, stalled in ((TICK_S, 0.0), (TICK_S + STALL_S, 0.0), (30.0 + TICK_S, 30.0), (0.1, 30.0)):
        clock.now += step
        assert ticker.stalled_s() == pytest.approx(stalled)


def test_the_ticker_is_a_thread_that_starts_again_in_a_forked_process() -> None:
    ticker = stalls._Ticker()
    assert ticker.stalled_s() == 0
    assert ticker._thread
    assert ticker._thread.daemon
    gone = threading.Thread()
    ticker._thread, ticker._last = gone, -1000.0
    assert ticker.stalled_s() == 0
    assert ticker._thread is not gone


async def test_a_deadline_without_stalls_is_one(machine: Machine) -> None:
    machine.stalled = 50.0  # before
    with pytest.raises(TimeoutError):
        async with awake_timeout(0.02):
            await asyncio.Event().wait()
    async with awake_timeout(60):
        await asyncio.sleep(0)


async def test_a_stall_lengthens_a_deadline(machine: Machine) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(TimeoutError):
        async with awake_timeout(0.05):
            machine.stalled += 0.2
            await asyncio.Event().wait()
    assert loop.time() - began >= 0.25


async def test_what_was_late_gets_time_to_wake_up(machine: Machine) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(TimeoutError):
        async with awake_timeout(0.1):
            machine.stalled += 0.001
            await asyncio.Event().wait()
    assert loop.time() - began >= 0.2


async def test_a_cancelled_wait_is_cancelled(machine: Machine) -> None:
    async def wait() -> None:
        async with awake_timeout(60):
            await asyncio.Event().wait()

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_durations_leave_stalls_out(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    # the clock's own thread may run already, and sleeps by this module too
    monkeypatch.setattr(stalls, "time", SimpleNamespace(monotonic=lambda: 500.0, sleep=time.sleep))
    machine.stalled = 30.0
    assert awake_s() == 470.0
