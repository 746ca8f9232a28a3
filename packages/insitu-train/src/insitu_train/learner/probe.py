"""Start-up check that the trainer reproduces the engine's log-probabilities.

Random prompts are sampled; ids must be in the vocabulary, log-probabilities finite and equal to those of a
full forward without the engine's code, at the configured temperature.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from insitu.errors import EngineError
from insitu.types import Generation, IntArray, RequestKey, SamplingParams
from insitu_train.embedded.core import EmbeddedCore
from insitu_train.embedded.model import Qwen3
from insitu_train.loss.fused_head import score_masked

PROMPTS = 3
TOKENS = 24


def probe_engine(core: EmbeddedCore, model: Qwen3, *, temperature: float, limit: float) -> float:
    """Return the largest |trainer - sampler| log-probability. Raises EngineError above `limit`."""
    rng = np.random.default_rng(0)
    room = core.options.max_context
    results: dict[int, Generation | EngineError] = {}
    prompts: list[IntArray] = []
    for i in range(PROMPTS):
        length = min(1 + 37 * i, room - 1)
        prompts.append(rng.integers(0, model.config.vocab_size, length).astype(np.int32))
        params = SamplingParams(max_tokens=TOKENS, temperature=temperature)
        key = RequestKey(seed=0, rollout_id="probe", turn=i)
        core.submit(prompts[i], params, key, partial(results.__setitem__, i))
    while core.busy:
        core.step()
    core.cache.clear()
    gaps = [_gap(model, prompts[i], results[i], temperature) for i in range(PROMPTS)]
    worst = max(gaps)
    if not worst <= limit:
        raise EngineError(
            f"engine probe: the engine's log-probabilities differ by {worst:.3g} from a full forward's,"
            f" above the limit of {limit:g}"
        )
    return worst


def _gap(model: Qwen3, prompt: IntArray, result: Generation | EngineError, temperature: float) -> float:
    if isinstance(result, EngineError):
        raise EngineError(f"engine probe: {result}")
    ids, mu = result.ids, result.logprobs
    if mu is None or len(mu) != len(ids) or len(ids) == 0 or not np.isfinite(mu).all():
        raise EngineError(f"engine probe: {len(ids)} ids came without a finite log-probability each")
    if ids.min() < 0 or ids.max() >= model.config.vocab_size:
        raise EngineError("engine probe: a sampled id is outside the vocabulary")
    row = torch.from_numpy(ids.astype(np.int64))[None]
    prefix = torch.from_numpy(prompt.astype(np.int64))
    with torch.no_grad():
        scores, _ = score_masked(model, prefix, row, torch.ones_like(row, dtype=torch.bool), temperature)
    return float((scores.logp - torch.from_numpy(mu)).abs().max())
