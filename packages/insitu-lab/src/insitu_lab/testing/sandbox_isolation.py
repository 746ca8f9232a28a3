"""Contract of the isolation, limits and network of sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from insitu.errors import PolicyUnsupported
from insitu.sandbox.base import Bind, Sandbox, SandboxBackend, SandboxSpec, memory_kills
from insitu_lab.testing.sandbox_files import FILES
from insitu_lab.testing.shell import count_processes, run, shell

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


CLIENT = """
import socket
s = socket.create_connection(("127.0.0.1", 9090), 10); s.sendall(b"hello\\n"); d = b""
while chunk := s.recv(1 << 20): d += chunk
print(d[:9].decode(), len(d))
"""


class IsolationContract:
    """Privileges, visibility of the host, limits and network policies."""

    async def test_no_privilege(self, sandbox: Sandbox) -> None:
        status = (
            await run(sandbox, "grep -E '^(Cap|NoNewPrivs)' /proc/self/status; id -u; hostname")
        ).split()
        assert status[-1] == "sandbox"
        assert status[-2] != "0"
        fields = dict(zip(status[:-2:2], status[1:-2:2], strict=True))
        assert int(fields.pop("NoNewPrivs:")) == 1
        assert {name: int(value, 16) for name, value in fields.items()} == dict.fromkeys(fields, 0)

    async def test_programs_can_tell_who_they_are(self, sandbox: Sandbox) -> None:
        assert await run(
            sandbox, "id -un; python3 -c 'import os, pwd; print(pwd.getpwuid(os.getuid()).pw_dir)'"
        ) == ("agent\n/home/agent")

    async def test_system_is_read_only(self, sandbox: Sandbox) -> None:
        for path in ("/usr/x", "/etc/x", "/x", "/opt/x", "/run/x", "/home/x", "/proc/sys/kernel/hostname"):
            assert (await shell(sandbox, f"echo x > {path}")).exit_code != 0, path

    async def test_init_cannot_be_killed_or_read(self, sandbox: Sandbox) -> None:
        await shell(sandbox, "kill -9 1; kill -TERM 1; kill -INT 1")
        assert await run(sandbox, "echo alive") == "alive"
        for name in ("mem", "environ", "fd/0", "root/"):
            assert (await shell(sandbox, f"head -c1 /proc/1/{name}")).exit_code != 0, name

    async def test_no_network(self, sandbox: Sandbox) -> None:
        dial = "import socket; socket.create_connection(({!r}, {}), 2)"
        for host, port in (("192.0.2.1", 80), ("169.254.169.254", 80), ("127.0.0.1", 22), ("::1", 22)):
            result = await sandbox.exec(["python3", "-c", dial.format(host, port)], timeout_s=20)
            assert result.exit_code == 1, host
        assert (await run(sandbox, "cut -d: -f1 -s /proc/net/dev")).split() == ["lo"]

    async def test_sandboxes_do_not_see_each_other(self, backend: SandboxBackend, sandbox: Sandbox) -> None:
        async with await backend.create(SandboxSpec()) as other:
            await other.spawn(["sleep", "4242"])
            await shell(other, "echo x > /tmp/mark; echo x > /dev/shm/mark")
            assert await count_processes(sandbox, "4242") == 0
            assert (await shell(sandbox, "ls /tmp/mark /dev/shm/mark")).exit_code != 0
            assert await count_processes(other, "4242") == 1

    async def test_the_hosts_environment_does_not_leak(
        self, backend: SandboxBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("HOST_SECRET", "do-not-leak")
        async with await backend.create(SandboxSpec(env={"OWN": "1"})) as sandbox:
            names = {line.split("=", 1)[0] for line in (await run(sandbox, "env")).splitlines()}
            assert {"PATH", "HOME", "OWN"} <= names
            assert "HOST_SECRET" not in names
            assert (await shell(sandbox, f"ls '{tmp_path}'")).exit_code != 0

    @pytest.fixture
    def tool(self, tmp_path: Path) -> Path:
        """Return a folder to bind, below one that only its owner may enter."""
        (tmp_path / "a tool, quoted").mkdir()
        (tmp_path / "a tool, quoted" / "data").write_text("shown")
        tmp_path.chmod(0o700)
        return tmp_path / "a tool, quoted"

    async def test_binds_are_read_only(self, backend: SandboxBackend, tool: Path) -> None:
        async with await backend.create(
            SandboxSpec(binds=(Bind(source=tool, target="/opt/deep/tool"),))
        ) as sandbox:
            assert await run(sandbox, "cat /opt/deep/tool/data") == "shown"
            assert (await shell(sandbox, "echo x > /opt/deep/tool/data")).exit_code != 0
            assert (await shell(sandbox, "touch /opt/deep/tool/new /opt/deep/new /opt/new")).exit_code != 0
        assert (tool / "data").read_text() == "shown"

    async def test_limits_hold_and_neighbours_do_not_feel_them(
        self, backend: SandboxBackend, sandbox: Sandbox
    ) -> None:
        if "resource_limits" not in backend.capabilities:
            with pytest.raises(PolicyUnsupported):
                await backend.create(SandboxSpec(max_processes=40))
            return
        async with await backend.create(SandboxSpec(max_processes=40, memory_bytes=200 << 20)) as limited:
            greedy = "x = bytearray(400 << 20)"
            assert (await limited.exec(["python3", "-c", greedy], timeout_s=20)).exit_code not in (0, None)
            many = "import os, time\nfor _ in range(60):\n    if os.fork() == 0:\n        time.sleep(60)\n"
            assert (await limited.exec(["python3", "-c", many], timeout_s=20)).exit_code == 1
            assert await run(sandbox, "python3 -c 'x = bytearray(400 << 20); print(len(x) >> 20)'") == "400"
            await limited.kill_all()
            assert await run(limited, "echo alive") == "alive"

    async def test_memory_that_is_shared_is_not_limited(self, backend: SandboxBackend) -> None:
        # Known limit of SandboxSpec.memory_bytes, which applies per process.
        if "resource_limits" not in backend.capabilities:
            return
        async with await backend.create(SandboxSpec(memory_bytes=100 << 20)) as limited:
            shared = (
                "import mmap; m = mmap.mmap(-1, 200 << 20)\nfor i in range(0, 200 << 20, 4096): m[i] = 1\n"
            )
            assert (await limited.exec(["python3", "-c", shared], timeout_s=30)).exit_code == 0
            private = "x = bytearray(200 << 20)"
            assert (await limited.exec(["python3", "-c", private], timeout_s=30)).exit_code == 1

    async def test_memory_is_bounded_for_the_sandbox_as_a_whole(
        self,
        backend: SandboxBackend,
        small_backend: Callable[[int], SandboxBackend] | None,
        sandbox: Sandbox,
    ) -> None:
        if "sandbox_memory" not in backend.capabilities or small_backend is None:
            return
        small = small_backend(128 << 20)
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

    async def test_kill_all_finds_a_process_that_lost_its_first_thread(self, sandbox: Sandbox) -> None:
        await sandbox.exec(["python3", "-c", HEADLESS], timeout_s=20)
        gone = await shell(
            sandbox, "until grep -qs '^State:.Z' /proc/[0-9]*/status && ls beat; do sleep .1; done", 20
        )
        assert gone.exit_code == 0
        await sandbox.kill_all()
        last = await sandbox.get(f"{sandbox.workdir}/beat")
        await asyncio.sleep(0.1)
        assert await sandbox.get(f"{sandbox.workdir}/beat") == last

    async def test_kill_all_beats_a_fork_bomb(self, backend: SandboxBackend) -> None:
        async with await backend.create(SandboxSpec(max_processes=50)) as sandbox:
            bomb = "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nif os.fork(): os._exit(0)\n"
            bomb += "os.setsid()\nwhile True:\n    try:\n        os.fork()\n    except OSError: pass\n"
            await sandbox.exec(["python3", "-c", bomb], timeout_s=20)
            await asyncio.sleep(0.1)
            await sandbox.kill_all()
            assert await run(sandbox, "echo alive") == "alive"

    async def test_the_gateway_is_reached_and_nothing_else(
        self, backend: SandboxBackend, tmp_path: Path
    ) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = await reader.readline()
            writer.write(b"got " + line + b"x" * 3_000_000)
            await writer.drain()
            writer.close()

        path = tmp_path / "g"
        async with await asyncio.start_unix_server(answer, str(path)):
            spec = SandboxSpec(network="gateway_only", gateway_socket=path, gateway_port=9090)
            async with await backend.create(spec) as sandbox:
                for _ in range(2):
                    result = await sandbox.exec(["python3", "-c", CLIENT], timeout_s=20)
                    assert result.stdout == b"got hello 3000010\n", result
                    await sandbox.kill_all()
                for taken in ("s.bind(('127.0.0.1', 9090))", "s.connect(('127.0.0.1', 9091))"):
                    code = f"import socket; s = socket.socket(); {taken}"
                    assert (await sandbox.exec(["python3", "-c", code], timeout_s=20)).exit_code == 1
                assert (await shell(sandbox, f"ls {path}")).exit_code != 0

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
    async def test_more_than_is_offered_is_refused_before_start(
        self, backend: SandboxBackend, spec: SandboxSpec, word: str
    ) -> None:
        if spec.network == "public" and backend.name.startswith("harbor"):
            pytest.skip("harbor: its sandboxes may have a public network")
        with pytest.raises(PolicyUnsupported, match=word) as caught:
            await backend.create(spec)
        assert not caught.value.infra

    async def test_an_image_is_used_or_refused(self, backend: SandboxBackend, image: str) -> None:
        if "images" not in backend.capabilities:
            with pytest.raises(PolicyUnsupported, match="image"):
                await backend.create(SandboxSpec(image="some/image"))
            return
        spec = SandboxSpec(image=image, workdir="/srv/job", files=FILES)
        async with await backend.create(spec) as sandbox:
            assert await run(sandbox, "pwd; touch made && echo ok") == "/srv/job\nok"
            assert (await sandbox.get_tree()).keys() == {*FILES, "made"}
