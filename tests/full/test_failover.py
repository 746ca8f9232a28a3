"""A docker daemon that ends while a run uses it: the fall-back takes over, and no agent is blamed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path

import pytest

from insitu.chat.renderer import ChatRenderer
from insitu.config import Config, load_config
from insitu.errors import SetupError
from insitu.evaluate.run import RolloutOptions, collect_rollouts
from insitu.progress.plain import PlainView
from insitu.runtime.engine import Sampler
from insitu.storage.run_dir import read_store
from insitu.tasks.toy import ToySource
from insitu.types import IntArray, Limits, Message, RequestKey
from insitu_train.demo.demonstrator import call, edit
from insitu_train.demo.scripted import ScriptedEngine
from tests.fakes.docker_daemon import docker_daemon

pytestmark = pytest.mark.full
IMAGE = "insitu-sandbox:bookworm"
TASKS = 4


@pytest.fixture
def daemon() -> Iterator[int]:
    """The process id of a docker daemon of this test's own, with an image."""
    try:
        with docker_daemon(own=True) as host:
            script = Path(__file__).parents[2] / "scripts" / "docker-base"
            made = subprocess.run([str(script), IMAGE], capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"no docker daemon: {made.stderr.strip()}")
            yield int((Path(host.removeprefix("unix://")).parent / "pid").read_text())
    except SetupError as error:
        pytest.skip(str(error))


def test_a_run_whose_docker_daemon_ends_goes_on_in_local_sandboxes(daemon: int, tmp_path: Path) -> None:
    source = ToySource(Limits())
    problems = [source.problem(task) for task in source.tasks("eval", 0, TASKS)]
    ended = False

    def policy(ids: IntArray, key: RequestKey) -> Message:
        """Solves every task; the daemon ends when the second one is under way."""
        nonlocal ended
        group = int(key.rollout_id.split("/")[2])
        if group == 1 and key.turn == 1 and not ended:
            os.kill(daemon, signal.SIGTERM)
            ended = True
        p = problems[group]
        done = Message(role="assistant", text="done")
        return [call("read", path=p.path), edit(p, p.fault.old, p.fault.new), done][key.turn]

    @asynccontextmanager
    async def sampler(
        config: Config, renderer: ChatRenderer, log: Path, say: object
    ) -> AsyncIterator[Sampler]:
        async def check() -> None:
            return None

        yield Sampler(engine=ScriptedEngine(renderer, policy, sampled=True), check=check)

    config = load_config(
        None,
        ["harness.agent=script", "harness.workers=2", f"rollout.count={TASKS}", "limits.wall_s=30",
         "limits.max_call_tokens=512", "model.max_context_tokens=8192", f"run.dir={tmp_path / 'run'}",
         "sandbox.backend=docker", "sandbox.fallback=local", f"sandbox.image={IMAGE}"],
    )  # fmt: skip
    shown = StringIO()
    summary = asyncio.run(collect_rollouts(config, PlainView(shown), RolloutOptions(sampler=sampler)))
    assert ended
    # Whatever was under way when the daemon ended was tried again elsewhere: no rollout earns 0 for it.
    assert (summary["graded"], summary["verdict"]["resolved"]) == (TASKS, TASKS)
    assert summary["status"]["ok"] == TASKS
    ledger = summary["ledger"]
    assert sum(ledger["excluded"].values()) == ledger["captured"]
    downs = [line for line in shown.getvalue().splitlines() if "docker sandbox is down" in line]
    assert len(downs) <= 1
    assert all("sandboxes come from local" in line for line in downs)
    with read_store(tmp_path / "run") as store:
        assert {outcome.reward for outcome in store.outcomes("rollout", 0)} == {1.0}
