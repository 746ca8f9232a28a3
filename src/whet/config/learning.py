"""The tables [collect] and [train]: which rollouts are wanted, and what is learnt from them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from whet.config.base import Count, CountOrZero, Fraction, Table


class CollectTable(Table):
    """Groups of rollouts."""

    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts per task."""
    attempts: Count = 3
    """Tries at one rollout when the infrastructure fails."""
    group_min: Annotated[int, Field(ge=2)] = 2
    """Graded rollouts below which nothing of a group is trained."""
    mask_alarm: Fraction = 0.1
    """Share of a step's tries that failed of the infrastructure from which a warning is given; 0 = never."""


class TrainTable(Table):
    """The learner."""

    loss: Literal["dppo", "ppo_clip"] = "dppo"
    """Policy-gradient loss."""
    advantage: Literal["dr_grpo", "grpo", "rloo", "maxrl"] = "dr_grpo"
    """Credit of a rollout against its group."""
    lr: Annotated[float, Field(gt=0)] = 2e-4
    """Peak learning rate."""
    warmup_steps: CountOrZero = 3
    """Steps of linear warm-up."""
    epochs: Count = 1
    """Passes over one batch."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest global gradient norm."""
    min_groups: Count = 2
    """Groups with a gradient below which the update is skipped."""
    threads: Count = 2
    """Torch threads while training."""
    truncated: Literal["keep", "mask", "penalise"] = "keep"
    """What becomes of the tokens of a rollout that reached a limit."""
    max_logprob_gap: Annotated[float, Field(gt=0)] = 1e-4
    """Largest |sampler - trainer| log-probability of a trained token; the run stops above it."""
    dppo_low: Fraction = 0.2
    """dppo: probability a token may lose against the sampler before its gradient is masked."""
    dppo_high: Fraction = 0.2
    """dppo: probability a token may gain against the sampler before its gradient is masked."""
    dppo_tau: Annotated[float, Field(ge=0)] = 1e-3
    """dppo: weight of the pull towards the sampler's log-probabilities."""
    clip_low: Fraction = 0.2
    """ppo_clip: lower clip of the ratio, 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """ppo_clip: upper clip of the ratio, 1 + clip_high."""
    token_budget: Count = 16384
    """Tokens per micro-batch."""
    rows: Literal["all", "collapse", "final"] = "all"
    """Rows with credit: all; collapse: only the final one exists; final: the others count, with no credit."""
    max_rows: CountOrZero = 0
    """rows all: most rows of one rollout, the first ones and the last are kept; 0 = no limit."""
    max_row_tokens: CountOrZero = 0
    """Most tokens of one row; a longer one is not trained and counts as overlong; 0 = no limit."""
