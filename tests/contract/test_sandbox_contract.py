"""What every sandbox backend must do, asserted on each of them alike."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandbox_labs import LABS, NEEDS_DAEMON, Lab, out, sh

from insitu.errors import PolicyUnsupported, SandboxError, SandboxLost
from insitu.sandbox.base import Bind, Sandbox, SandboxSpec, memory_kills
from insitu.sandbox.tree import TreeTooLarge
from insitu.types import FileEntry

FILES = {
    "a.py": FileEntry(content=b"print(1)\n"),
    "pkg/run.sh": FileEntry(content=b"#!/bin/sh\necho ran\n", executable=True),
    "empty": FileEntry(content=b""),
    "b\xe9 with space": FileEntry(content=bytes(range(256))),
}


PARAMETERS = [
    pytest.param(name, marks=[pytest.mark.full] if name in NEEDS_DAEMON else []) for name in sorted(LABS)
]


@pytest.fixture(scope="module", params=PARAMETERS)
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    image = request.getfixturevalue("docker_image") if request.param in NEEDS_DAEMON else ""
    return LABS[request.param](tmp_path_factory.mktemp("cache"), image)


@pytest.fixture(autouse=True)
def promised(request: pytest.FixtureRequest, lab: Lab) -> None:
    if why := lab.skips.get(request.node.originalname):
        pytest.skip(why)


@pytest.fixture
async def sandbox(lab: Lab) -> AsyncIterator[Sandbox]:
    async with await lab.backend.create(SandboxSpec(files=FILES)) as sandbox:
        yield sandbox


async def living(sandbox: Sandbox, word: str) -> int:
    """Processes of the sandbox whose command line holds `word` (the searching shell does not count
    itself)."""
    pattern = f"[{word[0]}]{word[1:]}"
    return int(
        (await sh(sandbox, f"cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -c '^{pattern}$'")).stdout
    )


async def begun(sandbox: Sandbox, word: str, count: int) -> None:
    """Wait until so many run: a shell may have forked and not yet begun what it was asked for."""
    async with asyncio.timeout(10):
        while await living(sandbox, word) != count:
            pass


# Commands


async def test_exec_gives_code_streams_and_takes_input_folder_and_environment(sandbox: Sandbox) -> None:
    result = await sandbox.exec(
        ["sh", "-c", "cat; echo $A; pwd; echo problem >&2; exit 7"],
        timeout_s=20,
        stdin=b"in\x00put\n",
        env={"A": "b c"},
        cwd="/tmp",
    )
    assert result.exit_code == 7
    assert result.stdout == b"in\x00put\nb c\n/tmp\n"
    assert result.stderr == b"problem\n"
    assert not result.timed_out
    assert not result.truncated


async def test_exec_begins_in_the_work_folder(sandbox: Sandbox) -> None:
    assert await out(sandbox, "pwd") == sandbox.workdir == "/work"


async def test_arguments_reach_the_program_unchanged(sandbox: Sandbox) -> None:
    odd = ["a b", "$HOME", "`id`", "'\"", "\xe9\n", "", "-x", "*"]
    result = await sandbox.exec(["printf", "%s|", *odd], timeout_s=20)
    assert result.stdout.decode() == "|".join([*odd, ""])


async def test_missing_command_is_an_ordinary_failure(sandbox: Sandbox) -> None:
    missing = await sandbox.exec(["no-such-command"], timeout_s=20)
    assert (missing.exit_code, b"no-such-command" in missing.stderr) == (127, True)


async def test_missing_folder_is_an_ordinary_failure(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(["true"], timeout_s=20, cwd="/nowhere")).exit_code == 126


async def test_no_command_and_a_nul_are_refused(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError):
        await sandbox.exec([], timeout_s=20)
    with pytest.raises(SandboxError, match="NUL"):
        await sandbox.exec(["echo", "a\0b"], timeout_s=20)


async def test_input_of_megabytes_arrives_whole(sandbox: Sandbox) -> None:
    data = os.urandom(3 << 20)
    result = await sandbox.exec(["cat"], timeout_s=20, stdin=data, max_output_bytes=4 << 20)
    assert result.stdout == data


async def test_output_is_bounded_and_says_so(sandbox: Sandbox) -> None:
    result = await sh(sandbox, "yes | head -c 5000000; yes | head -c 3000000 >&2")
    assert result.exit_code == 0
    assert (len(result.stdout), len(result.stderr)) == (1 << 20, 1 << 20)
    assert result.truncated


async def test_a_killed_command_is_not_exit_zero(sandbox: Sandbox) -> None:
    assert (await sh(sandbox, "kill -9 $$")).exit_code in (-9, 137)
    assert (await sh(sandbox, "kill -TERM $$")).exit_code in (-15, 143)


async def test_a_timeout_kills_the_whole_tree(sandbox: Sandbox) -> None:
    begun = time.monotonic()
    daemon = "(setsid sh -c 'setsid sleep 5151 & ' >/dev/null 2>&1 &); sleep 5151 & trap '' TERM; sleep 5151"
    result = await sh(sandbox, daemon, timeout_s=0.5)
    assert time.monotonic() - begun < 15
    assert result.timed_out
    assert result.exit_code in (-9, 137)
    assert await living(sandbox, "5151") == 0


async def test_a_timeout_spares_other_work(sandbox: Sandbox) -> None:
    process = await sandbox.spawn(["sh", "-c", "sleep 6161 & wait"])
    slow = asyncio.create_task(sh(sandbox, "sleep 1; echo done"))
    assert (await sh(sandbox, "sleep 60", timeout_s=0.3)).timed_out
    assert (await slow).stdout == b"done\n"
    assert process.poll() is None
    await begun(sandbox, "6161", 1)


async def test_what_a_timeout_killed_cannot_go_on_to_exit_zero(sandbox: Sandbox) -> None:
    for _ in range(5):
        late = await sh(sandbox, "sleep 60; exit 0", timeout_s=0.05)
        assert late.timed_out
        assert late.exit_code in (-9, 137)


async def test_output_before_a_timeout_is_kept(sandbox: Sandbox) -> None:
    assert (await sh(sandbox, "echo begun; sleep 60", timeout_s=1)).stdout == b"begun\n"


async def test_exec_does_not_wait_for_what_it_left_behind(sandbox: Sandbox) -> None:
    start = time.monotonic()
    assert (await sh(sandbox, "sleep 7171 & echo early")).stdout == b"early\n"
    assert time.monotonic() - start < 15
    await begun(sandbox, "7171", 1)


async def test_a_cancelled_exec_leaves_no_process(sandbox: Sandbox) -> None:
    task = asyncio.create_task(sh(sandbox, "sleep 929394"))
    for _ in range(100):
        if await living(sandbox, "929394"):
            break
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await living(sandbox, "929394") == 0


async def test_many_commands_at_once(sandbox: Sandbox) -> None:
    results = await asyncio.gather(*(sh(sandbox, f"sleep 0.1; echo {n}") for n in range(20)))
    assert [int(result.stdout) for result in results] == list(range(20))


# Processes with pipes


async def test_a_spawned_process_talks_and_dies_on_demand(sandbox: Sandbox) -> None:
    process = await sandbox.spawn(["sh", "-c", 'while read line; do echo "$X $line"; done'], env={"X": "1"})
    await process.write(b"one\ntwo\n")
    assert [await process.readline(20), await process.readline(20)] == [b"1 one\n", b"1 two\n"]
    with pytest.raises(TimeoutError):
        await process.readline(0.1)
    with pytest.raises(TimeoutError):
        await process.wait(0.1)
    assert process.poll() is None
    await process.kill()
    await process.kill()
    assert await process.wait(20) in (-9, 137)
    assert process.poll() in (-9, 137)
    assert await process.readline(20) == b""
    with pytest.raises(SandboxLost):
        await process.write(b"x")


async def test_killing_a_spawned_process_kills_what_it_started(sandbox: Sandbox) -> None:
    process = await sandbox.spawn(["sh", "-c", "sleep 3131 & setsid sleep 3131 & echo up; wait"])
    assert await process.readline(20) == b"up\n"
    await process.kill()
    assert await process.wait(20) != 0
    assert await living(sandbox, "3131") == 0


async def test_a_spawned_process_that_ends_by_itself(sandbox: Sandbox) -> None:
    process = await sandbox.spawn(["sh", "-c", "seq 1 100000 >&2; echo last >&2; echo out; exit 3"])
    assert await process.readline(20) == b"out\n"
    assert await process.wait(20) == 3
    await asyncio.sleep(0.1)
    tail = process.stderr_tail()
    assert tail.endswith(b"100000\nlast\n")
    assert len(tail) <= 16 << 10


async def test_long_lines_come_whole(sandbox: Sandbox) -> None:
    process = await sandbox.spawn(["sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x; echo"])
    assert len(await process.readline(20)) == 3_000_001


async def test_kill_all_finds_daemons_and_spares_spawned(sandbox: Sandbox) -> None:
    process = await sandbox.spawn(["sh", "-c", "while read line; do echo $line; done"])
    await sh(sandbox, "(setsid sh -c 'setsid sleep 8181 & ' >/dev/null 2>&1 &) ; sleep 0.1")
    await begun(sandbox, "8181", 1)
    await sandbox.kill_all()
    await sandbox.kill_all()
    assert await living(sandbox, "8181") == 0
    await process.write(b"still here\n")
    assert await process.readline(20) == b"still here\n"


async def test_kill_all_finds_what_cleared_its_environment_and_spares_spawned(sandbox: Sandbox) -> None:
    process = await sandbox.spawn(["sleep", "8383"])
    hide = "(env -i setsid sh -c 'sleep 8282 & sleep 8282 & wait' >/dev/null 2>&1 &) ; sleep 0.2"
    assert (await sh(sandbox, hide)).exit_code == 0
    await begun(sandbox, "8282", 2)
    for _ in range(4):  # also while the backend looks at what it spawned
        await sandbox.kill_all()
    assert await living(sandbox, "8282") == 0
    assert await living(sandbox, "8383") >= 1
    assert process.poll() is None
    await process.kill()


# Files


async def test_a_tree_goes_in_and_comes_out_unchanged(sandbox: Sandbox) -> None:
    assert await sandbox.get_tree() == FILES
    assert await out(sandbox, "pkg/run.sh") == "ran"


async def test_changes_come_out(sandbox: Sandbox) -> None:
    await sh(sandbox, "echo 2 >> a.py; rm empty; mkdir new; echo n > new/file; chmod +x new/file")
    tree = await sandbox.get_tree()
    assert tree["a.py"].content == b"print(1)\n2\n"
    assert "empty" not in tree
    assert tree["new/file"] == FileEntry(content=b"n\n", executable=True)


async def test_put_tree_replaces_and_lay_adds(sandbox: Sandbox) -> None:
    await sandbox.put_tree({"only": FileEntry(content=b"x"), "d/e": FileEntry(content=b"y")})
    assert sorted(await sandbox.get_tree()) == ["d/e", "only"]
    await sandbox.lay({"d/f": FileEntry(content=b"z")}, remove=["only"])
    assert sorted(await sandbox.get_tree()) == ["d/e", "d/f"]


async def test_lay_replaces_what_is_in_the_way_and_follows_nothing(sandbox: Sandbox) -> None:
    await sh(
        sandbox,
        "rm -rf * && mkdir ~/out && echo old > ~/out/f && ln -s ~/out d && ln -s ~/out/f f && mkdir g",
    )
    await sandbox.lay({name: FileEntry(content=b"new") for name in ("d/f", "f", "g")})
    assert {path: entry.content for path, entry in (await sandbox.get_tree()).items()} == {
        "d/f": b"new", "f": b"new", "g": b"new",
    }  # fmt: skip
    assert await out(sandbox, "cat ~/out/f") == "old"


async def test_files_of_root_cannot_be_touched(lab: Lab) -> None:
    if "file_owner" not in lab.backend.capabilities:
        pytest.skip("the namespaces mode needs root")
    async with await lab.backend.create(SandboxSpec()) as sandbox:
        await sandbox.put_tree({"t/hidden.py": FileEntry(content=b"true")}, owner="root")
        for script in (
            "echo x > t/hidden.py", "rm -f t/hidden.py", "mv t/hidden.py t/x", "mv t u",
            "chmod 777 t t/hidden.py", "rm -rf t; test ! -e t",
        ):  # fmt: skip
            assert (await sh(sandbox, script)).exit_code != 0, script
        assert await out(sandbox, "cat t/hidden.py; echo own > t/own.py; cat t/own.py") == "trueown"


async def test_links_pipes_sockets_and_odd_names_are_left_out(sandbox: Sandbox) -> None:
    plant = """
import os, socket
os.symlink("/etc/passwd", "link"); os.symlink("/", "rootlink"); os.mkfifo("pipe"); os.symlink("self", "self")
s = socket.socket(socket.AF_UNIX); s.bind("sock")
open(b"bad-\\xff", "w").write("x"); os.mkdir(b"dir-\\xff")
os.mkdir("shut"); open("shut/in", "w").write("s"); os.chmod("shut/in", 0); os.chmod("shut", 0)
"""
    await sandbox.put_tree({"good": FileEntry(content=b"g")})
    assert (await sandbox.exec(["python3", "-c", plant], timeout_s=20)).exit_code == 0
    assert await sandbox.get_tree() == {"good": FileEntry(content=b"g"), "shut/in": FileEntry(content=b"s")}


@pytest.mark.parametrize(
    "plant",
    [
        "head -c 2000000 /dev/zero > big",
        "truncate -s 500G sparse",
        "for i in $(seq 30); do echo > f$i; done",
        "for i in $(seq 1200); do ln -s x l$i; done",
    ],
    ids=["bytes", "sparse", "files", "entries"],
)
async def test_a_tree_over_a_cap_is_the_agents_doing(sandbox: Sandbox, plant: str) -> None:
    await sh(sandbox, plant)
    with pytest.raises(TreeTooLarge) as caught:
        await sandbox.get_tree(max_bytes=1 << 20, max_files=20)
    assert not caught.value.infra


async def test_what_lies_deeper_than_any_path_leads_is_left_out(sandbox: Sandbox) -> None:
    plant = "p=.; for i in $(seq {}); do p=$p/d; done; mkdir -p $p; echo 1 > $p/{}"
    await sh(sandbox, plant.format(80, "deep"))
    await sh(sandbox, plant.format(300, "deeper"))
    found = await sandbox.get_tree(max_bytes=1 << 20)
    assert [path for path in found if path.startswith("d/")] == ["d/" * 80 + "deep"]


async def test_put_and_get_one_file(sandbox: Sandbox) -> None:
    await sandbox.put("/home/agent/.config/tool/key", bytes(range(256)))
    assert await sandbox.get("/home/agent/.config/tool/key") == bytes(range(256))
    await sandbox.put("/tmp/run", b"#!/bin/sh\necho hi\n", executable=True)
    assert await out(sandbox, "/tmp/run") == "hi"
    assert await sandbox.get("/tmp/none") is None
    with pytest.raises(SandboxError):
        await sandbox.get("/home/agent/.config/tool/key", max_bytes=255)


async def test_get_reads_no_link_pipe_or_folder(sandbox: Sandbox) -> None:
    await sh(sandbox, "mkfifo p; ln -s /etc/passwd l; mkdir d; ln -s /etc e")
    for path in ("p", "l", "d", "e/passwd"):
        assert await sandbox.get(f"/work/{path}") is None, path


@pytest.mark.parametrize("path", ["/usr/x", "/work/../usr/x", "/work", "relative", "/home/agent/a/../../x"])
async def test_put_stays_inside(sandbox: Sandbox, path: str) -> None:
    with pytest.raises(SandboxError):
        await sandbox.put(path, b"x")


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", ""])
async def test_a_tree_with_a_path_outside_is_refused(sandbox: Sandbox, path: str) -> None:
    with pytest.raises(SandboxError):
        await sandbox.put_tree({path: FileEntry(content=b"x")})


async def test_put_follows_no_link(sandbox: Sandbox) -> None:
    await sh(sandbox, "ln -s /home/agent dir; echo old > ~/target; ln -s ~/target f")
    with pytest.raises(SandboxError):
        await sandbox.put("/work/dir/x", b"x")
    await sandbox.put("/work/f", b"new")
    assert await out(sandbox, "cat ~/target; cat f") == "old\nnew"


async def test_more_places_can_be_had(lab: Lab) -> None:
    async with await lab.backend.create(SandboxSpec(places=("/logs",))) as sandbox:
        assert await out(sandbox, "echo 1 > /logs/reward && ls -A /logs") == "reward"
        assert await sandbox.get("/logs/reward") == b"1\n"


async def test_wipe_empties_every_writable_place(sandbox: Sandbox) -> None:
    await sh(
        sandbox, "for p in /work ~ /tmp /dev/shm /var/tmp; do mkdir $p/d; echo > $p/d/f; chmod 0 $p/d; done"
    )
    await sandbox.kill_all()
    await sandbox.wipe()
    assert await out(sandbox, "find /work ~ /tmp /dev/shm /var/tmp/ -mindepth 1 | wc -l") == "0"
    assert await out(sandbox, "touch /work/x /tmp/x ~/x && echo ok") == "ok"


async def test_a_full_disk_is_the_boxs_own(sandbox: Sandbox) -> None:
    result = await sh(sandbox, "head -c 400000000 /dev/zero > /tmp/fill")
    assert result.exit_code != 0
    assert b"No space" in result.stderr
    await sandbox.wipe()
    assert await out(sandbox, "echo ok > /tmp/x && cat /tmp/x") == "ok"


# Walls


async def test_no_privilege(sandbox: Sandbox) -> None:
    status = (await out(sandbox, "grep -E '^(Cap|NoNewPrivs)' /proc/self/status; id -u; hostname")).split()
    assert status[-1] == "sandbox"
    assert status[-2] != "0"
    fields = dict(zip(status[:-2:2], status[1:-2:2], strict=True))
    assert int(fields.pop("NoNewPrivs:")) == 1
    assert {name: int(value, 16) for name, value in fields.items()} == dict.fromkeys(fields, 0)


async def test_programs_can_tell_who_they_are(sandbox: Sandbox) -> None:
    assert await out(
        sandbox, "id -un; python3 -c 'import os, pwd; print(pwd.getpwuid(os.getuid()).pw_dir)'"
    ) == ("agent\n/home/agent")


async def test_system_is_read_only(sandbox: Sandbox) -> None:
    for path in ("/usr/x", "/etc/x", "/x", "/opt/x", "/run/x", "/home/x", "/proc/sys/kernel/hostname"):
        assert (await sh(sandbox, f"echo x > {path}")).exit_code != 0, path


async def test_init_cannot_be_killed_or_read(sandbox: Sandbox) -> None:
    await sh(sandbox, "kill -9 1; kill -TERM 1; kill -INT 1")
    assert await out(sandbox, "echo alive") == "alive"
    for name in ("mem", "environ", "fd/0", "root/"):
        assert (await sh(sandbox, f"head -c1 /proc/1/{name}")).exit_code != 0, name


async def test_no_network(sandbox: Sandbox) -> None:
    dial = "import socket; socket.create_connection(({!r}, {}), 2)"
    for host, port in (("192.0.2.1", 80), ("169.254.169.254", 80), ("127.0.0.1", 22), ("::1", 22)):
        result = await sandbox.exec(["python3", "-c", dial.format(host, port)], timeout_s=20)
        assert result.exit_code == 1, host
    assert (await out(sandbox, "cut -d: -f1 -s /proc/net/dev")).split() == ["lo"]


async def test_sandboxes_do_not_see_each_other(lab: Lab, sandbox: Sandbox) -> None:
    async with await lab.backend.create(SandboxSpec()) as other:
        await other.spawn(["sleep", "4242"])
        await sh(other, "echo x > /tmp/mark; echo x > /dev/shm/mark")
        assert await living(sandbox, "4242") == 0
        assert (await sh(sandbox, "ls /tmp/mark /dev/shm/mark")).exit_code != 0
        assert await living(other, "4242") == 1


async def test_the_hosts_environment_does_not_leak(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOST_SECRET", "do-not-leak")
    async with await lab.backend.create(SandboxSpec(env={"OWN": "1"})) as sandbox:
        names = {line.split("=", 1)[0] for line in (await out(sandbox, "env")).splitlines()}
        assert {"PATH", "HOME", "OWN"} <= names
        assert "HOST_SECRET" not in names
        assert (await sh(sandbox, f"ls '{tmp_path}'")).exit_code != 0


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    """A folder to show, below one that only its owner may enter."""
    (tmp_path / "a tool, quoted").mkdir()
    (tmp_path / "a tool, quoted" / "data").write_text("shown")
    tmp_path.chmod(0o700)
    return tmp_path / "a tool, quoted"


async def test_binds_are_read_only(lab: Lab, tool: Path) -> None:
    async with await lab.backend.create(
        SandboxSpec(binds=(Bind(source=tool, target="/opt/deep/tool"),))
    ) as sandbox:
        assert await out(sandbox, "cat /opt/deep/tool/data") == "shown"
        assert (await sh(sandbox, "echo x > /opt/deep/tool/data")).exit_code != 0
        assert (await sh(sandbox, "touch /opt/deep/tool/new /opt/deep/new /opt/new")).exit_code != 0
    assert (tool / "data").read_text() == "shown"


async def test_limits_hold_and_neighbours_do_not_feel_them(lab: Lab, sandbox: Sandbox) -> None:
    if "resource_limits" not in lab.backend.capabilities:
        with pytest.raises(PolicyUnsupported):
            await lab.backend.create(SandboxSpec(max_processes=40))
        return
    async with await lab.backend.create(SandboxSpec(max_processes=40, memory_bytes=200 << 20)) as limited:
        greedy = "x = bytearray(400 << 20)"
        assert (await limited.exec(["python3", "-c", greedy], timeout_s=20)).exit_code not in (0, None)
        many = "import os\nfor _ in range(60):\n    if os.fork() == 0:\n        import time; time.sleep(60)\n"
        assert (await limited.exec(["python3", "-c", many], timeout_s=20)).exit_code == 1
        assert await out(sandbox, "python3 -c 'x = bytearray(400 << 20); print(len(x) >> 20)'") == "400"
        await limited.kill_all()
        assert await out(limited, "echo alive") == "alive"


async def test_memory_that_is_shared_is_not_limited(lab: Lab) -> None:
    """What the limit of one process leaves out, stated so that a change shows: SandboxSpec.memory_bytes."""
    if "resource_limits" not in lab.backend.capabilities:
        return
    async with await lab.backend.create(SandboxSpec(memory_bytes=100 << 20)) as limited:
        shared = "import mmap; m = mmap.mmap(-1, 200 << 20)\nfor i in range(0, 200 << 20, 4096): m[i] = 1\n"
        assert (await limited.exec(["python3", "-c", shared], timeout_s=30)).exit_code == 0
        private = "x = bytearray(200 << 20)"
        assert (await limited.exec(["python3", "-c", private], timeout_s=30)).exit_code == 1


CHILDREN = """
import os, sys, time
for _ in range(4):
    if os.fork() == 0:
        x = bytearray(50 << 20)
        for at in range(0, len(x), 4096): x[at] = 1
        time.sleep(1)
        os._exit(0)
codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(4)]
print(codes)
sys.exit(max(137 if code == -9 else 0 for code in codes))
"""


async def test_a_boxs_memory_is_bounded_as_a_whole(lab: Lab, sandbox: Sandbox) -> None:
    if "sandbox_memory" not in lab.backend.capabilities or lab.small is None:
        return
    small = lab.small(128 << 20)
    async with await small.create(SandboxSpec()) as tight, await small.create(SandboxSpec()) as neighbour:
        beside = asyncio.create_task(
            neighbour.exec(["python3", "-c", CHILDREN.replace("50 <<", "9 <<")], timeout_s=30)
        )
        alone = await tight.exec(["python3", "-c", "x = bytearray(50 << 20)"], timeout_s=30)
        assert (alone.exit_code, alone.out_of_memory) == (0, False)
        result = await tight.exec(["python3", "-c", CHILDREN], timeout_s=30)
        assert (result.exit_code, result.out_of_memory) == (137, True), result
        assert memory_kills(tight) >= 1
        own = await tight.exec(["sh", "-c", "exit 137"], timeout_s=30)
        assert (own.exit_code, own.out_of_memory) == (137, False)
        unharmed = await beside
        assert (unharmed.stdout, unharmed.out_of_memory) == (b"[0, 0, 0, 0]\n", False)
        assert memory_kills(neighbour) == memory_kills(sandbox) == 0


HEADLESS = """
import ctypes, os, threading, time
if os.fork(): os._exit(0)
os.setsid()
def beat():
    while True:
        with open("beat", "w") as file: file.write(str(time.time()))
        time.sleep(0.01)
threading.Thread(target=beat).start()
ctypes.CDLL(None).pthread_exit(None)
"""


async def test_kill_all_finds_a_process_that_lost_its_first_thread(lab: Lab, sandbox: Sandbox) -> None:
    await sandbox.exec(["python3", "-c", HEADLESS], timeout_s=20)
    gone = await sh(
        sandbox, "until grep -qs '^State:.Z' /proc/[0-9]*/status && ls beat; do sleep .1; done", 20
    )
    assert gone.exit_code == 0
    await sandbox.kill_all()
    last = await sandbox.get(f"{sandbox.workdir}/beat")
    await asyncio.sleep(0.1)
    assert await sandbox.get(f"{sandbox.workdir}/beat") == last


async def test_kill_all_beats_a_fork_bomb(lab: Lab) -> None:
    async with await lab.backend.create(SandboxSpec(max_processes=50)) as sandbox:
        bomb = "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nif os.fork(): os._exit(0)\n"
        bomb += "os.setsid()\nwhile True:\n    try:\n        os.fork()\n    except OSError: pass\n"
        await sandbox.exec(["python3", "-c", bomb], timeout_s=20)
        await asyncio.sleep(0.1)
        await sandbox.kill_all()
        assert await out(sandbox, "echo alive") == "alive"


async def test_the_gateway_is_reached_and_nothing_else(lab: Lab, tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        writer.write(b"got " + line + b"x" * 3_000_000)
        await writer.drain()
        writer.close()

    path = tmp_path / "g"
    ask = """
import socket
s = socket.create_connection(("127.0.0.1", 9090), 10); s.sendall(b"hello\\n"); d = b""
while chunk := s.recv(1 << 20): d += chunk
print(d[:9].decode(), len(d))
"""
    async with await asyncio.start_unix_server(answer, str(path)):
        spec = SandboxSpec(network="gateway_only", gateway_socket=path, gateway_port=9090)
        async with await lab.backend.create(spec) as sandbox:
            for _ in range(2):
                result = await sandbox.exec(["python3", "-c", ask], timeout_s=20)
                assert result.stdout == b"got hello 3000010\n", result
                await sandbox.kill_all()
            for taken in ("s.bind(('127.0.0.1', 9090))", "s.connect(('127.0.0.1', 9091))"):
                code = f"import socket; s = socket.socket(); {taken}"
                assert (await sandbox.exec(["python3", "-c", code], timeout_s=20)).exit_code == 1
            assert (await sh(sandbox, f"ls {path}")).exit_code != 0


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (SandboxSpec(network="public"), "public"),
        (SandboxSpec(network="allowlist"), "allowlist"),
        (SandboxSpec(network="gateway_only"), "socket"),
        (SandboxSpec(binds=(Bind(source=Path("/does/not/exist"), target="/opt/x"),)), "/does/not/exist"),
        (SandboxSpec(binds=(Bind(source=Path("/usr"), target="/work"),)), "/work"),
        (SandboxSpec(binds=(Bind(source=Path("/usr"), target="relative"),)), "relative"),
    ],
)
async def test_more_than_is_offered_is_refused_before_start(lab: Lab, spec: SandboxSpec, word: str) -> None:
    if spec.network == "public" and lab.backend.name.startswith("harbor"):
        pytest.skip("harbor: its sandboxes may have a public network")
    with pytest.raises(PolicyUnsupported, match=word) as caught:
        await lab.backend.create(spec)
    assert not caught.value.infra


async def test_an_image_is_taken_or_refused(lab: Lab) -> None:
    if "images" not in lab.backend.capabilities:
        with pytest.raises(PolicyUnsupported, match="image"):
            await lab.backend.create(SandboxSpec(image="some/image"))
        return
    spec = SandboxSpec(image=lab.image, workdir="/srv/job", files=FILES)
    async with await lab.backend.create(spec) as sandbox:
        assert await out(sandbox, "pwd; touch made && echo ok") == "/srv/job\nok"
        assert (await sandbox.get_tree()).keys() == {*FILES, "made"}


# The end


async def test_close_ends_everything_and_may_be_called_again(lab: Lab) -> None:
    sandbox = await lab.backend.create(SandboxSpec())
    process = await sandbox.spawn(["sleep", "919293"])
    await sandbox.close()
    await sandbox.close()
    assert await process.wait(20) != 0
    for refused in (
        sandbox.exec(["true"], timeout_s=1),
        sandbox.get_tree(),
        sandbox.kill_all(),
        sandbox.spawn(["true"]),
    ):
        with pytest.raises(SandboxLost):
            await refused


async def test_a_cancelled_close_finishes(lab: Lab) -> None:
    sandbox = await lab.backend.create(SandboxSpec())
    closing = asyncio.create_task(sandbox.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await sandbox.close()
    with pytest.raises(SandboxLost):
        await sandbox.exec(["true"], timeout_s=1)


async def test_closing_while_a_command_runs_is_no_exit_code(lab: Lab) -> None:
    sandbox = await lab.backend.create(SandboxSpec())
    running = asyncio.create_task(sh(sandbox, "touch started; sleep 60"))
    for _ in range(1000):
        if await sandbox.get(f"{sandbox.workdir}/started") is not None:
            break
        await asyncio.sleep(0.02)
    await sandbox.close()
    assert (await running).exit_code is None


async def test_many_sandboxes_at_once(lab: Lab) -> None:
    sandboxes = await asyncio.gather(*(lab.backend.create(SandboxSpec()) for _ in range(6)))
    try:
        results = await asyncio.gather(
            *(out(sandbox, f"echo {n} > m; cat m") for n, sandbox in enumerate(sandboxes))
        )
        assert results == [str(n) for n in range(6)]
    finally:
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
