"""A user's agent, sampler, reward, advantage, sandbox and engine train the toy model, named in each way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import insitu
from tests.e2e.plugins import toy_plugins

pytestmark = pytest.mark.slow

FILE = Path(toy_plugins.__file__)
SOURCE = Path(insitu.__file__).parents[1]
KEYS = {
    "harness.agent": "agent",
    "tasks.sampler": "sampler",
    "reward.function": "reward",
    "train.advantage": "advantage",
    "sandbox.backend": "sandbox",
    "engine.kind": "engine",
}
GROUPS = {"agent": "agents", "sandbox": "sandboxes"}
SMALL = {
    "run.steps": 2, "eval.count": 0, "tasks.source": "toy", "collect.groups_per_step": 1,
    "collect.group_size": 2, "harness.workers": 2, "train.threads": 1, "train.min_groups": 1,
    "limits.max_call_tokens": 32,
}  # fmt: skip


def wheel(folder: Path) -> Path:
    """Return a wheel of another distribution that declares the plug-ins as entry points."""
    info = "toy_plugins-0.3.dist-info"
    points = "".join(
        f"[insitu.{GROUPS.get(name, name + 's')}]\nmy_{name} = toy_plugins:{name}\n" for name in KEYS.values()
    )
    files = {
        "toy_plugins.py": FILE.read_text(),
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: toy-plugins\nVersion: 0.3\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": points,
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in files)
    path = folder / "toy_plugins-0.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def command_line(arguments: list[str], env: Mapping[str, str], cwd: Path) -> None:
    command = [sys.executable, "-m", "insitu", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **env}, cwd=cwd
    )
    assert done.returncode == 0, done.stderr[-3000:]


def toml(path: Path, values: Mapping[str, object]) -> Path:
    tables: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        table, key = name.split(".")
        tables.setdefault(table, {})[key] = value
    lines = []
    for table, keys in tables.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def by_toml(tmp_path: Path, env: dict[str, str]) -> None:
    values = SMALL | {key: f"{FILE}:{name}" for key, name in KEYS.items()}
    path = toml(tmp_path / "my.toml", values | {"run.dir": str(tmp_path / "run")})
    command_line(["train", str(path), "--plain"], env, tmp_path)


def by_entry_point(tmp_path: Path, env: dict[str, str]) -> None:
    site = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(site),
    ]
    subprocess.run([*pip, str(wheel(tmp_path))], check=True, timeout=120)
    values = SMALL | {key: f"my_{name}" for key, name in KEYS.items()}
    path = toml(tmp_path / "my.toml", values | {"run.dir": str(tmp_path / "run")})
    command_line(["train", str(path), "--plain"], {**env, "PYTHONPATH": f"{SOURCE}:{site}"}, tmp_path)


def by_object(tmp_path: Path, env: dict[str, str]) -> None:
    objects = {key: getattr(toy_plugins, name) for key, name in KEYS.items()}
    objects |= {"harness.agent": toy_plugins.agent(), "sandbox.backend": toy_plugins.Backend()}
    tables: dict[str, Any] = {}
    for name, value in objects.items():
        table, key = name.split(".")
        tables.setdefault(table, {})[key] = value
    insitu.train(tables, overrides={**SMALL, "run.dir": str(tmp_path / "run")})


@pytest.mark.full
@pytest.mark.parametrize(
    "way",
    [
        by_toml,
        by_entry_point,
        by_object,
    ],
)
def test_plug_ins_train_the_toy_model(way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path / "seen"
    monkeypatch.setenv("PLUGINS_SEEN", str(seen))
    way(tmp_path, {"PLUGINS_SEEN": str(seen), "PYTHONPATH": str(SOURCE)})
    assert set(seen.read_text().split()) == set(KEYS.values())
    run = insitu.open_run(tmp_path / "run")
    assert [step.step for step in run.steps] == [1, 2]
    assert run.ledger.balanced
    assert run.ledger.trained > 0
    rollouts = run.rollouts(phase="train")
    assert len(rollouts) == 4
    # Weights that the trainer published reached the user's engine: step 2 samples with version 1.
    assert {version for rollout in rollouts for turn in rollout.turns for version in versions(turn)} == {0, 1}
    assert run.summary["max_logprob_gap_seen"] <= 1e-4


def versions(turn: insitu.Turn) -> set[int]:
    return {version for _, version in turn.version_runs}
