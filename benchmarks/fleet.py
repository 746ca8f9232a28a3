"""Does a fleet lose, repeat or change anything when its nodes die, and what does it cost?

Run `python -m benchmarks fleet --json`, for Ray in its environment: `scripts/test-fleet --python -m
benchmarks fleet --ray --json`. Two synchronous training runs of the toy tasks with the script agent, one
local, one on nodes of which one is killed or frozen at random moments until `--kills` are done or the run
ends; with Ray every second time its whole machine, which another one replaces. `decided_once`: every rollout
has one decided attempt. `digest_equal`: all plans are those of the local run. `left_behind`: processes of
nodes, agents and sandboxes 70 s after the end. Then nodes that draw rollouts of 64k tokens at once:
`rollouts_per_s`, and `added_ms`, the median time of an attempt of 1,000 tokens. Status 1 unless the run is as
it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson

from benchmarks._arguments import Arguments, count, count_or_zero
from insitu.attempt import AttemptSpec
from insitu.chat.model_files import read_folder
from insitu.chat.template import template_renderer
from insitu.config import WARM_START, Config, load_config
from insitu.shutdown import descendants
from insitu.storage.run_dir import RunDir, has_rollouts, read_store
from insitu.tasks.base import UNTESTED
from insitu.tasks.toy import ToySource
from insitu.types import GradingPlan, Limits, Message, Status, Task
from insitu_fleet.controller import Fleet
from insitu_fleet.links import Link, ProcessLink
from insitu_fleet.ray_link import ray_links
from insitu_train.demo.scripted import ScriptedEngine

SMALL = (
    "harness.agent=script", "harness.mode=warm", "harness.workers=2", "run.steps=60", "eval.count=4",
    "collect.groups_per_step=2", "collect.group_size=4", "collect.attempts=30", "train.threads=1",
    "train.min_groups=1", "collect.max_consecutive_failures=60",
)  # fmt: skip
LEASE_S = 20.0
LIFE_S = 1500.0
LEFT_S = 70.0
PAUSE_S = (1.0, 6.0)
"""Between two kills."""
NODE = b"insitu_fleet.node"
SIMULATED = "benchmarks._fleet_node"
Strike = Callable[[int, int], None]
"""Sends a signal to a node, or to what it runs on."""


def _run(folder: Path, *further: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "insitu", "demo", "--agent", "script", "--plain", f"run.dir={folder}"]
    with folder.with_suffix(".log").open("ab") as output:
        return subprocess.Popen([*command, *SMALL, *further], stdout=output, stderr=output)


def _named(below: int, word: bytes) -> list[int]:
    found = []
    for pid in descendants(below):
        try:
            if word in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def _alive(pids: Sequence[int]) -> list[int]:
    def state(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"

    return [pid for pid in pids if state(pid) not in ("Z", "X", "gone")]


def _disturb(
    run: subprocess.Popen[bytes], folder: Path, kills: int, chance: random.Random, strike: Strike
) -> tuple[int, set[int]]:
    """Kill or freeze nodes of a running run until it ends; return how many, and every process seen below."""
    done, seen, ends = 0, set[int](), time.monotonic() + LIFE_S
    while run.poll() is None and time.monotonic() < ends:
        time.sleep(chance.uniform(*PAUSE_S))
        nodes = _named(os.getpid(), NODE)
        for node in nodes:
            seen |= {node, *descendants(node)}
        # A node that cannot start ends a run that has not begun.
        if nodes and done < kills and has_rollouts(folder):
            victim = chance.choice(nodes)
            seen |= {victim, *descendants(victim)}
            with contextlib.suppress(ProcessLookupError):
                strike(victim, chance.choice((signal.SIGKILL, signal.SIGSTOP)))
                done += 1
    if run.poll() is None:
        run.kill()
    return done, seen


def _plans(folder: Path) -> list[str]:
    with read_store(folder) as store:
        return [step.plan_hash for step in store.steps()]


def _account(folder: Path) -> tuple[bool, bool]:
    """Whether every rollout was decided once, and whether the ledger balances."""
    with read_store(folder) as store:
        rollouts = [r for phase, step in store.phases() for r in store.rollouts(phase, step)]
        names = [r.id for r in rollouts]
        once = len(names) == len(set(names)) and all(r.status is not Status.INFRA_FAILED for r in rollouts)
        balance = store.check_balance()
        return once and not balance.pending, balance.tokens.balanced


def disturbed(
    nodes: int, kills: int, seed: int, table: Sequence[str], strike: Strike = os.kill
) -> dict[str, Any]:
    """Compare a run on dying nodes with a local one."""
    with tempfile.TemporaryDirectory(prefix="insitu-bench-") as place:
        here, there = Path(place, "here"), Path(place, "there")
        local = _run(here)
        if local.wait(LIFE_S):
            raise SystemExit(f"fleet: the local run failed: {here.with_suffix('.log').read_text()[-500:]}")
        run = _run(there, *table, f"fleet.nodes={nodes}", f"fleet.lease_s={LEASE_S}")
        done, seen = _disturb(run, there, kills, random.Random(seed), strike)
        if run.returncode:
            raise SystemExit(f"fleet: the run failed: {there.with_suffix('.log').read_text()[-800:]}")
        once, balanced = _account(there)
        ends = time.monotonic() + LEFT_S
        while (left := _alive([*seen])) and time.monotonic() < ends:
            time.sleep(0.5)
        equal = _plans(here) == _plans(there)
    return {
        "nodes": nodes,
        "kills": done,
        "decided_once": once,
        "ledger_balanced": balanced,
        "digest_equal": equal,
        "left_behind": len(left),
    }


@asynccontextmanager
async def _links(config: Config) -> AsyncIterator[Sequence[Link]]:
    if config.fleet.kind == "ray":
        async with ray_links(config.fleet, SIMULATED) as links:
            yield links
    else:
        yield [ProcessLink(f"p{n}", 60.0, SIMULATED) for n in range(config.fleet.nodes)]


async def _measured(config: Config, rollouts: int, folder: Path) -> dict[str, float]:
    async with _links(config) as links:
        return await _time(config, links, rollouts, folder)


async def _time(config: Config, links: Sequence[Link], rollouts: int, folder: Path) -> dict[str, float]:
    renderer = template_renderer(read_folder(WARM_START))
    engine = ScriptedEngine(renderer, lambda ids, key: Message(role="assistant", text="done"))
    fleet = Fleet(config, links, engine, ToySource(Limits()), ("none", ""), print)
    await fleet.start()
    try:
        with RunDir.create(config.model_copy(update={"run": config.run.changed(dir=str(folder))})) as run:
            attempts = fleet.attempts(run)

            def spec(number: int, tokens: int) -> AttemptSpec:
                task = Task(id="drawn", prompt=str(tokens), files={}, grading=GradingPlan(runner=UNTESTED))
                return AttemptSpec(rollout_id=f"train/00001/000/{number:05d}-{tokens}", task=task, seed=0)

            async def burst(first: int) -> float:
                began = time.perf_counter()
                await asyncio.gather(*(attempts.run(spec(first + n, 65536)) for n in range(rollouts)))
                return time.perf_counter() - began

            took = []
            for number in range(100):
                began = time.perf_counter()
                await attempts.run(spec(number, 1000))
                took.append(time.perf_counter() - began)
            # The second time every node has drawn most of what it is asked for.
            await burst(0)
            await burst(0)
            seconds = min([await burst(0) for _ in range(3)])
    finally:
        await fleet.close()
    return {
        "added_ms": round(1000 * statistics.median(took), 2),
        "rollouts_per_s": round(rollouts / seconds, 1),
    }


def _share_path() -> None:
    """Let nodes import this package; nodes of Ray inherit what it was started with."""
    path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)


def measured(nodes: int, rollouts: int, table: Sequence[str]) -> dict[str, float]:
    """Measure nodes that answer at once."""
    _share_path()
    config = load_config(None, [*table, f"fleet.nodes={nodes}", "harness.workers=8"])
    with tempfile.TemporaryDirectory(prefix="insitu-bench-") as place:
        return asyncio.run(_measured(config, rollouts, Path(place, "run")))


def main(argv: list[str]) -> int:
    """Return 1 if something was lost, repeated or changed."""
    parser = Arguments(prog="benchmarks fleet", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--nodes", type=count, default=3)
    parser.add_argument("--kills", type=count_or_zero, default=20)
    parser.add_argument("--rollouts", type=count, default=64, help="rollouts of 64k tokens at once")
    parser.add_argument("--seed", type=count_or_zero, default=0)
    parser.add_argument("--ray", action="store_true", help="on a Ray cluster of machines on this one")
    options = parser.parse_args(argv)
    if options.ray:
        result = _on_ray(options)
    else:
        table = ["fleet.kind=processes"]
        figures = measured(options.nodes, options.rollouts, table)
        result = disturbed(options.nodes, options.kills, options.seed, table) | figures
    print(
        orjson.dumps(result).decode() if options.json else "\n".join(f"{k}: {v}" for k, v in result.items())
    )
    good = result["decided_once"] and result["ledger_balanced"] and result["digest_equal"]
    return 0 if good and not result["left_behind"] else 1


class _Machines:
    """A Ray cluster on this machine, whose lost members are replaced."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        self._options: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}
        # Ray's own limits are a minute: a frozen machine would be lost after the run.
        checks = {
            "health_check_period_ms": 1000,
            "health_check_timeout_ms": 2000,
            "health_check_failure_threshold": 3,
        }
        head = {**self._options, "include_dashboard": False, "_system_config": checks}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self._head = self.cluster.head_node.all_processes["raylet"][0].process.pid
        for _ in range(count - 1):
            self.cluster.add_node(**self._options)
        self._strikes = 0

    def strike(self, node: int, number: int) -> None:
        """Signal a node, every second time its machine, unless that is the controller's."""
        self._strikes += 1
        raylet = _above(node, "(raylet)")
        if self._strikes % 2 or raylet in (0, self._head):
            os.kill(node, number)
        else:
            os.kill(raylet, number)
            self.cluster.add_node(**self._options)


def _above(pid: int, name: str) -> int:
    """Return the nearest process above with a name, 0 if it is gone."""
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return 0
        if name in stat:
            return pid
        pid = int(stat.rpartition(")")[2].split()[1])
    return 0


def _on_ray(options: argparse.Namespace) -> dict[str, Any]:
    """Start a cluster with a machine for each node, and run on it."""
    _share_path()
    machines = _Machines(options.nodes)
    try:
        table = ["fleet.kind=ray", f"fleet.address={machines.cluster.address}"]
        figures = measured(options.nodes, options.rollouts, table)
        return disturbed(options.nodes, options.kills, options.seed, table, machines.strike) | figures
    finally:
        machines.cluster.shutdown()
