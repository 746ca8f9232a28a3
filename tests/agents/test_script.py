"""The script harness with any command, and the small agent that is shipped for it."""

from __future__ import annotations

import dataclasses
import json

import pytest
from scripted_server import ScriptedServer, Step, play

from insitu.agents.base import ModelAccess
from insitu.agents.harness import RecipeHarness
from insitu.agents.pool import Sockets, WorkerPool
from insitu.agents.recipe import Recipe
from insitu.agents.script import RECIPE, SCRIPT_AGENT
from insitu.errors import ConfigError
from insitu.sandbox.local import LocalBackend
from insitu.types import FileEntry, Limits, Task
from tests.fakes.agents import command_harness

pytestmark = pytest.mark.slow

FIXED = b"def f(a, b):\n    return a * b\n"
ACCESS = ModelAccess(public_id="pub", secret="secret-of-rollout", model="tiny")


def command(backend: LocalBackend, text: str, **options: bool) -> RecipeHarness:
    return command_harness(["sh", "-c", text], backend, **options)


@pytest.fixture
def agent(backend: LocalBackend) -> RecipeHarness:
    return RecipeHarness(RECIPE, backend)


def tool_texts(server: ScriptedServer) -> list[str]:
    return [message["content"] for message in server.requests[-1]["messages"] if message["role"] == "tool"]


async def test_command_gets_prompt_model_and_files(
    backend: LocalBackend, server: ScriptedServer, task: Task
) -> None:
    text = "cat > in; cat $PROMPT_FILE > file; env > env; ls > list; ~/agent/tool; echo log"
    files = {"tool": FileEntry(content=b"#!/bin/sh\necho tool > tool\n", executable=True)}
    env = {"PROMPT_FILE": "{prompt_file}", "LIMIT": "{call_tokens} of {context_tokens}"}
    recipe = Recipe(name="mine", command=("sh", "-c", text), files=files, env=env)
    harness = RecipeHarness(recipe, backend)
    async with harness.worker(server.path) as worker:
        result = await worker.run(task, ACCESS)
    tree = {name: entry.content.decode() for name, entry in result.tree.items()}
    assert (harness.name, len(harness.version), result.exit) == ("mine", 12, "finished")
    assert (tree["in"], tree["file"], tree["tool"]) == ("Fix f.", "Fix f.", "tool\n")
    assert "app.py\ncheck.py" in tree["list"]
    env = dict(line.split("=", 1) for line in tree["env"].splitlines())
    assert env["OPENAI_BASE_URL"] == "http://127.0.0.1:8080/s/pub/v1"
    assert (env["OPENAI_API_KEY"], env["OPENAI_MODEL"]) == ("secret-of-rollout", "tiny")
    assert env["LIMIT"] == f"512 of {1 << 17}"
    assert result.log == b"log\n"


@pytest.mark.parametrize(
    ("text", "exit_", "detail"),
    [
        ("exit 0", "finished", ""),
        ("echo to $OPENAI_API_KEY failed >&2; exit 3", "failed", "exit code 3: to *** failed"),
        ("kill -9 $$", "failed", "exit code -9"),
        ("sleep 60 & sleep 60", "timeout", "stopped after 0.5 s"),
    ],
)
async def test_exit_code_is_the_authority(
    backend: LocalBackend, server: ScriptedServer, task: Task, text: str, exit_: str, detail: str
) -> None:
    short = dataclasses.replace(task, limits=Limits(wall_s=0.5))
    async with command(backend, f"echo left > trace; {text}", warm=True).worker(server.path) as worker:
        result = await worker.run(short, ACCESS)
        assert worker.healthy == (exit_ != "timeout")
    assert result.exit == exit_
    assert result.detail.startswith(detail)
    assert b"secret-of-rollout" not in result.log
    assert result.tree["trace"].content == b"left\n"


async def test_an_agent_that_the_kernel_killed_for_memory_failed_for_that_reason(
    backend: LocalBackend, server: ScriptedServer, task: Task
) -> None:
    if "sandbox_memory" not in backend.capabilities:
        pytest.skip(f"no control groups here: {backend.why_no_cgroups}")
    small = LocalBackend(backend.mode, memory_bytes=64 << 20)
    for size, detail in ((100, "out of memory: exit code -9"), (1, "exit code 137")):
        text = f"exec python3 -c 'x = bytearray({size} << 20); exit(137)'"
        async with command(small, text).worker(server.path) as worker:
            result = await worker.run(task, ACCESS)
        assert (result.exit, result.detail.partition(": Trace")[0].rstrip(": ")) == ("failed", detail)


async def test_background_work_ends_before_capture(
    backend: LocalBackend, server: ScriptedServer, task: Task
) -> None:
    text = "(setsid sh -c 'while :; do date +%N > /work/clock; done' &) ; sleep 0.1"
    async with command(backend, text, warm=True).worker(server.path) as worker:
        await worker.run(task, ACCESS)
        assert worker._sandbox is not None
        one = await worker._sandbox.get_tree()
        two = await worker._sandbox.get_tree()
        assert one == two


async def test_warm_sandbox_is_emptied_and_strict_sandbox_is_new(
    backend: LocalBackend, server: ScriptedServer, task: Task
) -> None:
    text = "ls -A /tmp /work ~; echo x > /tmp/planted; echo x > planted; echo x > ~/planted"
    for warm in (True, False):
        harness = command(backend, text, warm=warm)
        async with WorkerPool(harness, 1, Sockets([server.path])) as pool:
            logs = []
            for _ in range(2):
                async with pool.lease() as worker:
                    logs.append((await worker.run(task, ACCESS)).log)
                    assert worker.healthy == warm
        assert logs[0] == logs[1]


def test_no_command_is_refused(backend: LocalBackend) -> None:
    with pytest.raises(ConfigError, match="command is empty"):
        command_harness([], backend)


async def test_small_agent_solves_with_tools(
    agent: RecipeHarness, server: ScriptedServer, task: Task
) -> None:
    async with agent.worker(server.path) as worker:
        result = await worker.run(task, ACCESS)
    assert (result.exit, result.detail) == ("finished", "")
    assert result.tree["app.py"].content == FIXED
    assert set(server.paths) == {"/s/pub/v1/chat/completions"}
    assert set(server.secrets) == {"secret-of-rollout"}
    assert tool_texts(server) == [
        "def f(a, b):\n    return a + b\n",
        "Successfully replaced 1 block(s) in app.py.",
        "ok\n",
    ]
    assert [tool["function"]["name"] for tool in server.requests[0]["tools"]] == ["read", "bash", "edit"]


def change(old: str, new: str) -> Step:
    return ("edit", {"path": "app.py", "edits": [{"oldText": old, "newText": new}]})


async def test_small_agent_answers_every_mistake_like_pi(
    agent: RecipeHarness, server: ScriptedServer, task: Task
) -> None:
    steps: tuple[Step, ...] = (
        change("nowhere", "x"),
        change("a", "x"),
        change("a + b", "a + b"),
        ("read", {"path": "missing.py"}),
        ("read", {"file": "app.py"}),
        ("sing", {}),
        ("bash", {"command": "echo out; echo err >&2; exit 3"}),
        ("bash", {"command": "true"}),
        ("bash", {"command": "if then"}),
        ("bash", {"command": "yes x | head -c 200000"}),
        ("bash", {"command": "sleep 100 & echo back"}),
        "done",
    )
    server.script = play(steps)
    async with agent.worker(server.path) as worker:
        result = await worker.run(task, ACCESS)
    texts = tool_texts(server)
    assert result.exit == "finished"
    assert texts[0].startswith("Could not find the exact text in app.py.")
    assert texts[1] == (
        "Found 2 occurrences of the text in app.py. The text must be unique. "
        "Please provide more context to make it unique."
    )
    assert texts[2].startswith("No changes made to app.py.")
    assert texts[3] == "No such file or directory: 'missing.py'"
    assert texts[4].startswith('Validation failed for tool "read"')
    assert texts[5] == "Tool sing not found"
    assert texts[6] == "out\nerr\n\n\nCommand exited with code 3"
    assert texts[7] == "(no output)"
    assert "syntax error" in texts[8]
    assert len(texts[9]) == 50 * 1024
    assert texts[10] == "back\n"
    assert result.tree == task.files


async def test_small_agent_survives_malformed_arguments(
    agent: RecipeHarness, server: ScriptedServer, task: Task
) -> None:
    server.raw_arguments = [
        "not json",
        "[]",
        '{"path": 7}',
        "null",
        json.dumps({"path": "app.py", "edits": 3}),
    ]
    server.script = play([("edit", {})] * 5 + ["done"])
    async with agent.worker(server.path) as worker:
        result = await worker.run(task, ACCESS)
    assert result.exit == "finished"
    assert all("alid" in text or "No such" in text for text in tool_texts(server))


async def test_small_agent_stops_at_a_refusal(
    agent: RecipeHarness, server: ScriptedServer, task: Task
) -> None:
    server.script = lambda turn, _: None
    async with agent.worker(server.path) as worker:
        result = await worker.run(task, ACCESS)
    assert result.exit == "failed"
    assert "the budget is spent" in result.detail


def test_small_agent_is_small() -> None:
    lines = SCRIPT_AGENT.read_text().splitlines()
    assert len(lines) <= 100
    imports = {line.split()[1] for line in lines if line.startswith(("import ", "from "))}
    assert imports == {"json", "os", "socket", "sys"}
