"""The sandbox benchmark prints the object that is promised, and counts what is left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks import sandbox
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.local import LocalBackend

pytestmark = pytest.mark.slow


def test_last_line_is_the_promised_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    monkeypatch.setattr(sandbox, "PARALLEL", 3)
    assert sandbox.main(["--rounds", "2", "--json"]) == 0
    said = orjson.loads(capsys.readouterr().out.splitlines()[-1])
    assert said.keys() == {"local"}
    assert said["local"].keys() == {"create_destroy_ms", "parallel_64_s", "leaks"}
    assert 0 < said["local"]["create_destroy_ms"]["p50"] <= said["local"]["create_destroy_ms"]["p95"]
    assert said["local"]["leaks"] == 0


def test_a_backend_that_is_missing_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    monkeypatch.setattr(sandbox, "PARALLEL", 1)
    assert sandbox.main(["--rounds", "1"]) == 0
    said = capsys.readouterr()
    assert "docker: not measured: " in said.err
    assert "docker" not in said.out


def test_what_is_left_behind_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    monkeypatch.setattr(sandbox, "PARALLEL", 1)

    async def two(*_: object) -> int:
        return 2

    monkeypatch.setattr(sandbox, "left", two)
    assert sandbox.main(["--rounds", "1", "--json"]) == 1
    said = capsys.readouterr()
    assert orjson.loads(said.out)["local"]["leaks"] == 2
    assert "local: sandboxes left something behind: 2" in said.err


async def test_a_sandbox_that_is_left_is_counted() -> None:
    backend = LocalBackend()
    async with await backend.create(SandboxSpec()):  # of an earlier measurement: not this one's
        before = sandbox.Seen.now(backend)
        async with await backend.create(SandboxSpec()):
            assert await sandbox.left(backend, before, 0.0) > 0
        assert await sandbox.left(backend, before) == 0


async def test_what_goes_within_a_moment_was_not_left() -> None:
    backend = LocalBackend()
    before = sandbox.Seen.now(backend)
    child = await asyncio.create_subprocess_exec("sleep", "0.3")
    assert await sandbox.left(backend, before, 0.0) == 1
    assert await sandbox.left(backend, before) == 0
    assert await child.wait() == 0


def test_what_others_mount_meanwhile_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = "601 29 0:52 / /var/lib/docker/overlay2/1f/merged rw - overlay overlay rw\n"
    ours = "602 29 0:53 / /tmp/insitu-sandbox-1/work rw - tmpfs tmpfs rw\n"
    backend = LocalBackend()
    before = sandbox.Seen.now(backend)
    known = Path("/proc/self/mountinfo").read_text()
    read_text = Path.read_text

    def said(extra: str) -> None:
        def read(path: Path, *more: Any, **named: Any) -> str:
            return known + extra if str(path) == "/proc/self/mountinfo" else read_text(path, *more, **named)

        monkeypatch.setattr(Path, "read_text", read)

    said(theirs)
    assert sandbox.Seen.now(backend).since(before) == 0
    said(theirs + ours)
    assert sandbox.Seen.now(backend).since(before) == 1
