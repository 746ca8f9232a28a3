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
from insitu_train.loss.fused_head import score_masked
from insitu_train.model.base import Policy

PROMPTS = 3
TOKENS = 24


def probe_engine(core: EmbeddedCore, model: Policy, *, temperature: float, limit: float) -> float:
    """Return the largest |trainer - sampler| log-probability. Raises EngineError above `limit`."""
    rng = np.random.default_rng(0)
    room = core.options.max_context
    results: dict[int, Generation | EngineError] = {}
    prompts: list[IntArray] = []
    for i in range(PROMPTS):
        length = min(1 + 37 * i, room - 1)
        prompts.append(rng.integers(0, model.vocab_size, length).astype(np.int32))
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


def _gap(model: Policy, prompt: IntArray, result: Generation | EngineError, temperature: float) -> float:
    if isinstance(result, EngineError):
        raise EngineError(f"engine probe: {result}")
    ids, mu = result.ids, result.logprobs
    if mu is None or len(mu) != len(ids) or len(ids) == 0 or not np.isfinite(mu).all():
        raise EngineError(f"engine probe: {len(ids)} ids came without a finite log-probability each")
    if ids.min() < 0 or ids.max() >= model.vocab_size:
        raise EngineError("engine probe: a sampled id is outside the vocabulary")
    # one row without a shared prefix: some policies run by rows only
    row = torch.from_numpy(np.concatenate([prompt, ids]).astype(np.int64))[None]
    sampled = torch.arange(row.shape[1])[None] >= len(prompt)
    with torch.no_grad():
        scores, _ = score_masked(model, row[0, :0], row, sampled, temperature)
    return float((scores.logp.cpu() - torch.from_numpy(mu)).abs().max())
