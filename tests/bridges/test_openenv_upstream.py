"""Environments of OpenEnv's own repository, by their own servers, acted on by an agent of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from env_server import start_app, stop
from test_openenv_tools import call, run_of

from insitu.types import Message, RequestKey, Status

SOURCE = Path(os.environ.get("INSITU_OPENENV_SRC", "/nowhere"))
pytestmark = [
    pytest.mark.bridge,
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not SOURCE.is_dir(), reason="INSITU_OPENENV_SRC names no checkout of OpenEnv"),
]
SMALL = ("model.max_context_tokens=16384", "harness.workers=1", "limits.max_calls=32")
Policy = Callable[[str, RequestKey], Message]


def moves(tool: str, field: str, values: list[int | str], sign: str) -> Policy:
    """Take a step after the other, each after the observation of the one before; then end."""

    def reply(text: str, key: RequestKey) -> Message:
        assert len(re.findall(sign, text)) >= key.turn
        if key.turn < len(values):
            return call(key, tool, **{field: values[key.turn]})
        return Message(role="assistant", text="That is all.")

    return reply


def echoed(text: str, key: RequestKey) -> Message:
    if key.turn == 0:
        return call(key, "echo_with_length", message="seven words of a message to echo")
    assert '"length":32' in text.replace(" ", "").replace("\\", "")
    return Message(role="assistant", text="That is all.")


PLAYS: dict[str, tuple[str, Policy, float]] = {
    # the shortest way; 10 for the exit, and -0.05 for each move before
    "maze_env": (
        'tool = "move"',
        moves(
            "move", "action",
            [3, 3, 3, 3, 1, 1, 3, 3, 1, 3, 1, 1, 1, 1], r"legal_actions",
        ),
        10.0 - 13 * 0.05,
    ),
    "connect4_env": ('tool = "drop"', moves("drop", "column", [0, 1, 0, 1, 0, 1, 0], r"legal_actions"), 1.0),
    "grid_world_env": (
        'tool = "walk"',
        moves("walk", "action", ["DOWN"] * 4 + ["RIGHT"] * 4, r"message"),
        1.0 - 0.7,
    ),
}  # fmt: skip


def played(tmp_path: Path, name: str, more: str, policy: Policy) -> list[tuple[Status, float | None, str]]:
    server, url = start_app(SOURCE / "envs", f"{name}.server.app:app")
    try:
        path = tmp_path / "tasks.toml"
        path.write_text(f'url = "{url}"\nresets = [{{}}]\nprompt = "Play."\n{more}\n')
        return run_of(tmp_path, str(path), "script", policy, *SMALL)[0]
    finally:
        stop(server)


@pytest.mark.parametrize("name", PLAYS)
def test_an_agent_plays_an_environment_of_actions_by_a_tool(tmp_path: Path, name: str) -> None:
    more, policy, reward = PLAYS[name]
    assert played(tmp_path, name, more, policy) == [(Status.OK, pytest.approx(reward), "")]


def test_an_agent_uses_the_tools_of_an_environment(tmp_path: Path) -> None:
    """It gives no reward for a call, so its rollout is not graded."""
    [(status, reward, error)] = played(tmp_path, "echo_env", "", echoed)
    assert (status, reward, error) == (Status.OK, None, "")
