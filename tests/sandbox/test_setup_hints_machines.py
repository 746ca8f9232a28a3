"""Machines that are not like the developer's: old Python, few descriptors, work below /usr, no namespaces."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sandbox_rig import open_descriptors, out, sh

from insitu.errors import PolicyUnsupported, SandboxError, SetupError
from insitu.sandbox import limits, setup_hints
from insitu.sandbox import rootfs as layout
from insitu.sandbox.base import SandboxSpec
from insitu.sandbox.cgroup import CgroupSupport
from insitu.sandbox.local import LocalBackend, LocalSandbox, allow_open_files
from insitu.sandbox.setup_hints import advise


@pytest.mark.parametrize(
    ("switches", "container", "words"),
    [
        ({"kernel/apparmor_restrict_unprivileged_userns": "1"}, False, "AppArmor"),
        ({"kernel/apparmor_restrict_unprivileged_userns": "0"}, False, "security module"),
        ({"kernel/unprivileged_userns_clone": "0"}, False, "kernel.unprivileged_userns_clone=1"),
        ({"user/max_user_namespaces": "0"}, True, "user.max_user_namespaces="),
        ({"user/max_user_namespaces": "15000"}, True, "systempaths=unconfined"),
        ({}, False, "security module"),
    ],
)
def test_advice_fits_the_reason(switches: dict[str, str], container: bool, words: str) -> None:
    said = advise(
        bwrap_missing=False, sysctl=lambda name: switches.get(name, ""), container=lambda: container
    )
    assert words in said
    assert "install" not in said
    missing = advise(bwrap_missing=True, sysctl=lambda _: "0", container=lambda: True)
    assert missing.startswith("install bubblewrap, ")


def test_root_of_a_namespace_of_one_user_is_an_ordinary_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits.os, "geteuid", lambda: 0)
    for ids, root, own in (
        ("0 0 4294967295", True, True),
        ("0 1000 1", False, False),
        ("0 1000 1\n1 100000 65536", True, False),
    ):
        monkeypatch.setattr(limits.Path, "read_text", lambda path, ids=ids: ids + "\n")
        assert (limits.is_root(), limits.has_own_users()) == (root, own)


@pytest.mark.slow
def test_before_any_package_is_there_a_machine_says_whether_it_can_isolate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(setup_hints.__file__).parents[2]
    bare = [sys.executable, "-S", "-c", "import runpy; runpy.run_module('insitu.sandbox.setup_hints')"]
    subprocess.run(bare, check=True, timeout=30, env={"PYTHONPATH": str(source), "PATH": os.environ["PATH"]})
    monkeypatch.setattr(setup_hints, "is_root", lambda: False)
    monkeypatch.setattr(setup_hints, "find_bwrap", lambda: "")
    monkeypatch.setattr(setup_hints, "isolation_fault", lambda bwrap: "")
    assert setup_hints.main() == setup_hints.NEEDS_BUBBLEWRAP
    monkeypatch.setattr(setup_hints, "find_bwrap", lambda: "/usr/bin/bwrap")
    assert setup_hints.main() == 0
    monkeypatch.setattr(setup_hints, "isolation_fault", lambda bwrap: "unshare: Operation not permitted")
    assert setup_hints.main() == 1
    assert capsys.readouterr().out.startswith("unshare: Operation not permitted; ")


@pytest.mark.slow
def test_the_probe_fails_where_namespaces_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert setup_hints.isolation_fault("") == ""
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions' >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(setup_hints, "is_root", lambda: False)
    assert setup_hints.isolation_fault(str(program)) == "bwrap: No permissions"
    refused = setup_hints._NAMESPACE_PROBE.replace('call("unshare", flags', 'call("unshare", 1 | flags')
    monkeypatch.setattr(setup_hints, "_NAMESPACE_PROBE", refused)
    assert setup_hints.isolation_fault("").startswith("unshare: ")


@pytest.fixture
def old_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "python3"
    program.write_text("#!/bin/sh\necho 3 9\n")
    program.chmod(0o755)
    monkeypatch.setattr(layout, "SYSTEM_PYTHON", program)
    return program


@pytest.mark.slow
async def test_a_sandbox_gets_a_recent_python_where_the_system_has_none(
    backend: LocalBackend, old_python: Path
) -> None:
    assert layout.python_version(old_python) == (3, 9)
    async with await LocalBackend(backend.mode).create(SandboxSpec()) as sandbox:
        run = "import sys; print(sys.prefix, sys.version_info >= (3, 11))"
        result = await sandbox.exec(["python3", "-c", run], timeout_s=10)
        assert result.stdout == b"/opt/python True\n", result
        assert await out(sandbox, "ls -A /opt/python/lib/python3*/site-packages 2>/dev/null || true") == ""


@pytest.mark.slow
def test_what_is_no_python_has_no_version(tmp_path: Path) -> None:
    broken = tmp_path / "python3"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert layout.python_version(broken) == layout.python_version(tmp_path / "missing") == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("as_current", [True, False])
async def test_work_below_usr_is_not_shown(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, as_current: bool
) -> None:
    folder = Path("/usr/share/doc")
    if as_current:
        monkeypatch.chdir(folder)
    chosen = LocalBackend(backend.mode, hidden=() if as_current else [folder, folder / "run"])
    async with await backend.create(SandboxSpec()) as sandbox:
        assert await out(sandbox, f"ls -A {folder}") != ""
    async with await chosen.create(SandboxSpec()) as sandbox:
        assert await out(sandbox, f"ls -A {folder}") == ""
        assert (await sh(sandbox, f"echo x > {folder}/stash")).exit_code != 0


@pytest.mark.parametrize("folder", ["/usr", "/usr/lib", "/usr/local", "/usr/local/bin"])
def test_a_folder_sandboxes_need_cannot_be_worked_in(folder: str) -> None:
    with pytest.raises(SetupError, match="every sandbox shows"):
        layout.hidden_folders([Path(folder)])


def test_more_files_may_be_open_than_by_default() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        allow_open_files()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == before[1]
        assert soft == 65536 or soft == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.slow
async def test_a_spawn_without_descriptors_is_a_sandbox_error_and_leaks_none(sandbox: LocalSandbox) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = open_descriptors()
    failed = 0
    for soft in range(3, held + 512):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
        try:
            process = await sandbox.spawn(["true"])
        except SandboxError:
            failed += 1
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            await asyncio.sleep(0)
            assert open_descriptors() == held
        else:
            break
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert failed >= 6
    assert await process.wait(5) == 0


@pytest.mark.slow
async def test_descriptors_in_transit_fail_one_spawn_and_spare_the_sandbox(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")

    with monkeypatch.context() as patch, pytest.raises(SandboxError, match="Too many references"):
        patch.setattr(socket, "send_fds", refuse)
        await sandbox.spawn(["true"])
    process = await sandbox.spawn(["true"])
    assert await process.wait(5) == 0


@pytest.mark.slow
async def test_a_kernel_that_cannot_count_a_boxs_processes_promises_no_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("insitu.sandbox.local._kernel", lambda: (5, 10))
    monkeypatch.setattr("insitu.sandbox.local.has_own_users", lambda: False)
    old = LocalBackend(cgroups=lambda: CgroupSupport(cgroups=None, why="none here"))
    assert "resource_limits" not in old.capabilities
    with pytest.raises(PolicyUnsupported, match=r"needs Linux 5\.14"):
        await old.create(SandboxSpec(max_processes=40))
    async with await old.create(SandboxSpec()) as sandbox:
        assert await out(sandbox, "echo ok") == "ok"
