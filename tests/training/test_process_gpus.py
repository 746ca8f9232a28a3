"""What is decided of GPUs before one is touched: which of them, how memory is cut, and Triton."""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from insitu.config import load_config
from insitu_train.learner.process import ALLOCATOR, VISIBLE, LearnerSpec, computing, least_used
from insitu_train.loss import chunked_logits as tiles
from insitu_train.loss.chunked_logits import TorchBackend, backend, triton_works

pytestmark = pytest.mark.slow


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str, status: int = 0) -> dict[str, str]:
    """A PATH whose nvidia-smi says that."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\nexit {status}\n")
    program.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    return {"PATH": path}


@pytest.mark.parametrize(
    ("lines", "order"),
    [
        ("GPU-a, 60000\nGPU-b, 3", "GPU-b,GPU-a"),  # a server has the first
        ("GPU-a, 3\nGPU-b, 60000", "GPU-a,GPU-b"),
        ("GPU-a, 400\nGPU-b, 3", "GPU-b,GPU-a"),  # no server yet: it will take the first
        ("GPU-a, 60000\nGPU-b, 3\nGPU-c, 60000\nGPU-d, 3", "GPU-d,GPU-b,GPU-c,GPU-a"),
        ("GPU-a, 3", None),
        ("GPU-a, [N/A]\nGPU-b, 3", None),
        ("", None),
    ],
)
def test_the_trainer_takes_the_gpu_that_no_server_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, order: str | None
) -> None:
    environment = driver(tmp_path, monkeypatch, lines)
    assert least_used(environment).get(VISIBLE) == order
    assert least_used({**environment, VISIBLE: "0"}) == {}


def test_without_a_driver_nothing_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert least_used(driver(tmp_path, monkeypatch, "no devices", status=9)) == {}
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert least_used({}) == {}


@pytest.mark.parametrize(
    ("lines", "beside", "shares"),
    [
        ({"engine.kind": "vllm"}, True, False),
        ({"engine.kind": "sglang"}, True, False),
        ({"engine.kind": "vllm", "policy.device": "cpu"}, False, False),
        ({"engine.kind": "vllm", "engine.publish": "ipc"}, False, True),
        ({"engine.kind": "vllm", "engine.share_gpu": "true"}, False, False),
    ],
)
def test_only_a_trainer_with_a_gpu_of_its_own_keeps_clear(
    tmp_path: Path, lines: dict[str, str], beside: bool, shares: bool
) -> None:
    given = {"engine.urls": "http://127.0.0.1:1", "policy.kind": "hf", **lines}
    spec = LearnerSpec.of(load_config(None, [f"{k}={v}" for k, v in given.items()]), model=tmp_path)
    assert (spec.beside_server, spec.shares_tensors) == (beside, shares)


def test_memory_is_cut_in_segments_that_grow_unless_a_server_maps_them() -> None:
    assert computing({})[ALLOCATOR] == "expandable_segments:True"
    assert ALLOCATOR not in computing({}, shares_tensors=True)
    assert computing({ALLOCATOR: "backend:native"})[ALLOCATOR] == "backend:native"


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Triton that is installed; returns the module that stands for insitu's kernels."""
    root, errors = types.ModuleType("triton"), types.ModuleType("triton.errors")
    root.__spec__ = importlib.machinery.ModuleSpec("triton", None)
    errors.TritonError = type("TritonError", (Exception,), {})  # type: ignore[attr-defined]
    kernels = types.ModuleType("insitu_train.loss.triton_kernels")
    for name, module in (("triton", root), ("triton.errors", errors), (kernels.__name__, kernels)):
        monkeypatch.setitem(sys.modules, name, module)
    triton_works.cache_clear()
    yield kernels
    triton_works.cache_clear()


@pytest.mark.parametrize("failure", [RuntimeError, PermissionError, "TritonError", "wrong"])
def test_a_triton_that_does_not_work_is_gone_around(triton: Any, failure: Any) -> None:
    """No C compiler, a home that cannot be written to, an error of its compiler, or wrong numbers."""

    class Broken(TorchBackend):
        def absorb(self, x: Any, out: Any, start: int, targets: Any, stats: Any, *more: Any) -> None:
            if failure == "wrong":
                return super().absorb(x * 2, out, start, targets, stats, *more)
            kind = sys.modules["triton.errors"].TritonError if failure == "TritonError" else failure
            raise kind("Failed to find C compiler\nmore")

    triton.TritonBackend = Broken
    assert not triton_works("cpu")


def test_a_triton_that_works_is_taken(triton: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Working(TorchBackend):
        pass

    triton.TritonBackend = Working
    assert triton_works("cpu")
    monkeypatch.setattr(tiles, "triton_works", lambda device: device == "cuda")
    assert isinstance(backend(torch.device("cuda"), "auto"), Working)
    assert not isinstance(backend(torch.device("cpu"), "auto"), Working)
