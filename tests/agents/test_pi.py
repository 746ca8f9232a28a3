"""The real Pi against a real server: it edits, leaks nothing into the next rollout, and stops on request."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path

import pytest
from scripted_server import READ_EDIT_CHECK, ScriptedServer, Step, play

from insitu.agents.base import ModelAccess
from insitu.agents.harness import RecipeHarness
from insitu.agents.install import Installed
from insitu.agents.pi import RECIPE
from insitu.agents.pool import Sockets, WorkerPool
from insitu.errors import HarnessError
from insitu.sandbox.local import LocalBackend
from insitu.types import FileEntry, Limits, Task

pytestmark = pytest.mark.slow

FIXED = b"def f(a, b):\n    return a * b\n"


def access(number: int = 0) -> ModelAccess:
    return ModelAccess(public_id=f"p{number}", secret=f"secret-of-rollout-{number}")


@pytest.fixture
def harness(pi: Installed, backend: LocalBackend) -> RecipeHarness:
    return RecipeHarness(RECIPE, backend, installed=pi, uses=64)


def bash(command: str) -> Step:
    return ("bash", {"command": command})


def tool_texts(server: ScriptedServer) -> list[str]:
    return [message["content"] for message in server.requests[-1]["messages"] if message["role"] == "tool"]


async def test_reads_edits_checks_and_is_captured(
    harness: RecipeHarness, server: ScriptedServer, task: Task
) -> None:
    async with harness.worker(server.path) as worker:
        result = await worker.run(task, access())
        assert (result.exit, result.detail) == ("finished", "")
        assert dict(result.tree) == {**task.files, "app.py": FileEntry(content=FIXED)}
        assert worker.healthy
    assert server.paths == ["/v1/chat/completions"] * 4
    assert set(server.secrets) == {"secret-of-rollout-0"}
    assert tool_texts(server)[2] == "ok\n"
    assert b"tool_execution_end" in result.log
    assert b"secret-of-rollout-0" not in result.log


async def test_request_is_what_the_model_is_trained_on(
    harness: RecipeHarness, server: ScriptedServer, task: Task
) -> None:
    """Constant paths, the trainer's own token limit, four tools, streaming."""
    async with harness.worker(server.path) as worker:
        await worker.run(task, access())
    body = server.requests[0]
    system = body["messages"][0]["content"]
    assert "/opt/pi/node_modules/@earendil-works/pi-coding-agent/README.md" in system
    assert system.endswith("<cwd>\n/work\n</cwd>")
    assert body["max_completion_tokens"] == 512
    assert body["stream"] is True
    assert body["model"] == "policy"
    assert [tool["function"]["name"] for tool in body["tools"]] == ["read", "bash", "edit", "write"]
    assert body["messages"][1] == {"role": "user", "content": [{"type": "text", "text": "Fix f."}]}


async def test_second_rollout_of_a_warm_worker_is_as_the_first(
    harness: RecipeHarness, server: ScriptedServer, task: Task
) -> None:
    async with harness.worker(server.path) as worker:
        first = await worker.run(task, access(1))
        second = await worker.run(task, access(2))
        third = await worker.run(task, dataclasses.replace(access(3), secret="$odd!$HOME-{3}"))
    assert first.tree == second.tree == third.tree
    one, two, three = server.requests[:4], server.requests[4:8], server.requests[8:]
    assert one == two == three
    assert server.secrets[:4] == ["secret-of-rollout-1"] * 4
    assert server.secrets[4:8] == ["secret-of-rollout-2"] * 4
    assert server.secrets[8:] == ["$odd!$HOME-{3}"] * 4


async def test_nothing_of_a_rollout_is_left_for_the_next(
    harness: RecipeHarness, server: ScriptedServer, task: Task
) -> None:
    plant = (
        "echo x > /tmp/planted; echo x > ~/planted; echo x > /dev/shm/planted; echo x > /work/planted; "
        "mkdir -p ~/.pi/agent/extensions && echo 'evil(' > ~/.pi/agent/extensions/x.ts; "
        "echo BE-EVIL > ~/.pi/agent/AGENTS.md; echo BE-EVIL > ~/.pi/agent/SYSTEM.md; "
        "echo '{\"defaultTools\":[]}' > ~/.pi/agent/settings.json; "
        "(setsid sh -c 'while :; do echo y > /work/app.py; sleep 0.01; done' >/dev/null 2>&1 &) ; "
        "(setsid sleep 777 >/dev/null 2>&1 &)"
    )
    look = "ls -A /work /tmp ~ /dev/shm ~/.pi/agent; cat /proc/[0-9]*/cmdline | tr '\\0' ' '; env"
    async with harness.worker(server.path) as worker:
        server.script = play((bash(look), "done"))
        await worker.run(task, access(1))
        clean = tool_texts(server)[0]
        system = server.requests[0]["messages"][0]
        server.script = play((bash(plant), "done"))
        first = await worker.run(task, access(2))
        assert "planted" in first.tree
        server.requests.clear()
        server.script = play((bash(look), "done"))
        second = await worker.run(task, access(3))
        after = tool_texts(server)[0]
    assert "planted" not in after
    assert "sleep" not in after
    assert "secret-of-rollout" not in after
    assert server.requests[0]["messages"][0] == system
    assert second.tree == task.files
    assert drop_ids(after) == drop_ids(clean)


def drop_ids(listing: str) -> list[str]:
    """Without what Pi, the shell and the kernel draw at random each time: session id, process ids."""
    return [line for line in listing.splitlines() if not line.startswith(("PI_SESSION_ID", "_=", "/usr/bin"))]


async def test_secret_is_in_no_command_line(
    harness: RecipeHarness, server: ScriptedServer, task: Task
) -> None:
    seen: list[bytes] = []

    def watch(turn: int, messages: object) -> Step | None:
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    seen.append((folder / "cmdline").read_bytes())
                except OSError:
                    continue
        return play(READ_EDIT_CHECK)(turn, [])

    server.script = watch
    async with harness.worker(server.path) as worker:
        await worker.run(task, access())
    assert any(b"cli.js" in line for line in seen) or any(line.startswith(b"pi") for line in seen)
    assert not any(b"secret-of-rollout" in line for line in seen)


async def test_timeout_stops_the_agent_and_still_captures(
    harness: RecipeHarness, server: ScriptedServer, task: Task
) -> None:
    server.script = play((READ_EDIT_CHECK[1], bash("sleep 600"), "done"))
    short = dataclasses.replace(task, limits=Limits(wall_s=1.5))
    begun = time.monotonic()
    async with harness.worker(server.path) as worker:
        result = await worker.run(short, access())
        assert not worker.healthy
        with pytest.raises(HarnessError):
            await worker.run(task, access())
    assert time.monotonic() - begun < 10
    assert result.exit == "timeout"
    assert result.tree["app.py"].content == FIXED


async def test_a_refused_call_ends_the_run_at_once(
    harness: RecipeHarness, server: ScriptedServer, task: Task
) -> None:
    server.script = lambda turn, _: READ_EDIT_CHECK[turn] if turn < 2 else None
    async with harness.worker(server.path) as worker:
        result = await worker.run(task, access())
    assert result.exit == "failed"
    assert "the budget is spent" in result.detail
    assert len(server.requests) == 3
    assert result.tree["app.py"].content == FIXED


async def test_an_agent_that_kills_pi_has_failed_by_itself(
    harness: RecipeHarness, server: ScriptedServer, task: Task
) -> None:
    server.script = play((READ_EDIT_CHECK[1], bash("kill -9 $PPID; sleep 5"), "done"))
    async with harness.worker(server.path) as worker:
        result = await worker.run(task, access())
        assert not worker.healthy
    assert result.exit == "failed"
    assert result.tree["app.py"].content == FIXED


async def test_a_tree_over_the_caps_is_the_agents_own_failure(
    harness: RecipeHarness, server: ScriptedServer, task: Task
) -> None:
    server.script = play((bash("truncate -s 900M /work/big"), "done"))
    async with harness.worker(server.path) as worker:
        result = await worker.run(task, access())
    assert (result.exit, dict(result.tree)) == ("failed", {})


async def test_other_limits_restart_pi(harness: RecipeHarness, server: ScriptedServer, task: Task) -> None:
    async with harness.worker(server.path) as worker:
        await worker.run(task, access(1))
        await worker.run(task, dataclasses.replace(access(2), max_call_tokens=77))
    assert [body["max_completion_tokens"] for body in server.requests] == [512] * 4 + [77] * 4
    assert server.secrets[-1] == "secret-of-rollout-2"


async def test_a_pi_that_cannot_start_says_so(
    pi: Installed, backend: LocalBackend, server: ScriptedServer, tmp_path: Path
) -> None:
    broken = dataclasses.replace(pi, folder=tmp_path)
    with pytest.raises(HarnessError, match="Pi ended"):
        async with RecipeHarness(RECIPE, backend, installed=broken).worker(server.path):
            pass


async def test_pool_reuses_warm_workers_and_replaces_worn_ones(
    pi: Installed, backend: LocalBackend, server: ScriptedServer, task: Task
) -> None:
    harness = RecipeHarness(RECIPE, backend, installed=pi, uses=2)
    used = []
    async with WorkerPool(harness, 1, Sockets([server.path])) as pool:
        for number in range(3):
            async with pool.lease() as worker:
                used.append(worker)
                assert (await worker.run(task, access(number))).exit == "finished"
    assert used[0] is used[1]
    assert used[1] is not used[2]


async def test_fresh_mode_never_reuses(
    pi: Installed, backend: LocalBackend, server: ScriptedServer, task: Task
) -> None:
    async with WorkerPool(
        RecipeHarness(RECIPE, backend, installed=pi), 2, Sockets([server.path] * 2)
    ) as pool:

        async def one(number: int) -> object:
            async with pool.lease() as worker:
                assert (await worker.run(task, access(number))).exit == "finished"
                assert not worker.healthy
                return worker

        workers = await asyncio.gather(one(1), one(2))
    assert workers[0] is not workers[1]
    assert sorted(server.secrets) == ["secret-of-rollout-1"] * 4 + ["secret-of-rollout-2"] * 4
