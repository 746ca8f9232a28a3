"""A fleet on a real Ray cluster, three nodes on this machine: equal results; machines killed and frozen."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from insitu.config import load_config
from insitu.errors import SetupError
from insitu.shutdown import descendants
from insitu.types import Status
from insitu_fleet import controller
from sources import SOURCES
from tests.e2e.test_fleet import Bed, alive, same, until

try:
    import ray
except ImportError:
    ray = None

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

LEASE_S = 8.0
NODE = b"insitu_fleet.node"


class RayBed(Bed):
    """A bed whose nodes are on the cluster."""

    def __init__(self, folder: Path, address: str, hold: asyncio.Event | None = None, nodes: int = 3) -> None:
        super().__init__(folder, 0, hold)
        table = {"kind": "ray", "address": address, "nodes": nodes, "lease_s": LEASE_S}
        base = self.config.model_dump() | {"fleet": table}
        base["run"] |= {"dir": str(folder / "ray")}
        self.config = load_config(None, base=base)


def processes(word: bytes) -> list[int]:
    """Return the processes below this one with a word in their command line."""
    found = []
    for pid in descendants(os.getpid()):
        try:
            if word in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def machine_of(node: int) -> int:
    """Return the raylet above a node's process."""
    while node:
        stat = Path(f"/proc/{node}/stat").read_text()
        if "(raylet)" in stat:
            return node
        node = int(stat.rpartition(")")[2].split()[1])
    raise AssertionError("no raylet is above it")


class Machines:
    """A cluster of four machines on this one, the head among them."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        checks = {
            "health_check_initial_delay_ms": 1000,
            "health_check_period_ms": 1000,
            "health_check_timeout_ms": 2000,
            "health_check_failure_threshold": 3,
        }
        options: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}
        head = {**options, "include_dashboard": False, "_system_config": checks}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        # One more than a fleet takes: it replaces a lost one.
        self.nodes = [self.cluster.add_node(**options) for _ in range(3)]
        self.head = self.cluster.head_node.all_processes["raylet"][0].process.pid
        """The raylet of the machine that the controller is on."""


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    os.environ["PYTHONPATH"] = SOURCES
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = Machines()
    yield made
    made.cluster.shutdown()


async def test_a_ray_fleet_gives_the_rollouts_of_a_local_run(machines: Machines, tmp_path: Path) -> None:
    here = await Bed(tmp_path / "here", 0).run()
    bed = RayBed(tmp_path / "there", machines.cluster.address)
    there = await bed.run()
    assert all(same(here[name], there[name]) for name in here)
    assert not processes(NODE)
    assert not bed.said


async def test_lost_machines_cost_no_rollout_and_leave_nothing(machines: Machines, tmp_path: Path) -> None:
    bed = RayBed(tmp_path, machines.cluster.address, asyncio.Event())
    assert bed.hold is not None
    async with bed.fleet() as (fleet, run):
        collecting = asyncio.create_task(bed.collect(fleet.attempts(run), limit=4))
        await until(lambda: bed.engine.in_flight == 6)
        below = sorted(processes(NODE), key=lambda node: machine_of(node) == machines.head)
        assert len(below) == 3
        boxes = [pid for node in below for pid in descendants(node)]
        os.kill(machine_of(below[0]), signal.SIGKILL)
        os.kill(below[1], signal.SIGSTOP)
        await until(lambda: fleet.gauges()["nodes_lost"] >= 2)
        bed.hold.set()
        await collecting
        await until(lambda: fleet.gauges()["nodes"] == 3)
    assert not bed.sink.undecided
    assert {r.status for r in bed.sink.rollouts.values()} == {Status.OK}
    await until(lambda: not alive([*below, *boxes]) and not processes(NODE))


async def test_more_nodes_than_machines_is_one_line(machines: Machines, tmp_path: Path) -> None:
    bed = RayBed(tmp_path, machines.cluster.address, nodes=9)
    with pytest.raises(SetupError, match=r"fleet.nodes = 9, but the Ray cluster at .* has [34] machines"):
        async with bed.fleet():
            raise AssertionError("it started")


async def test_no_cluster_is_one_line(tmp_path: Path) -> None:
    bed = RayBed(tmp_path, "127.0.0.1:1")
    with pytest.raises(SetupError, match=r"^fleet.address 127.0.0.1:1: ") as raised:
        async with bed.fleet():
            raise AssertionError("it started")
    assert "\n" not in str(raised.value)


async def test_a_start_that_takes_too_long_is_one_line(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "START_S", 0.01)
    bed = RayBed(tmp_path, machines.cluster.address)
    with pytest.raises(SetupError, match=r"^node r\d at .*: Ray did not start it within 0.01 s$"):
        async with bed.fleet():
            raise AssertionError("it started")
    await until(lambda: not processes(NODE))


async def test_a_cluster_of_another_ray_is_one_line(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = RayBed(tmp_path, machines.cluster.address)
    monkeypatch.setattr(ray, "__version__", "1.0.0")
    with pytest.raises(SetupError, match=r"^fleet.address .*Version mismatch.*1\.0\.0") as raised:
        async with bed.fleet():
            raise AssertionError("it started")
    assert "\n" not in str(raised.value)


async def test_without_a_free_machine_the_run_goes_on_with_the_others(
    machines: Machines, tmp_path: Path
) -> None:
    """A machine dies that no other can replace, since every one has a node."""
    bed = RayBed(tmp_path, machines.cluster.address, asyncio.Event(), nodes=0)
    assert bed.hold is not None
    async with bed.fleet() as (fleet, run):
        collecting = asyncio.create_task(bed.collect(fleet.attempts(run), limit=4))
        await until(lambda: bed.engine.in_flight >= 6)
        victim = next(pid for pid in map(machine_of, processes(NODE)) if pid != machines.head)
        os.kill(victim, signal.SIGKILL)
        line = "the fleet goes on without a node: node r"
        await until(lambda: any(said.startswith(line) for said in bed.said))
        assert bed.said[-1].endswith(": no machine of the Ray cluster is free for it")
        bed.hold.set()
        await collecting
    assert not bed.sink.undecided
    assert {r.status for r in bed.sink.rollouts.values()} == {Status.OK}
    await until(lambda: not processes(NODE))


async def test_without_its_own_ray_the_run_ends_in_one_line(machines: Machines, tmp_path: Path) -> None:
    """Last of those with this cluster: it takes the controller's machine from it."""
    bed = RayBed(tmp_path, machines.cluster.address, asyncio.Event(), nodes=2)
    async with bed.fleet() as (fleet, run):
        collecting = asyncio.create_task(bed.collect(fleet.attempts(run), limit=8))
        await until(lambda: bed.engine.in_flight == 4)
        os.kill(machines.head, signal.SIGKILL)
        line = "no node of the fleet is left: .*: the Ray of the controller's machine is dead"
        with pytest.raises(SetupError, match=line):
            await collecting
    await until(lambda: not processes(NODE))


async def test_no_cluster_on_this_machine_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ray also looks for head processes of others.
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", functools.cache(list))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    bed = RayBed(tmp_path, "auto")
    line = "fleet.address auto: no Ray cluster runs on this machine: start one with `ray start --head`"
    with pytest.raises(SetupError, match=f"^{line}$"):
        async with bed.fleet():
            raise AssertionError("it started")
