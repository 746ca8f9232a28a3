"""Requests to an engine and their results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from insitu.types.values import Value

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
ExpertArray = npt.NDArray[np.int16]
"""[tokens, layers, k] experts that each layer's router chose for a token; -1 = not known."""

Finish = Literal["stop", "length", "abort"]
VersionRuns = tuple[tuple[int, int], ...]
"""(start, version) pairs: from token offset `start` on, tokens were sampled by `version`."""


MIN_TEMPERATURE = 0.05
"""Least temperature of a session: vLLM silently changes lower ones, and they leave little to train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Neutral sampling: temperature as the trainer sets it, no top_p, no top_k, no penalties."""

    max_tokens: int
    temperature: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    """The stop id is sampled, kept and counted; generation ends after it."""
    experts_from: int = 0
    """First position of the prompt whose experts are returned, by an engine that returns them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKey:
    """Identifies one engine request and its random stream: the same key gives the same samples."""

    seed: int
    rollout_id: str
    turn: int
    """Ordinal of the call within its session, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTimes(Value):
    """Measurements of one engine request, in seconds since the epoch; None = not measured."""

    began_s: float | None = None
    """When the request went to the engine."""
    first_s: float | None = None
    """When the engine had sampled the first token, where it reports that."""
    ended_s: float | None = None
    cached: int | None = None
    """Prompt tokens that the engine took from its prefix cache, where it reports that."""


NOT_TIMED = CallTimes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Result of one engine request."""

    ids: IntArray = field(repr=False)
    """[n] sampled ids, the stop id included."""
    logprobs: FloatArray | None = field(repr=False)
    """[n] logprob of each sampled id under the distribution it was drawn from; None = demonstrated."""
    finish: Finish
    version_runs: VersionRuns
    times: CallTimes = NOT_TIMED
    experts: ExpertArray | None = field(default=None, repr=False)
    """Of each position from `SamplingParams.experts_from` to the one before the last sampled id, which was
    not computed yet; None = not returned."""
