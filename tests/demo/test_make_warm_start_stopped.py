"""A warm start that is stopped: no orphan, nothing half made; what was recorded is used at the next start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from insitu import cli
from insitu.shutdown import descendants

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from insitu.config import WARM_START
from insitu.cli import main
from insitu_train.demo import make_warm_start as warm
from insitu_train.demo.sft_data import read_recorded
from insitu.chat.load import load_renderer

shipped, family = read_recorded(WARM_START / "recorded.npz"), load_renderer(WARM_START)
order = ("pi", "script")

async def constant_text(config, agent, view):
    return family.decode(shipped.prefixes[order.index(agent)])

async def constant_ids(config, agent, folder, view):
    return shipped.prefixes[order.index(agent)]

async def record(*arguments):
    print("recorded", flush=True)
    return shipped

warm.constant_text, warm.constant_ids, warm.record = constant_text, constant_ids, record
sys.exit(main(["demo", "--from-scratch", "--plain", "run.dir=" + sys.argv[1]]))
"""
"""Without the half hour of agents: what they would say is taken from the shipped recording."""


@contextlib.contextmanager
def started(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str, list[int]]]:
    """The demo in its supervised training, what it said until then and its children."""
    for name in ("cache", "tmp"):
        (folder / name).mkdir(exist_ok=True)
    env = os.environ | {
        "PYTHONPATH": str(Path(cli.__file__).parents[2]),
        "INSITU_CACHE": str(folder / "cache"),
        "TMPDIR": str(folder / "tmp"),
    }
    argv = [sys.executable, "-u", "-c", PROGRAM, str(folder / "run")]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env=env) as program:
        try:
            said = ""
            assert program.stdout is not None
            for line in program.stdout:
                said += line
                if "supervised warm start" in line:
                    break
            end = time.monotonic() + 20
            while not (children := descendants(program.pid)) and time.monotonic() < end:
                time.sleep(0.01)
            yield program, said, children
        finally:
            program.kill()


def gone(pids: list[int], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.full
def test_a_stopped_warm_start_keeps_what_was_recorded_and_nothing_else(tmp_path: Path) -> None:
    shelf = tmp_path / "cache" / "warm-start"
    with started(tmp_path) as (program, said, children):
        program.kill()
        program.communicate(timeout=20)
    assert "recorded" in said.splitlines()
    assert children
    assert gone(children, 60.0)
    (left,) = shelf.glob("*.part-*")
    # The training ends with its controller however that ends, not when it next has something to report.
    assert "BrokenPipe" not in (left / "errors").read_text()
    with started(tmp_path) as (program, said, children):
        assert "recorded" not in said.splitlines()
        assert "the demonstrations are in the cache" in said
        assert not left.exists(), "of a process that is gone"
        began = time.monotonic()
        program.send_signal(signal.SIGTERM)
        _, errors = program.communicate(timeout=20)
        assert time.monotonic() - began < 5.0
        assert (program.returncode, errors) == (130, "insitu: stopped\n")
    assert gone(children, 2.0)
    assert [path.suffix for path in shelf.iterdir()] == [".npz"]
    assert list((tmp_path / "tmp").glob("insitu-*")) == []
    assert not (tmp_path / "run").exists()
