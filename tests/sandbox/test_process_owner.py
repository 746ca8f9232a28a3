"""The mark of an owner: the living are never taken for dead, the dead are."""

from __future__ import annotations

import subprocess
import sys

import pytest

from insitu.sandbox.process_owner import is_dead, owner


@pytest.mark.slow
def test_the_living_and_the_dead() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        mark = owner(other.pid)
        assert not is_dead(mark)
        assert not is_dead(owner())
        other.kill()
        other.wait()
        assert is_dead(mark)


def test_an_id_that_is_used_again_is_another_process() -> None:
    *place, pid, started = owner().split("-")
    assert is_dead("-".join([*place, pid, str(int(started) - 1)]))


def test_what_happened_elsewhere_is_not_judged() -> None:
    machine, boot, space, pid, started = owner().split("-")
    dead = "999999999"
    assert is_dead("-".join([machine, boot, space, dead, started]))
    assert not is_dead("-".join(["0" * 10, boot, space, dead, started]))
    assert not is_dead("-".join([machine, boot, "0" * 10, dead, started]))
    assert is_dead("-".join([machine, "0" * 10, space, pid, started])), "an earlier boot of this machine"
    for nonsense in ("", "a-b", "whatever", "-".join([machine, boot, space, "x", started])):
        assert not is_dead(nonsense)
