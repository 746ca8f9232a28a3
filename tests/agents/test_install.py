"""Finding and installing the pinned agent: offline when cached, one clear line when it cannot be had."""

from __future__ import annotations

import dataclasses
import os
import pwd
import shutil
import zipfile
from pathlib import Path

import pytest

import insitu
from insitu.agents import install
from insitu.agents.base import ModelAccess
from insitu.agents.harness import RecipeHarness
from insitu.agents.install import Installed, find_node
from insitu.agents.pi import RECIPE
from insitu.agents.recipe import Recipe
from insitu.cli import main
from insitu.doctor import examine
from insitu.errors import SetupError
from insitu.sandbox.local import LocalBackend
from insitu.types import Task


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


BWRAP = shutil.which("bwrap")
SHELL = Recipe(name="shell", npm=("@a/shell@3",), node=(22, 19), command=("shell", "{prompt_file}"))
"""Its program is linked into node_modules/.bin by npm."""


def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "a-shell-3"


def cached(tmp_path: Path) -> Path:
    return program(folder(tmp_path) / "node_modules" / ".bin" / "shell", "exit")


@pytest.mark.slow
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


def test_a_cached_agent_needs_no_network(bare: Path, tmp_path: Path) -> None:
    assert install.find(SHELL) is None
    cached(tmp_path)
    native = Installed(folder=folder(tmp_path), program=("{root}/node_modules/.bin/shell",))
    assert install.install(SHELL) == install.find(SHELL) == native
    (folder(tmp_path) / "node_modules/.bin/shell").write_text("#!/usr/bin/env node\n")
    found = install.install(SHELL)
    assert found.program == ("{node}", "{root}/node_modules/.bin/shell")


@pytest.mark.slow
def test_a_failed_install_leaves_nothing_and_says_why(bare: Path, tmp_path: Path) -> None:
    program(bare / "node", "echo v24.0.0")
    with pytest.raises(SetupError, match="npm is missing"):
        install.install(SHELL)
    program(bare / "npm", "echo 'npm error code ENOTFOUND' >&2; echo 'npm error network down' >&2; exit 1")
    with pytest.raises(
        SetupError, match=r"install @a/shell@3 \(is there a network\?\): code ENOTFOUND network down"
    ):
        install.install(SHELL)
    # pip names every version that needs a newer Python.
    program(bare / "npm", "printf 'ERROR: %04000d\\n' 7 >&2; exit 1")
    with pytest.raises(SetupError, match=r"a network\?\): ERROR: 0{193}$"):
        install.install(SHELL)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.slow
def test_an_install_is_complete_or_absent(bare: Path, tmp_path: Path) -> None:
    program(bare / "node", "echo v24.0.0")
    make = '/bin/mkdir -p node_modules/.bin; echo "$@" > node_modules/.bin/shell'
    program(bare / "npm", make)
    lines: list[str] = []
    found = install.install(SHELL, lines.append)
    flags = (folder(tmp_path) / "node_modules/.bin/shell").read_text()
    assert "@a/shell@3" in flags
    assert "--ignore-scripts" in flags
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["a-shell-3"]
    assert lines == [f"installing @a/shell@3 for agent shell in {tmp_path / 'cache'}"]
    program(bare / "npm", "exit 1")
    assert install.install(SHELL, lines.append) == found
    assert len(lines) == 1
    elsewhere = dataclasses.replace(SHELL, command=("build-*/shell",))
    with pytest.raises(SetupError, match=r"a-shell-3 has no program build-\*/shell for this machine"):
        install.install(elsewhere)
    newer = dataclasses.replace(SHELL.at_version("4"), node=(25, 0))
    with pytest.raises(SetupError, match=r"Node 25.0 or newer is needed"):
        install.install(newer)


def test_an_unwritable_cache_is_one_clear_line(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(SetupError, match="Not a directory"):
        install.install(SHELL)


@pytest.mark.slow
def test_a_user_without_a_home_is_told_what_to_set(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_user(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", no_user)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("INSITU_CACHE")
    for look in (install.find, install.install):
        with pytest.raises(SetupError, match="set INSITU_CACHE"):
            look(RECIPE)
    assert "set INSITU_CACHE" in str(list(examine()))


@pytest.mark.slow
def test_command_line(bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program(tmp_path / "cache" / "openai-codex-1.2.3" / COPIES / "codex", "exit")
    assert main(["install", "codex@1.2.3", "script"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"codex 1.2.3: {tmp_path / 'cache' / 'openai-codex-1.2.3'}"
    assert lines[1].endswith("no packages to install")
    assert main(["install", "nano"]) == 2
    assert "unknown name 'nano' of kind agents" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'spawn: ENOENT' >&2; exit 1", "(exit code 1): spawn: ENOENT"),
        ("exec /opt/agent/a", "not found"),
    ],
)
def test_a_package_whose_program_does_not_start_is_not_installed(
    bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, said: str
) -> None:
    if BWRAP:  # the only way to start a program in isolation for a user who is not root
        bare.mkdir(exist_ok=True)
        (bare / "bwrap").symlink_to(BWRAP)
    elif os.geteuid() != 0:
        pytest.skip("needs bubblewrap or root")
    program(tmp_path / "cache" / "openai-codex-1.2.3" / COPIES / "codex", script)
    assert main(["install", "codex@1.2.3"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = [line for line in captured.err.splitlines() if line.startswith("insitu: ")]
    assert line.startswith(
        f"insitu: agent codex: codex in {tmp_path}/cache/openai-codex-1.2.3 does not start ("
    )
    assert line.endswith(said)


@pytest.mark.slow
def test_the_public_form_returns_the_folders(bare: Path, tmp_path: Path) -> None:
    recipe = dataclasses.replace(SHELL, command=("shell",))
    program(folder(tmp_path) / "node_modules" / ".bin" / "shell", '[ "$1" = --version ]')
    assert insitu.install([recipe, "script"])["shell 3"] == folder(tmp_path)


COPIES = "node_modules/@openai/codex-linux-x64/vendor/x86_64/bin"


LIBRARY = """
import os, subprocess, sys
def main():
    print("PYTHONPATH" in os.environ, sys.argv[1:])
    return subprocess.run(["python3", "-c", "import mine_lib"]).returncode == 0
"""


def wheel(folder: Path, name: str, library: str) -> None:
    """Build a wheel by hand; no build tool is needed."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}_lib.py": library,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}_lib:main\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in files)
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.mark.slow
async def test_packages_of_pypi_are_seen_by_the_agent_and_not_by_its_commands(
    backend: LocalBackend, tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path / "wheels", "mine", LIBRARY)
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    recipe = Recipe(name="mine", pip=("mine==1.0",), command=("mine", "{model}"))
    installed = install.install(recipe)
    shutil.rmtree(tmp_path / "wheels")
    assert install.install(recipe) == installed
    access = ModelAccess(public_id="p", secret="secret-of-rollout")
    for command in (("mine", "{model}"), ("python3", "-m", "mine_lib"), ("python3", "-c", "import mine_lib")):
        harness = RecipeHarness(dataclasses.replace(recipe, command=command), backend)
        async with harness.worker(tmp_path / "g") as worker:
            result = await worker.run(task, access)
        assert (result.exit, result.detail) == ("finished", "")
        if command[0] == "mine":
            assert result.log.startswith(b"False ['policy']\n")
            assert b"No module named 'mine_lib'" in result.log
    missing = dataclasses.replace(recipe, pip=("mine==2.0",))
    with pytest.raises(
        SetupError, match=r"pip could not install mine==2.0 \(is there .*: ERROR: Could not find"
    ):
        install.install(missing)
