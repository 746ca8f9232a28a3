"""A step of verl's own V1 trainer on insitu's rollouts; its servers and its actor are stand-ins."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from trl_cpu import toy_config

import insitu
from insitu.config import dump_toml
from insitu_bridges import verl
from sources import ROOT, uninstalled

pytestmark = [pytest.mark.bridge, pytest.mark.slow]

REWARD = """
def score(rollout):
    return sum(int(number) for turn in rollout.turns for number in turn.ids) % 97 / 97
"""


def test_a_step_takes_what_the_agents_sampled_with_its_own_advantages(tmp_path: Path) -> None:
    place = os.environ.get("INSITU_VERL")
    if not place:
        pytest.skip("INSITU_VERL names no virtual environment with verl[verl-core]")
    (tmp_path / "rewards.py").write_text(REWARD)
    config = toy_config(
        tmp_path / "run",
        engine={"kind": "external", "key_env": verl.KEY},
        harness={"workers": 2},
        limits={"max_calls": 2, "max_call_tokens": 24},
        reward={"function": f"{tmp_path / 'rewards.py'}:score"},
    )
    (tmp_path / "insitu.toml").write_text(dump_toml(config))
    sources = os.pathsep.join([uninstalled(tmp_path / "entry-points"), str(ROOT / "tests" / "fakes")])
    variables = os.environ | {
        "INSITU_CONFIG": str(tmp_path / "insitu.toml"),
        "PYTHONPATH": sources,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    words = [str(Path(place) / "bin" / "python"), str(Path(__file__).with_name("verl_lab.py")), str(tmp_path)]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    rows = sorted(json.loads((tmp_path / "rows.json").read_text()), key=lambda row: row["key"])
    runs = [insitu.open_run(folder) for folder in tmp_path.glob("run-*")]
    assert len(runs) == 2, "one for each worker of verl"
    stored = {
        tuple(segment.ids.tolist()): (rollout, segment)
        for run in runs
        for rollout in run.rollouts()
        for segment in rollout.trajectory.segments
    }
    assert len(rows) == 8
    for _, members in groupby(rows, key=lambda row: row["key"].rsplit("_", 2)[0]):
        group = list(members)
        rewards = np.array([stored[tuple(row["input_ids"])][0].reward for row in group])
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for row, reward, advantage in zip(group, rewards, expected, strict=True):
            _, segment = stored[tuple(row["input_ids"])]
            mask = np.array(row["response_mask"], bool)
            assert mask.sum() == segment.mask.sum()
            assert (segment.mask[-len(mask) :] == mask).all()
            assert np.array(row["old_log_probs"])[mask] == pytest.approx(segment.logprobs[segment.mask])
            assert sum(row["rm_scores"]) == pytest.approx(reward)
            assert np.array(row["advantages"])[mask] == pytest.approx(
                np.full(mask.sum(), advantage), abs=1e-4
            )
