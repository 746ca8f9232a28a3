"""Settings and results that cross between controller and learner as plain values, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from insitu.config import Config
from insitu.config.base import CountOrZero, Keys
from insitu.config.model import PolicyKeys
from insitu.config.tables import ALARMS
from insitu.config.training import LearnerKeys, LossConfig, OptimizerKeys, split_ranks
from insitu.errors import ConfigError, boundary

Decay = Literal["constant", "linear", "cosine"]

EMBEDDED_GAP, FLOAT32_GAP, ROUNDED_GAP = 1e-4, 1e-3, 1.0
"""Default limits of |trainer - sampler| log-probability of one token: for the embedded engine, for a float32
server and trainer, and otherwise.
"""


class OptimConfig(OptimizerKeys):
    """Optimizer settings."""

    muon_lr: float = 0.0
    """Muon's learning rate for hidden matrices; 0 = AdamW for everything."""
    total_steps: int = 0
    """Steps until the decay ends; required unless constant."""
    final: float = 0.0
    """Share of the rate after the decay."""

    @model_validator(mode="after")
    def _decay_has_steps(self) -> Self:
        if self.decay != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(f"decay={self.decay} needs total_steps > warmup_steps")
        return self


def rate(config: OptimConfig, step: int) -> float:
    """Return the factor of the learning rates at optimizer step `step`, counted from 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    left = 1.0 - done if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.final + (1.0 - config.final) * left


Merged = Literal["", "auto", "sampler", "float32", "bfloat16"]


class Lora(Keys):
    """Low-rank adapters trained instead of the weights; see model/lora.py."""

    rank: int
    alpha: float
    """Adapters are scaled by alpha / rank."""
    targets: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Last name component of the adapted matrices; empty = those of attention and MLP in each layer."""
    merged: Merged = ""
    """Dtype of the sum of matrix and adapter in an engine; auto = the start model's, sampler = what the
    embedded engine needs for the policy's compute type, empty = unmerged."""


class PolicyConfig(PolicyKeys):
    """How the model is loaded; the keys of [policy]."""

    lora: Lora | None = None
    rows: bool = False
    """Run each row alone, through the model's own attention (train.layout)."""
    replay: bool = False
    """Tokens run through the sampler's experts (engine.replay_experts)."""

    @classmethod
    def of(cls, config: Config) -> PolicyConfig:
        p = config.policy
        lora = None
        if p.lora_rank:
            # `insitu sft` ends with the merged model, in the start model's type
            merged: Merged = "auto" if config.sft.run else config.engine.publish_dtype
            if config.engine.kind == "embedded" and not config.sft.run:
                merged = "sampler"
            lora = Lora(
                rank=p.lora_rank,
                alpha=p.lora_alpha,
                targets=p.lora_targets,
                merged="" if config.publishes_adapters else merged,
            )
        return p.pick(cls, lora=lora, rows=config.train.layout == "rows", replay=config.engine.replay_experts)


def shards_of(hosts: Sequence[int]) -> int:
    """Return how many ranks hold one copy of a sharded model. hosts: ranks of each host.

    Equal hosts have a copy each, so that only gradients travel between them. Unequal ones, and hosts of one
    rank, hold one copy together: slower, but it fits wherever a copy per host would, and a run that lost a
    host goes on.
    """
    return hosts[0] if len(set(hosts)) == 1 and hosts[0] > 1 else sum(hosts)


class TrainConfig(LearnerKeys):
    """Settings of the trainer."""

    optim: OptimConfig = OptimConfig()
    loss: LossConfig = LossConfig()
    policy: PolicyConfig = PolicyConfig()
    max_logprob_gap: Annotated[float, Field(ge=0)] = EMBEDDED_GAP
    """Largest |trainer - sampler| log-probability of a token of the current version; see mismatch.py."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The sampler's: log-probabilities are those of softmax(logits / temperature)."""
    max_staleness: CountOrZero = 0
    """Most versions that a trained token may be behind the trainer."""
    alarms: Mapping[str, float] = ALARMS
    references: Mapping[str, str] = {}
    """Reference policy by task set, where sets have their own; empty = `reference` for all."""
    share_gpu: bool = False
    """An engine uses the GPU between steps: torch's memory cache is freed after each."""

    @property
    def ranks_here(self) -> int:
        """Ranks on the learner's machine."""
        return split_ranks(self.ranks)[0]

    @property
    def world(self) -> int:
        """Ranks on all hosts."""
        return split_ranks(self.ranks)[1]

    @property
    def meeting(self) -> str:
        """HOST:PORT where ranks of other hosts come; empty = there are none."""
        return split_ranks(self.ranks)[2]

    @model_validator(mode="after")
    def _sharded(self) -> Self:
        if self.shard and (self.world == 1 or self.policy.kind != "hf"):
            raise ValueError("train.shard needs ranks > 1 and policy.kind hf")
        return self

    @classmethod
    def of(cls, config: Config) -> TrainConfig:
        """Return the learner's part of a run's configuration."""
        t = config.train
        references = {table.name: table.reference for table in config.tasks if table.weight}
        own = any(references.values())
        return t.pick(
            cls,
            references={name: found or t.reference for name, found in references.items() if own},
            alarms=config.run.alarms,
            optim=_optim(config),
            loss=t.pick(LossConfig),
            policy=PolicyConfig.of(config),
            temperature=config.engine.temperature,
            max_logprob_gap=t.max_logprob_gap or _gap_limit(config),
            max_staleness=config.collect.max_staleness,
            share_gpu=config.engine.share_gpu,
        )


def _gap_limit(config: Config) -> float:
    """Return the default limit for this engine and policy (docs/internals/training.md)."""
    if config.engine.kind == "tinker":
        return ROUNDED_GAP  # the service's precision is unknown
    policy = config.policy
    auto = policy.kind == "builtin" or policy.device == "cpu"
    exact = policy.dtype == "float32" or (policy.dtype == "auto" and auto)
    if config.engine.kind == "embedded":
        return EMBEDDED_GAP if exact else ROUNDED_GAP
    # a server's own dtype is unknown here: only a configured one counts as float32
    return FLOAT32_GAP if exact and config.engine.publish_dtype == "float32" else ROUNDED_GAP


def _optim(config: Config) -> OptimConfig:
    """Return the optimizer settings; without a decay they do not depend on the run length."""
    t = config.train
    decay: Decay = "constant" if config.sft.run else t.decay  # [sft] has its own
    total_steps = 0 if decay == "constant" else config.run.steps * t.epochs
    return t.pick(OptimConfig, decay=decay, total_steps=total_steps)


class ServiceOptions(Keys):
    """Where the model is trained and sampled; no field holds a secret."""

    url: str
    """Address of the service; empty = the SDK's default."""
    model: str
    """Name of the base model at the service, or a `tinker://` path of sampler weights."""
    key_env: str
    """Environment variable with the key; empty = the SDK's own."""
    max_context_tokens: int
    rank: int
    """Rank of the adapters that are trained; 0 = the service is only sampled from."""
    seed: int
    """Seed of the adapters' initial weights."""
    timeout_s: float
    """Timeout of a start, save or load."""

    @classmethod
    def of(cls, config: Config) -> ServiceOptions:
        """Return the service of a run's configuration."""
        trains = config.policy.kind == "tinker"
        return cls(
            url=config.engine.url,
            model=config.engine.model,
            key_env=config.engine.key_env,
            max_context_tokens=config.model.max_context_tokens,
            rank=config.policy.lora_rank if trains else 0,
            seed=config.run.seed,
            timeout_s=config.engine.call_timeout_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of one training step; means are over trained tokens, unweighted."""

    optimizer_steps: int
    """Optimizer steps so far: one per epoch of a step that was not skipped."""
    version: int
    """Policy version after the step."""
    skipped: str = ""
    """Why there was no update, or empty; the numbers below are then 0."""
    bad: bool = False
    """The update was refused for what was computed; `skipped` says what."""
    loss: float = 0.0
    """The minimised weighted sum, before the first update."""
    entropy: float = 0.0
    """Mean entropy in nats, before the first update."""
    grad_norm: float | None = 0.0
    """Global gradient norm before clipping, of the last epoch; None = not reported (a training service)."""
    clip_fraction: float = 0.0
    """Share of tokens clipped by the loss, mean over epochs."""
    clip_low_fraction: float = 0.0
    """The part of it with negative advantage."""
    clip_high_fraction: float = 0.0
    """The part of it with positive advantage."""
    corrected_fraction: float = 0.0
    """Share of tokens bounded or excluded by a correction, mean over epochs."""
    mismatch_kl: float = 0.0
    """Mean of rho - 1 - log rho, trainer against sampler, before the first update, current version only."""
    off_policy_kl: float = 0.0
    """The same over all trained tokens, so it includes staleness: the early sign of a collapse."""
    ess: float = 1.0
    """Effective sample size (sum rho)^2 / (N sum rho^2) over all N trained tokens before the first update."""
    ref_kl: float = 0.0
    """Mean estimated KL from the reference policy before the first update."""
    ref_kl_of_sets: Mapping[str, float] = field(default_factory=dict)
    """The same by named task set."""
    alarm: str = ""
    """Warnings for limits that are exceeded, or empty."""
    max_logprob_gap: float = 0.0
    """Largest |trainer - sampler| log-probability of trained tokens of the current version."""
    max_logprob_gap_seen: float = 0.0
    """The same over all compared tokens, also those excluded for it."""
    mismatched: int = 0
    """Tokens of the plan over the limit, hence not trained; the means count them."""
    lr: float = 0.0
    tokens: int = 0
    """Trained tokens."""
    rows: int = 0
    row_tokens: int = 0
    """Tokens of the rows, prompts included."""
    micro_batches: int = 0
    seconds: float = 0.0
    ranks: int = 0
    """Ranks that took part in the update, on all hosts."""
    shared_rows: int = 0
    """Rows that no rank holds, which several computed together."""
    shared_s: float = 0.0
    """Seconds of `seconds` in which they were computed."""
    mfu: float | None = None
    """Share of the devices' peak that the update reached (trainer/utilization.py); None where not known."""


def gaps(steps: Sequence[Mapping[str, Any]]) -> dict[str, float | int | None]:
    """Return the largest gaps between sampler and trainer over steps, and the number of mismatched tokens.

    None where no token was compared.
    """
    compared = [m for m in steps if m["max_logprob_gap"] is not None]
    trained = [m["max_logprob_gap"] for m in compared]
    seen = [m["max_logprob_gap_seen"] for m in compared]
    return {
        "max_logprob_gap": max(trained, default=None),
        "max_logprob_gap_seen": max(seen, default=None),
        "mismatched": sum(m["mismatched"] for m in steps),
    }


def dump_config(config: TrainConfig) -> str:
    """Return JSON text that `parse_config` reads."""
    return config.model_dump_json()


def parse_config(text: str) -> TrainConfig:
    """Read the text of `dump_config`. Raises ConfigError."""
    with boundary(ConfigError, "read the trainer's configuration"):
        return TrainConfig.model_validate_json(text)
