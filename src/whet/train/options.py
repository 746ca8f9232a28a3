"""Knobs and results of the learner as plain values: what crosses between controller and learner.

No torch here: the controller builds these, the learner's process reads them back from JSON.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Literal

from whet.config import Config
from whet.errors import ConfigError, boundary


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """How weights move."""

    lr: float = 2e-4
    """AdamW's learning rate at the top of the schedule."""
    muon_lr: float = 0.0
    """Muon's learning rate for hidden matrices; 0 = AdamW for everything."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """Largest global gradient norm."""
    warmup_steps: int = 0
    """Steps of linear warm-up; step k of n runs at k/n of the rate."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int = 0
    """Steps until the decay ends; needed unless constant."""
    final: float = 0.0
    """Share of the rate that is left when the decay has ended."""

    def __post_init__(self) -> None:
        if self.decay != "constant" and self.total_steps <= self.warmup_steps:
            raise ConfigError(f"decay={self.decay} needs total_steps > warmup_steps")


def rate(config: OptimConfig, step: int) -> float:
    """Factor on the learning rates at optimiser step `step`, counted from 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    left = 1.0 - done if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.final + (1.0 - config.final) * left


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Policy-gradient loss and its constants; see loss.py for the formulas."""

    name: Literal["dppo", "ppo_clip", "nll"] = "dppo"
    """nll is for supervised training: tokens of any origin, nothing is compared with a sampler's record."""
    dppo_low: float = 0.2
    """dppo: probability a token may lose against the sampler before its gradient is masked."""
    dppo_high: float = 0.2
    """dppo: probability a token may gain against the sampler before its gradient is masked."""
    dppo_tau: float = 1e-3
    """dppo: weight of the pull towards the sampler's log-probabilities."""
    clip_low: float = 0.2
    """ppo_clip: lower clip of the ratio, 1 - clip_low."""
    clip_high: float = 0.28
    """ppo_clip: upper clip of the ratio, 1 + clip_high."""
    dual_clip: float = 0.0
    """ppo_clip: bound c > 1 on the loss of tokens with negative advantage, -c A; 0 = off."""

    def __post_init__(self) -> None:
        if self.dual_clip and self.dual_clip <= 1.0:
            raise ConfigError(f"dual_clip={self.dual_clip} must be 0 or above 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters that are trained instead of the weights; see lora.py."""

    rank: int
    alpha: float
    """They count alpha / rank times."""
    targets: tuple[str, ...]
    """Last names of the matrices that have one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """How the model is held; the keys of [policy]."""

    kind: Literal["builtin", "hf"] = "builtin"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    memory_gib: float = 0.0
    """Memory of the device that training may fill; 0 = what is free."""
    lora: Lora | None = None

    @classmethod
    def of(cls, config: Config) -> PolicyConfig:
        p = config.policy
        lora = Lora(rank=p.lora_rank, alpha=p.lora_alpha, targets=p.lora_targets) if p.lora_rank else None
        return cls(kind=p.kind, device=p.device, dtype=p.dtype, memory_gib=p.memory_gib, lora=lora)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How the trainer turns a plan into one update per epoch."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    epochs: int = 1
    """Updates from one plan."""
    temperature: float = 1.0
    """The sampler's: the trainer's log-probabilities are those of softmax(logits / temperature)."""
    max_logprob_gap: float = 1e-4
    """Largest |trainer - sampler| log-probability of a token of the current version; above it, no update."""
    max_staleness: int = 0
    """Versions that a trained token may be behind the trainer; 0 = synchronous. Beyond it, no update."""
    threads: int = 1
    """Torch threads while training."""

    def __post_init__(self) -> None:
        if not (self.epochs >= 1 and self.threads >= 1 and self.temperature > 0):
            raise ConfigError("train: epochs and threads must be >= 1, temperature > 0")

    @classmethod
    def of(cls, config: Config) -> TrainConfig:
        """The learner's part of a run's configuration."""
        t = config.train
        return cls(
            optim=OptimConfig(lr=t.lr, warmup_steps=t.warmup_steps, grad_clip=t.grad_clip),
            loss=LossConfig(
                name=t.loss,
                dppo_low=t.dppo_low,
                dppo_high=t.dppo_high,
                dppo_tau=t.dppo_tau,
                clip_low=t.clip_low,
                clip_high=t.clip_high,
            ),
            policy=PolicyConfig.of(config),
            epochs=t.epochs,
            temperature=config.engine.temperature,
            max_logprob_gap=t.max_logprob_gap,
            threads=t.threads,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step of the trainer did. All means are over trained tokens, unweighted."""

    step: int
    """Optimiser steps done so far."""
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
    """Share of tokens whose gradient the loss cut off, mean over epochs."""
    mismatch_k3: float = 0.0
    """Mean of rho - 1 - log rho, trainer against sampler, before the first update, current version only."""
    max_logprob_gap: float = 0.0
    """Largest |trainer - sampler| log-probability before the first update, current version only."""
    lr: float = 0.0
    tokens: int = 0
    """Trained tokens."""
    rows: int = 0
    micro_batches: int = 0
    seconds: float = 0.0


def dump_config(config: TrainConfig) -> str:
    """JSON text that `parse_config` reads back."""
    return json.dumps(asdict(config))


def parse_config(text: str) -> TrainConfig:
    """Read what `dump_config` wrote. Raises ConfigError."""
    with boundary(ConfigError, "read the trainer's configuration"):
        raw = json.loads(text)
        try:
            optim, loss = raw.pop("optim"), raw.pop("loss")
            optim["betas"] = tuple(optim["betas"])
            policy = raw.pop("policy")
            lora = policy.pop("lora")
            if lora is not None:
                lora = Lora(**{**lora, "targets": tuple(lora["targets"])})
            return TrainConfig(
                optim=OptimConfig(**optim),
                loss=LossConfig(**loss),
                policy=PolicyConfig(**policy, lora=lora),
                **raw,
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(f"the trainer's configuration is not complete: {error}") from error
