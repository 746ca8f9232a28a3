"""The terminal loop: keys reach a real shell, mistakes are answered, and a hand-over loses no token."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from scripted_server import ScriptedServer, play

from insitu.agents.base import AgentResult, ModelAccess
from insitu.agents.harness import RecipeHarness
from insitu.agents.pool import Sockets, WorkerPool
from insitu.config import load_config
from insitu.runtime.agents import make_harness
from insitu.sandbox.local import LocalBackend
from insitu.types import Task
from insitu_tasksets.terminus import RECIPE
from insitu_tasksets.terminus_agent.terminal import ROWS, Screen, Terminal

ACCESS = ModelAccess(public_id="pub", secret="secret-of-rollout", max_call_tokens=50, max_context_tokens=4000)


def keys(*typed: str, done: bool = False, wait: float = 5.0) -> str:
    commands = [{"keystrokes": text, "duration": wait} for text in typed]
    return json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": done})


async def play_out(
    backend: LocalBackend, server: ScriptedServer, task: Task, steps: Sequence[str]
) -> tuple[AgentResult, list[str]]:
    """The result, and what the model was shown, message by message."""
    server.script = play(steps)
    async with RecipeHarness(RECIPE, backend).worker(server.path) as worker:
        result = await worker.run(task, ACCESS)
    shown = [str(request["messages"][-1]["content"]) for request in server.requests]
    return result, shown


@pytest.mark.slow
async def test_it_solves_a_task_by_typing(backend: LocalBackend, server: ScriptedServer, task: Task) -> None:
    steps = [
        keys("cat app.py\n"),
        "I know.\n```json\n" + keys("sed -i 's/+/*/' app.py\n", "python3 check.py\n", done=True) + "\n```",
        keys(done=True),
    ]
    result, shown = await play_out(backend, server, task, steps)
    assert (result.exit, result.detail, len(shown)) == ("finished", "", 3)
    assert result.tree["app.py"].content == b"def f(a, b):\n    return a * b\n"
    assert "The task:\nFix f.\n" in shown[0]
    assert shown[0].endswith("/work$")
    assert shown[1] == ("New terminal output:\n/work$ cat app.py\ndef f(a, b):\n    return a + b\n/work$")
    assert "python3 check.py\nok\n/work$" in shown[2]
    assert "answer with" in shown[2]
    assert server.paths == ["/s/pub/v1/chat/completions"] * 3
    assert not [request for request in server.requests if request.get("tools")]


@pytest.mark.slow
async def test_a_slow_shell_is_waited_for(backend: LocalBackend, server: ScriptedServer, task: Task) -> None:
    """A shell that computes has the terminal and is quiet, just like one that waits for a key."""
    count = "for ((i = 0; i < 300000; i++)); do :; done"
    steps = [keys(f"{count}; echo late\n", wait=60), keys(f"f() {{\n{count}\n}}\nf\necho $i\n", wait=60)]
    _, shown = await play_out(backend, server, task, [*steps, keys(done=True), keys(done=True)])
    assert shown[1].endswith("\nlate\n/work$")
    assert shown[2].endswith("/work$ echo $i\n300000\n/work$")


@pytest.mark.slow
def test_the_first_screen_is_that_of_a_started_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "bash"
    slow.write_text(f'#!/bin/sh\nsleep 0.3\nexec {shutil.which("bash")} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    terminal = Terminal()
    try:
        assert terminal.screen.news().splitlines()[-1] == ("~#" if os.geteuid() == 0 else "~$")
    finally:
        terminal.close()


@pytest.mark.slow
async def test_programs_can_be_steered_by_keys(
    backend: LocalBackend, server: ScriptedServer, task: Task
) -> None:
    steps = [
        keys("python3 -q\n", wait=1),
        keys("print(6*7)\n", "C-d", wait=1),
        keys("sleep 100\n", "C-c", "echo $?\n", wait=0.3),
        keys("seq 3000\n"),
        keys("echo wörld; printf 'x\\ry\\n'; clear; echo new\n"),
        keys("exit\n", done=True, wait=1),
        keys("echo no one reads\n", done=True, wait=0.1),
    ]
    result, shown = await play_out(backend, server, task, steps)
    assert (result.exit, result.detail) == ("finished", "")
    assert "42\n" in shown[2]
    assert "^C\n" in shown[3]
    assert "130\n" in shown[3]
    assert "characters left out" in shown[4]
    assert shown[4].endswith("2999\n3000\n/work$")
    assert shown[5].endswith("\nnew\n/work$")


@pytest.mark.slow
async def test_what_cannot_be_read_is_said_and_ends_in_the_end(
    backend: LocalBackend, server: ScriptedServer, task: Task
) -> None:
    wrong = ["no object", '{"commands": [', '{"commands": 3}', '{"commands": [{"keys": "x"}]}']
    wrong += ['{"commands": [{"keystrokes": "x", "duration": -1}]}', "[insitu] The budget is used up."]
    result, shown = await play_out(backend, server, task, [wrong[0], keys(), *wrong])
    assert (result.exit, len(shown)) == ("failed", 8)
    assert result.detail.endswith("there is no JSON object in it")
    said = ["no JSON object", "cannot be read", "not a list", '"keystrokes"', '"duration" of command 1']
    assert [part for part, text in zip(said, shown[3:8], strict=True) if part not in text] == []


@pytest.mark.slow
async def test_a_refusal_ends_it_and_no_secret_is_left(
    backend: LocalBackend, server: ScriptedServer, task: Task
) -> None:
    server.script = lambda turn, _messages: None
    async with RecipeHarness(RECIPE, backend).worker(server.path) as worker:
        result = await worker.run(task, ACCESS)
    assert result.exit == "failed"
    assert "the model answered 400" in result.detail
    assert len(server.requests) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fresh", "warm"])
async def test_it_is_configured_like_any_agent_and_can_be_warm(
    backend: LocalBackend, server: ScriptedServer, task: Task, mode: str
) -> None:
    harness = make_harness(load_config(None, ["harness.agent=terminus", f"harness.mode={mode}"]), backend)
    assert (harness.name, len(harness.version)) == ("terminus", 12)
    server.script = play([keys("ls -A ~ /tmp; touch ~/left /tmp/left /work/left\n"), keys(done=True)])
    shown = []
    async with WorkerPool(harness, 1, Sockets([server.path]), strict=mode == "fresh") as pool:
        for _ in range(2):
            server.requests.clear()
            async with pool.lease() as worker:
                assert (await worker.run(task, ACCESS)).exit == "finished"
            shown.append([request["messages"] for request in server.requests])
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    ("fed", "shown"),
    [
        ("a\r\nb", "a\nb"),
        ("abc\b\bX", "aXc"),
        ("long line\rshort", "shortline"),
        ("gone\x1b[2Jnew", "new"),
        ("ab\x1b[1;31mred\x1b[0m", "abred"),
        ("\x1b]0;title\x07text\x1b(B", "text"),
        ("one\r\ntwo\x1b[1;1HO", "One\ntwo"),
        ("keep\x1b[K\x1b[2D\x1b[K", "ke"),
        ("half an esc\x1b", "half an esc"),
        ("x" * 161, "x" * 160 + "\nx"),
    ],
)
def test_the_screen_shows_what_a_terminal_would(fed: str, shown: str) -> None:
    whole, split = Screen(), Screen()
    whole.feed(fed)
    for char in fed:
        split.feed(char)
    assert whole.shown() == split.shown() == shown


def test_the_screen_scrolls_and_tells_only_news() -> None:
    screen = Screen()
    screen.feed("".join(f"{n}\r\n" for n in range(100)))
    assert screen.shown().splitlines() == [str(n) for n in range(100 - ROWS + 1, 100)]
    assert screen.news().splitlines()[0] == "0"
    screen.feed("more\r\n")
    assert screen.news() == "more"
