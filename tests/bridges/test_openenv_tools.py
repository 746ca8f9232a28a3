"""Agents that act on a real OpenEnv environment of MCP tools, each attempt in a session of its own."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from env_server import start_app, stop

from insitu.config import load_config
from insitu.errors import ConfigError
from insitu.evaluate.run import RolloutOptions, collect_rollouts
from insitu.progress.plain import PlainView
from insitu.runtime.engine import Sampler
from insitu.storage.run_dir import read_store
from insitu.types import IntArray, Message, RequestKey, Status, ToolCall
from insitu_train.demo.scripted import ScriptedEngine

pytestmark = [pytest.mark.bridge, pytest.mark.slow, pytest.mark.filterwarnings("default")]

DOORS = """
import os
from fastmcp import FastMCP
from openenv.core.env_server import MCPEnvironment, State, create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server import Observation

class Doors(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("doors")
        self.wanted, self.left = 0, 3

        @server.tool
        def look(room: str) -> str:
            "Look around in a room: hall or attic."
            return f"A sign in the {room} says: door {self.wanted}."

        @server.tool
        def read(path: str) -> str:
            "Read a sign; agents have a tool of this name too."
            return "nothing here"

        @server.tool
        def open_door(door: int) -> str:
            "Open a door."
            if door == 99:
                os._exit(7)
            self.opened = door
            return "It is open." if door == self.wanted else "It is locked."

        super().__init__(server)
        self._state, self.opened = State(), None

    def reset(self, seed=None, episode_id=None, door=1, **keys):
        self.wanted, self.left, self.opened = door, 3, None
        return Observation(done=False, metadata={})

    def _judged(self, seen):
        if self.opened is not None:
            right = self.opened == self.wanted
            seen.reward, seen.done, self.opened = (1.0 if right else -0.25), right, None
        return seen

    def step(self, action, timeout_s=None, **keys):
        return self._judged(super().step(action, timeout_s=timeout_s, **keys))

    async def step_async(self, action, timeout_s=None, **keys):
        return self._judged(await super().step_async(action, timeout_s=timeout_s, **keys))

    def _step_impl(self, action, timeout_s=None, **keys):
        raise ValueError(f"unknown action {action}")

    @property
    def state(self):
        return self._state

app = create_app(Doors, CallToolAction, CallToolObservation, env_name="doors", max_concurrent_envs=16)
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[str]:
    """A file with three tasks of a running server."""
    (tmp_path / "doors.py").write_text(DOORS)
    server, at = start_app(tmp_path, "doors:app")
    try:
        path = tmp_path / "doors.toml"
        path.write_text(
            f'url = "{at}"\nprompt = "Find the right door and open it."\n'
            "resets = [{ door = 4 }, { door = 5 }, { door = 6 }]\n"
        )
        yield str(path)
    finally:
        stop(server)


def run_of(
    tmp_path: Path, tasks: str, agent: str, policy: Any, *more: str
) -> tuple[list[tuple[Status, float | None, str]], ScriptedEngine, Any]:
    """Outcomes of a run in which a scripted policy acts inside a real agent, its engine and renderer."""
    made: dict[str, Any] = {}

    @asynccontextmanager
    async def sampler(config: Any, renderer: Any, log: Path, say: object) -> Any:
        async def check() -> None: ...

        def reply(ids: IntArray, key: RequestKey) -> Message:
            return policy(renderer.decode(ids), key)

        made.update(engine=ScriptedEngine(renderer, reply, sampled=True), renderer=renderer)
        yield Sampler(engine=made["engine"], check=check)

    config = load_config(
        None,
        [
            "tasks.source=openenv", f"tasks.path={tasks}", "reward.function=openenv",
            f"harness.agent={agent}", "harness.workers=2", "tasks.eval_share=1", "rollout.count=0",
            "collect.attempts=1", "model.max_context_tokens=131072", f"run.dir={tmp_path / 'run'}",
            *more,
        ],
    )  # fmt: skip
    asyncio.run(collect_rollouts(config, PlainView(StringIO()), RolloutOptions(sampler=sampler)))
    with read_store(tmp_path / "run") as store:
        found = [(o.status, o.reward, o.error) for o in store.outcomes("rollout", 0)]
    return found, made["engine"], made["renderer"]


def call(key: RequestKey, name: str, **arguments: Any) -> Message:
    made = ToolCall(id=f"call{key.turn}", name=name, arguments=json.dumps(arguments))
    return Message(role="assistant", text="", tool_calls=(made,))


def look_and_open(text: str, key: RequestKey) -> Message:
    """Look, read the number in the observation, open a wrong door, then the right one."""
    seen = re.findall(r"says: door (\d)", text)
    if not seen:
        return call(key, "look", room="attic")
    if "It is locked." not in text:
        return call(key, "open_door", door=0)
    if "It is open." not in text:
        return call(key, "open_door", door=int(seen[-1]))
    return Message(role="assistant", text="It is open.")


@pytest.mark.parametrize(
    "agent",
    ["script", "pi", *(pytest.param(one, marks=pytest.mark.full) for one in ("claude_code", "codex"))],
)
def test_an_agent_acts_on_the_environment_by_its_tools(tmp_path: Path, tasks: str, agent: str) -> None:
    found, engine, renderer = run_of(tmp_path, tasks, agent, look_and_open)
    assert found == [(Status.OK, 0.75, "")] * 3
    last = [renderer.decode(one.ids) for one in engine.sent if one.key.turn == 3]
    assert len(last) == 3
    for (
        whole
    ) in last:  # the model reads observations, and neither rewards nor what its agent says of the tool
        text = whole[whole.rindex("Find the right door") :]
        assert "The episode is over" in text
        assert "0.25" not in text
        assert "reward" not in text
        assert not re.search(r"(?i)unknown tool|no such tool|not found", text)
    # these agents have a tool `read` of their own: the environment's has another name
    assert ("env_read" in last[0]) == (agent in ("script", "pi"))


def test_an_agent_that_takes_no_step_earns_nothing_and_wrong_arguments_take_none(
    tmp_path: Path, tasks: str
) -> None:
    def wrong(text: str, key: RequestKey) -> Message:
        return call(key, "open_door", door="four") if key.turn == 0 else Message(role="assistant", text="So.")

    found, engine, renderer = run_of(tmp_path, tasks, "script", wrong)
    assert [(status, reward) for status, reward, _ in found] == [(Status.OK, 0.0)] * 3
    text = renderer.decode(next(one for one in engine.sent if one.key.turn == 1).ids)
    assert "is not of type" in text


def test_an_environment_that_dies_is_infrastructure(tmp_path: Path, tasks: str) -> None:
    def fatal(text: str, key: RequestKey) -> Message:
        return call(key, "open_door", door=99) if key.turn == 0 else Message(role="assistant", text="So.")

    found, _, _ = run_of(tmp_path, tasks, "script", fatal)
    assert {status for status, _, _ in found} == {Status.INFRA_FAILED}
    assert all("environment" in error or "reset" in error for _, _, error in found)


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        ("single_turn", "harness.agent single_turn: it offers the model no tools"),
        ("terminus", "no tools"),
        ("aider", "no tools"),
    ],
)
def test_an_agent_without_tools_is_refused_before_anything_starts(
    tmp_path: Path, tasks: str, agent: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=f"is an environment that agents act on by tools: .*{why}"):
        run_of(tmp_path, tasks, agent, look_and_open)
