"""Sampling of tokens: exact log-probabilities and one random stream per request.

A stream is a function of (seed, rollout, turn) alone. The logprob of a token is that of the distribution it
was sampled from; greedy requests (temperature 0) report the logprob at temperature 1.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from insitu.types import RequestKey


def stream(key: RequestKey, n: int) -> npt.NDArray[np.float64]:
    """Return the first n numbers of a request's stream, uniform in [0, 1 - 2**-52]."""
    name = struct.pack("<qq", key.seed, key.turn) + key.rollout_id.encode()
    raw = hashlib.shake_256(name).digest(8 * n)
    numbers: npt.NDArray[np.float64] = (np.frombuffer(raw, "<u8") >> np.uint64(12)).astype(np.float64)
    return numbers * 2.0**-52


def draw(
    logits: Tensor, temperature: Tensor, uniform: Tensor, *, greedy: bool = True
) -> tuple[Tensor, Tensor]:
    """Sample one id per row by inverse CDF over fp32 probabilities.

    logits [R, V] fp32; temperature [R] fp32, 0 = argmax; uniform [R] float64. `greedy` False promises that
    no temperature is 0. Returns ids [R] int64 and logprobs [R] fp32, which are NaN or -inf where the logits
    are not finite.
    """
    scale = torch.where(temperature == 0, 1.0, temperature) if greedy else temperature
    logprobs = torch.log_softmax(logits / scale[:, None], -1)
    cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
    # u <= 1 - 2**-52 keeps the target below the total, so the id found always has probability > 0
    target = uniform[:, None] * cdf[:, -1:]
    ids = torch.searchsorted(cdf, target, right=True)
    ids.clamp_max_(logits.shape[1] - 1)
    if greedy:
        ids = torch.where(temperature[:, None] == 0, logits.argmax(-1, keepdim=True), ids)
    chosen = logprobs.gather(1, ids).clamp_max_(0.0)
    return ids[:, 0], chosen[:, 0]
