"""A fleet on a real Ray cluster, three nodes on this machine: equal results; machines killed and frozen."""

from __future__ import annotations

import asyncio
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
from tests.e2e.test_fleet import Bed, alive, same, until

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

LEASE_S = 8.0
NODE = b"insitu.runtime.fleet.node"
SOURCE = str(Path(__file__).parents[2] / "src")


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
    """A cluster of four machines on this one."""

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


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    os.environ["PYTHONPATH"] = SOURCE
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
        below = processes(NODE)
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
