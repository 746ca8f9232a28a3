"""What starts ranks by Ray, without a cluster; with one: tests/e2e/test_fleet_ranks.py."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from insitu.config.fleet import FleetTable
from insitu.config.training import split_ranks
from insitu.errors import SetupError
from insitu_fleet import ray_host, ray_link, ray_ranks

AGENT = """#!/bin/sh
cd {folder}
echo "$* $SECRET" >> calls
[ -f killed ] || {{ touch killed; kill -9 $$; }}
echo "the learner refuses this host: clocks"
exit 3
"""


@pytest.mark.parametrize(("hosts", "ranks"), [("3", "1+4@10.0.0.1:29400"), ("1", "1")])
def test_one_host_alone_has_its_own_ranks(hosts: str, ranks: str) -> None:
    words = f"--hosts {hosts} --here 1 --each 2 --port 29400 -- bash start.sh".split()
    found = ray_ranks._train_ranks(ray_ranks.parser().parse_args(words), "10.0.0.1")
    assert found == ranks
    split_ranks(found)


@pytest.mark.slow
def test_an_agent_that_is_killed_begins_again_and_one_that_is_refused_ends_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(AGENT.format(folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(ray_host, "_AGAIN_S", 0.0)
    ended = ray_host.run_ranks(["10.0.0.1:29400", "--ranks", "2"], {"SECRET": "s"})
    assert ended == (socket.gethostname(), 3, "the learner refuses this host: clocks")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["-P -m insitu ranks 10.0.0.1:29400 --ranks 2 s"] * 2


def test_without_ray_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_ranks, "ray", None)
    words = "--hosts 2 --here 1 --each 1 --port 29400 -- bash start.sh".split()
    assert ray_ranks.main(words) == 1
    assert capsys.readouterr().err.startswith("ray: ray is not installed: ")
    options = ray_ranks.parser().parse_args(words)
    assert options.command == ["bash", "start.sh"]


class AuthenticationError(Exception):
    """Ray's own error of a missing token, a RayError."""


REFUSALS = (
    (
        ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379"),
        "ConnectionError: Failed to connect to Ray cluster at 10.0.0.1:6379;"
        " a head with ~/.ray/auth_token asks for it: set RAY_AUTH_MODE=token here, with the same file",
    ),
    (AuthenticationError("no\ntoken"), "AuthenticationError: no token"),
    (ConnectionError("Could not find any"), "ConnectionError: Could not find any"),
)


@pytest.mark.parametrize(("error", "line"), REFUSALS)
async def test_a_cluster_that_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, line: str
) -> None:
    def init(**options: object) -> None:
        raise error

    pickled = SimpleNamespace(register_pickle_by_value=lambda module: None)
    for module in (ray_ranks, ray_link):
        monkeypatch.setattr(module, "ray", SimpleNamespace(init=init, cloudpickle=pickled))
        monkeypatch.setattr(module, "RayError", AuthenticationError, raising=False)
    assert ray_ranks.main("--hosts 2 --here 1 --each 1 --port 29400 -- true".split()) == 1
    assert capsys.readouterr().err == f"ray: no Ray cluster here: {line}\n"
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        with pytest.raises(SetupError) as caught:
            async with ray_link.ray_links(FleetTable(kind="ray", address=address)):
                raise AssertionError("it connected")
    assert str(caught.value) == f"fleet.address {address}: {line}"
