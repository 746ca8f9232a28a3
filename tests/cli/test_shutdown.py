"""Ctrl-C: a clean stop, a deadline for a stop that hangs, no orphan either way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from insitu import cli

pytestmark = pytest.mark.slow

PROGRAM = """
import asyncio, signal, subprocess, sys, time
from insitu import shutdown as stop
# pytest may run under nohup, which this inherits
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
mode = sys.argv[1]
stop.STOP_S = float(sys.argv[2])
async def main():
    script = "trap '' INT TERM; sleep 60 & echo $!; wait"
    child = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True)
    print(child.stdout.readline().strip(), child.pid, flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        if mode == "hang":
            await asyncio.sleep(60)
        if mode == "block":
            time.sleep(60)
        stop_children = stop.descendants(__import__("os").getpid())
        for pid in stop_children:
            __import__("os").kill(pid, 9)
        child.wait(timeout=5)
        child.stdout.close()
        print("torn down", flush=True)
        if mode == "error":
            raise RuntimeError("a consequence of the stop")
try:
    stop.run_interruptible(main())
except KeyboardInterrupt:
    print("clean", flush=True)
    sys.exit(130)
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("mode", ["clean", "error", "hang", "block", "twice"])
def test_a_signal_stops_everything_in_time(mode: str, number: int) -> None:
    env = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
    deadline_s = 1.0 if mode in ("hang", "block") else 20.0
    argv = [sys.executable, "-c", PROGRAM, "hang" if mode == "twice" else mode, str(deadline_s)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env=env) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert all(alive(pid) for pid in pids)
        began = time.monotonic()
        program.send_signal(number)
        if mode == "twice":
            time.sleep(0.3)
            program.send_signal(number)
        assert program.wait(timeout=10) == 130
        seconds = time.monotonic() - began
        said, complaint = program.stdout.read(), program.stderr.read()
    # A killed process is gone a moment after its killer on a busy machine.
    while any(alive(pid) for pid in pids) and time.monotonic() < began + 10:
        time.sleep(0.01)
    assert not any(alive(pid) for pid in pids)
    assert ("clean" in said) == (mode in ("clean", "error"))
    assert complaint == (
        "" if "clean" in said else "insitu: forced stop without cleanup; stored results are kept\n"
    )
    assert seconds < 5.0


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    env = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
    argv = [sys.executable, "-c", PROGRAM, "nohup", "20"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env) as program:
        assert program.stdout is not None
        program.stdout.readline()
        program.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(timeout=0.3)
        program.send_signal(signal.SIGTERM)
        assert program.wait(timeout=10) == 130


EARLY = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
number, module = int(sys.argv[1]), sys.argv[2]
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Finder())
from insitu.cli import main
sys.exit(main(["show", "--json", "nowhere"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    "module", ["insitu.cli.options", "insitu.cli.report", "numpy", "insitu.storage.run_dir"]
)
def test_a_signal_while_modules_are_imported_is_one_line(module: str, number: int) -> None:
    env = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
    argv = [sys.executable, "-c", EARLY, str(int(number)), module]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "insitu: stopped\n")
