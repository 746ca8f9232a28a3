"""How fast does the embedded engine decode, against `generate` of transformers on the same machine?

Run `python -m whet.bench.engine`. Both sides hold the same weights, start from prompts of the same length
and sample (temperature 1) the same number of tokens with no stop id. The two sides take turns, so that a
busy machine hurts both; reported are medians. Decode means: time of the whole call minus that of a call
that yields one token, divided into the tokens between. The engine's prompts are unique, so nothing is
reused from its prefix cache; the whole call, prompts included, is reported too.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from whet.engine.embedded_core import EmbeddedCore, EngineOptions
from whet.engine.embedded_model import ModelConfig, Qwen3, initialise, save_model
from whet.types import Generation, RequestKey, SamplingParams

Timed = Callable[[int, int], float]
"""(batch, tokens) -> seconds of one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Medians over the repeats."""

    side: str
    batch: int
    decode_tokens_s: float
    """Sampled tokens per second once the prompts are in."""
    call_tokens_s: float
    """Sampled tokens per second of the whole call."""


def engine_side(model: Qwen3, prompt_tokens: int, options: EngineOptions) -> Timed:
    """Times the embedded engine on fresh random prompts."""
    core = EmbeddedCore(model, options)
    rng = np.random.default_rng(0)

    def timed(batch: int, tokens: int) -> float:
        counts: list[int] = []

        def done(result: Generation | Exception) -> None:
            if isinstance(result, Exception):
                raise result
            counts.append(len(result.ids))

        prompts = rng.integers(0, model.config.vocab_size, (batch, prompt_tokens), dtype=np.int32)
        start = time.process_time()
        for row, ids in enumerate(prompts):
            key = RequestKey(seed=0, rollout_id=f"bench/{row}", turn=0)
            core.submit(ids, SamplingParams(max_tokens=tokens), key, done)
        while core.busy:
            core.step()
        spent = time.process_time() - start
        if counts != [tokens] * batch:
            raise RuntimeError(f"the engine sampled {counts}, not {tokens} tokens each")
        return spent

    return timed


def transformers_side(model: Qwen3, prompt_tokens: int, threads: int) -> Timed:
    """Times `Qwen3ForCausalLM.generate` with the same weights and neutral sampling."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder))
        theirs: Any = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.eval()
    configured: Any = transformers.GenerationConfig
    rng = torch.Generator().manual_seed(0)

    def timed(batch: int, tokens: int) -> float:
        torch.set_num_threads(threads)
        ids = torch.randint(0, model.config.vocab_size, (batch, prompt_tokens), generator=rng)
        settings = configured(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens, pad_token_id=0
        )
        start = time.process_time()
        with torch.inference_mode():
            out = theirs.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        spent = time.process_time() - start
        if out.shape != (batch, prompt_tokens + tokens):
            raise RuntimeError(f"generate gave shape {tuple(out.shape)}")
        return spent

    return timed


def measure(sides: dict[str, tuple[Timed, list[int]]], tokens: int, repeats: int) -> list[Rate]:
    """Alternate the sides over `repeats` rounds after one warm-up; tokens per second by side and batch."""
    cases = [(side, batch) for side, (_, batches) in sides.items() for batch in batches]
    first: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    whole: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for turn in range(repeats + 1):
        for side, batch in cases:
            timed = sides[side][0]
            one, all_of_it = timed(batch, 1), timed(batch, tokens)
            if turn:
                first[side, batch].append(one)
                whole[side, batch].append(all_of_it)
    rates = []
    for side, batch in cases:
        once, spent = statistics.median(first[side, batch]), statistics.median(whole[side, batch])
        rates.append(
            Rate(
                side=side,
                batch=batch,
                decode_tokens_s=batch * (tokens - 1) / max(spent - once, 1e-9),
                call_tokens_s=batch * tokens / spent,
            )
        )
    return rates


def report(rates: list[Rate], result: dict[str, object]) -> None:
    """A table on stderr for people, one JSON line on stdout for programs."""
    table = Table(title="tokens per second")
    for column in ("side", "batch", "decode", "whole call"):
        table.add_column(column, justify="left" if column == "side" else "right")
    for r in rates:
        table.add_row(r.side, str(r.batch), f"{r.decode_tokens_s:,.0f}", f"{r.call_tokens_s:,.0f}")
    Console(stderr=True).print(table)
    print(json.dumps(result))


def main(argv: list[str] | None = None) -> int:
    """Measure and print. Exit status 1 when decode at batch 8 is below `--at-least` times transformers."""
    parser = argparse.ArgumentParser(prog="whet bench engine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=550)
    parser.add_argument("--tokens", type=int, default=64, help="sampled per request")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--at-least", type=float, default=0.0, help="fail below this ratio at batch 8")
    args = parser.parse_args(argv)
    model = initialise(ModelConfig(vocab_size=args.vocab), 0)
    options = EngineOptions(threads=args.threads, max_context=args.prompt_tokens + args.tokens)
    sides = {
        "whet": (engine_side(model, args.prompt_tokens, options), [1, 8, 32]),
        "transformers": (transformers_side(model, args.prompt_tokens, args.threads), [8]),
    }
    rates = measure(sides, args.tokens, args.repeats)
    by_case = {(r.side, r.batch): r.decode_tokens_s for r in rates}
    ratio = by_case["whet", 8] / by_case["transformers", 8]
    result: dict[str, object] = {
        "rates": [asdict(r) for r in rates],
        "ratio_at_batch_8": round(ratio, 2),
        "settings": vars(args),
        "model": asdict(model.config),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
    }
    report(rates, result)
    return 0 if ratio >= args.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
