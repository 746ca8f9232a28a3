"""Agents in containers of a daemon that is reached over TCP; they call the gateway at an address."""

from __future__ import annotations

import asyncio
import socket
from io import StringIO
from pathlib import Path

import pytest

from insitu.config import load_config
from insitu.evaluate.run import RolloutOptions, collect_rollouts
from insitu.progress.plain import PlainView
from tests.evaluate.test_harbor_agents import CLOUD, free_port, solver

pytestmark = pytest.mark.full


def test_an_agent_works_there_and_is_graded_there(
    podman_image: str, remote_daemon: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", remote_daemon)
    port = free_port()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        host = probe.getsockname()[0]
    there = [
        "sandbox.environment=insitu_fleet.docker_host:docker_environment",
        f"sandbox.image={podman_image}",
        "sandbox.egress=open",
        f"gateway.listen=0.0.0.0:{port}",
        f"gateway.public_url=http://{host}:{port}",
        "harness.agent=script",
        f"run.dir={tmp_path / 'run'}",
    ]
    shown = StringIO()
    options = RolloutOptions(sampler=solver)
    summary = asyncio.run(collect_rollouts(load_config(None, [*CLOUD, *there]), PlainView(shown), options))
    assert (summary["graded"], summary["verdict"]["resolved"]) == (2, 1), summary
    assert summary["calls"] == 3 + 1
