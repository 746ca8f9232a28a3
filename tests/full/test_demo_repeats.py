"""The demo ends with the same weights on every machine, whatever runs at the same time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.full

KNOWN = Path(__file__).parents[1] / "data" / "demo_weights.json"
"""Weights after one step of seed 0, by agent, for kinds of CPU: vendor and vector extension choose kernels.

They change with the warm start, the demo's configuration, the version of Pi and that of torch. An ordinary
user's demo is compared with them by scripts/test-unprivileged.
"""


def _weights(run_dir: Path, agent: str, workers: int) -> str:
    overrides = [f"run.dir={run_dir}", "run.steps=1", "eval.count=4", f"harness.workers={workers}"]
    command = [sys.executable, "-m", "insitu", "demo", "--agent", agent, "--plain", "--json", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return str(json.loads(done.stdout.splitlines()[-1])["weights"])


@pytest.mark.parametrize("agent", ["pi", "script"])
def test_weights_depend_neither_on_the_workers_nor_on_the_machine(agent: str, tmp_path: Path) -> None:
    found = {_weights(tmp_path / str(workers), agent, workers) for workers in (12, 5)}
    assert len(found) == 1
    vendor = re.findall(r"^vendor_id\s*: (\w+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    kind = " ".join([*vendor[:1], torch.backends.cpu.get_cpu_capability()])
    known = json.loads(KNOWN.read_text()).get(kind)
    assert known is None or found == {known[agent]}
