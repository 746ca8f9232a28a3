"""A real model in the embedded engine beside its peers: `python -m benchmarks engine --model FOLDER`.

Both have the same weights, get prompts of random ids and sample at temperature 1 from the full distribution
without stop ids; they take turns, medians over the repeats. The shapes:

decode B x C   tokens per second of B rows whose contexts begin with C tokens, without the prompts' time.
prefill N      prompt tokens per second of one prompt of N tokens.

Sides: insitu in float32 and, where the CPU multiplies it, in bfloat16, and `generate` of transformers in
float32 as it comes. The time of prompts is that of a call for one token; insitu holds them by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers

from insitu.types import IntArray, RequestKey, SamplingParams
from insitu_train.embedded.core import EmbeddedCore, EngineOptions, SampledFolder
from insitu_train.embedded.weights import BFLOAT16

Run = Callable[[IntArray, int], None]
"""(prompts [B, n], tokens): sample for each prompt."""

DECODE = ((1, 128), (8, 128), (32, 128), (64, 128), (32, 1024))
PREFILL = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRate:
    """Tokens per second of one side in one shape."""

    shape: str
    side: str
    tokens_s: float
    """Per wall second."""
    tokens_cpu_s: float
    """Per CPU second: on a busy machine the fairer number."""


def insitu_side(folder: Path, dtype: Literal["float32", "bfloat16"], threads: int) -> Run:
    context = max(c for _, c in DECODE) + 256
    options = EngineOptions(
        max_rows=64, max_context=context, threads=threads, dtype=dtype, cache_tokens=65536
    )
    core = EmbeddedCore(SampledFolder(folder), options)

    def run(prompts: IntArray, tokens: int) -> None:
        ended: list[int] = []

        def done(result: Any) -> None:
            if isinstance(result, Exception):
                raise result
            ended.append(len(result.ids))

        for row, prompt in enumerate(prompts):
            key = RequestKey(seed=0, rollout_id=f"bench/{row}", turn=0)
            core.submit(prompt, SamplingParams(max_tokens=tokens), key, done)
        while core.busy:
            core.step()
        if ended != [tokens] * len(prompts):
            raise RuntimeError(f"asked for {tokens} tokens each, got {ended}")

    return run


def transformers_side(folder: Path, threads: int) -> Run:
    """`generate` of transformers."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    made: Any = transformers.GenerationConfig
    neutral = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": None}

    def run(prompts: IntArray, tokens: int) -> None:
        torch.set_num_threads(threads)
        settings = made(max_new_tokens=tokens, pad_token_id=0, **neutral)
        with torch.inference_mode():
            ids = torch.from_numpy(prompts).long()
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        if out.shape[1] != prompts.shape[1] + tokens:
            raise RuntimeError(f"asked for {tokens} tokens each, got {out.shape[1] - prompts.shape[1]}")

    return run


def _spent(run: Run, prompts: IntArray, tokens: int) -> Any:
    start = np.array([time.perf_counter(), time.process_time()])
    run(prompts, tokens)
    return np.array([time.perf_counter(), time.process_time()]) - start


def measure_model(
    sides: dict[str, Run], vocab: int, tokens: int, repeats: int, shapes: tuple[tuple[int, int], ...] = DECODE
) -> list[ModelRate]:
    """Measure every side in turns; return the medians."""
    rng = np.random.default_rng(0)
    seen: dict[tuple[str, str], list[Any]] = {}
    for turn in range(repeats + 1):
        for name, run in sides.items():
            for rows, context in shapes:
                prompts = rng.integers(0, vocab, (rows, context), dtype=np.int32)
                once = _spent(run, prompts, 1)
                if name.startswith("insitu"):
                    once = _spent(run, prompts, 1)  # its prompts are held by then
                rest = np.maximum(_spent(run, prompts, tokens) - once, 1e-9)
                if turn:
                    seen.setdefault((f"decode {rows} x {context}", name), []).append(
                        rows * (tokens - 1) / rest
                    )
            spent = _spent(run, rng.integers(0, vocab, (1, PREFILL), dtype=np.int32), 1)
            if turn:
                seen.setdefault((f"prefill {PREFILL}", name), []).append(PREFILL / spent)
    medians = {case: np.median(values, 0).round(1).tolist() for case, values in seen.items()}
    return [
        ModelRate(shape=shape, side=side, tokens_s=wall, tokens_cpu_s=cpu)
        for (shape, side), (wall, cpu) in medians.items()
    ]


def model_sides(folder: Path, threads: int) -> dict[str, Run]:
    """Return the sides that this machine has."""
    sides = {"insitu float32": insitu_side(folder, "float32", threads)}
    if BFLOAT16:
        sides["insitu bfloat16"] = insitu_side(folder, "bfloat16", threads)
    sides["transformers generate"] = transformers_side(folder, threads)
    return sides
