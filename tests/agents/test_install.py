"""Finding and installing the pinned agent: offline when cached, one clear line when it cannot be had."""

from __future__ import annotations

import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from insitu.agents import install
from insitu.agents.install import (
    PI_PACKAGE,
    PI_VERSION,
    PiInstall,
    find_node,
    find_pi,
    install_pi,
)
from insitu.doctor import doctor
from insitu.errors import SetupError


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, an empty PATH and no Node from a Python package; returns the folder on PATH."""
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(install, "_wheel_node", lambda: None)
    return tmp_path / "bin"


def cached(tmp_path: Path) -> Path:
    cli = tmp_path / "cache" / f"pi-{PI_VERSION}" / "node_modules" / PI_PACKAGE / "dist" / "bundle" / "cli.js"
    cli.parent.mkdir(parents=True)
    cli.write_text("")
    return cli


def test_node_missing_or_old_is_one_clear_line(bare: Path) -> None:
    with pytest.raises(SetupError, match=r"Node 22.19 or newer is needed \(none found\): (uv )?pip install"):
        find_node()
    program(bare / "node", "echo v20.11.1")
    with pytest.raises(SetupError, match=r"node is 20\.11\)"):
        find_node()
    program(bare / "node", "echo nonsense")
    with pytest.raises(SetupError, match=r"node is 0\.0\)"):
        find_node()
    program(bare / "node", "echo v22.19.0")
    assert find_node() == bare / "node"


def test_cached_pi_needs_no_network(bare: Path, tmp_path: Path) -> None:
    program(bare / "node", "echo v24.0.0")
    assert find_pi() is None
    cached(tmp_path)
    found = install_pi()
    modules = tmp_path / "cache" / f"pi-{PI_VERSION}" / "node_modules"
    assert found == PiInstall(version=PI_VERSION, node=bare / "node", modules=modules)


def test_failed_install_leaves_nothing_and_says_why(bare: Path, tmp_path: Path) -> None:
    program(bare / "node", "echo v24.0.0")
    with pytest.raises(SetupError, match="npm is missing"):
        install_pi()
    program(bare / "npm", "echo 'npm error code ENOTFOUND' >&2; echo 'npm error network down' >&2; exit 1")
    with pytest.raises(SetupError, match=r"is there a network\?\): code ENOTFOUND network down"):
        install_pi()
    assert list((tmp_path / "cache").iterdir()) == []


def test_install_is_complete_or_absent(bare: Path, tmp_path: Path) -> None:
    program(bare / "node", "echo v24.0.0")
    make = f'/bin/mkdir -p "node_modules/{PI_PACKAGE}/dist/bundle"; '
    make += f'echo "$@" > "node_modules/{PI_PACKAGE}/dist/bundle/cli.js"'
    program(bare / "npm", make)
    found = install_pi()
    flags = (found.modules / PI_PACKAGE / "dist" / "bundle" / "cli.js").read_text()
    assert f"{PI_PACKAGE}@{PI_VERSION}" in flags
    assert "--ignore-scripts" in flags
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"pi-{PI_VERSION}"]
    program(bare / "npm", "exit 1")
    assert install_pi() == found


def test_unwritable_cache_is_one_clear_line(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(bare / "node", "echo v24.0.0")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(SetupError, match="Not a directory"):
        install_pi()


def test_a_user_without_a_home_is_told_what_to_set(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("INSITU_CACHE")
    for find in (find_pi, install_pi):
        with pytest.raises(SetupError, match="set INSITU_CACHE"):
            find()
    assert "set INSITU_CACHE" in doctor()[0]


def test_command_line(bare: Path, tmp_path: Path) -> None:
    program(bare / "node", "echo v24.0.0")
    cached(tmp_path)
    command = [sys.executable, "-m", "insitu.agents.install"]
    env = {"INSITU_CACHE": str(tmp_path / "cache"), "PATH": str(bare), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([*command, "pi"], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"pi {PI_VERSION}: {tmp_path}" in done.stdout
    wrong = subprocess.run([*command, "nano"], capture_output=True, text=True, env=env, timeout=60)
    assert wrong.returncode == 2
