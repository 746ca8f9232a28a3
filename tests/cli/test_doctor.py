"""What `insitu doctor` says of training on a GPU; none of it is needed for the demo."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from insitu import doctor
from insitu.doctor import MachineCheck

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
        "not installed: insitu supports vLLM 0.32, and 0.26 with --worker-extension-cls" in found["vllm"].text
    )


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
    assert found["vllm"].text.startswith("1.2.3: insitu supports")
