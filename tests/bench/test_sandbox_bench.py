"""The sandbox benchmark prints the object that is promised, and counts what is left behind."""

from __future__ import annotations

import orjson
import pytest

from whet.bench import sandbox
from whet.sandbox.base import SandboxSpec
from whet.sandbox.local import LocalBackend


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
    monkeypatch.setattr(sandbox, "left", lambda backend, before, mounts: 2)
    assert sandbox.main(["--rounds", "1", "--json"]) == 1
    said = capsys.readouterr()
    assert orjson.loads(said.out)["local"]["leaks"] == 2
    assert "local: boxes left something behind: 2" in said.err


async def test_a_box_that_is_left_is_counted() -> None:
    backend = LocalBackend()
    before, mounts = sandbox.descendants(), sandbox.mounted()
    async with await backend.create(SandboxSpec()):
        assert sandbox.left(backend, before, mounts) > 0
    assert sandbox.left(backend, before, mounts) == 0
