"""State of the decoding slots as arrays, so that a step handles all rows at once.

A random stream is a function of (seed, rollout, turn) alone. The logprob of a token is that of the
distribution it was sampled from; greedy requests (temperature 0) report the logprob at temperature 1.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from insitu.types import FloatArray, IntArray, RequestKey
from insitu_train.embedded.attention import Layout
from insitu_train.embedded.forward import CachedForward

_AT_ONCE = 2**19
"""Logits drawn from at once: memory of more is given back to the system and zeroed by it at each step."""


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


class DecodeSlots:
    """Next input, position, temperature and random numbers of each slot, and its sampled tokens."""

    def __init__(self, forward: CachedForward, max_context: int) -> None:
        rows = forward.rows
        self._forward = forward
        self._ids = np.zeros(rows, np.int64)
        self._positions = np.zeros(rows, np.int64)
        self._temperature = np.ones(rows, np.float32)
        self._counts = np.zeros(rows, np.int64)
        self._uniform = np.zeros((rows, max_context), np.float64)
        self._sampled = np.zeros((rows, max_context), np.int32)
        self._logprobs = np.zeros((rows, max_context), np.float32)

    def start(
        self, slot: int, prompt: IntArray, temperature: float, uniform: npt.NDArray[np.float64]
    ) -> None:
        """Start decoding in `slot`: `prompt` except its last token has been computed."""
        last = len(prompt) - 1
        self._ids[slot], self._positions[slot] = prompt[last], last
        self._temperature[slot], self._counts[slot] = temperature, 0
        self._uniform[slot, : len(uniform)] = uniform

    def positions(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the position of the next input of each slot."""
        return self._positions[slots]

    def result(self, slot: int) -> tuple[IntArray, FloatArray]:
        """Return ids and logprobs sampled in `slot` so far."""
        count = self._counts[slot]
        return self._sampled[slot, :count].copy(), self._logprobs[slot, :count].copy()

    def step(self, slots: npt.NDArray[np.int64], layout: Layout) -> tuple[list[int], list[float]]:
        """Sample one token in each of `slots`, the rows of `layout`; return ids and logprobs in their order.

        A logprob that is not finite means broken weights: its row must be stopped.
        """
        positions, counts = self._positions[slots], self._counts[slots]
        logits = self._forward.decode(self._ids[slots], positions, layout)[: len(slots)]
        temperature = self._temperature[slots]
        uniform = torch.from_numpy(self._uniform[slots, counts])
        greedy = not temperature.all()
        rows = max(1, _AT_ONCE // logits.shape[1])
        columns = logits, torch.from_numpy(temperature), uniform
        parts = zip(*(torch.split(column, rows) for column in columns), strict=True)
        drawn = [draw(*part, greedy=greedy) for part in parts]
        ids, logprobs = (torch.cat(found).numpy() for found in zip(*drawn, strict=True))
        self._sampled[slots, counts] = ids
        self._logprobs[slots, counts] = logprobs
        self._counts[slots] = counts + 1
        self._ids[slots] = ids
        self._positions[slots] = positions + 1
        return ids.tolist(), logprobs.tolist()
