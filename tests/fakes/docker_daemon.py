"""A docker daemon for tests: the one that runs here, else one of our own, kept apart from all others and
stopped at the end. Callers: tests marked full, which `make test-full` runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from insitu.errors import SetupError
from insitu.sandbox.process_owner import is_dead, owner

START_S = 60.0
STOP_S = 30.0
PREFIX = "insitu-dockerd-"
_PR_SET_PDEATHSIG = 1


def answers() -> bool:
    """Whether a daemon answers where this process's environment points."""
    try:
        done = subprocess.run(["docker", "version"], capture_output=True, timeout=START_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


@contextlib.contextmanager
def docker_daemon(*, own: bool = False) -> Iterator[str]:
    """Yields DOCKER_HOST (empty for the usual one), which is set meanwhile. `own`: never one that runs
    already, for a test that ends it. Raises SetupError."""
    if shutil.which("docker") is None:
        raise SetupError("no docker daemon: the docker command line is not installed")
    if not own and answers():
        yield os.environ.get("DOCKER_HOST", "")
        return
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        raise SetupError("no docker daemon: none runs, and to start one takes root and dockerd")
    sweep(Path(tempfile.gettempdir()))
    # A short path: a unix socket's may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    (folder / "owner").write_text(owner())
    before = os.environ.get("DOCKER_HOST")
    try:
        with _running(folder) as host:
            os.environ["DOCKER_HOST"] = host
            yield host
    finally:
        if before is None:
            os.environ.pop("DOCKER_HOST", None)
        else:
            os.environ["DOCKER_HOST"] = before
        _unmount(folder)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _running(folder: Path) -> Iterator[str]:
    host = f"unix://{folder}/docker.sock"
    places = ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
    alone = ["--host", host, "--bridge", "none", "--iptables=false", "--ip6tables=false"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["dockerd", *places, *alone],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            preexec_fn=_end_with_parent,
        )
    try:
        deadline = time.monotonic() + START_S
        ask = ["docker", "--host", host, "version"]
        while subprocess.run(ask, capture_output=True, timeout=START_S, check=False).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                lines = (folder / "log").read_text(errors="replace").strip().splitlines()
                raise SetupError(f"no docker daemon: dockerd did not start: {lines[-1] if lines else ''}")
            time.sleep(0.1)
        yield host
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_with_parent() -> None:
    """Tests that are killed leave no daemon: it gets the signal at which it also stops what it started."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def sweep(parent: Path) -> int:
    """Remove what daemons of killed tests left below `parent`; how many."""
    swept = 0
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            # One that is still about to end is for the next time.
            if is_dead((folder / "owner").read_text()) and not _lives(folder):
                _unmount(folder)
                shutil.rmtree(folder, ignore_errors=True)
                swept += 1
    return swept


def _lives(folder: Path) -> bool:
    try:
        pid = int((folder / "pid").read_text())
        return bytes(folder) in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return False


def _unmount(folder: Path) -> None:
    """What the daemon left mounted below its folder."""
    for line in reversed(Path("/proc/mounts").read_text().splitlines()):
        place = line.split()[1]
        if Path(place).is_relative_to(folder):
            subprocess.run(["umount", "--lazy", place], capture_output=True, timeout=STOP_S, check=False)
