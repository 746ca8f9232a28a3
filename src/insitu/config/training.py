"""The tables [collect] and [train]: sampling of groups, and the learner."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from insitu.config.base import (
    AdvantageName,
    Count,
    CountOrZero,
    Keys,
    LossName,
    OwnPath,
    Seconds,
    SecondsOrZero,
    Table,
    only,
    unless,
)

Beta = Annotated[float, Field(ge=0, lt=1)]


def _none_or_two(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(values) not in (0, 2):
        raise ValueError("must be two numbers, or []")
    return values


def _degenerate(value: object) -> object:
    """Return drop, keep or a variance, which the command line gives as text."""
    if value in ("drop", "keep"):
        return value
    try:
        variance = float(str(value))
    except ValueError:
        variance = 0.0
    if not 0 < variance < math.inf:
        raise ValueError("must be drop, keep or a variance above 0")
    return variance


def split_ranks(ranks: int | str) -> tuple[int, int, str]:
    """Return the ranks here, those on all hosts, and where hosts meet, empty for one; raise ValueError."""
    found = re.fullmatch(r"([1-9]\d*)(?:\+([1-9]\d*)@([^@:\s]+:[1-9]\d{0,4}))?", str(ranks))
    if found is None or int((found[3] or ":0").rpartition(":")[2]) >= 1 << 16:
        raise ValueError("must be a number from 1, or HERE+THERE@HOST:PORT, such as 2+4@10.0.0.1:29400")
    return int(found[1]), int(found[1]) + int(found[2] or 0), found[3] or ""


_TWO = AfterValidator(_none_or_two)
_Bounds = Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(strict=False), _TWO]
_AHEAD = unless("max_staleness", 0)
_CLIPPED = only("loss", "ppo_clip", "decoupled")
_CORRECTED = only("correction", "tis", "mask", "icepop")
_KL = unless("kl", "none")
CLIPS: Mapping[str, tuple[float, float]] = {
    "dppo": (0.2, 0.2),
    "ppo_clip": (0.2, 0.28),  # clip-higher of DAPO
    "decoupled": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),  # as published: a mean over a rollout's tokens moves little
    "cispo": (0.0, 4.0),
}
"""Per loss, what clip = [] stands for."""
W_BOUNDS: Mapping[str, tuple[float, float]] = {"tis": (0.0, 2.0), "mask": (0.0, 3.0), "icepop": (0.5, 5.0)}
"""Per correction, what correction_bounds = [] stands for."""


class CollectKeys(Keys):
    """The collector: groups of rollouts, their retries and deadlines."""

    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts per task."""
    attempts: Count = 3
    """Attempts per rollout; only infrastructure failures are retried."""
    group_min: Annotated[int, Field(ge=2)] = 2
    """Least graded rollouts of a group; a smaller group is not trained."""
    max_staleness: CountOrZero = 0
    """Versions a trained token may be behind the trainer; rollouts run while it trains. 0 = synchronous."""
    late_groups: Annotated[Literal["wait", "skip", "cancel"], _AHEAD] = "wait"
    """A step waits for a late group, skips its retries, or drops it."""
    group_deadline_s: Annotated[SecondsOrZero, _AHEAD] = 0.0
    """Seconds after which an attempt's agent is stopped, if less than wall_s; 0 = none."""
    replace_degenerate: Annotated[float, Field(ge=0), _AHEAD] = 1.0
    """Groups with equal rewards replaced per step, as a share of groups_per_step."""
    stall_timeout_s: Seconds = 3600.0
    """Seconds without a rollout starting or ending after which the run stops; at least twice wall_s."""


class CollectTable(CollectKeys, Table):
    """Groups of rollouts."""

    groups_per_step: Count = 12
    """Tasks per optimizer step."""
    run: OwnPath = ""
    """Run directory of `insitu serve` whose sessions are the groups, instead of agents; the command line
    names it."""
    max_consecutive_failures: Count = 20
    """Consecutive infrastructure failures after which the run stops with the last cause."""


class LossConfig(Keys):
    """The loss, its ratio, its corrections and its divergence from a reference policy."""

    loss: LossName = "dppo"
    """Policy-gradient loss: dppo, ppo_clip, cispo, gspo, decoupled, or a function of log-probabilities, as
    entry point, module:attribute or file.py:attribute; nll is the one of `insitu sft`."""
    ratio: Annotated[Literal["sampler", "trainer"], only("loss", "ppo_clip", "cispo", "gspo")] = "sampler"
    """Denominator of the ratio; sampler = the sampled logprobs, trainer = recomputed
    before the step (the default of gspo)."""
    dppo_tau: Annotated[float, Field(ge=0), only("loss", "dppo")] = 1e-3
    """Weight of the KL term towards the sampler's log-probabilities."""
    clip: Annotated[_Bounds, only("loss", *CLIPS)] = ()
    """[LOW, HIGH]: the ratio is bound to 1 - LOW and 1 + HIGH; dppo: probability a token may lose or gain
    before its gradient is masked; gspo: of a rollout's mean ratio; cispo: HIGH alone, of the ratio that
    multiplies a token's gradient. [] = [0.2, 0.28], dppo [0.2, 0.2], gspo [0.0003, 0.0004], cispo [0, 4]."""
    dual_clip: Annotated[float, Field(ge=0), _CLIPPED] = 0.0
    """Upper bound of the ratio where the advantage is negative; 0 = no bound."""
    correction: Annotated[
        Literal["none", "tis", "mask", "icepop"], only("loss", "ppo_clip", "cispo", "gspo", "decoupled")
    ] = "none"
    """Importance weight w of a token: trainer's probability before the step over the sampler's, bounded."""
    correction_level: Annotated[Literal["token", "rollout", "rollout_mean"], _CORRECTED] = "token"
    """One w per token, per rollout (product), or per rollout and token (geometric mean)."""
    correction_bounds: Annotated[_Bounds, _CORRECTED] = ()
    """Smallest and largest w that is trained, on both sides of 1; tis: [0, clip of w]; mask: [0, largest].
    [] = tis [0, 2], mask [0, 3], icepop [0.5, 5]."""
    off_policy_mask: Annotated[float, Field(ge=0)] = 0.0
    """Mean log(sampler / trainer) above which a rollout with negative advantage is masked; 0 = never."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Estimator of the divergence from a reference policy."""
    kl_weight: Annotated[float, Field(ge=0), _KL] = 0.0
    """Factor in the loss; 0 = only measured."""
    kl_unbiased: Annotated[bool, _KL] = True
    """Multiply by the ratio, for an unbiased gradient."""

    @model_validator(mode="after")
    def _has_bounds(self) -> Self:
        if self.correction != "none" and not self.trainer_ratio:
            raise ValueError(
                f"correction = {self.correction!r} corrects ratio = 'trainer',"
                f" which loss = {self.loss!r} with ratio = {self.ratio!r} does not use"
            )
        if wrong := _wrong_bounds(self.correction, *self.w_bounds):
            raise ValueError(wrong)
        if self.loss == "cispo" and self.clips[0]:
            raise ValueError("clip = [0, HIGH] with loss = 'cispo': it has no lower bound")
        if 0 < self.dual_clip <= 1 + self.clips[1]:
            raise ValueError("dual_clip must be above 1 + the upper bound of clip, or 0 for no bound")
        if self.kl == "k1" and not self.kl_unbiased:
            raise ValueError("kl = 'k1' needs kl_unbiased: its own gradient is zero on average")
        return self

    @property
    def clips(self) -> tuple[float, float]:
        """Lower and upper bound of the loss; zeros for a loss of the user's own."""
        low, high = self.clip or CLIPS.get(self.loss, (0.0, 0.0))
        return low, high

    @property
    def trainer_ratio(self) -> bool:
        """Whether the ratio is against the trainer's log-probabilities before the step's first update."""
        return self.loss == "decoupled" or (
            self.ratio == "trainer" and self.loss in ("ppo_clip", "cispo", "gspo")
        )

    @property
    def has_kl_term(self) -> bool:
        """Whether a term of the loss does not depend on the advantage: kl, or dppo's KL term."""
        return (self.kl != "none" and self.kl_weight > 0) or (self.loss == "dppo" and self.dppo_tau > 0)

    @property
    def w_bounds(self) -> tuple[float, float]:
        """Smallest and largest w that is trained."""
        low, high = self.correction_bounds or W_BOUNDS.get(self.correction, (0.0, math.inf))
        return low, high

    def needs_old_logprobs(self, epoch: int) -> bool:
        """Return whether a pass without gradients must precede this one.

        It does where a decision about a whole rollout depends on the weights being trained.
        """
        if self.off_policy_mask:
            return True
        # Before the first update the trainer's own record has these log-probabilities.
        if self.loss == "gspo" and (epoch > 0 or not self.trainer_ratio):
            return True
        return epoch == 0 and self.correction != "none" and self.correction_level != "token"


class OptimizerKeys(Keys):
    """AdamW and its schedule."""

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
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest global gradient norm."""


class _ParallelKeys(Keys):
    """Data parallelism."""

    ranks: Annotated[int | str, AfterValidator(lambda given: split_ranks(given) and given)] = 1
    """Data-parallel processes; 1 = the learner alone, "2+4@10.0.0.1:29400" = two here, and four that other
    hosts bring to this address of the learner's machine (`insitu ranks`)."""


class RowRules(Keys):
    """Rows of a rollout that are trained."""

    rows: Literal["all", "collapse", "final"] = "all"
    """Rows with credit: all; collapse: only the final one exists; final: the others count, with no credit."""
    max_rows: Annotated[CountOrZero, only("rows", "all")] = 0
    """Most rows of one rollout, the first ones and the last are kept; 0 = no limit."""
    max_row_tokens: CountOrZero = 0
    """Most tokens of one row; a longer one is excluded as overlong; 0 = no limit."""


class PlanKeys(RowRules, _ParallelKeys):
    """Advantages, weights and micro-batches of a step."""

    advantage: AdvantageName = "dr_grpo"
    """Advantage estimator: dr_grpo, grpo, rloo, maxrl, zero (rewards are not trained on, for distillation
    alone), or a function of the rewards of a group, as entry point, module:attribute or file.py:attribute."""
    degenerate: Annotated[str | float, BeforeValidator(_degenerate)] = "drop"
    """Groups with equal rewards: left out, or trained by `kl` alone; a number = groups whose rewards have a
    smaller variance are left out too."""
    reducer: Literal["rollout", "token", "constant", "group"] = "rollout"
    """Unit that the loss is averaged over; constant = rollouts, each its tokens divided by
    limits.max_session_tokens."""
    truncated: Literal["keep", "mask", "penalise", "drop_group"] = "keep"
    """What becomes of a rollout that reached a limit: trained, masked, penalised, left out with its group."""
    overlong_tokens: Annotated[tuple[CountOrZero, ...], Field(strict=False), _TWO] = ()
    """[FROM, TO]: numbers of sampled tokens of a rollout between which its reward falls by 1, linearly; [] =
    no length penalty."""
    min_groups: Count = 1
    """Least groups with a gradient; with fewer the update is skipped (exclusion `few_groups`)."""
    token_budget: Count = 16384
    """Tokens per micro-batch."""
    layout: Literal["prefix", "tree", "rows"] = "prefix"
    """Shared computation in a micro-batch: a prefix common to all rows, every token that rows share, or none:
    each row alone, through the model's own attention, which is also what happens where insitu's own attention
    cannot compute a model."""

    @model_validator(mode="after")
    def _penalties_fit(self) -> Self:
        if self.overlong_tokens and self.overlong_tokens[0] >= self.overlong_tokens[1]:
            raise ValueError("overlong_tokens = [FROM, TO] needs FROM below TO")
        for key, used in (
            ("truncated penalise", self.truncated == "penalise"),
            ("overlong_tokens", self.overlong_tokens),
        ):
            if self.advantage == "maxrl" and used:
                raise ValueError(f"advantage maxrl needs rewards >= 0; {key} gives negative ones")
        return self


class LearnerKeys(_ParallelKeys):
    """Passes, numerics and processes of the learner."""

    epochs: Count = 1
    """Passes over one batch."""
    threads: Count = 2
    """Torch threads while training."""
    max_logprob_gap: Annotated[float, Field(ge=0)] = 0.0
    """Most |sampler - trainer| logprob of a trained token; 0 = 1e-4 embedded, 1e-3 float32, else 1."""
    on_bad_step: Literal["stop", "skip"] = "stop"
    """A step whose loss or gradient is not finite, or whose tokens differ too much between sampler and
    trainer: stop = the run ends; skip = its groups are dropped (exclusion `bad_step`), at most 3
    times between two updates."""
    reference: Annotated[OwnPath, _KL] = ""
    """Reference policy or teacher: a model folder, or the URL of a vLLM server; empty = the initial model of
    the run. `tasks.reference` replaces it for one task set."""
    shard: Annotated[bool, unless("ranks", 1)] = False
    """policy.kind = hf: shard the model over the ranks (FSDP2)."""
    step_timeout_s: Seconds = 3600.0
    """Timeout of one step of the learner, on each of its ranks, of a start of it, and of one save, load or
    export of its weights; then the run stops."""


class TrainTable(PlanKeys, OptimizerKeys, LearnerKeys, LossConfig, Table):
    """The learner."""

    restarts: CountOrZero = 3
    """Restarts of a dead learner, or of a server that lost its weights; reset by a completed step."""

    @model_validator(mode="before")
    @classmethod
    def _ratio_of_gspo(cls, values: Any) -> Any:
        """Default `ratio` to trainer for gspo."""
        # gspo's bounds are as small as the rounding gap between sampler and trainer (decision 0039).
        if isinstance(values, dict) and values.get("loss") == "gspo":
            return {"ratio": "trainer", **values}
        return values

    @model_validator(mode="after")
    def _samples(self) -> Self:
        if self.loss == "nll":
            raise ValueError("loss = 'nll' trains on given tokens: use `insitu sft`")
        if self.kl == "none" or not self.kl_weight:
            for key, used in (
                ("degenerate = 'keep'", self.degenerate == "keep"),
                ("advantage = 'zero'", self.advantage == "zero"),
            ):
                if used:
                    raise ValueError(f"{key} needs kl with kl_weight above 0: nothing else would be trained")
        return self


def _wrong_bounds(correction: str, low: float, high: float) -> str:
    """Return why a correction cannot have these bounds; empty if it can.

    A w of 1, where sampler and trainer agree, must stay. tis at 1 is allowed: it only ever reduces weights.
    """
    if low and correction != "icepop":
        return f"correction_bounds = [0, HIGH] with {correction!r}: it has no lower bound"
    if high < 1 or (high == 1 and correction != "tis"):
        least = "at least" if correction == "tis" else "above"
        return f"correction_bounds: {high:g} must be {least} 1 with {correction!r}: w is 1 where all is well"
    if low >= 1:
        return f"correction_bounds: {low:g} must be below 1: w is 1 where all is well"
    return ""


class SelectionKeys(Keys):
    """Stored rollouts that are used."""

    min_reward: float = 1.0
    """Least reward of a rollout that is used."""
    per_task: CountOrZero = 4
    """Most rollouts of one task: those with the highest reward, then the latest; 0 = all."""
    held_out: bool = False
    """Use rollouts of held-out tasks too; evaluations on them are invalid afterwards."""


class SftTable(SelectionKeys, Table):
    """`insitu sft RUN`: supervised training on stored rollouts."""

    run: OwnPath = ""
    """Run directory whose rollouts are used; the command line names it."""
    rollouts_per_step: Count = 32
    """Rollouts in one optimizer step; the last step of a pass takes the remainder."""
