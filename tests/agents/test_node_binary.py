"""Pi's Node as a copy that can be run and not read: there once for each content, and gone when unused."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from insitu.agents import node_binary
from insitu.agents.node_binary import UNUSED_S, sealed_node
from insitu.errors import SetupError


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def program(path: Path, words: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {words}\n")
    path.chmod(0o755)
    return path


def copies(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("node-*") if stat.S_IMODE(path.stat().st_mode) == 0o111)


def aged(path: Path) -> Path:
    os.utime(path, times=(time.time() - UNUSED_S - 60,) * 2)
    return path


def let_go(sealed: Path) -> None:
    """As the end of this process would."""
    os.close(node_binary._lock_fds.pop(sealed))


def test_a_sealed_node_can_be_run_and_not_read(cache: Path, tmp_path: Path) -> None:
    node = program(tmp_path / "bin" / "node", "v24.0.0")
    sealed = sealed_node(node)
    assert sealed.parent == cache
    assert stat.S_IMODE(sealed.stat().st_mode) == 0o111
    assert sealed.stat().st_size == node.stat().st_size
    assert sealed_node(node) == sealed
    with pytest.raises(SetupError, match=r"copy .*No such file"):
        sealed_node(tmp_path / "missing")


def test_one_node_is_there_once_wherever_it_lies(cache: Path, tmp_path: Path) -> None:
    sealed = sealed_node(program(tmp_path / "a" / "node", "v24.0.0"))
    shutil.rmtree(tmp_path / "a")
    assert sealed_node(program(tmp_path / "a" / "node", "v24.0.0")) == sealed, "the environment was made anew"
    assert sealed_node(program(tmp_path / "b" / "node", "v24.0.0")) == sealed
    assert copies(cache) == [sealed.name]
    other = sealed_node(program(tmp_path / "a" / "node", "v24.0.1"))
    assert other != sealed, "as long, and another content"
    assert copies(cache) == sorted([sealed.name, other.name])


def test_what_nobody_uses_is_removed_after_a_week(cache: Path, tmp_path: Path) -> None:
    first = sealed_node(program(tmp_path / "node", "v24.0.0"))
    second = sealed_node(program(tmp_path / "node", "v24.0.1"))
    third = sealed_node(program(tmp_path / "node", "v24.0.2"))
    named_otherwise = aged(program(cache / "node-0123456789abcdef", "an older release's"))
    bystander = aged(program(cache / "node-of-somebody", "other"))
    left = cache / f"{first.name}.part-{2**22 + 1}-x"
    left.mkdir()
    let_go(first), let_go(second)
    aged(first), aged(third)
    assert sealed_node(program(tmp_path / "node", "v24.0.1")) == second
    assert copies(cache) == sorted([second.name, third.name]), "the third is held by this process"
    assert not named_otherwise.exists()
    assert not left.exists()
    assert bystander.exists()
    locks = sorted(path.name for path in cache.glob("*.lock"))
    assert locks == sorted(f"{path.name}.lock" for path in (second, third))
    assert sealed_node(program(tmp_path / "node", "v24.0.0")) == first, "it is made again"


@pytest.mark.slow
def test_what_another_process_uses_stays_however_old(cache: Path, tmp_path: Path) -> None:
    node = program(tmp_path / "node", "v24.0.0")
    code = "import sys; from pathlib import Path; from insitu.agents.node_binary import sealed_node\n"
    code += "print(sealed_node(Path(sys.argv[1])), flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(node)]
    env = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as user:
        assert user.stdout is not None
        sealed = aged(Path(user.stdout.readline().strip()))
        sealed_node(program(tmp_path / "node", "v24.0.1"))
        assert sealed.exists()
        user.kill()
    sealed_node(node)
    assert not sealed.exists()


def test_a_cache_that_takes_no_notes_does_for_a_copy_that_is_there(cache: Path, tmp_path: Path) -> None:
    node = program(tmp_path / "node", "v24.0.0")
    sealed = sealed_node(node)
    let_go(sealed)
    lock = cache / f"{sealed.name}.lock"
    lock.unlink()
    lock.mkdir()
    assert sealed_node(node) == sealed
