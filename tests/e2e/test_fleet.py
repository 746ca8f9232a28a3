"""A fleet of child processes with real agents, sandboxes and graders: equal results, and nodes that die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

import insitu
from insitu import cli
from insitu.attempt import AttemptSpec
from insitu.chat.model_files import read_folder
from insitu.chat.template import TemplateRenderer, template_renderer
from insitu.collect.breaker import LOST, Breaker
from insitu.collect.collector import Collector
from insitu.collect.options import AttemptRunner, CollectOptions
from insitu.config import Config, load_config
from insitu.errors import CaptureError, EngineError, SetupError
from insitu.gateway.token_backend import TokenBackend
from insitu.install_hints import install_extra
from insitu.runtime.agents import agents_of, find_setups, limits_of
from insitu.runtime.run import open_agents
from insitu.shutdown import descendants
from insitu.storage.run_dir import RunDir
from insitu.tasks.toy import ToySource
from insitu.types import IntArray, Message, RequestKey, Rollout, Status, Task
from insitu_fleet import controller as controller_module
from insitu_fleet import ray_link
from insitu_fleet.controller import Fleet, open_fleet
from insitu_fleet.links import ProcessLink
from insitu_fleet.ray_relay import NodeRelay
from insitu_train.channel.installed import code_identity
from insitu_train.demo.demonstrator import edit
from insitu_train.demo.make_warm_start import write_renderer
from insitu_train.demo.scripted import ScriptedEngine
from tests.fakes.memory_sink import MemorySink

pytestmark = pytest.mark.slow

DONE = Message(role="assistant", text="done")
LEASE_S = 8.0
WAIT_S = 60.0


def config_of(folder: Path, nodes: int) -> Config:
    write_renderer(folder / "family", "")
    tables: list[str] = [
        "harness.agent=script", "harness.mode=warm", "harness.workers=2", "limits.wall_s=60",
        "limits.max_call_tokens=512", "model.max_context_tokens=16384", f"model.path={folder / 'family'}",
        f"run.dir={folder / f'run{nodes}'}",
    ]  # fmt: skip
    if nodes:
        tables += ["fleet.kind=processes", f"fleet.nodes={nodes}", f"fleet.lease_s={LEASE_S}"]
    return load_config(None, tables)


@dataclass
class Bed:
    """A run's configuration, its tasks, and an engine that solves them."""

    folder: Path
    nodes: int
    hold: asyncio.Event | None = None
    """Requests of the second turn wait for it."""
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = config_of(self.folder, self.nodes)
        self.renderer: TemplateRenderer = template_renderer(read_folder(self.folder / "family"))
        self.source = ToySource(limits_of(self.config))
        self.engine = ScriptedEngine(self.renderer, self.play, sampled=True, before=self.wait)
        self.sink = MemorySink()

    def tasks(self, count: int) -> Sequence[Task]:
        return self.source.tasks("train", 0, count)

    def play(self, ids: IntArray, key: RequestKey) -> Message:
        group = int(key.rollout_id.split("/")[2])
        p = self.source.problem(self.tasks(group + 1)[group])
        right = int(key.rollout_id.split("/")[3]) % 2
        return DONE if key.turn else edit(p, p.fault.old, p.fault.new if right else "0")

    async def wait(self, key: RequestKey) -> None:
        if self.hold is not None and key.turn:
            await self.hold.wait()

    @contextlib.asynccontextmanager
    async def fleet(self) -> AsyncIterator[tuple[Fleet, RunDir]]:
        setups = find_setups(self.config.arms)
        with RunDir.create(self.config) as run:
            opened = open_fleet(self.config, self.engine, self.source, agents_of(setups), self.said.append)
            async with opened as fleet:
                yield fleet, run

    async def collect(self, attempts: AttemptRunner, limit: int = 20) -> None:
        """Fill two groups of four."""
        options = CollectOptions(seed=1, group_size=4, groups=2, total=2, pause_s=0.01)
        tasks = self.tasks(2)
        collector = Collector(
            attempts, self.sink, Silent(), Breaker(limit), options, lambda number: tasks[number]
        )
        async with collector.open():
            await collector.next_batch()

    async def run(self) -> dict[str, Rollout]:
        setups = find_setups(self.config.arms)
        backend = TokenBackend(self.engine, self.renderer)
        with RunDir.create(self.config) as run:
            opened = open_agents(self.config, backend, self.engine, self.source, setups, self.said.append)
            async with opened as agents:
                await self.collect(agents.attempts(run))
        return self.sink.rollouts


class Silent:
    def rollout_started(self, rollout_id: str) -> None: ...

    def rollout_finished(self, rollout_id: str, *, reward: float | None, tokens: int) -> None: ...


def pids(fleet: Fleet) -> list[int]:
    found = [node.link.pid for node in fleet.nodes if isinstance(node.link, ProcessLink)]
    return [pid for pid in found if pid is not None]


def alive(processes: Sequence[int]) -> list[int]:
    def running(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return [pid for pid in processes if running(pid)]


async def until(done: Callable[[], object]) -> None:
    ends = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < ends, "it did not happen in time"
        await asyncio.sleep(0.05)


def spec(bed: Bed, slot: int = 1) -> AttemptSpec:
    return AttemptSpec(rollout_id=f"train/00001/000/{slot:02d}", task=bed.tasks(1)[0], seed=1)


def same(left: Rollout, right: Rollout) -> bool:
    """Compare all but times."""
    strip = {"timings": left.timings, "began_s": None}
    one, two = replace(left, **strip), replace(right, **strip)  # type: ignore[arg-type]
    assert (one.status, one.reward, one.diff, one.changed) == (two.status, two.reward, two.diff, two.changed)
    assert one.trajectory.ledger == two.trajectory.ledger
    pairs = zip(one.trajectory.segments, two.trajectory.segments, strict=True)
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b in pairs
        for name in ("ids", "mask", "logprobs", "versions")
    )


async def test_a_fleet_gives_the_rollouts_of_a_local_run(tmp_path: Path) -> None:
    here = await Bed(tmp_path, 0).run()
    there = await Bed(tmp_path, 2).run()
    assert {name: r.reward for name, r in here.items()} == {name: r.reward for name, r in there.items()}
    assert sorted({r.reward for r in here.values()}) == [0.0, 1.0]  # type: ignore[type-var]
    assert all(same(here[name], there[name]) for name in here)


@pytest.mark.full
async def test_killed_and_frozen_nodes_cost_one_failure_each_and_no_rollout(tmp_path: Path) -> None:
    bed = Bed(tmp_path, 2, hold=asyncio.Event())
    assert bed.hold is not None
    async with bed.fleet() as (fleet, run):
        collecting = asyncio.create_task(bed.collect(fleet.attempts(run), limit=3))
        await until(lambda: bed.engine.in_flight == 4)
        first, second = pids(fleet)
        below = [*descendants(first), *descendants(second)]
        os.kill(first, signal.SIGKILL)
        os.kill(second, signal.SIGSTOP)
        await until(lambda: fleet.gauges()["nodes_lost"] == 2)
        await until(lambda: not alive([first, second, *below]))
        bed.hold.set()
        await collecting
        await until(lambda: fleet.gauges()["nodes"] == 2)
    assert not bed.sink.undecided
    assert {r.status for r in bed.sink.rollouts.values()} == {Status.OK}
    assert len(bed.sink.failed) == 4, "two attempts of each node are repeated"
    lines = [line for line in bed.said if line.startswith(LOST)]
    assert len(lines) == 2
    assert any("killed by signal 9" in line for line in lines)
    assert any("did not answer node.beat" in line for line in lines)


async def test_a_cancelled_attempt_leaves_its_tokens(tmp_path: Path) -> None:
    bed = Bed(tmp_path, 1, hold=asyncio.Event())
    partial: list[Rollout] = []
    async with bed.fleet() as (fleet, run):
        running = asyncio.create_task(fleet.attempts(run).run(spec(bed), lambda clock: None, partial.append))
        await until(lambda: bed.engine.in_flight and len(bed.engine.sent) == 2)
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()
        await until(lambda: not bed.engine.in_flight)
        assert bed.engine.aborted
        assert fleet.nodes[0].running == 0
    (rollout,) = partial
    ledger = rollout.trajectory.ledger
    assert ledger.captured
    assert ledger.balanced


async def test_a_defect_on_a_node_ends_the_run_and_names_the_node(tmp_path: Path) -> None:
    bed = Bed(tmp_path, 1)

    async def refuse(key: RequestKey) -> None:
        raise CaptureError("broken invariant")

    bed.engine.before = refuse
    async with bed.fleet() as (fleet, run):
        with pytest.raises(CaptureError, match=r"node p0: .*broken invariant"):
            await fleet.attempts(run).run(spec(bed))


async def test_failures_of_the_engine_are_infrastructure_failures(tmp_path: Path) -> None:
    bed = Bed(tmp_path, 1)
    bed.engine.fail = lambda key: EngineError("no weights")
    async with bed.fleet() as (fleet, run):
        rollout = await fleet.attempts(run).run(spec(bed))
    assert (rollout.status, rollout.reward) == (Status.INFRA_FAILED, None)
    assert "no weights" in rollout.error


async def test_a_node_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    bed = Bed(tmp_path, 2)
    bed.config = bed.config.model_copy(
        update={"model": bed.config.model.model_copy(update={"renderer": "no-such"})}
    )
    with pytest.raises(SetupError, match=r"^node p\d: .*no-such") as raised:
        async with bed.fleet():
            raise AssertionError("it started")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("other", ["0.0.0 (1f0eb279)", f"{insitu.__version__} (other files)"])
async def test_a_node_with_another_insitu_is_one_line(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed, there = Bed(tmp_path, 2), re.escape(code_identity())
    monkeypatch.setattr(controller_module, "code_identity", lambda: other)
    line = rf"^node p\d: .*has insitu {there}, the controller {re.escape(other)}"
    with pytest.raises(SetupError, match=line) as raised:
        async with bed.fleet():
            raise AssertionError("it started")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["-m", "not_here"], r"its process died \(exit status 1\): .*No module named not_here"),
        (["-c", "import time; time.sleep(60)"], "its process did not start listening"),
    ],
)  # fmt: skip
async def test_a_machine_where_no_node_starts_says_why_and_keeps_nothing(words: list[str], line: str) -> None:
    relay, before = NodeRelay(), set(descendants(os.getpid()))
    assert re.fullmatch(line, await relay.open(words, 3.0))
    await relay.close(0.0)
    await until(lambda: not alive(sorted(set(descendants(os.getpid())) - before)))


@pytest.mark.parametrize("address", ["", "here", "here:6379x", "here:99999", "ray://here:10001"])
def test_an_address_that_is_none_is_one_line(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = str(Path(__file__).parents[2] / "examples" / "fleet.toml")
    assert cli.main(["train", example, "--dry-run", f"fleet.address={address}"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"insitu: fleet: address {address!r} is neither auto nor HOST:PORT"
    ]


def test_without_ray_the_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_link, "ray", None)
    file = tmp_path / "fleet.toml"
    file.write_text("[fleet]\nkind = 'ray'\n[harness]\nagent = 'script'\nworkers = 1\n")
    assert cli.main(["doctor", "--fleet", str(file)]) != 0
    captured = capsys.readouterr()
    assert f"ray is not installed: {install_extra('ray')}" in captured.out + captured.err


def test_doctor_checks_every_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.toml"
    table = "[fleet]\nkind = 'processes'\nnodes = 2\n"
    file.write_text(f"{table}[harness]\nagent = 'script'\nworkers = 1\n")
    assert cli.main(["doctor", "--fleet", str(file)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["ok", "p0"], ["ok", "p1"]]
    assert last.startswith("nothing ")
    assert all("started script" in line for line in lines)
    file.write_text(f"{table}[model]\nrenderer = 'no-such'\n")
    assert cli.main(["doctor", "--fleet", str(file)]) == 1
    assert "unknown renderer 'no-such'" in capsys.readouterr().out
    file.write_text("")
    assert cli.main(["doctor", "--fleet", str(file)]) == 2
    assert "fleet.kind is none" in capsys.readouterr().err


CONTROLLER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from e2e.test_fleet import Bed, pids, spec, until
from insitu.shutdown import descendants

async def main():
    bed = Bed(Path({folder!r}), 2, hold=asyncio.Event())
    async with bed.fleet() as (fleet, run):
        attempts = [asyncio.create_task(fleet.attempts(run).run(spec(bed, n))) for n in range(4)]
        await until(lambda: bed.engine.in_flight == 4)
        below = [pid for node in pids(fleet) for pid in descendants(node)]
        print(*pids(fleet), *below, flush=True)
        await asyncio.wait(attempts)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
async def test_nodes_without_their_controller_leave_nothing(tmp_path: Path, number: int) -> None:
    program = CONTROLLER.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path))
    words = [sys.executable, "-c", program]
    controller = await asyncio.to_thread(subprocess.Popen, words, stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    try:
        line = await asyncio.to_thread(controller.stdout.readline)
        nodes = [int(pid) for pid in line.split()]
        assert len(nodes) > 4
        os.kill(controller.pid, number)
        await until(lambda: not alive(nodes))
    finally:
        controller.kill()
        controller.stdout.close()
        controller.wait(10)
