"""[train] decay, betas and weight_decay reach the optimiser, and what cannot fall is refused."""

from __future__ import annotations

import pytest

from insitu.config import dump_toml as toml_of
from insitu.config import load_config
from insitu.errors import ConfigError
from insitu_train.options import OptimConfig, TrainConfig, dump_config, parse_config, rate


def optim(*overrides: str) -> OptimConfig:
    return TrainConfig.of(load_config(None, list(overrides))).optim


def test_the_rate_falls_to_nothing_at_the_last_update_of_the_run() -> None:
    keys = ("run.steps=10", "train.epochs=2", "train.warmup_steps=4")
    found = optim(*keys, "train.decay=linear")
    assert found.total_steps == 20
    assert [rate(found, k) for k in (0, 3, 4, 12, 20)] == [0.25, 1.0, 1.0, 0.5, 0.0]
    assert optim(*keys, "train.decay=cosine").decay == "cosine"
    # of a constant rate the length of the run is no part: a checkpoint fits a run that goes on for longer
    assert optim(*keys) == optim("run.steps=11", *keys[1:]) == optim(*keys, "train.decay=constant")
    with pytest.raises(
        ConfigError, match=r"run.steps x train.epochs = 4 are no more than .*warmup_steps = 4"
    ):
        load_config(None, ["run.steps=2", *keys[1:], "train.decay=linear"])


def test_betas_and_weight_decay_come_from_the_file_and_survive_the_way_to_the_learner() -> None:
    config = load_config(base={"train": {"betas": [0.8, 0.999], "weight_decay": 0.1}})
    made = TrainConfig.of(config)
    assert (made.optim.betas, made.optim.weight_decay) == ((0.8, 0.999), 0.1)
    assert parse_config(dump_config(made)) == made
    assert "betas = [0.8, 0.999]" in toml_of(config)
    assert optim("train.betas=[0.8, 0.999]", "train.weight_decay=0.1") == made.optim
    assert optim() == OptimConfig(lr=2e-4, warmup_steps=3)
    for wrong in ("train.betas=[0.9]", "train.betas=[0.9, 1.0]", "train.weight_decay=-1"):
        with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
            load_config(None, [wrong])
