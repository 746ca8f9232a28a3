"""SkyRL 0.4's server of the Tinker API, its JAX backend on a Ray of two nodes, trained by insitu.

The nodes are network namespaces. INSITU_SKYRL_RAY names a virtual environment of Python 3.12 or newer with
SkyRL and what insitu needs (docs/training-service.md).
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

import insitu
from insitu.config import WARM_START
from insitu.errors import SetupError
from sources import uninstalled
from tests.fakes.net_hosts import NetHost, net_hosts, until

RUN_S = 3000.0
pytestmark = [pytest.mark.full, pytest.mark.takes(RUN_S)]

HEAD, PORT = "10.77.0.1:6379", 8000
UV = """#!/usr/bin/env bash
# not exec: the server looks for `uv run` in the command line of its parent
while [[ $# -gt 0 ]]; do
  case "$1" in run) shift ;; --extra) shift 2 ;; *) break ;; esac
done
{python} "$@"
"""
LIMITS = {
    "use_ray": True, "num_processes": 2, "fully_sharded_data_parallel_size": 2, "max_lora_adapters": 3,
    "max_lora_rank": 8, "train_micro_batch_size": 16, "sample_max_num_sequences": 16,
}  # fmt: skip


def started_ray(stack: ExitStack, hosts: list[NetHost], ray: Path, folder: Path, env: dict[str, str]) -> None:
    for host in hosts:
        # files of its own, as those of the other node
        host.run("mount", "-t", "tmpfs", "none", env["RAY_TMPDIR"])
        head = ["--head", "--port", "6379", "--include-dashboard", "false"]
        own = head if host is hosts[0] else ["--address", HEAD]
        words = [str(ray), "start", *own, "--node-ip-address", host.address, "--num-cpus", "1"]
        log = folder / f"{host.name}.log"
        words += ["--object-store-memory", str(80 << 20), "--block"]
        stack.enter_context(host.started(*words, log=log, env=env))
        until(lambda log=log: "Ray runtime started" in log.read_text(), f"no Ray on {host.name}")


def test_two_ray_nodes_train_by_the_tinker_api(tmp_path: Path) -> None:
    place = os.environ.get("INSITU_SKYRL_RAY")
    if not place:
        pytest.skip("INSITU_SKYRL_RAY names no environment with SkyRL 0.4")
    python, uv = Path(place) / "bin" / "python", tmp_path / "uv"
    uv.write_text(UV.format(python=python))
    uv.chmod(0o755)
    with ExitStack() as stack:
        # pytest's folders are too long for Ray's sockets
        short = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
        try:
            hosts = stack.enter_context(net_hosts("one", "two"))
        except SetupError as error:
            pytest.skip(f"no hosts here: {error}")
        env = os.environ | {
            "PATH": f"{tmp_path}:{python.parent}:{os.environ['PATH']}",
            "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "RAY_TMPDIR": short,
            # Ray writes a token there, which other clusters refuse
            "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path),
        }  # fmt: skip
        env.pop("PYTHONPATH", None)
        started_ray(stack, hosts, python.parent / "ray", tmp_path, env)
        server = [
            *("bash", str(uv), "run", "-m", "skyrl.tinker.api", "--base-model", str(WARM_START)),
            *("--backend", "jax", "--backend-config", json.dumps(LIMITS)),
            *("--checkpoints-base", str(tmp_path)),
            *("--database-url", f"sqlite:///{tmp_path}/t.db", "--host", hosts[0].address),
            *("--port", str(PORT), "--session-timeout-sec", "300"),
        ]
        log, own = tmp_path / "server.log", env | {"RAY_ADDRESS": HEAD}
        stack.enter_context(hosts[0].started(*server, log=log, env=own))
        until(lambda: "Uvicorn running" in log.read_text(), "no server", 300.0)
        run, said = tmp_path / "run", tmp_path / "insitu.log"
        train = [
            *(str(python), "-m", "insitu", "demo", "--agent", "script", "--plain", f"run.dir={run}"),
            *("run.steps=2", "collect.groups_per_step=2", "collect.group_size=4", "eval.count=2"),
            *("eval.every_steps=0", "train.lr=5e-3", "train.max_logprob_gap=1e-4", "train.min_groups=1"),
            *("limits.wall_s=1800", "engine.kind=tinker", f"engine.urls=http://{hosts[0].address}:{PORT}"),
            *(f"engine.model={WARM_START}", "policy.kind=tinker", "policy.lora_rank=8"),
        ]
        variables = {**os.environ, "PYTHONPATH": uninstalled(tmp_path / "entry-points")}
        with hosts[0].started(*train, log=said, env=variables) as process:
            assert process.wait(RUN_S) == 0, said.read_text() + log.read_text()[-3000:]
        assert "ip=10.77.0.2" in log.read_text(), "an actor on the other node"
    stored = insitu.open_run(run)
    assert stored.ledger.balanced
    assert len(stored.steps) == 2
    assert all(step.metrics["mismatched"] == 0 for step in stored.steps)
