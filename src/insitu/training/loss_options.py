"""What is minimised: the loss, its ratio, its corrections and the pull to a reference, as plain values.

No torch: the controller builds this, the learner reads it back. Formulas stand in losses.py, correct.py and
kl.py, the keys of [train] in config/training.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from insitu.config.training import HIGHEST_W, wrong_bounds
from insitu.errors import ConfigError

LossName = Literal["dppo", "ppo_clip", "cispo", "gspo", "decoupled", "nll"]
Correction = Literal["none", "tis", "mask", "icepop"]
Level = Literal["token", "rollout", "rollout_mean"]
KlKind = Literal["none", "k1", "k2", "k3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Policy-gradient loss and its constants."""

    name: LossName = "dppo"
    """nll is for supervised training: tokens of any origin, nothing is compared with a sampler's record."""
    ratio: Literal["sampler", "trainer"] = "sampler"
    """ppo_clip, cispo, gspo: what the live policy is divided by: the sampler's record, or what the trainer
    itself found before the step's first update. dppo takes the sampler, decoupled the trainer."""
    dppo_low: float = 0.2
    """dppo: probability a token may lose against the sampler before its gradient is masked."""
    dppo_high: float = 0.2
    """dppo: probability a token may gain against the sampler before its gradient is masked."""
    dppo_tau: float = 1e-3
    """dppo: weight of the pull towards the sampler's log-probabilities."""
    clip_low: float = 0.2
    """ppo_clip, decoupled: lower clip of the ratio, 1 - clip_low."""
    clip_high: float = 0.28
    """ppo_clip, decoupled: upper clip of the ratio, 1 + clip_high."""
    dual_clip: float = 0.0
    """ppo_clip, decoupled: bound c > 1 on the loss of tokens with negative advantage, -c A; 0 = off."""
    gspo_low: float = 3e-4
    """gspo: lower clip of a rollout's ratio, 1 - gspo_low."""
    gspo_high: float = 4e-4
    """gspo: upper clip of a rollout's ratio, 1 + gspo_high."""
    cispo_cap: float = 5.0
    """cispo: largest ratio that a token's gradient is multiplied by."""
    correction: Correction = "none"
    """How the loss answers to w, the trainer's probability before the step over the sampler's."""
    correction_level: Level = "token"
    """Whose w: each token's, its rollout's (the product), or its rollout's per token (the geometric mean)."""
    correction_low: float = 0.5
    """icepop: smallest w that is trained."""
    correction_high: float = 0.0
    """tis: where w is cut off; mask, icepop: largest w that is trained; 0 = 2, 3 and 5."""
    off_policy_mask: float = 0.0
    """Mean log(sampler / live policy) of a rollout with negative advantage above which its tokens do not
    count; 0 = off."""
    kl: KlKind = "none"
    """Estimator of the divergence from the reference policy."""
    kl_weight: float = 0.0
    """Its factor in the loss; 0 = it is only measured."""
    kl_unbiased: bool = True
    """Multiply it by the ratio, so that its gradient is that of the divergence."""

    def __post_init__(self) -> None:
        if self.dual_clip and self.dual_clip <= 1.0:
            raise ConfigError(f"dual_clip={self.dual_clip} must be 0 or above 1")
        if self.correction != "none" and not self.trainer_ratio:
            raise ConfigError(
                f"correction={self.correction} corrects a ratio against the trainer's log-probabilities"
                f" before the step, which {self.name} with ratio={self.ratio} does not have"
            )
        if wrong := wrong_bounds(self.correction, self.correction_low, self.correction_high):
            raise ConfigError(wrong)
        if self.kl == "k1" and not self.kl_unbiased:
            raise ConfigError("kl=k1 without kl_unbiased pulls nowhere: its gradient is zero on average")

    @property
    def trainer_ratio(self) -> bool:
        """The ratio is against what the trainer found before the step's first update."""
        return self.name == "decoupled" or (
            self.ratio == "trainer" and self.name in ("ppo_clip", "cispo", "gspo")
        )

    @property
    def has_kl_term(self) -> bool:
        """A part of the loss does not ask for the advantage: the divergence from a reference, dppo's pull."""
        return (self.kl != "none" and self.kl_weight > 0) or (self.name == "dppo" and self.dppo_tau > 0)

    @property
    def highest_w(self) -> float:
        return self.correction_high or HIGHEST_W.get(self.correction, math.inf)

    def needs_old_logprobs(self, epoch: int) -> bool:
        """A pass without gradients must precede this one: something is settled for a whole rollout by the
        weights that are being trained. Before the first update they are the trainer's record itself."""
        if self.off_policy_mask:
            return True
        if self.name == "gspo" and (epoch > 0 or not self.trainer_ratio):
            return True
        return epoch == 0 and self.correction != "none" and self.correction_level != "token"
