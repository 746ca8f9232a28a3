"""Steps whose loss is not finite: the run stops, and a resumed one drops them for a named reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import insitu
from insitu.storage.run_dir import read_store

pytestmark = pytest.mark.slow

SMALL = [
    "run.steps=3", "eval.count=0", "run.checkpoint_every_steps=1", "collect.groups_per_step=2",
    "collect.group_size=4", "harness.workers=4", "train.threads=1",
]  # fmt: skip
LOSS = """
from pathlib import Path


def loss(logp, terms, config):
    bad = (Path(__file__).parent / "bad").exists()
    return -terms.advantage * logp * (float("nan") if bad else 1.0)
"""


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "insitu", *map(str, arguments), "--plain"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env={**os.environ, **environment}
    )


@pytest.mark.full
def test_a_resumed_run_passes_bad_steps(tmp_path: Path) -> None:
    run_dir, bad = tmp_path / "run", tmp_path / "bad"
    (tmp_path / "own.py").write_text(LOSS)
    own = f"train.loss={tmp_path / 'own.py'}:loss"
    killed = run(
        *("demo", "--agent", "script", f"run.dir={run_dir}", own, *SMALL),
        INSITU_FAILPOINT=f"step.before:2:{tmp_path / 'once'}",
    )
    assert killed.returncode == -9
    bad.touch()
    stopped = run("demo", "--resume", run_dir)
    assert stopped.returncode == 1
    (line,) = [line for line in stopped.stderr.splitlines() if line.startswith("insitu: ")]
    assert "loss nan" in line
    assert "train.on_bad_step = 'skip'" in line
    other = run("demo", "--resume", run_dir, "train.lr=1")
    assert "drop train.lr=1 (train.on_bad_step, " in other.stderr
    assert "may change)" in other.stderr
    done = run("demo", "--json", "--resume", run_dir, "train.on_bad_step=skip")
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["rl_steps"], summary["updates"]) == (3, 1)
    assert summary["ledger"]["excluded"]["bad_step"] > 0
    with read_store(run_dir) as store:
        assert [step.metrics["bad"] for step in store.steps()][:2] == [False, True]
        assert store.check_balance().discarded["bad_step"] > 0
    bad.unlink()
    replayed = run("replay", run_dir, "--json")
    assert replayed.returncode == 0, replayed.stderr[-2000:]
    out = tmp_path / "rows"
    account = insitu.export_run(run_dir, out, to="jsonl")["account"]
    assert account["excluded"]["bad_step"] == summary["ledger"]["excluded"]["bad_step"]


@pytest.mark.full
def test_bad_steps_without_an_update_in_between_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(LOSS)
    (tmp_path / "bad").touch()
    own = [f"train.loss={tmp_path / 'own.py'}:loss", "train.on_bad_step=skip"]
    done = run("demo", "--agent", "script", f"run.dir={tmp_path / 'run'}", *own, *SMALL, "run.steps=9")
    assert done.returncode == 1
    assert "3 steps since the last update were refused, the last: step 0: loss nan" in done.stderr
    with read_store(tmp_path / "run") as store:
        assert sum(step.metrics["bad"] for step in store.steps()) == 3
