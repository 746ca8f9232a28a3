"""Hosts are killed, and their links cut, while they train: the run goes on and trains every step once."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hosts_lab import KEY, agent, free_port, ranks_below
from test_distributed import CONFIG
from train_lab import sampled_groups, small_model

from insitu_train.channel.host_link import SECRET
from insitu_train.embedded.model import save_model
from insitu_train.learner.client import Learner
from insitu_train.learner.process import LearnerSpec
from insitu_train.learner.supervisor import LearnerSupervisor
from insitu_train.plan.step import PlanConfig, StepPlan, plan_step
from insitu_train.recovery import CommittedStep
from insitu_train.served_batches import NoEngine

pytestmark = [pytest.mark.slow, pytest.mark.full]

LOSSES = int(os.environ.get("INSITU_HOST_LOSSES", "4"))
"""Losses in the test, half of them kills, half of them cuts."""


class Cable:
    """Carries one address to another until it is cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    near.close()
                    continue
                self._ends += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Run:
    """The committed steps of a run, as its store has them."""

    def __init__(self, learner: Learner, folder: Path, say: Callable[[str], None]) -> None:
        self.plans: list[StepPlan] = []
        self.ranks: list[int] = []
        self._weights: list[str] = []
        self._folder, self._saved = folder, 0
        self.supervisor = LearnerSupervisor(learner, NoEngine(), self._committed, restarts=9, say=say)

    async def step(self, plan: StepPlan) -> None:
        """Train, commit, and save every third step."""
        trained = await self.supervisor.train(plan)
        assert trained.result.version == len(self.plans) + 1, "a step is trained once"
        assert trained.result.tokens == plan.tokens
        self.ranks.append(trained.result.ranks)
        self.plans.append(plan)
        self._weights.append(trained.weights)
        await self.supervisor.publish(trained)
        if len(self.plans) % 3 == 0:
            await self.supervisor.save(self._folder / f"step-{len(self.plans)}")
            assert not await self.supervisor.written()
            self._saved = len(self.plans)

    def _committed(self) -> tuple[Path | None, list[CommittedStep]]:
        after = range(self._saved, len(self.plans))
        steps = [
            CommittedStep(step=n + 1, plan=lambda n=n: self.plans[n], version=n + 1, weights=self._weights[n])
            for n in after
        ]
        return (self._folder / f"step-{self._saved}" if self._saved else None), steps


async def test_killed_and_cut_hosts_cost_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, KEY)
    save_model(small_model(0), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    port, log, lines = free_port(), tmp_path / "agents.log", list[str]()
    cable = Cable(port)
    train = CONFIG.changed(
        ranks=f"1+2@127.0.0.1:{port}", threads=1, step_timeout_s=80.0, max_staleness=99, max_logprob_gap=100.0
    )
    spec = LearnerSpec(
        model=tmp_path / "model", train=train, samples=False, log=tmp_path / "learner.log",
        start_deadline_s=120.0,
    )  # fmt: skip
    plan = plan_step(sampled_groups(small_model(0)), PlanConfig(token_budget=120, ranks=3))
    with ExitStack() as stack:
        agents = [
            stack.enter_context(agent(at, log=log, name=name))
            for at, name in ((port, "killed"), (cable.port, "cut"))
        ]
        async with Learner.start(spec) as learner:
            run = Run(learner, tmp_path, lines.append)
            await run.supervisor.begin()
            for loss in range(LOSSES):
                await run.step(plan)
                step = asyncio.create_task(run.step(plan))
                await asyncio.sleep(0.01 * (loss % 5))  # another moment of the step each time
                if loss % 2:
                    cable.cut()
                    await step
                    continue
                agents[0].kill()
                agents[0].wait()
                until = time.monotonic() + 20
                while ranks_below(agents[0].pid):
                    assert time.monotonic() < until
                agents[0] = stack.enter_context(agent(port, log=log, name=f"killed-{loss}"))
                await step
            for _ in range(2):
                await run.step(plan)
            assert run.supervisor.restarts >= LOSSES // 2
            assert learner.version == len(run.plans)
    cable.close()
    print(f"{LOSSES} losses, {len(run.plans)} steps, {run.supervisor.restarts} restarts")
    print("\n".join(lines))
    assert any("is lost" in line or "another rank died" in line for line in lines), lines


async def test_a_host_that_comes_back_takes_part_after_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, KEY)
    save_model(small_model(0), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    port, log, lines = free_port(), tmp_path / "agents.log", list[str]()
    train = CONFIG.changed(
        ranks=f"1+1@127.0.0.1:{port}", threads=1, step_timeout_s=80.0, max_staleness=99, max_logprob_gap=100.0
    )
    spec = LearnerSpec(
        model=tmp_path / "model", train=train, samples=False, log=tmp_path / "learner.log",
        start_deadline_s=120.0,
    )  # fmt: skip
    plan = plan_step(sampled_groups(small_model(0)), PlanConfig(token_budget=120, ranks=2))
    with ExitStack() as stack:
        first = stack.enter_context(agent(port, log=log))
        async with Learner.start(spec) as learner:
            run = Run(learner, tmp_path, lines.append)
            await run.supervisor.begin()
            await run.step(plan)
            first.kill()
            first.wait()
            await run.step(plan)  # alone, after waiting for a host
            assert run.ranks == [2, 1]
            stack.enter_context(agent(port, log=log))
            until = time.monotonic() + 60
            while not learner.waiting:
                assert time.monotonic() < until
                await run.step(plan)
            await run.supervisor.take_in()
            await run.step(plan)
            assert run.ranks[-1] == 2, lines
            assert run.supervisor.restarts == 1, "a life that began for a host's sake is no restart"
            await run.supervisor.take_in()  # no host waits
            assert learner.version == len(run.plans)
    assert sum("which waited" in line for line in lines) == 1, lines
