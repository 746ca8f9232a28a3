"""Reference policies: frozen models that score tokens, in this process or behind a server.

A teacher is a reference policy with a large train.kl_weight. Only the tokens of the rollouts are scored, all
of them ids of the run's tokenizer; preflight has compared that with the reference's, whose embedding may have
more rows, for padding. Weights are outside the run directory, so a run keeps their checksum and refuses
other ones when it is resumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from insitu.config.base import is_url
from insitu.errors import ConfigError, TrainError
from insitu_train.embedded.weights import checksum
from insitu_train.loss.fused_head import score
from insitu_train.model.base import PLAIN, MemoryOptions, Policy
from insitu_train.model.hf import HfPolicy
from insitu_train.model.load import open_policy
from insitu_train.options import TrainConfig
from insitu_train.plan.step import PlanRow
from insitu_train.trainer.batch import TensorBatch, states
from insitu_train.trainer.scoring_server import ScoringServer
from insitu_train.trainer.served_reference import ServedReference


class Scorer(Protocol):
    """What the trainer needs of a reference policy."""

    @property
    def checksum(self) -> str:
        """Hex SHA-256 that tells it from others."""
        ...

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Its models in this process."""
        ...

    @property
    def max_positions(self) -> int: ...

    def logprobs(self, batch: TensorBatch, temperature: float, techniques: MemoryOptions = PLAIN) -> Tensor:
        """Return [N] of the batch's trained tokens, row by row. techniques: those of the training pass."""
        ...


class Reference:
    """A frozen policy."""

    def __init__(self, model: Policy) -> None:
        self._model = model
        for _, parameter in model.named_parameters():
            parameter.requires_grad_(False)
        self.checksum = checksum(model)
        """Hex SHA-256 over name, shape and values of every parameter, in name order."""
        if isinstance(model, HfPolicy):
            model.freeze()

    @property
    def policies(self) -> tuple[Policy, ...]:
        return (self._model,)

    @property
    def max_positions(self) -> int:
        return self._model.max_positions

    def logprobs(self, batch: TensorBatch, temperature: float, techniques: MemoryOptions = PLAIN) -> Tensor:
        """Return [N] of the batch's trained tokens, row by row. techniques: those of the training pass."""
        if isinstance(self._model, HfPolicy):
            self._model.techniques = techniques
        with torch.no_grad():
            return score(self._model, *states(self._model, batch), temperature).logp


class References:
    """Reference policies by name of a task set."""

    def __init__(self, by_set: Mapping[str, Scorer]) -> None:
        self._by_set = by_set
        self._all = [*dict.fromkeys(by_set.values())]
        named = [f"{name}={scorer.checksum}" for name, scorer in sorted(by_set.items())]
        self.checksum = hashlib.sha256("\n".join(named).encode()).hexdigest()

    @property
    def policies(self) -> tuple[Policy, ...]:
        return tuple(policy for scorer in self._all for policy in scorer.policies)

    @property
    def max_positions(self) -> int:
        return min(scorer.max_positions for scorer in self._all)

    def logprobs(self, batch: TensorBatch, temperature: float, techniques: MemoryOptions = PLAIN) -> Tensor:
        """Return [N] of the batch's trained tokens, row by row, each by its task set's reference."""
        scorers = [self._of(row) for row in batch.rows]
        # One pass of the whole batch for each of them: few micro-batches mix sets.
        found = {one: one.logprobs(batch, temperature, techniques) for one in dict.fromkeys(scorers)}
        parts = {one: torch.split(logp, batch.counts) for one, logp in found.items()}
        return torch.cat([parts[scorer][i] for i, scorer in enumerate(scorers)])

    def _of(self, row: PlanRow) -> Scorer:
        try:
            return self._by_set[row.part]
        except KeyError:
            raise TrainError(
                f"rollout {row.rollout_id}: no reference policy for task set {row.part!r}"
            ) from None


def read_reference(config: TrainConfig, model: Path) -> Scorer | None:
    """Return the reference policies that the loss needs, None without a KL. An empty name is the start model.

    Raises ConfigError when a folder is not a model, or a server does not score the vocabulary of `model`.
    """
    if config.loss.kl == "none":
        return None
    names = config.references or {"": config.reference}
    keys = {name: ".".join(filter(None, ["tasks", part, "reference"])) for part, name in names.items()}
    keys[config.reference] = "train.reference"
    opened = {
        name: _open(name or str(model), keys[name], config, model) for name in dict.fromkeys(names.values())
    }
    if len(opened) == 1:
        return next(iter(opened.values()))
    return References({part: opened[name] for part, name in names.items()})


def _open(source: str, key: str, config: TrainConfig, model: Path) -> Scorer:
    if is_url(source):
        return ServedReference(ScoringServer(source, key, model, config.step_timeout_s))
    folder = Path(source)
    if not (folder / "config.json").exists():
        raise ConfigError(f"{key}: {folder} is not a model folder: it has no config.json")
    return Reference(open_policy(folder, config.policy.changed(lora=None, replay=False)))
