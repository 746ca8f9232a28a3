"""The tables [collect] and [train]: sampling of groups, and the learner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from insitu.config.base import Count, CountOrZero, Fraction, OwnPath, Seconds, SecondsOrZero, Table

Beta = Annotated[float, Field(ge=0, lt=1)]


class CollectTable(Table):
    """Groups of rollouts."""

    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts per task."""
    attempts: Count = 3
    """Attempts per rollout; only infrastructure failures are retried."""
    group_min: Annotated[int, Field(ge=2)] = 2
    """Least graded rollouts of a group; a smaller group is not trained."""
    infra_failure_alarm: Fraction = 0.1
    """Warn when this share of a step's attempts fails because of the infrastructure; 0 = never."""
    tamper_alarm: Fraction = 0.1
    """Warn when this share of a step's verdicts is tampered; 0 = never."""
    reward_alarm: Fraction = 0.4
    """Warn when a step's mean reward exceeds the mean of the 8 before by this much; 0 = never."""
    excluded_tokens_alarm: Fraction = 0.2
    """The same for the share of sampled tokens excluded because of agent behaviour; 0 = never."""
    max_consecutive_failures: Count = 20
    """Consecutive infrastructure failures after which the run stops with the last cause."""
    max_staleness: CountOrZero = 0
    """Versions a trained token may be behind the trainer; rollouts run while it trains. 0 = synchronous."""
    lookahead: Annotated[float, Field(gt=0, le=1)] = 0.3
    """max_staleness > 0: share of the running groups, from the oldest on, that a step may choose from."""
    late_groups: Literal["wait", "skip", "cancel"] = "wait"
    """max_staleness > 0: a step waits for a late group, skips its retries, or drops it."""
    group_deadline_s: SecondsOrZero = 0.0
    """max_staleness > 0: seconds after which an attempt's agent is stopped, if less than wall_s; 0 = none."""
    group_grace_s: Seconds = 600.0
    """Seconds after the agent's limit until an attempt times out; at least twice the grader's timeout."""
    replace_degenerate: Annotated[float, Field(ge=0)] = 1.0
    """max_staleness > 0: groups with equal rewards replaced per step, as a share of groups_per_step."""
    stall_timeout_s: Seconds = 3600.0
    """Seconds without a rollout starting or ending after which the run stops; at least twice wall_s."""

    @model_validator(mode="after")
    def _fits_staleness(self) -> Self:
        for key in ("lookahead", "late_groups", "group_deadline_s", "replace_degenerate"):
            if not self.max_staleness and self.__dict__[key] != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect with max_staleness = 0")
        return self


class TrainTable(Table):
    """The learner."""

    loss: Literal["dppo", "ppo_clip", "cispo", "gspo", "decoupled"] = "dppo"
    """Policy-gradient loss."""
    advantage: Literal["dr_grpo", "grpo", "rloo", "maxrl"] = "dr_grpo"
    """Advantage estimator."""
    reducer: Literal["rollout", "token", "constant", "group"] = "rollout"
    """Unit that the loss is averaged over; constant = rollouts, each its tokens / constant_tokens."""
    constant_tokens: Count = 1024
    """reducer constant: what a rollout's token losses are divided by."""
    lr: Annotated[float, Field(gt=0)] = 2e-4
    """Peak learning rate."""
    warmup_steps: CountOrZero = 3
    """Steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warm-up, to 0 at the last update; run.steps must not change then."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    """AdamW betas."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW weight decay (decoupled)."""
    epochs: Count = 1
    """Passes over one batch."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest global gradient norm."""
    min_groups: Count = 1
    """Least groups with a gradient; with fewer the update is skipped (exclusion `few_groups`)."""
    threads: Count = 2
    """Torch threads while training."""
    ranks: Count = 1
    """Data-parallel processes; 1 = the learner alone."""
    shard: bool = False
    """ranks > 1 and policy.kind = hf: shard the model over the ranks (FSDP2)."""
    truncated: Literal["keep", "mask", "penalise"] = "keep"
    """What happens to a rollout that reached a limit: trained as is, masked, or penalised."""
    overlong_tokens: CountOrZero = 0
    """Sampled tokens of a rollout from which its reward is reduced by 1; 0 = no length penalty."""
    overlong_margin_tokens: Count = 4096
    """overlong_tokens: the penalty grows linearly over this many tokens before it."""
    max_logprob_gap: Annotated[float, Field(ge=0)] = 0.0
    """Most |sampler - trainer| logprob of a trained token; 0 = 1e-4 embedded, 1e-3 float32, else 1."""
    ratio: Literal["sampler", "trainer"] = "sampler"
    """ppo_clip, cispo, gspo: denominator of the ratio; sampler = the sampled logprobs, trainer = recomputed
    before the step (the default of gspo)."""
    dppo_low: Fraction = 0.2
    """dppo: probability a token may lose against the sampler before its gradient is masked."""
    dppo_high: Fraction = 0.2
    """dppo: probability a token may gain against the sampler before its gradient is masked."""
    dppo_tau: Annotated[float, Field(ge=0)] = 1e-3
    """dppo: weight of the KL term towards the sampler's log-probabilities."""
    clip_low: Fraction = 0.2
    """ppo_clip, decoupled: lower clip of the ratio, 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """ppo_clip, decoupled: upper clip of the ratio, 1 + clip_high."""
    dual_clip: Annotated[float, Field(ge=0)] = 0.0
    """ppo_clip, decoupled: upper bound of the ratio where the advantage is negative; 0 = no bound."""
    gspo_low: Fraction = 3e-4
    """gspo: lower clip of a rollout's ratio, 1 - gspo_low."""
    gspo_high: Annotated[float, Field(ge=0)] = 4e-4
    """gspo: upper clip of a rollout's ratio, 1 + gspo_high."""
    cispo_cap: Annotated[float, Field(gt=0)] = 5.0
    """cispo: upper bound of the ratio that a token's gradient is multiplied by."""
    correction: Literal["none", "tis", "mask", "icepop"] = "none"
    """Importance weight w of a token: trainer's probability before the step over the sampler's, bounded."""
    correction_level: Literal["token", "rollout", "rollout_mean"] = "token"
    """w per token, per rollout (product), or per rollout and token (geometric mean)."""
    correction_low: Annotated[float, Field(ge=0)] = 0.5
    """icepop: smallest w that is trained, below 1."""
    correction_high: Annotated[float, Field(ge=0)] = 0.0
    """tis: clip of w; mask, icepop: largest w that is trained; above 1, 0 = 2, 3 and 5."""
    off_policy_mask: Annotated[float, Field(ge=0)] = 0.0
    """Mean log(sampler / trainer) above which a rollout with negative advantage is masked; 0 = never."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Estimator of the divergence from a reference policy."""
    kl_weight: Annotated[float, Field(ge=0)] = 0.0
    """kl: factor in the loss; 0 = only measured."""
    kl_unbiased: bool = True
    """kl: multiply by the ratio, for an unbiased gradient."""
    reference: OwnPath = ""
    """kl: model folder of the reference policy; empty = the initial model of the run."""
    reference_alarm: Annotated[float, Field(ge=0)] = 0.0
    """kl: warn at this divergence from the reference; 0 = never."""
    kl_alarm: Annotated[float, Field(ge=0)] = 0.1
    """Warn at this divergence between trainer and sampler of a batch; 0 = never."""
    collapse_alarm: Fraction = 0.5
    """Warn when the mean reward of 4 steps falls significantly below this share of the run's best, after
    consecutive steps without an update, and when the entropy has collapsed; 0 = never."""
    start_timeout_s: Seconds = 600.0
    """Timeout of a start of the learner, and of one save, load or export of its weights."""
    step_timeout_s: Seconds = 3600.0
    """Timeout of one step of the learner, on each of its ranks; then the run stops."""
    restarts: CountOrZero = 3
    """Restarts of a dead learner, or of a server that lost its weights; reset by a completed step."""
    token_budget: Count = 16384
    """Tokens per micro-batch."""
    layout: Literal["prefix", "tree"] = "prefix"
    """Shared computation in a micro-batch: a prefix common to all rows, or every token that rows share."""
    rows: Literal["all", "collapse", "final"] = "all"
    """Rows with credit: all; collapse: only the final one exists; final: the others count, with no credit."""
    max_rows: CountOrZero = 0
    """rows all: most rows of one rollout, the first ones and the last are kept; 0 = no limit."""
    max_row_tokens: CountOrZero = 0
    """Most tokens of one row; a longer one is excluded as overlong; 0 = no limit."""

    @model_validator(mode="before")
    @classmethod
    def _ratio_of_gspo(cls, values: Any) -> Any:
        """Default `ratio` to trainer for gspo."""
        # gspo's bounds are as small as the rounding gap between sampler and trainer (docs/decisions/0039).
        if isinstance(values, dict) and values.get("loss") == "gspo":
            return {"ratio": "trainer", **values}
        return values

    @model_validator(mode="after")
    def _has_ranks(self) -> Self:
        if self.shard and self.ranks == 1:
            raise ValueError("shard has no effect with ranks = 1")
        return self

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for key, (choice, values) in TRAIN_KEYS.items():
            default = type(self).model_fields[key].default
            chosen = self.__dict__[choice]
            if chosen not in values and self.__dict__[key] != default:
                allowed = ", ".join(values)
                raise ValueError(f"{key} has no effect with {choice} = {chosen!r}, only with {allowed}")
        if self.correction != "none" and self.loss != "decoupled" and self.ratio != "trainer":
            raise ValueError(
                f"correction = {self.correction!r} corrects a ratio against the trainer's log-probabilities"
                f" before the step: it needs ratio = 'trainer', not {self.ratio!r}"
            )
        if wrong := wrong_bounds(self.correction, self.correction_low, self.correction_high):
            raise ValueError(wrong)
        if self.overlong_margin_tokens != 4096 and not self.overlong_tokens:
            raise ValueError("overlong_margin_tokens has no effect without overlong_tokens")
        if 0 < self.overlong_tokens < self.overlong_margin_tokens:
            raise ValueError("overlong_margin_tokens is more than overlong_tokens")
        if 0 < self.dual_clip <= 1 + self.clip_high:
            raise ValueError("dual_clip must be above 1 + clip_high, or 0 for no bound")
        if self.kl == "k1" and not self.kl_unbiased:
            raise ValueError("kl = 'k1' needs kl_unbiased: its own gradient is zero on average")
        return self


HIGHEST_W: Mapping[str, float] = {"tis": 2.0, "mask": 3.0, "icepop": 5.0}
"""Per correction, the bound that correction_high = 0 stands for."""


def wrong_bounds(correction: str, low: float, high: float) -> str:
    """Return why a correction with these bounds would change tokens whose w is 1; empty if it would not.

    w is 1 where sampler and trainer agree. tis at 1 is allowed: it only ever reduces weights.
    """
    high = high or HIGHEST_W.get(correction, math.inf)
    if high < 1 or (high == 1 and correction != "tis"):
        least = "at least" if correction == "tis" else "above"
        return f"correction_high = {high:g} must be {least} 1 with {correction!r}: w is 1 where all is well"
    if correction == "icepop" and low >= 1:
        return f"correction_low = {low:g} must be below 1: w is 1 where all is well"
    return ""


_CLIPPED, _KL = ("ppo_clip", "decoupled"), ("k1", "k2", "k3")
_CORRECTED = ("tis", "mask", "icepop")
TRAIN_KEYS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "constant_tokens": ("reducer", ("constant",)),
    "ratio": ("loss", ("ppo_clip", "cispo", "gspo")),
    "dppo_low": ("loss", ("dppo",)),
    "dppo_high": ("loss", ("dppo",)),
    "dppo_tau": ("loss", ("dppo",)),
    "clip_low": ("loss", _CLIPPED),
    "clip_high": ("loss", _CLIPPED),
    "dual_clip": ("loss", _CLIPPED),
    "gspo_low": ("loss", ("gspo",)),
    "gspo_high": ("loss", ("gspo",)),
    "cispo_cap": ("loss", ("cispo",)),
    "correction": ("loss", ("ppo_clip", "cispo", "gspo", "decoupled")),
    "correction_level": ("correction", _CORRECTED),
    "correction_low": ("correction", ("icepop",)),
    "correction_high": ("correction", _CORRECTED),
    "kl_weight": ("kl", _KL),
    "kl_unbiased": ("kl", _KL),
    "reference": ("kl", _KL),
    "reference_alarm": ("kl", _KL),
}
"""Keys of [train] that have an effect only with some values of another key."""
