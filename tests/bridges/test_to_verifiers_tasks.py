"""Tasks and rewards of the real verifiers and OpenEnv (scripts/test-bridges), and a run on each."""

from __future__ import annotations

import asyncio
import importlib
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from env_server import start_app, stop
from environments import check_openenv, check_verifiers, config, taskset

from insitu.evaluate.run import RolloutOptions, collect_rollouts
from insitu.progress.plain import PlainView
from insitu.runtime.engine import Sampler
from insitu.storage.run_dir import read_store
from insitu.types import Message
from insitu_train.demo.scripted import ScriptedEngine

pytestmark = pytest.mark.bridge
GUESS = """
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class GuessAction(Action):
    number: int

class Seen(Observation):
    hint: str = ""

class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.wanted, self._state = -1, State()

    def list_splits(self):
        return ["train"]

    def num_tasks(self, split):
        return 3

    def reset(self, seed=None, episode_id=None, split="train", index=0, **keys):
        self.wanted = 4 * index
        return Seen(hint="between 0 and 9")

    def step(self, action, timeout_s=None, **keys):
        right = action.number == self.wanted
        return Seen(reward=right - 0.1, done=right)

    @property
    def state(self):
        return self._state

app = create_app(Guess, GuessAction, Seen, env_name="guess", max_concurrent_envs=8)
"""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "guess.py").write_text(GUESS)
    server, at = start_app(tmp_path, "guess:app")
    try:
        yield at
    finally:
        stop(server)


@pytest.fixture(scope="module")
def verifiers() -> None:
    """Import its tasksets; they need mcp 2, which the environment below has, and OpenEnv's fastmcp mcp 1."""
    pytest.importorskip("verifiers.v1")
    theirs = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "mcp"}
    below = Path(sysconfig.get_path("purelib"), "zz_base.pth").read_text().strip()
    sys.path.insert(0, below)
    try:
        for name in ("server.mcpserver", "client.sse", "client.stdio", "client.streamable_http", "types"):
            importlib.import_module(f"mcp.{name}")
    finally:
        sys.path.remove(below)
    importlib.import_module("verifiers.v1.tasksets")
    for name in [name for name in sys.modules if name.partition(".")[0] == "mcp"]:
        del sys.modules[name]
    sys.modules.update(theirs)


@pytest.mark.usefixtures("verifiers")
def test_verifiers_own_tasks_and_rewards(tmp_path: Path) -> None:
    check_verifiers(tmp_path)


def test_openenvs_own_tasks_and_rewards(url: str, tmp_path: Path) -> None:
    pytest.importorskip("openenv")
    check_openenv(url, tmp_path)


def rewards_of(
    tmp_path: Path, source: str, path: str, reply: str
) -> tuple[dict[str, Any], list[float | None]]:
    """Run a model that always says the same on every task of a source."""

    @asynccontextmanager
    async def sampler(config: Any, renderer: Any, log: Path, say: object) -> Any:
        async def check() -> None: ...

        policy = lambda ids, key: Message(role="assistant", text=reply)  # noqa: E731
        yield Sampler(engine=ScriptedEngine(renderer, policy, sampled=True), check=check)

    made = config(
        source, path, "harness.agent=single_turn", "harness.mode=fresh", "tasks.eval_share=1",
        "rollout.samples=1", "rollout.count=0", f"run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    summary = asyncio.run(collect_rollouts(made, PlainView(StringIO()), RolloutOptions(sampler=sampler)))
    with read_store(tmp_path / "run") as store:
        return dict(summary), sorted(outcome.reward for outcome in store.outcomes("rollout", 0))


@pytest.mark.usefixtures("verifiers")
def test_a_run_is_scored_by_verifiers(tmp_path: Path) -> None:
    with taskset(tmp_path, "run_of_a_test") as name:
        summary, rewards = rewards_of(tmp_path, "verifiers", name, "6")
    assert rewards == [0.5] * 7 + [2.5]
    assert summary["trust"] == {"standard": 8}


def test_a_run_is_scored_by_an_openenv_server(url: str, tmp_path: Path) -> None:
    pytest.importorskip("openenv")
    summary, rewards = rewards_of(tmp_path, "openenv", url, '{"number": 8}')
    assert rewards == pytest.approx([-0.1, -0.1, 0.9])
    assert summary["trust"] == {"weak": 3}
