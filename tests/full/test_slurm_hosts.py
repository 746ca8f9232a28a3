"""The job of `insitu deploy slurm` under a real Slurm of two nodes, namespaces of this machine: the second
one has a rank of the trainer."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_slurm import CONF, PROGRAMS, daemon, munge_words

from insitu.errors import SetupError
from insitu_fleet.deploy.folder import DeployOptions, deploy
from sources import SOURCES
from tests.fakes.net_hosts import SHORT_RUN, NetHost, net_hosts, until

pytestmark = pytest.mark.full

NODES = (
    "NodeName=one NodeAddr=10.77.0.1 CPUs={cpus} State=UNKNOWN\n"
    "NodeName=two NodeAddr=10.77.0.2 CPUs={cpus} State=UNKNOWN"
)


@dataclass(frozen=True, slots=True)
class Two:
    """A Slurm of two nodes."""

    one: NetHost
    two: NetHost
    variables: dict[str, str]

    def called(self, *command: str, cwd: Path | None = None) -> str:
        return self.one.run(*command, env=self.variables, cwd=cwd)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Two]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid():
        pytest.skip(f"no Slurm here: {', '.join(missing) or 'its daemons need root'}")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        folder.chmod(0o755)
        for name in ("state", "spool-one", "spool-two"):
            (folder / name).mkdir()
        text = CONF.format(host="one", ports=[6817, 6818], folder=folder, cpus=os.cpu_count())
        text = text.replace("one(127.0.0.1)", "one(10.77.0.1)").replace(
            f"{folder}/spool", f"{folder}/spool-%n"
        )
        text = text.replace("/slurmd.pid", "/slurmd-%n.pid")
        lines = [line for line in text.splitlines() if not line.startswith("NodeName=")]
        at = next(n for n, line in enumerate(lines) if line.startswith("PartitionName="))
        lines[at:at] = NODES.format(cpus=os.cpu_count()).splitlines()
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        variables = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PYTHONPATH": SOURCES,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        try:
            one, two = stack.enter_context(net_hosts("one", "two"))
        except SetupError as error:
            pytest.skip(f"no Slurm here: {error}")
        munged = ["munged", "--foreground", *munge_words(folder)]
        stack.enter_context(daemon(munged, variables, folder / "munged.out"))
        until(lambda: (folder / "munge.socket").exists(), "munged does not start")
        for host, command in (
            (one, ["slurmctld", "-D", "-c"]),
            (one, ["slurmd", "-D"]),
            (two, ["slurmd", "-D"]),
        ):
            log = folder / f"{command[0]}-{host.name}.out"
            stack.enter_context(host.started(*command, log=log, env=variables))
        made = Two(one, two, variables)

        def idle() -> bool:
            with contextlib.suppress(SetupError):
                return made.called("sinfo", "--noheader", "--format=%T %D").split() == ["idle", "2"]
            return False

        until(idle, "the nodes are not idle")
        yield made


def ended(slurm: Two, job: str) -> tuple[str, str]:
    """Wait for a job and return its state and exit code."""
    fields: dict[str, str] = {}

    def over() -> bool:
        words = slurm.called("scontrol", "--oneliner", "show", "job", job).split()
        fields.update(dict(word.partition("=")[::2] for word in words))
        return fields["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

    until(over, f"job {job} does not end", 400.0)
    return fields["JobState"], fields["ExitCode"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = tmp_path / "mine.toml"
    config.write_text(SHORT_RUN + 'ranks = "1+1@anywhere:29400"\nstep_timeout_s = 120\n')
    deploy(DeployOptions(target="slurm", config=config, out=tmp_path / "job", nodes=2))
    return tmp_path / "job"


def test_the_second_node_has_a_rank_and_begins_again_when_it_is_killed(slurm: Two, folder: Path) -> None:
    run = folder / "runs" / "main"
    job = slurm.called("sbatch", "--parsable", "job.sbatch", cwd=folder).strip()
    said = folder / f"insitu-{job}.log"
    until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text(), "no step", 300.0)
    assert "train.ranks: 2 ranks, 1 here, 1 of two (10.77.0.2)" in said.read_text()
    agents = slurm.two.processes(b"\0ranks\0")
    agents = [pid for pid in agents if b"bash" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert agents
    for pid in agents:
        os.kill(pid, signal.SIGKILL)
    assert ended(slurm, job) == ("COMPLETED", "0:0"), said.read_text()
    text = said.read_text()
    assert "is lost" in text, text
    assert text.count("train.ranks: 2 ranks, 1 here, 1 of two (10.77.0.2)") == 2, text
    assert json.loads((run / "summary.json").read_text())["rl_steps"] == 3
    until(lambda: not slurm.two.processes(b"ranks"), "processes of the job are left")


def test_the_run_goes_on_with_one_node(slurm: Two, folder: Path) -> None:
    """Stopped after a step on two nodes, submitted again on one."""
    run = folder / "runs" / "main"
    job = slurm.called("sbatch", "--parsable", "job.sbatch", cwd=folder).strip()
    until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text(), "no step", 300.0)
    slurm.called("scancel", "--batch", "--signal=TERM", job)
    assert ended(slurm, job) == ("FAILED", "143:0")
    until(lambda: not slurm.two.processes(b"ranks"), "processes of the job are left")
    job = slurm.called("sbatch", "--parsable", "--nodes=1", "job.sbatch", cwd=folder).strip()
    assert ended(slurm, job) == ("COMPLETED", "0:0"), (folder / f"insitu-{job}.log").read_text()
    assert json.loads((run / "summary.json").read_text())["rl_steps"] == 3


def test_a_node_that_is_cut_off_does_not_end_the_run(slurm: Two, folder: Path) -> None:
    """Last of those with this Slurm, which takes a while to believe in the node again."""
    config = folder / "insitu.toml"
    config.write_text(config.read_text().replace("step_timeout_s = 120", "step_timeout_s = 60"))
    run = folder / "runs" / "main"
    job = slurm.called("sbatch", "--parsable", "job.sbatch", cwd=folder).strip()
    until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text(), "no step", 300.0)
    slurm.two.cable(up=False)
    until((run / "summary.json").exists, "the run does not end", 300.0)
    slurm.two.cable(up=True)
    said = (folder / f"insitu-{job}.log").read_text()
    assert "host two is lost: nothing was heard for 15 s" in said, said
    assert "train.ranks: 1 ranks, 1 here" in said, said
    assert json.loads((run / "summary.json").read_text())["rl_steps"] == 3
    assert ended(slurm, job) == ("COMPLETED", "0:0")
    until(lambda: not slurm.two.processes(b"\0ranks\0"), "processes of the job are left")
