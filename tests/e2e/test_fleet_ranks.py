"""The folder of `insitu deploy ray` on a real Ray of three hosts, network namespaces of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from insitu.errors import SetupError
from insitu_fleet.deploy.folder import DeployOptions, deploy
from insitu_fleet.ray_link import TOKEN_HINT
from sources import SOURCES
from tests.fakes.net_hosts import SHORT_RUN, NetHost, net_hosts, until

pytestmark = [pytest.mark.slow, pytest.mark.ray]

INSITU = """#!/bin/sh
exec {python} -m insitu "$@"
"""
WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Three hosts with Ray, the head on the first, which asks for a token."""

    hosts: list[NetHost]
    variables: dict[str, str]

    def ranks(self) -> list[int]:
        """Processes of ranks on the hosts without the learner."""
        return [pid for host in self.hosts[1:] for pid in host.processes(b"\0ranks\0")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        # pytest's folders are too long for Ray's sockets
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
        )
        for name in ("bin", "tmp", ".ray"):
            (folder / name).mkdir()
        (folder / ".ray" / "auth_token").write_text("0" * 64)
        (folder / "bin" / "insitu").write_text(INSITU.format(python=sys.executable))
        (folder / "bin" / "insitu").chmod(0o755)
        variables = os.environ | {
            "RAY_TMPDIR": str(folder / "tmp"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "HOME": str(folder),
            "PYTHONPATH": SOURCES,
            "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        try:
            hosts = stack.enter_context(net_hosts("one", "two", "three"))
        except SetupError as error:
            pytest.skip(f"no hosts here: {error}")
        common = ["--num-cpus", "1", "--object-store-memory", str(80 << 20), "--block"]
        for host in hosts:
            # files of its own, as those of the other hosts' Ray
            host.run("mount", "-t", "tmpfs", "none", str(folder / "tmp"))
            head = ["--head", "--port", "6379", "--include-dashboard", "false"]
            own = head if host is hosts[0] else ["--address", f"{hosts[0].address}:6379"]
            words = ["ray", "start", *own, "--node-ip-address", host.address, *common]
            log = folder / f"{host.name}.log"
            stack.enter_context(host.started(*words, log=log, env=variables))
            until(lambda log=log: "Ray runtime started" in log.read_text(), f"no Ray on {host.name}")
        yield Cluster(hosts, variables)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = tmp_path / "mine.toml"
    config.write_text(SHORT_RUN + 'threads = 1\nranks = "1+2@anywhere:29400"\n')
    deploy(DeployOptions(target="ray", config=config, out=tmp_path / "job", nodes=3))
    return tmp_path / "job"


def run_job(cluster: Cluster, folder: Path, log: Path, **more: str) -> contextlib.AbstractContextManager:
    variables = cluster.variables | more
    return cluster.hosts[0].started("bash", str(folder / "job.sh"), log=log, env=variables)


def test_the_hosts_of_a_cluster_bring_ranks_and_are_left_empty(
    cluster: Cluster, folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with run_job(cluster, folder, log) as job:
        assert job.wait(WAIT_S) == 0, log.read_text()
    said = log.read_text()
    assert "train.ranks: 3 ranks, 1 here, 1 of three (10.77.0.3), 1 of two (10.77.0.2)" in said, said
    assert json.loads((folder / "runs" / "main" / "summary.json").read_text())["rl_steps"] == 3
    until(lambda: not cluster.ranks(), "ranks are left")


def test_nothing_is_left_of_a_job_that_is_killed(cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    log, metrics = tmp_path / "log", folder / "runs" / "main" / "metrics.jsonl"
    with run_job(cluster, folder, log):
        until(lambda: metrics.exists() and metrics.read_text(), "no step", WAIT_S)
        assert cluster.ranks()
        (driver,) = cluster.hosts[0].processes(b"insitu_fleet.ray_ranks")
        os.kill(driver, signal.SIGKILL)
        until(lambda: not cluster.ranks(), "ranks are left")
        until(lambda: not cluster.hosts[0].processes(b"\0train\0"), "the run is left")


def test_a_host_that_is_refused_and_a_place_that_is_missing_are_one_line(
    cluster: Cluster, folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "refused"
    config = folder / "insitu.toml"
    config.write_text(config.read_text() + "step_timeout_s = 60\n")
    with run_job(cluster, folder, log, MODEL_DIR="/no-such") as job:
        assert job.wait(WAIT_S) == 1
    said = log.read_text()
    assert said.count("ray: host two: ") == said.count("ray: host three: ") == 1, said
    assert "refuses this host: /no-such has no model on two: give --model FOLDER" in said
    assert "0 of 2 ranks of other hosts came within 30 s" in said
    log = tmp_path / "missing"
    few = "import insitu_fleet.ray_ranks as program; program.PLACE_S = 3; raise SystemExit(program.main())"
    words = [*"--hosts 4 --here 1 --each 1 --port 29400 --".split(), "true"]
    with cluster.hosts[0].started(sys.executable, "-c", few, *words, log=log, env=cluster.variables) as job:
        assert job.wait(120) == 1
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("ray: ")]
    assert line.startswith(
        "ray: no 4 hosts, this one (10.77.0.1) among them, with 1 CPU free within 3 s: the Ray cluster has "
    )
    assert "two (10.77.0.2: 1 CPU, 0 GPU)" in line
    log = tmp_path / "no-token"
    with run_job(cluster, folder, log, RAY_AUTH_MODE="disabled") as job:
        assert job.wait(120) == 1
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("ray: ")]
    assert line.startswith("ray: no Ray cluster here: ConnectionError: ")
    assert line.endswith(f"; {TOKEN_HINT}")
