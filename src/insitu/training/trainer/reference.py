"""The reference policy: a frozen model that scores tokens.

Its weights are outside the run directory, so checkpoints contain their checksum and a resumed run refuses
other ones.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from insitu.engines.embedded.weights import checksum
from insitu.errors import ConfigError
from insitu.training.loss.fused_head import score
from insitu.training.model.base import PLAIN, MemoryOptions, Policy
from insitu.training.model.hf import HfPolicy
from insitu.training.model.load import open_policy
from insitu.training.options import TrainConfig
from insitu.training.trainer.batch import TensorBatch, states


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
    def policy(self) -> Policy:
        return self._model

    @property
    def max_positions(self) -> int:
        return self._model.max_positions

    def check(self, trained: Policy) -> None:
        """Raise ConfigError when the vocabularies differ."""
        if self._model.vocab_size != trained.vocab_size:
            raise ConfigError(
                f"the reference policy has {self._model.vocab_size} tokens, the trained model"
                f" {trained.vocab_size}: a KL between them is undefined"
            )

    def logprobs(self, batch: TensorBatch, temperature: float, techniques: MemoryOptions = PLAIN) -> Tensor:
        """Return [N] of the batch's trained tokens, row by row. techniques: those of the training pass."""
        if isinstance(self._model, HfPolicy):
            self._model.techniques = techniques
        with torch.no_grad():
            return score(self._model, *states(self._model, batch), temperature).logp


def read_reference(config: TrainConfig, model: Path) -> Reference | None:
    """Return the policy that the loss needs, from its own folder or the start `model`; None without a KL.

    Raises ConfigError when the folder is not a model.
    """
    if config.loss.kl == "none":
        return None
    folder = Path(config.reference) if config.reference else model
    if not (folder / "config.json").exists():
        raise ConfigError(f"train.reference: {folder} is not a model folder: it has no config.json")
    return Reference(open_policy(folder, config.policy.changed(lora=None)))
