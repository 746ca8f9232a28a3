"""What every worker that owns a sandbox keeps to: the task's setup, how it stops, what it counts and
keeps."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

import insitu.agents.termination as stop
from insitu.agents.artifacts import Artifacts, follow_links, redact
from insitu.agents.base import PLAIN, AgentResult, FinishedCheck, ModelAccess, never_finished
from insitu.agents.harness import RecipeHarness
from insitu.agents.pool import Sockets, WorkerPool
from insitu.agents.worker import count
from insitu.errors import HarnessError, PolicyUnsupported, SandboxStartError
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.local import LocalBackend
from insitu.types import FileEntry, Limits, Setup, Task, TaskStep, Tree
from tests.fakes.agents import command_harness

pytestmark = pytest.mark.slow

ACCESS = ModelAccess(public_id="pub", secret="secret-of-rollout")
KNOCK = (
    "import socket\n"
    "for family, address in ((2, '192.0.2.7'), (2, '169.254.169.254'), (10, '2001:db8::1')):\n"
    "    for kind in (1, 2):\n"
    "        socket.socket(family, kind).connect_ex((address, 80))\n"
    "try: socket.getaddrinfo('pypi.org', 443, family=2)\n"
    "except OSError: pass\n"
)


def shell(backend: LocalBackend, text: str, *, warm: bool = False, kept: str = "") -> RecipeHarness:
    artifacts = Artifacts(paths=tuple(kept.split()), max_files=3, max_bytes=100)
    return command_harness(["sh", "-c", text], backend, warm=warm, artifacts=artifacts)


async def ran(
    harness: RecipeHarness, tmp_path: Path, task: Task, finished: FinishedCheck = never_finished
) -> AgentResult:
    async with harness.worker(tmp_path / "g", task.setup) as worker:
        return await worker.run(task, ACCESS, finished)


def prepared(task: Task, *commands: str, workdir: str = "/work") -> Task:
    return dataclasses.replace(task, setup=Setup(commands=commands, workdir=workdir, timeout_s=5))


async def test_a_task_finds_what_its_setup_has_made_below_its_files(
    backend: LocalBackend, tmp_path: Path, task: Task
) -> None:
    made = prepared(task, "echo old > app.py; echo made > made", "pwd > place", workdir="/repo")
    harness = shell(backend, "pwd > where; cat app.py > app", warm=True)
    async with harness.worker(tmp_path / "g", made.setup) as worker:
        result = await worker.run(made, ACCESS)
        assert not worker.healthy, "a sandbox with a setup serves one rollout, also of a warm harness"
    assert result.tree["made"].content == b"made\n"
    assert result.tree["place"].content == result.tree["where"].content == b"/repo\n"
    assert result.tree["app"].content == task.files["app.py"].content


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo no such thing >&2; exit 3", "setup command 1 ended with 3: no such thing"),
        ("sleep 9", "setup command 1 took too long: no output"),
    ],
)
async def test_a_setup_that_fails_is_no_doing_of_the_agent(
    backend: LocalBackend, tmp_path: Path, task: Task, command: str, said: str
) -> None:
    bad = dataclasses.replace(task, setup=Setup(commands=(command,), timeout_s=1))
    with pytest.raises(SandboxStartError) as caught:
        await ran(shell(backend, "true"), tmp_path, bad)
    assert caught.value.infra
    assert str(caught.value) == said


async def test_a_sandbox_serves_tasks_of_its_own_setup_only(
    backend: LocalBackend, tmp_path: Path, task: Task
) -> None:
    async with shell(backend, "true").worker(tmp_path / "g") as worker:
        with pytest.raises(HarnessError, match="sandbox is not that of task t"):
            await worker.run(prepared(task, "true"), ACCESS)
    with pytest.raises(PolicyUnsupported, match="no images"):
        await ran(shell(backend, "true"), tmp_path, dataclasses.replace(task, setup=Setup(image="x")))


async def test_idle_workers_make_room_for_those_of_another_setup(
    backend: LocalBackend, tmp_path: Path, task: Task
) -> None:
    sockets = Sockets([tmp_path / "g0", tmp_path / "g1"])
    other = Setup(workdir="/repo")
    async with WorkerPool(shell(backend, "true", warm=True), 2, sockets) as pool:
        await pool.warm()
        async with pool.lease(PLAIN) as first, pool.lease(other) as second:
            assert (await first.run(task, ACCESS)).exit == "finished"
            assert (await second.run(dataclasses.replace(task, setup=other), ACCESS)).exit == "finished"
        async with pool.lease(other) as again:
            assert again is second
        async with pool.lease(PLAIN) as again:
            assert again is first


async def test_a_stopped_agent_may_write_down_what_it_has(
    backend: LocalBackend, tmp_path: Path, task: Task
) -> None:
    text = "trap 'echo had > said; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    short = dataclasses.replace(task, limits=Limits(wall_s=0.5))
    result = await ran(shell(backend, text), tmp_path, short)
    assert (result.exit, result.detail, result.log[:3]) == ("timeout", "stopped after 0.5 s", b"up\n")
    assert result.tree["said"].content == b"had\n"


async def test_an_agent_that_will_not_stop_is_killed(
    backend: LocalBackend, tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "GRACE_S", 0.3)
    text = "trap 'echo no >> said' TERM; while :; do sleep 0.05; done; echo over > over"
    short = dataclasses.replace(task, limits=Limits(wall_s=0.5))
    result = await ran(shell(backend, text), tmp_path, short)
    assert result.exit == "timeout"
    assert set(result.tree) - set(task.files) == {"said"}


async def test_an_agent_that_said_it_is_done_is_not_waited_for(
    backend: LocalBackend, tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "LINGER_S", 0.2)
    begun = time.monotonic()
    long = dataclasses.replace(task, limits=Limits(wall_s=300))
    harness = shell(backend, "echo did > did; sleep 300")
    result = await ran(harness, tmp_path, long, lambda: time.monotonic() > begun + 1)
    assert (result.exit, result.detail) == ("finished", "reported completion and was stopped")
    assert result.tree["did"].content == b"did\n"


async def test_what_a_sandbox_tries_to_reach_is_counted_by_rollout(
    backend: LocalBackend, tmp_path: Path, task: Task
) -> None:
    harness = shell(backend, 'if [ "$(cat)" = out ]; then python3 knock.py; fi', warm=True)
    files = {"knock.py": FileEntry(content=KNOCK.encode())}
    bad = dataclasses.replace(task, prompt="out", files=files)
    async with harness.worker(tmp_path / "g") as worker:
        found = [(await worker.run(one, ACCESS)).egress_attempts for one in (task, bad, task, bad)]
    assert found == [0, 7, 0, 7]


def test_books_that_say_nothing_are_not_zero() -> None:
    old = "Ip: Forwarding OutNoRoutes\nIp: 1 5\nUdp: InDatagrams\nUdp: 3\n"
    assert count(old) == 5
    assert count(old + "Ip6OutNoRoutes \t 2\n") == 7
    for silent in ("", "Ip: Forwarding\nIp: 1\n", "Ip: OutNoRoutes\nIp: many\n"):
        assert count(silent) is None


async def test_declared_artifacts_are_kept_within_bounds(
    backend: LocalBackend, tmp_path: Path, task: Task
) -> None:
    text = (
        "mkdir -p ~/logs/deep out; echo $OPENAI_API_KEY > ~/logs/a; echo deep > ~/logs/deep/b; "
        "ln -s /etc/passwd ~/logs/link; mkfifo ~/logs/pipe; head -c 200 /dev/zero > ~/logs/big; "
        "echo 1 > out/1; echo 2 > out/2; echo undeclared > ~/other"
    )
    result = await ran(shell(backend, text, kept="/home/agent/logs out /missing"), tmp_path, task)
    assert result.exit == "finished"
    assert result.artifacts == {
        "/home/agent/logs/a": b"***\n",
        "/home/agent/logs/deep/b": b"deep\n",
        "/work/out/1": b"1\n",
    }
    assert (await ran(shell(backend, text), tmp_path, task)).artifacts == {}


def test_an_empty_secret_redacts_nothing() -> None:
    assert redact("abc", "") == "abc"
    assert redact(b"a b a", "a") == b"*** b ***"


async def test_a_link_in_place_of_a_file_stands_for_what_it_leads_to() -> None:
    names = ("a", "b", "c", "d", "e", "f", "pkg/g", "h", "kept")
    base = {name: FileEntry(content=b"old") for name in names}
    async with await LocalBackend().create(SandboxSpec(files=base)) as sandbox:
        made = (
            "rm a b c d e f pkg/g h; printf new > real; printf 3 > /tmp/away; ln -s real a; ln -s a b;"
            " ln -s /work/real c; ln -s /tmp/away d; ln -s e e; ln -s /etc/passwd f; ln -s ../real pkg/g;"
            " ln -s real new"
        )
        assert (await sandbox.exec(["sh", "-c", made], timeout_s=20.0)).exit_code == 0
        tree = await follow_links(sandbox, base, await sandbox.get_tree())
    assert {path: entry.content for path, entry in tree.items()} == {
        "real": b"new", "kept": b"old", "a": b"new", "b": b"new", "c": b"new", "pkg/g": b"new",
    }  # fmt: skip


def stepped(task: Task, *prompts: str, wall_s: float = 20.0) -> Task:
    limits = Limits(wall_s=wall_s)
    steps = tuple(
        TaskStep(name=f"s{number}", task=dataclasses.replace(task, prompt=prompt, files={}, limits=limits))
        for number, prompt in enumerate(prompts, 1)
    )
    return dataclasses.replace(task, files={}, steps=steps, limits=limits)


async def test_the_next_step_begins_where_the_agent_failed_and_its_verdict_decides(
    backend: LocalBackend, tmp_path: Path, task: Task
) -> None:
    seen: list[tuple[int, bytes]] = []

    async def graded(number: int, tree: Tree) -> bool:
        seen.append((number, tree["asked"].content))
        return number < 1

    harness = shell(backend, "cat >> asked; echo . >> asked; test $(wc -l < asked) = 2 || exit 3")
    three = stepped(task, "one", "two", "three")
    async with harness.worker(tmp_path / "g") as worker:
        result = await worker.run(three, ACCESS, graded=graded)
        assert not worker.healthy
    assert seen == [(0, b"one.\n"), (1, b"one.\ntwo.\n")]
    assert (result.exit, result.tree["asked"].content) == ("failed", b"one.\ntwo.\n")


async def test_only_a_steps_own_files_are_laid_over_what_is_there(
    backend: LocalBackend, tmp_path: Path, task: Task
) -> None:
    async def graded(number: int, tree: Tree) -> bool:
        return True

    a, b = {"a": FileEntry(content=b"old")}, {"b": FileEntry(content=b"new")}
    both = stepped(task, "one", "two")
    first, second = both.steps
    first = dataclasses.replace(first, task=dataclasses.replace(first.task, files=a), files=a)
    second = dataclasses.replace(second, task=dataclasses.replace(second.task, files=a | b), files=b)
    harness = shell(backend, "printf mine >> a; cat >/dev/null")
    async with harness.worker(tmp_path / "g") as worker:
        result = await worker.run(dataclasses.replace(both, steps=(first, second)), ACCESS, graded=graded)
    assert {path: result.tree[path].content for path in "ab"} == {"a": b"oldminemine", "b": b"new"}


async def test_no_step_has_more_time_than_the_task(backend: LocalBackend, tmp_path: Path, task: Task) -> None:
    async def graded(number: int, tree: Tree) -> bool:
        return True

    both = dataclasses.replace(stepped(task, "one", "two"), limits=Limits(wall_s=0.5))
    async with shell(backend, "sleep 30").worker(tmp_path / "g") as worker:
        result = await worker.run(both, ACCESS, graded=graded)
    assert (result.exit, result.detail) == ("timeout", "stopped after 0.5 s")
