"""How fast is the embedded engine, against `generate` of transformers on the same machine?

Run `python -m benchmarks.engine`. Both sides hold the same fp32 weights, run on the same number of threads,
get prompts of the same length that neither has seen, sample at temperature 1 from the full distribution
without stop ids (each row gives exactly the tokens asked for), keep keys and values, and take turns after a
warm-up. The other side is `Qwen3ForCausalLM.generate` as it comes. Counted are the sampled tokens that a call
returns, per CPU second (with one thread: what an idle machine would take, fairly also on a busy one) and per
wall second; medians over the repeats. The shapes:

call          one call, prompts included in the time: a batch of unrelated prompts.
decode        of the same calls, what remains after subtracting a call for one token.
group         one call, prompts included: the batch samples from one prompt, as a group of rollouts starts.
conversation  what an agent does: calls in a row, each prompt all before plus something new; the prompts of a
              batch share their beginning. The engine reuses its cache; `generate` has none.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks._arguments import Arguments, count
from benchmarks._engine_model import measure_model, model_sides
from insitu.types import Generation, IntArray, RequestKey, SamplingParams
from insitu_train.embedded.architecture import ModelConfig, read_architecture
from insitu_train.embedded.core import EmbeddedCore, EngineOptions
from insitu_train.embedded.model import Qwen3, initialise, save_model

Side = Callable[[IntArray, int], IntArray]
"""(prompts [B, n], tokens) -> sampled ids [B, tokens]."""

Seconds = npt.NDArray[np.float64]
"""[2]: CPU, wall; or tokens over each of them."""

CALLS, SAMPLED, ADDED = 4, 40, 60
"""A conversation: calls, tokens sampled per call, tokens added before the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Sampled tokens per second, medians over the repeats."""

    shape: str
    side: str
    batch: int
    tokens_s: float
    """Per CPU second."""
    tokens_s_wall: float


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


def spent(side: Side, prompts: IntArray, tokens: int) -> tuple[Seconds, IntArray]:
    """CPU and wall seconds of one call, and what it sampled."""
    start = np.array([time.process_time(), time.perf_counter()])
    sampled = side(prompts, tokens)
    seconds = np.array([time.process_time(), time.perf_counter()]) - start
    if sampled.shape != (len(prompts), tokens):
        raise RuntimeError(f"asked for {tokens} tokens for each of {len(prompts)}, got {sampled.shape}")
    return seconds, sampled


class Load:
    """Prompts that no side has seen before, of uniform random ids."""

    def __init__(self, vocab: int, prompt_tokens: int) -> None:
        self._rng = np.random.default_rng(0)
        self._vocab, self._length = vocab, prompt_tokens
        self._constant = self.ids(1, min(300, prompt_tokens // 2))

    def ids(self, rows: int, n: int) -> IntArray:
        return self._rng.integers(0, self._vocab, (rows, n), dtype=np.int32)

    def call(self, side: Side, batch: int, tokens: int) -> dict[str, Seconds]:
        """Tokens per second of a call for unrelated prompts, whole and after its first token."""
        prompts = self.ids(2 * batch, self._length)
        once, _ = spent(side, prompts[:batch], 1)
        whole, _ = spent(side, prompts[batch:], tokens)
        rest = np.maximum(whole - once, 1e-9)
        return {"call": batch * tokens / whole, "decode": batch * (tokens - 1) / rest}

    def group(self, side: Side, batch: int, tokens: int) -> dict[str, Seconds]:
        """Tokens per second of a call for one prompt in all rows."""
        seconds, _ = spent(side, self.ids(1, self._length).repeat(batch, 0), tokens)
        return {"group": batch * tokens / seconds}

    def conversation(self, side: Side, batch: int, tokens: int) -> dict[str, Seconds]:
        """Tokens per second over whole calls; their prompts average `prompt_tokens`."""
        tokens = min(tokens, SAMPLED)
        own = self._length - self._constant.shape[1] - (CALLS - 1) * (tokens + ADDED) // 2
        held = np.concatenate([self._constant.repeat(batch, 0), self.ids(batch, max(own, 1))], 1)
        total = np.zeros(2)
        for _ in range(CALLS):
            seconds, sampled = spent(side, held, tokens)
            total += seconds
            held = np.concatenate([held, sampled, self.ids(batch, ADDED)], 1)
        return {"conversation": batch * tokens * CALLS / total}


def measure(sides: dict[str, Side], load: Load, tokens: int, repeats: int) -> list[Rate]:
    """Alternate the sides over `repeats` rounds after one warm-up."""
    cases = [(load.call, batch) for batch in (1, 8, 32)]
    cases += [(shape, batch) for shape in (load.group, load.conversation) for batch in (8, 32)]
    seen: dict[tuple[str, str, int], list[Seconds]] = {}
    for turn in range(repeats + 1):
        for run, batch in cases:
            for name, side in sides.items():
                rates = run(side, batch, tokens)
                for shape, rate in rates.items() if turn else ():
                    seen.setdefault((shape, name, batch), []).append(rate)
    medians = {case: np.median(values, 0).round(1).tolist() for case, values in seen.items()}
    return [
        Rate(shape=shape, side=side, batch=batch, tokens_s=cpu, tokens_s_wall=wall)
        for (shape, side, batch), (cpu, wall) in sorted(medians.items())
    ]


def report(rates: list[Rate]) -> dict[str, float]:
    """Print a table on stderr; return the ratios per CPU second by shape and batch."""
    by_case = {(r.shape, r.side, r.batch): r for r in rates}
    table = Table(title="sampled tokens per CPU second (per wall second)")
    for column in ("shape", "batch", "insitu", "transformers", "ratio"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    ratios = {}
    for (shape, side, batch), ours in by_case.items():
        if side != "insitu":
            continue
        theirs = by_case[shape, "transformers", batch]
        ratio = ours.tokens_s / theirs.tokens_s
        ratios[f"{shape}_{batch}"] = round(ratio, 2)
        shown = [f"{r.tokens_s:,.0f} ({r.tokens_s_wall:,.0f})" for r in (ours, theirs)]
        table.add_row(shape, str(batch), *shown, f"{ratio:.1f} x")
    Console(stderr=True).print(table)
    return ratios


def _real(args: argparse.Namespace) -> int:
    vocab = read_architecture(args.model).vocab_size
    began = os.getloadavg()[0]
    with model_sides(args.model, args.threads, args.vllm, args.side) as sides:
        rates = measure_model(sides, vocab, args.tokens, args.repeats)
    if not args.json:
        table = Table("shape", "side", "tokens/s", "per CPU second", title=str(args.model))
        for rate in rates:
            table.add_row(rate.shape, rate.side, f"{rate.tokens_s:,.1f}", f"{rate.tokens_cpu_s:,.1f}")
        Console(stderr=True).print(table)
    settings = {
        **vars(args),
        "model": args.model.name,
        "vllm": args.vllm and args.vllm.name,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    settings["load"] = [round(began, 1), round(os.getloadavg()[0], 1)]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"rates": [asdict(rate) for rate in rates], "settings": settings, **versions}))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Measure and print; JSON on stdout. Status 1 when conversations at batch 8 miss `--at-least`."""
    parser = Arguments(prog="benchmarks engine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompt-tokens", type=count, default=550)
    parser.add_argument("--tokens", type=count, default=64, help="sampled per request when measuring decode")
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--vocab", type=count, default=1024)
    parser.add_argument("--at-least", type=float, default=0.0, help="wanted ratio, conversations at batch 8")
    parser.add_argument("--model", type=Path, help="measure a real model's folder beside its peers instead")
    parser.add_argument("--vllm", type=Path, help="environment of a vLLM, as scripts/setup-vllm prints")
    parser.add_argument(
        "--side", action="append", default=[], help="with --model: only sides of this beginning"
    )
    parser.add_argument("--json", action="store_true", help="with --model: no table on standard error")
    args = parser.parse_args(argv)
    if args.model is not None:
        return _real(args)
    model = initialise(ModelConfig(vocab_size=args.vocab), 0)
    room = args.prompt_tokens + CALLS * (max(args.tokens, SAMPLED) + ADDED)
    sides = {
        "insitu": engine_side(model, EngineOptions(threads=args.threads, max_context=room)),
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
