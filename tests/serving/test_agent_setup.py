"""The printed set-up is what a shell takes, and it leads to the session and nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from insitu.errors import ConfigError
from insitu.serving.agent_setup import TASK, Access, agent_names, setup

pytestmark = pytest.mark.slow

SECRET = "s3cret-" + "x" * 36
STUB = """#!/bin/sh
{ printf '%s\\n' "$0" "$@"; } > "$STUB_OUT.args"
env > "$STUB_OUT.env"
"""


@pytest.fixture
def access(tmp_path: Path) -> Access:
    return Access(
        address="http://127.0.0.1:4321/s/abcd",
        secret=SECRET,
        model="policy",
        max_call_tokens=256,
        context_tokens=8192,
        home=str(tmp_path / "a home"),
    )


@pytest.mark.parametrize("agent", agent_names())
def test_a_shell_runs_it(agent: str, access: Access, tmp_path: Path) -> None:
    way = replace(setup(agent, access, prompt="fix 'it' now"), note="its first prompt is too long")
    assert way.lines()[0] == f"# {agent}: will not work, its first prompt is too long"
    folder = tmp_path / "bin"
    folder.mkdir()
    stub = folder / way.command[0]
    stub.write_text(STUB)
    stub.chmod(0o755)
    env = {"PATH": f"{folder}:/usr/bin:/bin", "STUB_OUT": str(tmp_path / "out"), "HOME": "/nonexistent"}
    subprocess.run(["sh", "-eu"], input="\n".join(way.lines()), env=env, text=True, check=True, timeout=20)
    seen = (tmp_path / "out.env").read_text()
    arguments = (tmp_path / "out.args").read_text().split("\n")[1:-1]
    written = "".join(Path(path).read_text() for path in way.files)
    assert f"HOME={access.home}" in seen.splitlines()
    assert any("fix 'it' now" in argument for argument in arguments)
    assert access.address in seen + written
    assert SECRET in seen
    assert not any(SECRET in argument for argument in arguments)
    assert SECRET not in written
    assert "/home/agent" not in seen + written + "".join(arguments)
    for path in way.files:
        assert path.startswith(access.home + os.sep)
        text = Path(path).read_text()
        assert tomllib.loads(text) if path.endswith(".toml") else json.loads(text)


def test_every_recipe_with_a_command_of_its_own_is_there() -> None:
    assert agent_names() == ["pi", "claude_code", "codex", "opencode", "qwen_code", "gemini_cli", "mini_swe"]


def test_an_unknown_agent_is_named(access: Access) -> None:
    with pytest.raises(ConfigError, match="no agent 'emacs'; there are: pi, claude_code"):
        setup("emacs", access)


@pytest.mark.parametrize("agent", agent_names())
def test_the_written_script_takes_the_task(agent: str, access: Access, tmp_path: Path) -> None:
    way = setup(agent, access, TASK)
    folder = tmp_path / "bin"
    folder.mkdir()
    stub = folder / way.command[0]
    stub.write_text(STUB)
    stub.chmod(0o755)
    script = tmp_path / "agent.sh"
    script.write_text(way.script())
    env = {"PATH": f"{folder}:/usr/bin:/bin", "STUB_OUT": str(tmp_path / "out"), "HOME": "/nonexistent"}
    task = "fix 'it' \"now\" $HOME"
    subprocess.run(["sh", script, task], env=env, check=True, timeout=20)
    arguments = (tmp_path / "out.args").read_text().split("\n")[1:-1]
    assert [argument for argument in arguments if task in argument]
    assert TASK not in "".join(arguments)
    refused = subprocess.run(["sh", script], env=env, capture_output=True, text=True, check=False, timeout=20)
    assert refused.returncode != 0
    assert "usage: sh FILE TASK" in refused.stderr
