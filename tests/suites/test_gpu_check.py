"""`insitu gpu-check`: each check in a process of its own; what cannot run is skipped and never passes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from insitu import cli
from insitu.errors import ConfigError
from insitu_lab.api import gpu_check
from insitu_lab.gpu import run
from insitu_lab.gpu.slices import SLICES, GpuCheck, GpuSlice, overrides
from insitu_lab.gpu_checks import CHECKS

pytestmark = pytest.mark.slow


def report(out: Path, name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((out / f"{name}.json").read_text())
    return found


def test_every_computed_check_is_a_function() -> None:
    names = {check.name for one in SLICES for check in one.checks if check.run is None}
    assert names == set(CHECKS)
    assert all(one.limit_s <= 540 for one in SLICES)


def test_the_slices_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gpu-check", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [one.name for one in SLICES]


@pytest.mark.full
def test_a_slice_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert cli.main(["gpu-check", "env", "kernels", "--rehearse", "--json", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: one["ok"] for name, one in found["slices"].items()} == {"env": True, "kernels": True}
    kernels = report(out, "kernels")
    assert kernels["skipped"] == [{"name": "kernels.triton", "reason": "a rehearsal has no GPU"}]
    checks = kernels["checks"]
    assert isinstance(checks, list)
    assert {check["name"].rsplit("_", 1)[-1] for check in checks} >= {"out", "gradient", "logp", "weight"}


@pytest.mark.full
def test_without_a_gpu_nothing_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = gpu_check(["step", "serve"], out=tmp_path)["slices"]
    assert {name: one["ok"] for name, one in found.items()} == {"step": None, "serve": None}
    skipped = report(tmp_path, "step")["skipped"]
    assert isinstance(skipped, list)
    assert {one["reason"] for one in skipped} == {"torch sees no GPU"}


def test_a_hang_a_crash_and_a_missed_deadline_cost_a_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("hangs", "crashes", "is silent")
    made = GpuSlice(
        name="lab", text="", limit_s=60, checks=tuple(GpuCheck(name=name, limit_s=2) for name in names)
    )
    programs = {
        "hangs": "import time; time.sleep(60)",
        "crashes": "import os, sys; print('bad kernel', file=sys.stderr, flush=True); os.abort()",
        "is silent": "",
    }
    monkeypatch.setattr(run, "SLICES", [made])
    monkeypatch.setattr(
        run, "_command", lambda check, options, python: ["python3", "-c", programs[check.name]]
    )
    lines: list[str] = []
    began = time.monotonic()
    found = run.check_gpu(run.GpuCheckOptions(out=tmp_path), lines.append)
    assert time.monotonic() - began < 50
    assert found["slices"]["lab"]["ok"] is False
    checks = report(tmp_path, "lab")["checks"]
    assert isinstance(checks, list)
    assert [check["why"] for check in checks] == [
        "no end within 2 s", "killed by signal 6: bad kernel", "it printed no result",
    ]  # fmt: skip
    late = run.check_gpu(run.GpuCheckOptions(out=tmp_path, deadline_s=0.0), lines.append)
    assert late["slices"]["lab"] == {"ok": None, "seconds": 0.0, "skipped": 3}
    with pytest.raises(ConfigError, match="no slice 'bench'; there are lab"):
        run.check_gpu(run.GpuCheckOptions(out=tmp_path, slices=["bench"]), lines.append)


def test_runs_are_ones_that_insitu_accepts(tmp_path: Path) -> None:
    from insitu.config import demo_preset, load_config

    for check in (check for one in SLICES for check in one.checks if check.run is not None):
        for rehearse in (False, True):
            keys = overrides(check, str(tmp_path), "/opt/vllm", rehearse=rehearse)
            config = load_config(None, ["harness.agent=script", *keys], demo_preset())
            assert config.engine.launch


@pytest.mark.full
def test_the_whole_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gpu-check", "--rehearse", "--json", "--out", str(tmp_path), "--deadline", "900"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["slices"]
    assert [name for name, one in found.items() if one["ok"]] == [
        "env", "kernels", "step", "memory", "ranks", "run",
    ]  # fmt: skip
    assert set(found) == {one.name for one in SLICES}
