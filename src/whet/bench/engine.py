"""How fast is the embedded engine, against `generate` of transformers on the same machine?

Run `python -m whet.bench.engine`. Both sides hold the same weights, get prompts of the same length, sample
at temperature 1 without stop ids, and take turns. Measured are CPU seconds (with one thread: the time an
idle machine would need, fairly also on a busy one), medians over the repeats, in two shapes:

decode        unrelated prompts; the time of a call minus that of a call for one token.
conversation  what an agent does: calls in a row, each prompt all before plus something new; the prompts of a
              batch share their beginning. The engine re-uses what it holds, `generate` cannot.
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
from whet.types import Generation, IntArray, RequestKey, SamplingParams

Side = Callable[[IntArray, int], IntArray]
"""(prompts [B, n], tokens) -> sampled ids [B, tokens]."""

CALLS, SAMPLED, ADDED = 4, 40, 60
"""A conversation: calls, tokens sampled per call, tokens added before the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Median over the repeats."""

    shape: str
    side: str
    batch: int
    tokens_s: float
    """Sampled tokens per CPU second."""


def engine_side(model: Qwen3, options: EngineOptions) -> Side:
    """The embedded engine."""
    core = EmbeddedCore(model, options)

    def generate(prompts: IntArray, tokens: int) -> IntArray:
        out: dict[int, IntArray] = {}

        def submit(row: int) -> None:
            def done(result: Generation | Exception) -> None:
                if isinstance(result, Exception):
                    raise result
                out[row] = result.ids

            key = RequestKey(seed=0, rollout_id=f"bench/{row}", turn=prompts.shape[1])
            core.submit(prompts[row], SamplingParams(max_tokens=tokens), key, done)

        for row in range(len(prompts)):
            submit(row)
        while core.busy:
            core.step()
        return np.stack([out[row] for row in range(len(prompts))])

    return generate


def transformers_side(model: Qwen3, threads: int) -> Side:
    """`Qwen3ForCausalLM.generate` with the same weights and neutral sampling."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder))
        theirs: Any = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.eval()
    configured: Any = transformers.GenerationConfig

    def generate(prompts: IntArray, tokens: int) -> IntArray:
        torch.set_num_threads(threads)
        ids = torch.from_numpy(prompts).long()
        settings = configured(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens, pad_token_id=0
        )
        with torch.inference_mode():
            out = theirs.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        sampled: IntArray = out[:, prompts.shape[1] :].to(torch.int32).numpy()
        return sampled

    return generate


def spent(side: Side, prompts: IntArray, tokens: int) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    sampled = side(prompts, tokens)
    seconds = time.process_time() - start
    if sampled.shape != (len(prompts), tokens):
        raise RuntimeError(f"asked for {tokens} tokens for each of {len(prompts)}, got {sampled.shape}")
    return seconds


class Load:
    """Prompts that no side has seen before, of uniform random ids."""

    def __init__(self, vocab: int, prompt_tokens: int) -> None:
        self._rng = np.random.default_rng(0)
        self._vocab, self._length = vocab, prompt_tokens
        self._constant = self.ids(1, min(300, prompt_tokens // 2))

    def ids(self, rows: int, n: int) -> IntArray:
        return self._rng.integers(0, self._vocab, (rows, n), dtype=np.int32)

    def decode(self, side: Side, batch: int, tokens: int) -> float:
        """Tokens per CPU second after the first token."""
        prompts = self.ids(2 * batch, self._length)
        once, whole = spent(side, prompts[:batch], 1), spent(side, prompts[batch:], tokens)
        return batch * (tokens - 1) / max(whole - once, 1e-9)

    def conversation(self, side: Side, batch: int, tokens: int) -> float:
        """Tokens per CPU second over whole calls; their prompts average `prompt_tokens`."""
        own = self._length - self._constant.shape[1] - (CALLS - 1) * (tokens + ADDED) // 2
        held = np.concatenate([self._constant.repeat(batch, 0), self.ids(batch, max(own, 1))], 1)
        seconds = 0.0
        for _ in range(CALLS):
            start = time.process_time()
            sampled = side(held, tokens)
            seconds += time.process_time() - start
            held = np.concatenate([held, sampled, self.ids(batch, ADDED)], 1)
        return batch * tokens * CALLS / seconds


def measure(sides: dict[str, Side], load: Load, tokens: int, repeats: int) -> list[Rate]:
    """Alternate the sides over `repeats` rounds after one warm-up."""
    cases = [("decode", side, batch) for batch in (1, 8, 32) for side in sides]
    cases += [("conversation", side, batch) for batch in (8, 32) for side in sides]
    seen: dict[tuple[str, str, int], list[float]] = {case: [] for case in cases}
    for turn in range(repeats + 1):
        for shape, side, batch in cases:
            if shape == "decode":
                rate = load.decode(sides[side], batch, tokens)
            else:
                rate = load.conversation(sides[side], batch, min(tokens, SAMPLED))
            if turn:
                seen[shape, side, batch].append(rate)
    return [
        Rate(shape=shape, side=side, batch=batch, tokens_s=round(statistics.median(values), 1))
        for (shape, side, batch), values in seen.items()
    ]


def report(rates: list[Rate]) -> dict[str, float]:
    """Print a table on stderr; return the ratios by shape and batch."""
    by_case = {(r.shape, r.side, r.batch): r.tokens_s for r in rates}
    table = Table(title="sampled tokens per CPU second")
    for column in ("shape", "batch", "whet", "transformers", "ratio"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    ratios = {}
    for (shape, side, batch), ours in by_case.items():
        if side != "whet":
            continue
        theirs = by_case[shape, "transformers", batch]
        ratios[f"{shape}_{batch}"] = round(ours / theirs, 2)
        table.add_row(shape, str(batch), f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.1f} x")
    Console(stderr=True).print(table)
    return ratios


def main(argv: list[str] | None = None) -> int:
    """Measure and print; JSON on stdout. Status 1 when conversations at batch 8 miss `--at-least`."""
    parser = argparse.ArgumentParser(prog="whet bench engine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=550)
    parser.add_argument("--tokens", type=int, default=64, help="sampled per request when measuring decode")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--at-least", type=float, default=0.0, help="wanted ratio, conversations at batch 8")
    args = parser.parse_args(argv)
    model = initialise(ModelConfig(vocab_size=args.vocab), 0)
    room = args.prompt_tokens + CALLS * (max(args.tokens, SAMPLED) + ADDED)
    sides = {
        "whet": engine_side(model, EngineOptions(threads=args.threads, max_context=room)),
        "transformers": transformers_side(model, args.threads),
    }
    rates = measure(sides, Load(args.vocab, args.prompt_tokens), args.tokens, args.repeats)
    ratios = report(rates)
    result = {
        "ratios": ratios,
        "rates": [asdict(r) for r in rates],
        "settings": vars(args),
        "model": asdict(model.config),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
    }
    print(json.dumps(result))
    return 0 if ratios["conversation_8"] >= args.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
