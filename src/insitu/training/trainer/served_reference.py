"""A reference policy behind a vLLM server: it scores each row as a prompt.

vLLM gives the log-probabilities of a prompt's tokens without a temperature, so it is 1. A server may have
more tokens than the trained model (padding of its embeddings), not other ones: texts of sample ids are
compared at the start.
"""

from __future__ import annotations

import hashlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from insitu.backoff import backoff_s
from insitu.engines.http import checked_url
from insitu.engines.served_model import VocabularySample
from insitu.errors import ConfigError, TrainError, boundary
from insitu.training.model.base import PLAIN, MemoryOptions, Policy
from insitu.training.plan.step import PlanRow
from insitu.training.trainer.batch import TensorBatch

_AT_ONCE = 8
"""Rows that are scored at the same time."""
_ATTEMPTS = 5


class ServedReference:
    """A model that a vLLM server scores with."""

    policies: tuple[Policy, ...] = ()

    def __init__(self, url: str, model: Path, timeout_s: float) -> None:
        """Connect. model: folder with the trained model's tokenizer. timeout_s: of one call with its retries.

        Raises ConfigError when the server cannot be reached or has another vocabulary.
        """
        self._url, self._timeout_s = checked_url(url, "train.reference"), timeout_s
        try:
            card = self._call("/v1/models")["data"][0]
            self._name, self.max_positions = str(card["id"]), int(card["max_model_len"]) - 1
            self._check_tokens(model)
        except (TrainError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(
                f"train.reference: {self._url} is not a vLLM server that scores: {error}"
            ) from error
        self.checksum = hashlib.sha256(f"{self._url} {self._name}".encode()).hexdigest()
        """Of address and name: the weights of a server cannot be read."""

    def check(self, trained: Policy) -> None:
        """Do nothing: the vocabulary was compared at the start."""

    def logprobs(self, batch: TensorBatch, temperature: float, techniques: MemoryOptions = PLAIN) -> Tensor:
        """Return [N] of the batch's trained tokens, row by row. Raises TrainError when the server fails."""
        if temperature != 1.0:
            raise TrainError("train.reference: a server scores at engine.temperature = 1 only")
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = list(pool.map(self._row, batch.rows))
        return torch.from_numpy(np.concatenate(found)).to(batch.mu.device)

    def _row(self, row: PlanRow) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        body = {
            "model": self._name,
            "prompt": row.ids.tolist(),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "add_special_tokens": False,
        }
        reply = self._call("/v1/completions", body)
        try:
            scores = reply["choices"][0]["prompt_logprobs"]
            found = [scores[at][str(row.ids[at])]["logprob"] for at in np.flatnonzero(row.mask)]
        except (KeyError, IndexError, TypeError) as error:
            raise TrainError(
                f"{self._url} gave no log-probability for a token of the prompt: {error!r}"
            ) from error
        logprobs = np.array(found, np.float32)
        if len(scores) != len(row.ids) or not (np.isfinite(logprobs) & (logprobs <= 0)).all():
            raise TrainError(f"{self._url}: log-probabilities of rollout {row.rollout_id} are not usable")
        return logprobs

    def _check_tokens(self, model: Path) -> None:
        sample = VocabularySample(model)
        if not sample.is_text(self._call("/detokenize", {"model": self._name, "tokens": sample.ids})):
            raise ConfigError(f"train.reference: {self._url} has another vocabulary than model.path")

    def _call(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON of a reply, retried while the server is busy or away. Raises TrainError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + route, data, {"Content-Type": "application/json"})
        until = time.monotonic() + self._timeout_s
        for failures in range(1, _ATTEMPTS):
            try:
                return self._once(request, until)
            except urllib.error.HTTPError as error:
                if error.code not in (429, 500, 502, 503):
                    raise TrainError(f"{self._url}{route} answered {error.code}: {_detail(error)}") from error
            except OSError:
                pass  # not reachable, or cut off
            time.sleep(max(0.0, min(backoff_s(failures, 1.0), until - time.monotonic())))
        with boundary(TrainError, f"call {self._url}{route}"):
            return self._once(request, until)

    def _once(self, request: urllib.request.Request, until: float) -> Any:
        # proxies of the environment are for other hosts
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=max(0.1, until - time.monotonic())) as reply:
            return json.load(reply)


def _detail(error: urllib.error.HTTPError) -> str:
    return error.read(300).decode("utf-8", "replace").strip()
