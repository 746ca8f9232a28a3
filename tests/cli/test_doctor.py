"""What `insitu doctor` says of training on a GPU; none of it is needed for the demo."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from insitu import doctor
from insitu.doctor import MachineCheck
from insitu.errors import SetupError

pytestmark = pytest.mark.slow


def training() -> dict[str, MachineCheck]:
    return {finding.name: finding for finding in doctor._training()}


def test_a_machine_without_gpu_triton_or_compiler_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    found = training()
    assert list(found) == ["transformers", "gpu", "triton", "compiler", "vllm"]
    assert not any(finding.found or finding.needed for finding in found.values())
    assert "[hf]" in found["transformers"].text
    assert "train on the CPU" in found["gpu"].text
    assert found["compiler"].text.startswith("Triton needs a C compiler and ")
    assert "Python.h" in found["compiler"].text
    assert (
        "not installed: as a server it needs /weight_info and /weight_checker, as vLLM 0.32 has"
        in found["vllm"].text
    )


def test_what_ends_every_run_is_marked_and_named_last() -> None:
    checks = [
        MachineCheck(name="python", found=True, text="3.11"),
        MachineCheck(name="bubblewrap", found=False, text="no way to isolate"),
        MachineCheck(name="gpu", found=False, text="none", needed=False),
    ]
    text, complete = doctor.report(checks)
    assert [line[:4] for line in text.splitlines()] == ["ok  ", "NO  ", "--  ", "need"]
    assert (text.splitlines()[-1], complete) == ("needed and missing: bubblewrap", False)


def test_isolation_is_tried_as_a_sandbox_does(monkeypatch: pytest.MonkeyPatch) -> None:
    working: set[str] = set()

    def backend(mode: str) -> None:
        if mode not in working:
            raise SetupError(f"no way to isolate a process here ({mode}: refused)")

    monkeypatch.setattr(doctor, "LocalBackend", backend)
    for root, modes, needed in (
        (True, {"bubblewrap", "namespaces"}, []),
        (True, {"namespaces"}, []),
        (True, {"bubblewrap"}, []),
        (True, set(), ["namespaces"]),
        (False, {"bubblewrap"}, []),
        (False, set(), ["bubblewrap"]),
    ):
        working.clear()
        working.update(modes)
        monkeypatch.setattr(doctor, "is_root", lambda root=root: root)
        checks = list(doctor._isolation())
        assert [check.name for check in checks if check.needed and not check.found] == needed
        assert all(check.found or "refused" in check.text for check in checks)


def test_what_is_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, says in (("nvidia-smi", "NVIDIA H100 80GB HBM3, 81559 MiB, 580.1"), ("cc", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(doctor, "_version", lambda name: "1.2.3")
    found = training()
    assert all(finding.found for finding in found.values())
    assert found["gpu"].text == "NVIDIA H100 80GB HBM3, 81559 MiB, 580.1"
    assert found["compiler"].text == f"{tmp_path / 'cc'}, {tmp_path / 'Python.h'}"
    assert found["vllm"].text.startswith("1.2.3: as a server it needs")
