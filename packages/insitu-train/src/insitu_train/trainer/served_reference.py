"""A reference policy behind a vLLM server: it scores each row as a prompt.

vLLM gives the log-probabilities of a prompt's tokens without a temperature, so it is 1. A server may have
more tokens than the trained model (padding of its embeddings), not other ones: texts of sample ids are
compared at the start.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from insitu.errors import TrainError
from insitu_train.model.base import PLAIN, MemoryOptions, Policy
from insitu_train.plan.step import PlanRow
from insitu_train.trainer.batch import TensorBatch
from insitu_train.trainer.scoring_server import ScoringServer

_AT_ONCE = 8
"""Rows that are scored at the same time."""


class ServedReference:
    """A model that a vLLM server scores with."""

    policies: tuple[Policy, ...] = ()

    def __init__(self, server: ScoringServer) -> None:
        self._server, self.max_positions = server, server.max_positions
        self.checksum = hashlib.sha256(server.model.encode()).hexdigest()
        """Of the model's name: the weights of a server cannot be read, and its address may change."""

    def logprobs(self, batch: TensorBatch, temperature: float, techniques: MemoryOptions = PLAIN) -> Tensor:
        """Return [N] of the batch's trained tokens, row by row. Raises TrainError when the server fails."""
        if temperature != 1.0:
            raise TrainError(f"{self._server.name} scores at engine.temperature = 1 only")
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = list(pool.map(self._row, batch.rows))
        return torch.from_numpy(np.concatenate(found)).to(batch.mu.device)

    def _row(self, row: PlanRow) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        body = {
            "model": self._server.model,
            "prompt": row.ids.tolist(),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "add_special_tokens": False,
        }
        reply, name = self._server.call("/v1/completions", body), self._server.name
        try:
            scores = reply["choices"][0]["prompt_logprobs"]
            found = [scores[at][str(row.ids[at])]["logprob"] for at in np.flatnonzero(row.mask)]
        except (KeyError, IndexError, TypeError) as error:
            raise TrainError(
                f"{name} gave no log-probability for a token of the prompt: {error!r}"
            ) from error
        logprobs = np.array(found, np.float32)
        if len(scores) != len(row.ids) or not (np.isfinite(logprobs) & (logprobs <= 0)).all():
            raise TrainError(f"{name}: log-probabilities of rollout {row.rollout_id} are not usable")
        return logprobs
