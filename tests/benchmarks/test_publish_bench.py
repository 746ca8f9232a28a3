"""`python -m benchmarks publish` on a CPU: the form of its line, and what a delta of a real step weighs."""

from __future__ import annotations

import argparse
import json

import pytest

from benchmarks import publish

pytestmark = pytest.mark.slow

SMALL = ["--hidden", "256", "--layers", "2", "--vocab", "4096", "--tokens", "128", "--repeats", "2"]


@pytest.mark.full
def test_every_method_is_told_and_a_delta_is_a_tenth_at_most(capfd: pytest.CaptureFixture[str]) -> None:
    assert publish.main(["--json", *SMALL]) == 0
    said = capfd.readouterr()
    found = json.loads(said.out.strip().splitlines()[-1])
    assert {name: sorted(reported) for name, reported in found.items()} == {
        name: ["bytes", "full_bytes", "seconds"] for name in ("inprocess", "disk", "disk_delta")
    }
    assert all(reported["seconds"] > 0 and reported["full_bytes"] > 0 for reported in found.values())
    assert found["inprocess"]["bytes"] == 0
    assert found["disk"]["bytes"] == found["disk"]["full_bytes"] == found["disk_delta"]["full_bytes"]
    assert 0 < found["disk_delta"]["bytes"] <= 0.1 * found["disk_delta"]["full_bytes"]
    assert "vllm_ipc: untested: it needs a GPU" in said.err
    assert "vllm_nccl: untested" in said.err


def test_a_delta_that_saves_too_little_fails(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(_: argparse.Namespace) -> dict[str, publish.Cost]:
        return {"disk_delta": publish.Cost(seconds=[0.1, 0.3], sent=[120, 101], full_bytes=1000)}

    monkeypatch.setattr(publish, "run", run)
    assert publish.main(["--json"]) == 1
    said = capfd.readouterr()
    reported = {"disk_delta": {"seconds": 0.2, "bytes": 110, "full_bytes": 1000}}
    assert json.loads(said.out.splitlines()[-1]) == reported
    assert "a delta is more than a tenth of the whole" in said.err
