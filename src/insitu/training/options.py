"""Knobs and results of the learner as plain values: what crosses between controller and learner.

No torch here: the controller builds these, the learner's process reads them back from JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from insitu.config import Config
from insitu.config.base import CountOrZero, Keys
from insitu.config.model import PolicyKeys
from insitu.config.training import LearnerKeys, LossConfig, OptimizerKeys
from insitu.errors import ConfigError, boundary

Decay = Literal["constant", "linear", "cosine"]

EMBEDDED_GAP, FLOAT32_GAP, ROUNDED_GAP = 1e-4, 1e-3, 1.0
"""Largest |trainer - sampler| log-probability of one token: the embedded engine, a server and a trainer that
compute in float32, and anything else."""


class OptimConfig(OptimizerKeys):
    """AdamW or Muon and their schedule; step k of n warm-up steps has k/n of the rate."""

    muon_lr: float = 0.0
    """Muon's learning rate for hidden matrices; 0 = AdamW for everything."""
    total_steps: int = 0
    """Steps until the decay ends; needed unless constant."""
    final: float = 0.0
    """Share of the rate that is left when the decay has ended."""

    @model_validator(mode="after")
    def _decay_has_steps(self) -> Self:
        if self.decay != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(f"decay={self.decay} needs total_steps > warmup_steps")
        return self


def rate(config: OptimConfig, step: int) -> float:
    """Factor on the learning rates at optimiser step `step`, counted from 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    left = 1.0 - done if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.final + (1.0 - config.final) * left


class Lora(Keys):
    """Low-rank adapters that are trained instead of the weights; see model/lora.py."""

    rank: int
    alpha: float
    """They count alpha / rank times."""
    targets: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Last names of the matrices that have one; empty = those of attention and MLP that each layer has."""
    merged: Literal["", "auto", "float32", "bfloat16"] = ""
    """Type in which an engine holds the sum of matrix and adapter; auto = as the start model's config.json
    says, empty = it gets adapters as they are."""


def publishes_adapters(config: Config) -> bool:
    """Whether the engine gets adapters as they are, and not whole weights that they were added to."""
    table = config.engine
    by_name = table.kind == "vllm" and table.publish_lora == "adapter"
    return config.policy.lora_rank > 0 and by_name and not config.sft.run


class PolicyConfig(PolicyKeys):
    """The trained model, its device, and its adapters if it has any."""

    lora: Lora | None = None

    @classmethod
    def of(cls, config: Config) -> PolicyConfig:
        p = config.policy
        lora = None
        if p.lora_rank:
            # `insitu sft` ends with the merged model, in the start model's type
            merged = "auto" if config.sft.run else config.engine.publish_dtype
            lora = Lora(
                rank=p.lora_rank,
                alpha=p.lora_alpha,
                targets=p.lora_targets,
                merged="" if publishes_adapters(config) else merged,
            )
        return p.pick(cls, lora=lora)


class TrainConfig(LearnerKeys):
    """Options of the trainer, which turns a plan into one update per epoch."""

    optim: OptimConfig = OptimConfig()
    loss: LossConfig = LossConfig()
    policy: PolicyConfig = PolicyConfig()
    max_logprob_gap: Annotated[float, Field(ge=0)] = EMBEDDED_GAP
    """Largest |trainer - sampler| log-probability of a token of the current version; above it, no update."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The sampler's: the trainer's log-probabilities are those of softmax(logits / temperature)."""
    max_staleness: CountOrZero = 0
    """Versions that a trained token may be behind the trainer; beyond it, no update."""
    share_gpu: bool = False
    """An engine uses the GPU's memory between two steps: torch's cache is emptied after each."""

    @model_validator(mode="after")
    def _sharded(self) -> Self:
        if self.shard and (self.ranks == 1 or self.policy.kind != "hf"):
            raise ValueError("train.shard needs ranks > 1 and policy.kind hf")
        return self

    @classmethod
    def of(cls, config: Config) -> TrainConfig:
        """The learner's part of a run's configuration."""
        t = config.train
        return t.pick(
            cls,
            optim=_optim(config),
            loss=t.pick(LossConfig),
            policy=PolicyConfig.of(config),
            temperature=config.engine.temperature,
            max_logprob_gap=t.max_logprob_gap or _gap_limit(config),
            max_staleness=config.collect.max_staleness,
            share_gpu=config.engine.share_gpu,
        )


def _gap_limit(config: Config) -> float:
    """What the numbers of this engine and policy allow (docs/decisions/0048). A server's own type is not
    known here: only what was asked for by name counts as float32."""
    if config.engine.kind == "embedded":
        return EMBEDDED_GAP
    policy = config.policy
    auto = policy.kind == "builtin" or policy.device == "cpu"
    exact = policy.dtype == "float32" or (policy.dtype == "auto" and auto)
    return FLOAT32_GAP if exact and config.engine.publish_dtype == "float32" else ROUNDED_GAP


def _optim(config: Config) -> OptimConfig:
    """How weights move. A decay ends with the run's last update; without one the run's length plays no part,
    so that a run may be resumed for more steps."""
    t = config.train
    decay: Decay = "constant" if config.sft.run else t.decay  # [sft] has its own
    total_steps = 0 if decay == "constant" else config.run.steps * t.epochs
    return t.pick(OptimConfig, decay=decay, total_steps=total_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step of the trainer did. All means are over trained tokens, unweighted."""

    optimizer_steps: int
    """Optimiser steps done so far: one for each epoch of a step that was not skipped."""
    version: int
    """Policy version of the weights after the step."""
    skipped: str = ""
    """Why there was no update, or empty; all numbers below are then 0."""
    loss: float = 0.0
    """The weighted sum that was minimised, before the first update."""
    entropy: float = 0.0
    """Mean entropy of the policy in nats, before the first update."""
    grad_norm: float = 0.0
    """Global gradient norm before clipping, of the last epoch."""
    clip_fraction: float = 0.0
    """Share of tokens whose gradient the loss bounded, mean over epochs."""
    clip_low_fraction: float = 0.0
    """The part of it with a negative advantage."""
    clip_high_fraction: float = 0.0
    """The part of it with a positive advantage."""
    corrected_fraction: float = 0.0
    """Share of tokens that a correction bounded or left out, mean over epochs."""
    mismatch_kl: float = 0.0
    """Mean of rho - 1 - log rho, trainer against sampler, before the first update, current version only."""
    off_policy_kl: float = 0.0
    """The same over all trained tokens, so staleness counts too: the early sign of a collapse."""
    ess: float = 1.0
    """(sum rho)^2 / (N sum rho^2) over all N trained tokens before the first update: which share of them
    the ratios leave effective."""
    ref_kl: float = 0.0
    """Mean estimated divergence from the reference policy before the first update."""
    alarm: str = ""
    """What is beyond a limit that calls for a person, or empty."""
    max_logprob_gap: float = 0.0
    """Largest |trainer - sampler| log-probability before the first update, of trained tokens of the current
    version."""
    max_logprob_gap_seen: float = 0.0
    """The same of all tokens compared, also those that are not trained for it: over the limit where there are
    any."""
    mismatched: int = 0
    """Tokens of the plan that were over the limit and so are not trained; the means count them."""
    lr: float = 0.0
    tokens: int = 0
    """Trained tokens."""
    rows: int = 0
    micro_batches: int = 0
    seconds: float = 0.0


def gaps(steps: Sequence[Mapping[str, Any]]) -> dict[str, float | int | None]:
    """How far sampler and trainer were apart: in what was trained, in all that was compared, and in how many
    tokens too far; None where no token was compared. Earlier versions of insitu told the first alone."""
    compared = [m for m in steps if m["max_logprob_gap"] is not None]
    trained = [m["max_logprob_gap"] for m in compared]
    seen = [m.get("max_logprob_gap_seen", m["max_logprob_gap"]) for m in compared]
    return {
        "max_logprob_gap": max(trained, default=None),
        "max_logprob_gap_seen": max(seen, default=None),
        "mismatched": sum(m.get("mismatched", 0) for m in steps),
    }


def dump_config(config: TrainConfig) -> str:
    """JSON text that `parse_config` reads back."""
    return config.model_dump_json()


def parse_config(text: str) -> TrainConfig:
    """Read what `dump_config` wrote. Raises ConfigError."""
    with boundary(ConfigError, "read the trainer's configuration"):
        return TrainConfig.model_validate_json(text)
