"""The job of `insitu deploy slurm` under a real Slurm of one node: daemons of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from insitu_fleet.deploy.folder import DeployOptions, deploy
from sources import SOURCES
from tests.fakes.net_hosts import SHORT_RUN

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
WAIT_S = 240.0


def free_ports() -> list[int]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return [one.getsockname()[1], two.getsockname()[1]]


def until(done: Callable[[], object], what: str) -> None:
    ends = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < ends, what
        time.sleep(0.2)


def munge_words(folder: Path) -> list[str]:
    """Return the options with which munged keeps all its files in a folder."""
    files = {
        "key-file": "munge.key",
        "socket": "munge.socket",
        "pid-file": "munged.pid",
        "seed-file": "munge.seed",
        "log-file": "munged.log",
    }
    return [f"--{word}={folder / name}" for word, name in files.items()]


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """Variables of commands that use a Slurm of this machine alone."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid():
        pytest.skip(f"no Slurm here: {', '.join(missing) or 'its daemons need root'}")
    with contextlib.ExitStack() as stack:
        # munged refuses a folder that others may write to, and paths of sockets are short
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        folder.chmod(0o755)
        for name in ("state", "spool"):
            (folder / name).mkdir()
        conf, host = folder / "slurm.conf", socket.gethostname().partition(".")[0]
        conf.write_text(CONF.format(host=host, ports=free_ports(), folder=folder, cpus=os.cpu_count()))
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        variables = os.environ | {
            "SLURM_CONF": str(conf),
            "PYTHONPATH": SOURCES,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        for command in (
            ["munged", "--foreground", *munge_words(folder)],
            ["slurmctld", "-D", "-c"],
            ["slurmd", "-D"],
        ):
            stack.enter_context(daemon(command, variables, folder / f"{command[0]}.out"))
            if command[0] == "munged":
                until(lambda: (folder / "munge.socket").exists(), "munged does not start")
        until(lambda: "idle" in called(variables, "sinfo", "--noheader"), "the node is not idle")
        yield variables


@contextlib.contextmanager
def daemon(command: list[str], variables: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        started = subprocess.Popen(command, env=variables, stdout=output, stderr=output)
    try:
        yield
    finally:
        started.terminate()
        try:
            started.wait(30)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait(30)


def called(variables: dict[str, str], *command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        command, env=variables, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout


def submit(slurm: dict[str, str], folder: Path) -> str:
    return called(slurm, "sbatch", "--parsable", "job.sbatch", cwd=folder).strip()


def ended(slurm: dict[str, str], job: str) -> tuple[str, str]:
    """Wait for a job and return its state and exit code."""
    fields: dict[str, str] = {}

    def over() -> bool:
        words = called(slurm, "scontrol", "--oneliner", "show", "job", job).split()
        fields.update(dict(word.partition("=")[::2] for word in words))
        return fields["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

    until(over, f"job {job} does not end")
    return fields["JobState"], fields["ExitCode"]


def processes(folder: Path) -> list[int]:
    """Return the processes of jobs that were submitted in a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"SLURM_SUBMIT_DIR={folder}\0".encode() in (place / "environ").read_bytes():
                found.append(int(place.name))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = tmp_path / "mine.toml"
    config.write_text(SHORT_RUN)
    deploy(DeployOptions(target="slurm", config=config, out=tmp_path / "job"))
    return tmp_path / "job"


def test_a_job_is_stopped_and_resumed_by_the_same_file(slurm: dict[str, str], folder: Path) -> None:
    job, run = submit(slurm, folder), folder / "runs" / "main"
    until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size, "no step")
    # what Slurm itself sends before the end of an allocation (--signal=B:TERM@60)
    called(slurm, "scancel", "--batch", "--signal=TERM", job)
    assert ended(slurm, job) == ("FAILED", "143:0")
    until(lambda: not processes(folder), "processes of the job are left")
    said = (folder / f"insitu-{job}.log").read_text()
    assert "Killed" not in said, said
    assert "forced stop" not in said, said
    assert not (run / "summary.json").exists()
    assert (folder / "job_id.txt").read_text().strip() == job
    assert f"RUN_DIR={run}\n" in (folder / "run.env").read_text()
    again = submit(slurm, folder)
    assert ended(slurm, again) == ("COMPLETED", "0:0"), (folder / f"insitu-{again}.log").read_text()
    assert json.loads((run / "summary.json").read_text())["rl_steps"] == 3
    until(lambda: not processes(folder), "processes of the job are left")


def test_a_job_ends_when_a_part_of_it_dies(slurm: dict[str, str], folder: Path) -> None:
    job, run = submit(slurm, folder), folder / "runs" / "main"
    until(lambda: (run / "config.toml").exists(), "no run")

    def is_trainer(pid: int) -> bool:
        return b"\0train\0insitu.toml\0" in Path(f"/proc/{pid}/cmdline").read_bytes()

    (trainer,) = filter(is_trainer, processes(folder))
    os.kill(trainer, signal.SIGKILL)
    assert ended(slurm, job) == ("FAILED", "137:0")
    until(lambda: not processes(folder), "processes of the job are left")
