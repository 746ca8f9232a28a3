"""How many sessions can one controller have? Real controller code, simulated machines, virtual time.

Run `python -m benchmarks scale --json`. The collector, the fleet with its frames and its engine calls, the
sink and SQLite run as in a run ahead of the trainer; the nodes answer in virtual time with rollouts of 20
turns, and their own work is timed apart and subtracted. A session makes its calls at its end, so that only
rollouts that finish are paid for. `rollouts_per_s`: finished rollouts per CPU second of the controller, which
is one thread. `cores`: its CPU time at 200 finished rollouts per second. `gib`: its resident memory with all
sessions open. `commit_s`: wall time of the SQLite commit of a step of 4,096 rollouts. Not in it: the engine's
HTTP, planning, and the learner.

`--cluster` prints the arithmetic of 64 hosts and a 70B model (benchmarks/_cluster.py) for docs/scale.md, with
bytes measured here and speeds of the record of this benchmark.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import re
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson

from benchmarks._arguments import Arguments, count
from benchmarks._cluster import Bytes, Cluster, Line, lines, predicted
from insitu.attempt import AttemptSpec
from insitu.collect.breaker import Breaker
from insitu.collect.collector import Collector
from insitu.collect.options import CollectOptions
from insitu.collect.store_sink import StoreSink
from insitu.config import load_config
from insitu.engines.base import EngineInfo, Receipt
from insitu.errors import EngineError
from insitu.storage.run_dir import RunDir
from insitu.tasks.base import UNTESTED
from insitu.tasks.toy import ToySource
from insitu.types import (
    Generation,
    GradingPlan,
    IntArray,
    Ledger,
    Limits,
    RequestKey,
    Rollout,
    SamplingParams,
    Segment,
    Task,
    Trajectory,
    Turn,
)
from insitu.types.codec import VALUES
from insitu_fleet.controller import Fleet
from insitu_fleet.values import pack
from insitu_train.alarms import InfraFailureRate
from insitu_train.channel.rpc import Frame, Handler, RpcPeer, encode
from insitu_train.learner.serialization import encode_plan
from insitu_train.plan.step import PlanConfig, PlanRow, StepPlan, pack_rows
from tests.fakes.attempts import fake_rollout
from tests.fakes.virtual_time import run_virtual

T = TypeVar("T")
TURNS, NEW, SAMPLED = 20, 400, 100
"""Turns of a rollout, and tokens that each adds to the context and samples."""
GROUP = 8
STEP = 4096
ROW = 32_768
"""Tokens of a long row of most steps."""
RECORDS = Path(__file__).parent / "results"
RATE = 200
LIFE_S, APART_S = 60.0, 0.01
CALL = re.compile(rb'"op":"([a-z.]+)","id":(\d+)\}')


class Inline(concurrent.futures.ThreadPoolExecutor):
    """Runs at once what would go to a thread: there are none in virtual time."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **options: Any) -> concurrent.futures.Future[T]:
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        done.set_result(fn(*args, **options))
        return done


class Answering:
    """An engine that has every reply ready."""

    info = EngineInfo(name="ready", max_context_tokens=1 << 17)
    receipt = Receipt(version=0, checksum="")
    reply = Generation(
        ids=np.arange(SAMPLED, dtype=np.int32),
        logprobs=np.full(SAMPLED, -0.5, dtype=np.float32),
        finish="stop",
        version_runs=((0, 0),),
    )

    async def generate(self, ids: IntArray, params: SamplingParams, key: RequestKey) -> Generation:
        return self.reply

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


def rollout_of(spec: AttemptSpec) -> Rollout:
    """A rollout of 20 turns in one segment."""
    context, ids = np.arange(NEW, dtype=np.int32), Answering.reply.ids
    turns = tuple(
        Turn(
            index=n, parent=n - 1, context_ids=context, ids=ids, logprobs=Answering.reply.logprobs,
            finish="stop", version_runs=((0, 0),),
        )
        for n in range(TURNS)
    )  # fmt: skip
    mask = np.tile(np.arange(NEW + SAMPLED) >= NEW, TURNS)
    segment = Segment(
        rollout_id=spec.rollout_id, index=0, kind="sampled", label="final",
        ids=np.arange(len(mask), dtype=np.int32), mask=mask,
        logprobs=np.where(mask, np.float32(-0.5), np.float32(0)), versions=np.zeros(len(mask), np.int32),
    )  # fmt: skip
    ledger = Ledger(captured=TURNS * SAMPLED, trained=TURNS * SAMPLED)
    return replace(
        fake_rollout(spec, float(hash(spec.rollout_id) % 2)),
        trajectory=Trajectory(segments=(segment,), turns=turns, ledger=ledger),
    )


class SimulatedLink:
    """A node in this process whose own time is counted apart; implements `runtime.fleet.links.Link`."""

    spent_s = 0.0
    """CPU time of all nodes."""
    specs: Mapping[str, AttemptSpec] = {}
    finished = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self._peer: RpcPeer
        self._numbers = iter(range(1, 1 << 30))
        self._attempts: list[asyncio.Task[None]] = []

    async def open(self, handlers: Mapping[str, Handler], deadline_s: float) -> RpcPeer:
        self._peer = RpcPeer(self.name, handlers)
        self._peer.attach(self._arrive)
        return self._peer

    async def explain(self, error: EngineError) -> EngineError:
        return error

    async def close(self, *, lost: bool) -> None:
        self._peer.end("closed")
        for task in self._attempts:
            task.cancel()

    def _arrive(self, data: bytes) -> None:
        began = time.process_time()
        found = CALL.search(data)
        if found is not None and found[1] == b"attempt.run":
            rollout_id = re.search(rb'"AttemptSpec","([^"]+)"', data)
            name = rollout_id[1].decode() if rollout_id else ""
            self._attempts.append(asyncio.create_task(self._attempt(int(found[2]), name)))
        elif found is not None and found[1] != b"cancel":
            beat = encode({"lags": [], "sessions": [], "id": int(found[2])})
            asyncio.get_running_loop().call_soon(self._peer.feed, beat)
        SimulatedLink.spent_s += time.process_time() - began

    async def _attempt(self, number: int, rollout_id: str) -> None:
        began = time.process_time()
        ready = encode({"key": [rollout_id, 1], "op": "attempt.ready", "id": next(self._numbers)})
        SimulatedLink.spent_s += time.process_time() - began
        self._peer.feed(ready)
        _, step, group, _ = rollout_id.split("/")
        await asyncio.sleep(LIFE_S + APART_S * (1000 * (int(step) - 1) + int(group)))
        began = time.process_time()
        calls = _calls(rollout_id, self._numbers)
        spec = AttemptSpec(rollout_id=rollout_id, task=TASK, seed=0)
        frame: Frame = pack(rollout_of(spec), None, {}, ())
        answer = encode({**frame.meta, "id": number}, frame.arrays)
        SimulatedLink.spent_s += time.process_time() - began
        for call in calls:
            self._peer.feed(call)
            await asyncio.sleep(0.1)
        self._peer.feed(answer)
        SimulatedLink.finished += 1


def _calls(rollout_id: str, numbers: Iterator[int]) -> list[bytes]:
    """Return the frames of a rollout's engine calls."""
    prompt, calls = np.arange(TURNS * (NEW + SAMPLED), dtype=np.int32), []
    for turn in range(TURNS):
        key = RequestKey(seed=0, rollout_id=rollout_id, turn=turn)
        params = SamplingParams(max_tokens=512, stop_ids=frozenset((1,)))
        meta = {"op": "engine.generate", "id": next(numbers), "call": turn}
        ids = prompt[: (turn + 1) * (NEW + SAMPLED)]
        calls.append(encode(meta, VALUES.pack((ids, params, key))))
    return calls


TASK = Task(
    id="t", prompt="p" * 2000, files={}, grading=GradingPlan(runner=UNTESTED), limits=Limits(wall_s=1e6)
)


class Silent:
    """Implements `collect.options.RolloutObserver`."""

    def rollout_started(self, rollout_id: str) -> None: ...

    def rollout_finished(self, rollout_id: str, *, reward: float | None, tokens: int) -> None: ...


def _gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


async def _simulated(sessions: int, machines: int, groups: int, folder: Path) -> dict[str, Any]:
    asyncio.get_running_loop().set_default_executor(Inline())
    places = -(-sessions // machines)
    config = load_config(
        None,
        ["fleet.kind=processes", f"fleet.nodes={machines}", f"harness.workers={places}", f"run.dir={folder}"],
    )
    links = [SimulatedLink(f"m{number}") for number in range(machines)]
    fleet = Fleet(config, links, Answering(), ToySource(Limits()), ("none", ""), print)
    await fleet.start()
    options = CollectOptions(
        seed=0, group_size=GROUP, groups=groups, total=1 << 30, group_deadline_s=1e5, stall_timeout_s=1e6,
        max_staleness=-(-sessions // (GROUP * groups)), replace_degenerate=0.0, whole=False,
    )  # fmt: skip
    with RunDir.create(config) as run, run.store() as store:
        sink = StoreSink(store, InfraFailureRate(0.0))
        collector = Collector(
            fleet.attempts(run), sink, Silent(), Breaker(), options,
            lambda number: replace(TASK, id=str(number)),
        )  # fmt: skip
        async with collector.open():
            while sum(node.running for node in fleet.nodes) < sessions:  # noqa: ASYNC110
                await asyncio.sleep(1.0)
            gib, open_sessions = _gib(), sum(node.running for node in fleet.nodes)
            spent, began, finished = SimulatedLink.spent_s, time.process_time(), SimulatedLink.finished
            batch = await collector.next_batch()
            cpu_s = time.process_time() - began - (SimulatedLink.spent_s - spent)
            done = SimulatedLink.finished - finished
            names = [r.id for group in batch.groups for r in group.rollouts]
            began = time.perf_counter()
            store.assign(1, names)
            tokens = len(names) * TURNS * SAMPLED
            store.commit_step(1, {}, "", "", Ledger(captured=tokens, trained=tokens), trained=names)
            commit_s = time.perf_counter() - began
            await fleet.close()
            raise _Done(
                {
                    "sessions": open_sessions,
                    "cores": round(RATE * cpu_s / done, 2),
                    "gib": round(gib, 2),
                    "rollouts_per_s": round(done / cpu_s, 1),
                    "commit_s": round(commit_s, 2),
                    "stored_kb": round(_size(run.path) / len(names) / 1e3, 1),
                }
            )


def _size(folder: Path) -> int:
    """Return the bytes of a run's store."""
    return sum(file.stat().st_size for file in folder.glob("*.sqlite*"))


class _Done(Exception):
    """Carries the figures; raised to leave the collector without waiting for its sessions."""

    def __init__(self, figures: dict[str, Any]) -> None:
        super().__init__("measured")
        self.figures = figures


def simulated(sessions: int, machines: int, rollouts: int) -> dict[str, Any]:
    """Measure in virtual time."""
    with tempfile.TemporaryDirectory(prefix="insitu-bench-") as place:
        try:
            return run_virtual(_simulated(sessions, machines, rollouts // GROUP, Path(place, "run")))
        except _Done as done:
            return done.figures


def measured_bytes(record: Mapping[str, Any]) -> Bytes:
    """Return sizes of what is sent and stored. record: a result of this benchmark."""
    spec = AttemptSpec(rollout_id="train/1/0/0", task=TASK, seed=0)
    frame = encode({"id": 1}, pack(rollout_of(spec), None, {}, ()).arrays)
    calls = sum(len(call) for call in _calls(spec.rollout_id, itertools.count()))
    ids = np.arange(TURNS * (NEW + SAMPLED), dtype=np.int32)
    row = PlanRow(
        group_id="1/0", rollout_id=spec.rollout_id, segment=0, advantage=1.0, weight=1.0, ids=ids,
        mask=ids > 0,
        logprobs=np.zeros(len(ids), np.float32), versions=np.zeros(len(ids), np.int32),
    )  # fmt: skip
    rows = tuple(replace(row, rollout_id=f"train/1/0/{n}") for n in range(GROUP))
    tokens = GROUP * len(ids)
    batches = pack_rows(rows, PlanConfig())
    plan = StepPlan(rows=rows, batches=batches, ledger=Ledger(captured=tokens, trained=tokens), groups=1)
    return Bytes(
        plan=len(encode({"op": "step"}, encode_plan(plan))) / tokens,
        frame=len(frame),
        calls=calls,
        store=1e3 * simulated(64, 4, 64)["stored_kb"],
        per_s=record["rollouts_per_s"],
        commit_s=record["commit_s"],
    )


def cluster(c: Cluster) -> list[Line]:
    """Return the table of a cluster."""
    record = orjson.loads((RECORDS / "scale.json").read_bytes())["result"]
    memory, parameters = {}, 0
    for shards in (c.gpus, c.shards):
        parameters, gb = predicted(shards, ROW)
        memory[f"one copy on {shards} ranks, a row of {ROW:,} tokens"] = gb
    for parts in (1, c.trainers * c.gpus):
        _, gb = predicted(c.shards, c.row, parts)
        by = "alone" if parts == 1 else f"shared by {parts} ranks"
        memory[f"one copy on {c.shards} ranks, a row of {c.row:,} tokens {by}"] = gb
    return list(lines(c, measured_bytes(record), parameters, memory))


def main(argv: list[str]) -> int:
    """Return 0: the figures are to be read."""
    parser = Arguments(prog="benchmarks scale", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--sessions", type=count, default=10_000)
    parser.add_argument("--machines", type=count, default=100)
    parser.add_argument("--rollouts", type=count, default=STEP, help="rollouts of the step that is measured")
    parser.add_argument("--cluster", action="store_true", help="print the arithmetic of many hosts instead")
    options = parser.parse_args(argv)
    if options.cluster:
        table = [str(line) for line in cluster(Cluster())]
        print(orjson.dumps({"lines": table}).decode() if options.json else "\n".join(table))
        return 0
    result = simulated(options.sessions, options.machines, options.rollouts)
    print(
        orjson.dumps(result).decode() if options.json else "\n".join(f"{k}: {v}" for k, v in result.items())
    )
    return 0
