"""Cancelling an attempt reaches all three: the engine's request, the agent's process and its sandbox."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import pytest

from insitu import stalls
from insitu.agents.base import Clock, ModelAccess, loop_time
from insitu.agents.pool import Sockets, WorkerPool
from insitu.attempt import AttemptExecutor, AttemptSpec, _AttemptState, _seal, ignore_start
from insitu.chat.model_files import read_folder
from insitu.chat.template import TemplateRenderer, template_renderer
from insitu.collect.breaker import Breaker
from insitu.collect.collector import Collector
from insitu.collect.options import CollectOptions
from insitu.engines.downtime import engine_down
from insitu.gateway.host_tools import HostTool
from insitu.gateway.request import GatewayConfig
from insitu.gateway.server import Gateway
from insitu.gateway.token_backend import TokenBackend
from insitu.stalls import stalled_s
from insitu.tasks.toy import ToySource
from insitu.types import (
    Ledger,
    Limits,
    Message,
    Outcome,
    RequestKey,
    Rollout,
    Status,
    Task,
    ToolCall,
    Trajectory,
    Tree,
    Verdict,
)
from insitu_train.demo.make_warm_start import write_renderer
from insitu_train.demo.scripted import ScriptedEngine
from tests.fakes.agents import command_harness
from tests.fakes.memory_sink import MemorySink
from tests.fakes.sandbox import FakeBackend
from tests.fakes.sandbox_run import FakeRun

SPEC = AttemptSpec(rollout_id="train/00001/000/00", task=ToySource(Limits()).tasks("train", 0, 1)[0], seed=1)


@dataclass
class World:
    """Real gateway, harness, pool and attempts; engine, sandbox and agent are fakes that can be looked at."""

    attempts: AttemptExecutor
    engine: ScriptedEngine
    backend: FakeBackend
    pool: WorkerPool
    hangs: asyncio.Event = field(default_factory=asyncio.Event)
    """The engine has a call that it will never answer."""
    ended: list[str] = field(default_factory=list)
    host_calls: list[tuple[str, int, Sequence[Mapping[str, object]]]] = field(default_factory=list)
    """What was kept of calls of host tools."""


REPORT = HostTool(name="report", description="Say it.", parameters={"type": "object"})
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@asynccontextmanager
async def world(tmp_path: Path, *, warm: bool, tools: tuple[HostTool, ...] = ()) -> AsyncIterator[World]:
    """With `tools`, the agent has one of its own, and the first reply calls the host tool `report`."""
    socket = tmp_path / "g"

    async def second_call_hangs(key: RequestKey) -> None:
        if key.turn > 0:
            made.hangs.set()
            await asyncio.sleep(3600)

    async def agent(run: FakeRun) -> int:
        """Asks twice, as an agent in a sandbox would."""
        url = run.env["OPENAI_BASE_URL"].split("/s/")[1]
        head = {"Authorization": f"Bearer {run.env['OPENAI_API_KEY']}"}
        messages = [{"role": "user", "content": "hello"}]
        try:
            async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as http:
                for _ in range(2):
                    body = {"messages": messages, "tools": [LOOK] if tools else []}
                    where = f"http://gateway/s/{url}/chat/completions"
                    async with http.post(where, json=body, headers=head) as reply:
                        messages += [(await reply.json())["choices"][0]["message"]]
                        messages += [{"role": "user", "content": "again"}]
        except asyncio.CancelledError:
            made.ended.append("killed")
            raise
        return 0

    async def judge(task: Task, tree: Tree) -> Verdict:
        return Verdict(outcome=Outcome.UNRESOLVED, reward=0.0, trust="strong")

    renderer = scripted_family(tmp_path)
    calls = (ToolCall(id="", name="report", arguments='{"sure": 1}'),) if tools else ()
    said = Message(role="assistant", text="done", tool_calls=calls)
    engine = ScriptedEngine(renderer, lambda ids, key: said, sampled=True, before=second_call_hangs)
    backend = FakeBackend({"agent": agent})
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(
            Gateway(TokenBackend(engine, renderer), GatewayConfig(tools=tools))
        )
        await stack.enter_async_context(gateway.listen_unix(socket))
        harness = command_harness(["agent"], backend, warm=warm)
        pool = WorkerPool(harness, 1, Sockets([socket]), strict=not warm)
        await stack.enter_async_context(pool)
        kept: list[tuple[str, int, Sequence[Mapping[str, object]]]] = []
        attempts = AttemptExecutor(gateway, pool, judge, keep_calls=lambda *call: kept.append(call))
        made = World(attempts, engine, backend, pool, host_calls=kept)
        yield made


def scripted_family(tmp_path: Path) -> TemplateRenderer:
    write_renderer(tmp_path / "family", "")
    return template_renderer(read_folder(tmp_path / "family"))


@pytest.mark.parametrize("warm", [False, True])
async def test_engine_agent_and_sandbox_stop_at_once_and_what_was_sampled_is_handed_over(
    tmp_path: Path, warm: bool
) -> None:
    async with world(tmp_path, warm=warm) as w:
        lost: list[Rollout] = []
        running = asyncio.create_task(w.attempts.run(SPEC, ignore_start, lost.append))
        async with asyncio.timeout(10.0):
            await w.hangs.wait()
        (sandbox,) = w.backend.open
        began_at = time.monotonic()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert time.monotonic() - began_at < 5.0, "it waited for a reply that is not needed"
        assert [key.turn for key in w.engine.aborted] == [1]
        assert w.engine.in_flight == 0
        assert w.ended == ["killed"]
        assert sandbox.closed
        assert w.backend.open == []
        (rollout,) = lost
        assert (rollout.status, rollout.reward, rollout.error) == (Status.INFRA_FAILED, None, "cancelled")
        ledger = rollout.trajectory.ledger
        assert ledger.captured > 0, "the first reply was sampled"
        assert ledger.balanced
        # the place is free again: the next attempt gets a sandbox of its own
        w.hangs.clear()
        after = asyncio.create_task(w.attempts.run(SPEC, ignore_start))
        async with asyncio.timeout(10.0):
            await w.hangs.wait()
        after.cancel()
        await asyncio.wait([after])
        assert len(w.backend.sandboxes) == 2


async def test_the_host_calls_of_a_cancelled_try_are_kept(tmp_path: Path) -> None:
    async with world(tmp_path, warm=False, tools=(REPORT,)) as w:
        running = asyncio.create_task(w.attempts.run(replace(SPEC, attempt=3), ignore_start))
        async with asyncio.timeout(10.0):
            await w.hangs.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        ((rollout_id, attempt, (call,)),) = w.host_calls
        assert (rollout_id, attempt, call["name"]) == (SPEC.rollout_id, 3, "report")
        assert call["arguments"] == '{"sure":1}'


class Quiet:
    def rollout_started(self, rollout_id: str) -> None: ...

    def rollout_finished(self, rollout_id: str, *, reward: float | None, tokens: int) -> None: ...


async def test_a_version_on_its_way_stops_what_it_makes_too_old_in_engine_agent_and_sandbox(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, warm=True) as w:
        sink = MemorySink()
        options = CollectOptions(seed=1, group_size=1, max_staleness=1, total=1, stall_timeout_s=9.0)
        collector = Collector(w.attempts, sink, Quiet(), Breaker(), options, lambda number: SPEC.task)
        async with asyncio.timeout(10.0), collector.open() as c:
            await w.hangs.wait()
            (sandbox,) = w.backend.open
            c.version_pending(2)
            await asyncio.sleep(0.5)
            assert w.engine.in_flight == 0
            assert w.ended == ["killed"]
            assert sandbox.closed
            assert sink.discarded == {SPEC.rollout_id: "stale"}
            assert sink.lost["stale"] > 0
            assert len(sink.planned) == 1, "nothing begins before the version is live"
            w.hangs.clear()
            c.version_published(1)
            await w.hangs.wait()
            assert sink.started[1:] == [("train/00002/000/00", 1, 1)]


async def test_a_cancellation_during_the_seal_loses_no_token() -> None:
    sealed = Trajectory(segments=(), turns=(), ledger=Ledger(captured=3, trained=3))

    class Slow:
        public_id = secret = ""
        left = False

        async def seal(self, deadline_s: float) -> Trajectory:
            await asyncio.sleep(0.05)
            return sealed

    under = _AttemptState(start=0.0, began_s=0.0)
    sealing = asyncio.create_task(_seal(Slow(), 10.0, under))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    sealing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sealing
    assert under.trajectory is sealed


@pytest.mark.slow
async def test_time_without_an_engine_is_not_the_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls._ticker, "_stalled", 60.0)  # stalls before the session are not its own
    async with world(tmp_path, warm=False) as w:
        down = list[float]()

        async def mended(key: RequestKey) -> None:
            if key.turn > 0:
                began = loop_time()
                with engine_down():
                    await asyncio.sleep(2.5)
                down.append(loop_time() - began)

        w.engine.before = mended
        task, heard = replace(SPEC.task, limits=Limits(wall_s=1.0)), list[Clock]()
        stalled = stalled_s()

        def on_start(clock: Clock = loop_time, /) -> None:
            heard.append(clock)
            assert clock() == pytest.approx(loop_time(), abs=0.2)

        rollout = await w.attempts.run(replace(SPEC, task=task), on_start)
        assert (rollout.status, len(rollout.trajectory.turns), rollout.error) == (Status.OK, 2, "")
        (left_out,) = [loop_time() - clock() for clock in heard]
        # On a busy machine the engine is away for longer, and stalls are left out too.
        assert down[0] - 0.1 <= left_out <= down[0] + stalled_s() - stalled + 0.4


@pytest.mark.slow
async def test_an_agent_that_is_stopped_while_there_is_no_engine_has_not_failed(tmp_path: Path) -> None:
    async with world(tmp_path, warm=False) as w:

        async def gone(key: RequestKey) -> None:
            if key.turn > 0:
                with engine_down():
                    await asyncio.sleep(3600)

        w.engine.before = gone
        w.attempts._access = lambda session, limits: ModelAccess(  # type: ignore[method-assign]
            public_id=session.public_id, secret=session.secret
        )
        task = replace(SPEC.task, limits=Limits(wall_s=1.0))
        rollout = await w.attempts.run(replace(SPEC, task=task))
        assert (rollout.status, rollout.reward) == (Status.INFRA_FAILED, None)
        assert rollout.error == "the engine was down when the call was stopped"
