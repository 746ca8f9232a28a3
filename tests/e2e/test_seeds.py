"""The scripts of examples/seeds, each the day of one system's author, with the demo's model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from insitu.config import load_config

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
SEEDS = ROOT / "examples" / "seeds"
DEADLINE_S = 600
TRAIN = [
    "run.steps=1", "collect.group_size=4", "collect.groups_per_step=1", "harness.workers=2",
    "train.threads=1", "train.min_groups=1", "limits.max_call_tokens=48",
]  # fmt: skip
RUNS: dict[str, tuple[dict[str, str], list[str]]] = {
    "terminus": ({}, TRAIN),
    "mini_swe": ({"SWE_AGENT": "script"}, TRAIN),
    "generic": ({}, [*TRAIN, "train.degenerate=drop"]),
    "slime": (
        {"SLIME_AGENT": "script", "SLIME_SCENARIO": "linear"},
        ["rollout.count=2", "model.max_context_tokens=2048", "limits.max_call_tokens=64"],
    ),
}


def called(name: str, tmp_path: Path, variables: dict[str, str], *keys: str) -> tuple[int, str]:
    (tmp_path / "insitu").write_text(f'#!/bin/sh\nexec {sys.executable} -m insitu "$@"\n')
    (tmp_path / "insitu").chmod(0o755)
    prefix = {"mini_swe": "SWE"}.get(name, name.upper())
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        f"{prefix}_OUTPUT_DIR": f"{tmp_path}/run",
    }
    done = subprocess.run(
        [SEEDS / f"{name}.sh", *keys],
        cwd=ROOT, env=env | variables, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_every_script_is_here() -> None:
    assert sorted(path.stem for path in SEEDS.glob("*.sh")) == sorted(RUNS)
    for path in SEEDS.glob("*.toml"):
        load_config(path)


@pytest.mark.parametrize("name", RUNS)
def test_a_day_of_its_author_runs(name: str, tmp_path: Path) -> None:
    variables, keys = RUNS[name]
    code, said = called(name, tmp_path, variables, *keys)
    assert code == 0, said[-3000:]
    assert (tmp_path / "run" / "config.toml").exists()
    assert "not uploaded (--dry-run)" in said


def test_what_a_script_needs_is_one_line(tmp_path: Path) -> None:
    code, said = called("slime", tmp_path, {"SLIME_SCRIPT": "launch.sh"})
    assert (code, "slime needs its rows" in said) == (1, True)
    code, said = called("generic", tmp_path, {"GENERIC_VLLM_URL": "http://127.0.0.1:9"})
    assert (code, "GENERIC_MODEL" in said) == (1, True)
