from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest

from insitu.config import load_config
from insitu.errors import ConfigError, TrainError
from insitu.types import equal_rewards
from insitu_train.plan.advantage import advantages, overlong_penalty


def test_formulas_against_hand_written_numbers() -> None:
    rewards = [1.0, 0.0, 0.0, 0.5]
    mean, std = 0.375, statistics.pstdev(rewards)
    assert advantages(rewards) == pytest.approx([r - mean for r in rewards])
    assert advantages(rewards, "grpo") == pytest.approx([(r - mean) / std for r in rewards], rel=1e-6)
    others = [(sum(rewards) - r) / 3 for r in rewards]
    assert advantages(rewards, "rloo") == pytest.approx([r - o for r, o in zip(rewards, others, strict=True)])
    assert advantages(rewards, "maxrl") == pytest.approx([(r - mean) / mean for r in rewards])


@pytest.mark.parametrize("kind", ["dr_grpo", "grpo", "rloo", "maxrl"])
def test_an_unscorable_rollout_is_not_a_zero(kind: str) -> None:
    with_hole = advantages([1.0, None, 0.0, 1.0, None], kind)  # type: ignore[arg-type]
    without = advantages([1.0, 0.0, 1.0], kind)  # type: ignore[arg-type]
    assert [with_hole[i] for i in (0, 2, 3)] == list(without)
    assert with_hole[1] is None
    assert with_hole[4] is None


def test_equal_rewards_give_exact_zeros_where_the_float_mean_would_not() -> None:
    rewards = [0.1] * 3
    assert np.mean([0.1] * 3) != 0.1
    assert advantages(rewards) == (0.0, 0.0, 0.0)
    assert advantages([None, 0.7]) == (None, 0.0)
    assert advantages([]) == ()


def test_rewards_that_differ_in_their_last_bit_are_equal() -> None:
    rewards = [0.1 + 0.2, 0.3, 0.3]
    assert len(set(rewards)) == 2
    assert equal_rewards(rewards)
    for kind in ("dr_grpo", "grpo", "rloo", "maxrl"):
        assert advantages(rewards, kind) == (0.0, 0.0, 0.0)  # type: ignore[arg-type]
    assert not equal_rewards([1e-12, 0.0])
    assert not equal_rewards([0.3, 0.3 + 1e-6])


@pytest.mark.parametrize("size", [2, 4, 8])
def test_grpo_divides_by_the_deviation_of_the_group_itself(size: int) -> None:
    """The deviation of a sample is larger, and so the advantages of trainers that take it are smaller."""
    rewards = [float(i % 2) for i in range(size)]
    ours = advantages(rewards, "grpo")
    mean, sample = statistics.fmean(rewards), statistics.stdev(rewards)
    theirs = [(r - mean) / sample for r in rewards]
    assert theirs == pytest.approx([a * ((size - 1) / size) ** 0.5 for a in ours], rel=1e-6)


def test_refusals() -> None:
    with pytest.raises(TrainError, match="not finite"):
        advantages([1.0, float("nan")])
    with pytest.raises(TrainError, match="maxrl"):
        advantages([1.0, -0.5], "maxrl")


def test_length_costs_nothing_then_evenly_more_then_all() -> None:
    """DAPO's soft punishment with L = 20, C = 8."""
    lengths = (0, 12, 14, 16, 20, 400)
    assert [overlong_penalty(n, (12, 20)) for n in lengths] == [0.0, 0.0, 0.25, 0.5, 1.0, 1.0]
    assert overlong_penalty(10**6, ()) == 0.0


def test_an_estimator_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def best_only(rewards):\n    return (rewards == rewards.max()) * 1.0\n"
        "def wrong(rewards):\n    return rewards[1:]\n"
        "async def later(rewards):\n    return rewards\n"
        "def broken(rewards):\n    return rewards / {}\n"
    )
    name = load_config(None, [f"train.advantage={tmp_path}/mine.py:best_only"]).train.advantage
    assert advantages([0.5, None, 0.0, 1.0], name) == (0.0, None, 0.0, 1.0)
    with pytest.raises(
        TrainError, match=r"returned \[1.0\] for rewards \[0.0, 1.0\], expected 2 finite numbers"
    ):
        advantages([0.0, 1.0], f"{tmp_path}/mine.py:wrong")
    with pytest.raises(TrainError, match=r"mine.py:broken raised TypeError\(.*\) \(mine.py line 8\)"):
        advantages([0.0, 1.0], f"{tmp_path}/mine.py:broken")
    with pytest.raises(ConfigError, match=r"mine.py:later is a coroutine function, must be a plain one"):
        advantages([0.0, 1.0], f"{tmp_path}/mine.py:later")
    with pytest.raises(ConfigError, match=r"unknown name 'grpe' of kind advantages; did you mean grpo\?"):
        load_config(None, ["train.advantage=grpe"])
