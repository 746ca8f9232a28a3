"""[train]: a key that has no effect with the chosen loss is refused, as is a ratio that cannot be."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch

from insitu.config import dump_toml, load_config
from insitu.config.base import marks
from insitu.config.training import LossConfig, TrainTable
from insitu.errors import ConfigError
from insitu_train.loss.losses import LossInputs, token_loss
from insitu_train.options import TrainConfig
from insitu_train.plan.step import PlanConfig

pytestmark = pytest.mark.slow

CHOICES = {
    "loss": ["gspo", "dppo", "cispo", "nll"],
    "reducer": ["token"],
    "correction": ["none"],
    "kl": ["none"],
}
USED_WITH = {
    key: mark
    for key, field in TrainTable.model_fields.items()
    for mark in marks(field)
    if mark.keys[0] in CHOICES
}
"""Keys of [train] that only some choices use."""
CORRECTED: dict[str, object] = {"loss": "ppo_clip", "ratio": "trainer"}
OTHER: dict[str, object] = {"ratio": "trainer", "correction": "tis", "correction_level": "rollout"}


def value_of(key: str) -> object:
    """One that is not the default."""
    default = TrainTable.model_fields[key].default
    if key in OTHER:
        return OTHER[key]
    if key == "reference":
        return "/models/ref"
    if isinstance(default, tuple):
        return [0.4, 4.0]
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int) else 0.4


@pytest.mark.parametrize("key", USED_WITH)
def test_a_key_without_meaning_is_refused(key: str) -> None:
    mark = USED_WITH[key]
    (choice,) = mark.keys
    other = next(value for value in CHOICES[choice] if value not in mark.values)
    with pytest.raises(ConfigError, match=rf"{key} has no effect with {choice} = '{other}'"):
        load_config(base={"train": {choice: other, key: value_of(key)}})


@pytest.mark.parametrize(
    ("train", "line"),
    [
        (
            {"loss": "gspo", "ratio": "sampler", "correction": "tis"},
            "correction = 'tis' corrects ratio = 'trainer', which loss = 'gspo' with ratio =",
        ),
        ({"loss": "dppo", "correction": "icepop"}, "correction has no effect with loss = 'dppo'"),
        (
            {**CORRECTED, "correction": "icepop", "correction_bounds": [6.0, 9.0]},
            "correction_bounds: 6 must be below 1: w is 1 where all is well",
        ),
        (
            {**CORRECTED, "correction": "icepop", "correction_bounds": [0.1, 0.3]},
            "correction_bounds: 0.3 must be above 1 with 'icepop'",
        ),
        (
            {**CORRECTED, "correction": "mask", "correction_bounds": [0, 1.0]},
            "correction_bounds: 1 must be above 1 with 'mask'",
        ),
        (
            {**CORRECTED, "correction": "tis", "correction_bounds": [0, 0.5]},
            "correction_bounds: 0.5 must be at least 1 with 'tis'",
        ),
        (
            {**CORRECTED, "correction": "tis", "correction_bounds": [0.5, 2]},
            "correction_bounds = [0, HIGH] with 'tis': it has no lower bound",
        ),
        ({"clip": [0.2]}, "train.clip: must be two numbers, or []"),
        ({"loss": "cispo", "clip": [0.2, 4]}, "clip = [0, HIGH] with loss = 'cispo': it has no lower bound"),
        ({"loss": "ppo_clip", "dual_clip": 1.2}, "dual_clip must be above 1 + the upper bound of clip"),
        ({"kl": "k1", "kl_unbiased": False}, "kl = 'k1' needs kl_unbiased: its own gradient is zero"),
        ({"overlong_margin_tokens": 5}, "train.overlong_margin_tokens; it is now train.overlong_tokens"),
        ({"overlong_tokens": [4000, 4000]}, "overlong_tokens = [FROM, TO] needs FROM below TO"),
        (
            {"overlong_tokens": [5000, 9000], "advantage": "maxrl"},
            "maxrl needs rewards >= 0; overlong_tokens",
        ),
    ],
)
def test_choices_that_exclude_each_other_are_one_line(train: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(base={"train": train})
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("train", "ratio"),
    [
        ({"loss": "gspo"}, "trainer"),
        ({"loss": "gspo", "ratio": "sampler"}, "sampler"),
        ({"loss": "ppo_clip"}, "sampler"),
        ({}, "sampler"),
    ],
)
def test_gspo_alone_is_against_the_trainer_unless_it_is_set(train: dict[str, object], ratio: str) -> None:
    config = load_config(base={"train": train})
    assert TrainConfig.of(config).loss.ratio == ratio
    assert load_config(base=tomllib.loads(dump_toml(config))) == config


def test_what_rounding_puts_between_sampler_and_trainer_costs_gspo_no_gradient() -> None:
    """A rollout of 100 tokens, none moved, the sampler's record off as bfloat16's: more than the bounds."""
    mu = torch.full((100,), -1.0)
    terms = LossInputs(mu=mu, advantage=torch.ones(100), live_mu=torch.full((100,), 1e-3))
    live = mu + 1e-3
    chosen = TrainConfig.of(load_config(base={"train": {"loss": "gspo"}})).loss
    assert not token_loss(live, terms, chosen).cut.any()
    assert token_loss(live, terms, chosen.changed(ratio="sampler")).cut.all()


@pytest.mark.parametrize(
    "bounds",
    [
        {"correction": "icepop", "correction_bounds": [0.99, 5]},
        {"correction": "tis", "correction_bounds": [0, 1]},
        {},
    ],
)
def test_bounds_on_both_sides_of_1_are_taken(bounds: dict[str, object]) -> None:
    load_config(base={"train": CORRECTED | {"correction": "mask"} | bounds})


def test_a_loss_made_without_a_file_has_the_same_bounds() -> None:
    with pytest.raises(ValueError, match="correction_bounds: 6 must be below 1"):
        LossConfig(loss="ppo_clip", ratio="trainer", correction="icepop", correction_bounds=(6.0, 9.0))


def test_choices_reach_the_learner_and_the_planner() -> None:
    train = {
        "loss": "decoupled",
        "clip": (0.1, 0.3),
        "dual_clip": 2.0,
        "correction": "icepop",
        "correction_level": "rollout_mean",
        "correction_bounds": (0.25, 4.0),
        "off_policy_mask": 0.5,
        "kl": "k3",
        "kl_weight": 0.01,
        "kl_unbiased": False,
        "reference": "/models/ref",
        "reducer": "constant",
        "overlong_tokens": (800, 900),
    }
    config = load_config(base={"train": train})
    learner, plan = TrainConfig.of(config), PlanConfig.of(config)
    parts = [part.model_dump() for part in (learner, learner.loss, plan)]
    assert learner.loss.loss == train.pop("loss")
    for key, value in train.items():
        assert value in [part[key] for part in parts if key in part], key


def test_every_choice_of_a_loss_is_explained() -> None:
    text = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    words = {*USED_WITH, "loss", "advantage", "reducer", "kl", "off_policy_mask"}
    words |= {value for mark in USED_WITH.values() for value in mark.values}
    assert {word for word in words if f"`{word}`" not in text and f'"{word}"' not in text} == set()
