"""`insitu top`: a run under way seen from another process; the live view's curve and its agent."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from run_lab import Flavour, make_rollout, make_run

from insitu.config import load_config
from insitu.progress.live import LiveView, agent_line, sparkline
from insitu.progress.plain import PlainView
from insitu.storage.run_dir import RunDir
from insitu.storage.timeline import Timeline
from insitu_view.watch import watch

DEADLINE_S = 60


def test_a_run_under_way_is_shown_until_it_ends(tmp_path: Path) -> None:
    config = load_config(None, [f"run.dir={tmp_path / 'run'}", "run.steps=3", "eval.count=2"])
    out = io.StringIO()
    with RunDir.create(config) as run, run.store() as store:
        watching = threading.Thread(target=watch, args=(run.path, PlainView(out), 0.02))
        watching.start()
        with run.timeline().phase("evaluate", 0):
            store.put_rollout("eval_before", 0, 0, 0, make_rollout(Flavour(), "eval_before", 0, 0, 0, True))
            wait_for(out, "held-out tasks after step 0 (2)")
        with run.metrics() as metrics:
            metrics.write({"event": "eval_before", "step": 0, "solved": 1, "total": 2, "reward_mean": 0.5})
            wait_for(out, "held-out step 0: 0.500 (1/2 solved)")
            metrics.write({"event": "step", "step": 1, "reward_mean": 0.25, "loss": 0.1, "weights": "f00"})
            wait_for(out, "step 1/3 reward_mean=0.25")
        assert watching.is_alive()
        run.write_summary({"agent": "script"})
    watching.join(DEADLINE_S)
    assert not watching.is_alive()
    assert "the run is finished: insitu show" in out.getvalue()


def test_a_step_beside_an_evaluation_is_shown_with_it(tmp_path: Path) -> None:
    settings = ["run.steps=3", "eval.count=2", "eval.every_steps=1", "eval.beside_training=true"]
    config = load_config(None, [f"run.dir={tmp_path / 'run'}", *settings, "collect.groups_per_step=3"])
    out = io.StringIO()
    with RunDir.create(config) as run, run.store():
        watching = threading.Thread(target=watch, args=(run.path, PlainView(out), 0.02))
        watching.start()
        for phase, step, shown in (
            ("collect", 1, f"rollouts of step 1 of 3 ({3 * config.collect.group_size})"),
            (
                "collect",
                2,
                "rollouts of step 2 of 3, beside held-out tasks after step 1"
                f" ({3 * config.collect.group_size + 2})",
            ),
            ("train", 2, "training step 2 of 3, beside held-out tasks after step 1\n"),
            ("evaluate", 1, "] held-out tasks after step 1\n"),
        ):
            with run.timeline().phase(phase, step):
                wait_for(out, shown)
        run.write_summary({"agent": "script"})
    watching.join(DEADLINE_S)
    assert not watching.is_alive()


def wait_for(out: io.StringIO, text: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while text not in out.getvalue():
        assert time.monotonic() < end, out.getvalue()
        time.sleep(0.02)


@pytest.mark.slow
def test_the_command_ends_with_a_run_that_ended(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", hostile=True)
    command = [sys.executable, "-m", "insitu", "top", str(path), "--plain"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.partition(" ")[0] for line in done.stdout.splitlines()] == ["run:", "step", "the"]
    assert not any(text in done.stdout for text in ("left=", "[ "))
    assert "the run is finished" in done.stdout
    assert not any(char in done.stdout for char in "\x1b\u202e")
    command[4] = str(tmp_path)
    missing = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert missing.returncode == 1
    assert missing.stderr.startswith(f"insitu: {tmp_path} is not a run directory")


def test_the_live_view_shows_the_curve_and_what_an_agent_does(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl")
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    view = LiveView(console, agent=agent_line(tmp_path))
    view.begin("pi, seed 0", 0)

    def shown() -> str:
        out = io.StringIO()
        Console(file=out, width=100).print(view.render())
        return out.getvalue()

    assert "agent" not in shown()
    doing = 'call 3: bash {"command":"ls\x1b[2J"}' + "x" * 200
    timeline.write("agent", {"rollout": "train/00001/000/02", "doing": doing})
    for step in range(1, 9):
        view.step_done(step, 8, {"reward_mean": step / 8})
    text = shown()
    assert '  agent      train/00001/000/02  call 3: bash {"command":"ls?[2J"}' in text
    assert "  curve      ▂▃▄▅▆▇██  mean reward 0.12 -> 1.00" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    timeline.write("agent", {})
    assert "call 3" not in shown()


def test_a_sparkline_has_a_bar_for_each_share() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert len(sparkline([0.5] * 1000)) == 40
    assert sparkline([-1.0, 2.0]) == "▁█"
