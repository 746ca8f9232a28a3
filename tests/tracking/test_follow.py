"""Trackers get each line of a run once, in a process that the run neither waits for nor fails with."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from own_trackers import got

import insitu
from insitu.config import demo_preset, dump_toml, load_config
from insitu.errors import ConfigError, SetupError
from insitu.runtime.trackers import check_trackers
from insitu.storage.files import write_text
from insitu.storage.metrics import GROUPS, read_metrics
from insitu.storage.run_dir import RunDir
from insitu_view.tracking import start
from insitu_view.tracking.names import HELDOUT, STEP, numbers, sent_name, table

HERE = Path(__file__).parent
OWN = f"{HERE / 'own_trackers.py'}:"
DEADLINE_S = 120
pytestmark = pytest.mark.slow


def wait_for(true: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def write_steps(run: RunDir, steps: range) -> None:
    with run.metrics() as metrics:
        for step in steps:
            metrics.write(
                {"event": "step", "step": step, "loss": 0.5 / step, "alarm": "", "ess": float("nan")}
            )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    """A run under way, with two steps and an evaluation."""
    config = load_config(None, [f"run.dir={tmp_path / 'run'}"], {"track": {"to": [f"{OWN}Recorder"]}})
    with RunDir.create(config) as created, created.store():
        with created.metrics() as metrics:
            metrics.write({"event": "eval_before", "step": 0, "solved": 1, "total": 4, "reward_mean": 0.25})
        write_steps(created, range(1, 3))
        yield created


def test_a_replay_sends_each_line_once_and_a_resumed_run_keeps_its_id(run: RunDir) -> None:
    run.close()
    assert insitu.track(run.path) == {f"{OWN}Recorder": 3}
    assert insitu.track(run.path) == {f"{OWN}Recorder": 0}
    assert [line["what"] for line in got(run.path)] == ["open", "log", "log", "log", "finish"]
    assert got(run.path, "log")[0]["metrics"] == {
        "heldout/solved": 1.0, "heldout/total": 4.0, "heldout/reward_mean": 0.25, "heldout/solve_rate": 0.25,
    }  # fmt: skip
    assert got(run.path, "log")[1] == {"what": "log", "step": 1, "metrics": {"loss/loss": 0.5}}
    assert got(run.path, "finish")[0]["state"] == "stopped"
    # It goes on: step 2 again, as after a kill between two checkpoints of `insitu sft`, and step 3.
    write_steps(run, range(2, 4))
    run.write_summary({"heldout_after": 0.75, "agent": "script"})
    assert insitu.track(run.path) == {f"{OWN}Recorder": 1}
    assert [line["step"] for line in got(run.path, "log")] == [0, 1, 2, 3]
    assert len({line["id"] for line in got(run.path, "open")}) == 1
    assert got(run.path, "finish")[-1] == {
        "what": "finish", "state": "finished", "summary": {"heldout_after": 0.75}
    }  # fmt: skip


def test_a_follower_sends_while_the_run_goes_on_and_ends_with_it(run: RunDir) -> None:
    command = [sys.executable, "-m", "insitu", "track", str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        wait_for(lambda: len(got(run.path, "log")) == 3)
        write_steps(run, range(3, 5))
        wait_for(lambda: len(got(run.path, "log")) == 5)
        assert process.poll() is None
        run.close()
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (0, f"{OWN}Recorder: 5 lines sent\n")


_STUCK = """
import sys, insitu_view.tracking.follow as follow
from pathlib import Path
follow.STUCK_S, follow.POLL_S = 0.5, 0.1
sys.exit(follow.main(Path(sys.argv[1]), sys.argv[2]))
"""


def test_a_tracker_that_hangs_after_the_run_is_ended(run: RunDir) -> None:
    with subprocess.Popen([sys.executable, "-c", _STUCK, str(run.path), f"{OWN}Hanging"]) as process:
        wait_for((run.path / "trackers" / "hang").exists)
        time.sleep(1.0)
        assert process.poll() is None, "the run goes on"
        run.close()
        assert process.wait(DEADLINE_S) == 3
    log = next(run.logs.glob("tracker-*.log")).read_text()
    assert "the tracker did nothing for 0.5 s after the end of the run" in log


def test_secrets_reach_neither_tracker_nor_log(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_API_KEY", "key-of-the-tracker")
    url = "http://me:key-of-the-tracker@host/v1"
    overrides = [f"run.dir={run.path}", "engine.kind=upstream", f"engine.urls={url}", "engine.model=m"]
    config = load_config(None, overrides, {"track": {"to": run.config.track.to}})
    write_text(run.path / "config.toml", dump_toml(config))
    run.close()
    insitu.track(run.path)
    with pytest.raises(SetupError, match=r"ended \(exit status 1\): .*Failing raised RuntimeError") as raised:
        insitu.track(run.path, to=[f"{OWN}Failing"])
    assert "no route with ***" in str(raised.value)
    written = [file.read_text() for folder in ("trackers", "logs") for file in (run.path / folder).iterdir()]
    assert "key-of-the-tracker" not in "".join(written)
    assert got(run.path, "open")[0]["config"]["engine"]["urls"] == ["http://***@host/v1"]


def test_wrong_trackers_are_one_line_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*names: object) -> str:
        with pytest.raises(ConfigError) as raised:
            check_trackers(load_config(None, (), {"track": {"to": names}}))
        return str(raised.value)

    assert "unknown name 'wandbb' of kind trackers; did you mean wandb?" in check("wandbb")
    assert "is a Python object that another process cannot import" in check(lambda run: None)
    assert check("nowhere.py:X").startswith("track.to: no such file: ")
    monkeypatch.setattr(start, "find_spec", lambda name: None)
    assert check("wandb").startswith("track.to: wandb is not installed: ")
    with pytest.raises(ConfigError, match="project has no effect with to = "):
        load_config(None, ["track.project=mine"])


SMALL = {
    "harness.agent": "script", "run.steps": 2, "eval.count": 4, "collect.groups_per_step": 2,
    "collect.group_size": 4, "harness.workers": 4, "train.threads": 1, "train.min_groups": 1,
}  # fmt: skip


def train(path: Path, *to: str, **more: object) -> tuple[insitu.Run, list[str]]:
    notes: list[str] = []

    def progress(event: insitu.RunEvent) -> None:
        notes.append(event.text if event.kind == "note" else "")

    overrides = SMALL | {"run.dir": str(path), "track.to": list(to)} | more
    return insitu.train(demo_preset(), overrides=overrides, progress=progress), notes


@pytest.mark.full
def test_trackers_that_hang_fail_and_crash_change_nothing_of_a_run(tmp_path: Path) -> None:
    plain, _ = train(tmp_path / "plain")
    hang = tmp_path / "tracked" / "trackers" / "hang"
    try:
        own = [f"{OWN}{name}" for name in ("Hanging", "Failing", "Crashing", "Recorder")]
        tracked, notes = train(tmp_path / "tracked", *own)
        # The run has ended, and its hanging follower has not.
        pid = int(hang.read_text())
        os.kill(pid, 0)
    finally:
        hang.unlink(missing_ok=True)
    assert plain.summary is not None
    assert tracked.summary is not None
    assert tracked.summary["weights"] == plain.summary["weights"]
    assert any("Failing ended (exit status 1)" in note for note in notes), notes
    assert any("Crashing ended (killed by signal 9)" in note for note in notes), notes
    wait_for(lambda: got(tracked.path, "finish"))
    lines = list(read_metrics(tracked.path / "metrics.jsonl"))
    wait_for(lambda: not alive(pid))
    recorded = json.loads((tracked.path / "trackers" / "got.jsonl").read_text().splitlines()[0])
    assert recorded["name"] == "tracked"
    check_recorded(tracked.path, lines)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def check_recorded(path: Path, lines: list[dict[str, Any]]) -> None:
    """Every finite number of metrics.jsonl was sent, under a documented name."""
    # Failing and Crashing write to the same file: only lines after the last opening count.
    names = {name for name, _, _ in table()}
    for line in lines:
        sent = numbers(line)
        assert {"step": line["step"], "metrics": sent, "what": "log"} in got(path, "log")
        assert sent.keys() <= names, sent.keys() - names
    step = numbers(lines[1])
    assert step["all/rollouts"] == 8.0
    assert 0 < step["effective/rollouts"] <= 8.0
    assert "all/reward_mean" in step
    assert 0.0 < step["effective/reward_mean"] < 1.0, "groups without a gradient are not among them"
    assert any(row["id"].startswith("eval_before/") for row in got(path, "rollouts")[0]["rows"])


def events(folder: Path) -> list[Any]:
    """Events of TensorBoard files: length, checksum, record, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


def test_tensorboard_files_hold_the_numbers_of_the_run(run: RunDir) -> None:
    run.write_summary({"heldout_after": 0.75})
    run.close()
    assert insitu.track(run.path, to=["tensorboard"]) == {"tensorboard": 3}
    assert insitu.track(run.path, to=["tensorboard"]) == {"tensorboard": 0}
    found = events(run.path / "trackers" / "tensorboard")
    values = {(v.tag, event.step): v.simple_value for event in found for v in event.summary.value}
    assert values[("loss/loss", 1)] == 0.5
    assert values[("loss/loss", 2)] == 0.25
    assert values[("heldout/solve_rate", 0)] == 0.25
    assert values[("summary/heldout_after", 2)] == 0.75
    times = [line["time_s"] for line in read_metrics(run.path / "metrics.jsonl")]
    assert {event.wall_time for event in found if event.summary.value} >= set(times)


def test_names_are_unique_and_grouped() -> None:
    rows = list(table())
    assert len({name for name, _, _ in rows}) == len(rows)
    assert sent_name("effective_reward_mean") == "effective/reward_mean"
    assert sent_name("something_new") == "other/something_new"
    assert {*STEP, HELDOUT, "other"} == GROUPS, "names that task sets may not have"
    shared = {name.removeprefix("effective_") for name in STEP["effective"]}
    assert shared - {"groups"} <= STEP["all"].keys()
