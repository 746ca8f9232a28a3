"""A failpoint kills the process that passes it, once, and does nothing where it is not armed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from insitu import failpoint

PASSES = "from insitu import failpoint; [failpoint.hit(n) for n in ('a', 'b', 'a')]; print('alive')"


def run(armed: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-S", "-c", PASSES],
        env={failpoint.VARIABLE: armed, "PYTHONPATH": str(Path(failpoint.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.strip()


@pytest.mark.slow
def test_a_process_dies_once_when_it_is_time(tmp_path: Path) -> None:
    first, second = f"a:2:{tmp_path / 'a'}", f"b:9:{tmp_path / 'b'}"
    assert run("") == (0, "alive")
    assert run(f"{first},{second}") == (-signal.SIGKILL, "")
    assert (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()
    assert run(f"{first},{second}") == (0, "alive")


def test_in_the_same_process_it_raises_and_only_while_armed() -> None:
    failpoint.hit("step.before")
    with failpoint.armed("step.before", 2):
        failpoint.hit("step.before")
        with pytest.raises(failpoint.FailpointHit, match=r"step\.before"):
            failpoint.hit("step.before")
    failpoint.hit("step.before")
