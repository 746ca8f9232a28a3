"""A real model in the embedded engine beside its peers: `python -m benchmarks engine --model FOLDER`.

Both have the same weights, get prompts of random ids and sample at temperature 1 from the full distribution
without stop ids; they take turns, medians over the repeats. The shapes:

decode B x C   tokens per second of B rows whose contexts begin with C tokens, without the prompts' time.
prefill N      prompt tokens per second of one prompt of N tokens.

Sides: insitu in float32 and, where the CPU multiplies it, in bfloat16; `generate` and `generate_batch` of
transformers, and llama.cpp's server (where `xllamacpp` is installed; scripts/setup-extras does), all in
float32; with --vllm, vLLM's compiled server in both types, a process of its own whose CPU time counts; with
--side only those whose names begin so. The
time of prompts is that of a call for one token; insitu and vLLM hold them by then. Where a side took longer
than `TURN_S` for a shape, it is measured there once, and not again.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from insitu.types import IntArray, RequestKey, SamplingParams
from insitu_train.embedded.architecture import read_architecture
from insitu_train.embedded.core import EmbeddedCore, EngineOptions, SampledFolder
from insitu_train.embedded.weights import BFLOAT16
from insitu_train.gguf.write import write_gguf

Run = Callable[[IntArray, int], None]
"""(prompts [B, n], tokens): sample for each prompt."""

DECODE = ((1, 128), (8, 128), (32, 128), (64, 128), (32, 1024))
PREFILL = 512
ROOM = 256
"""Tokens of a context beyond its prompt."""
TURN_S = 30.0
VLLM_START_S = 600.0
"""It compiles the model at its first start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRate:
    """Tokens per second of one side in one shape."""

    shape: str
    side: str
    tokens_s: float
    """Per wall second."""
    tokens_cpu_s: float
    """Per CPU second: on a busy machine the fairer number."""
    turns: int
    """Measured; one that took longer than `TURN_S` is not repeated."""


def insitu_side(folder: Path, dtype: Literal["float32", "bfloat16"], threads: int) -> Run:
    context = max(c for _, c in DECODE) + ROOM
    options = EngineOptions(
        max_rows=64, max_context=context, threads=threads, dtype=dtype, cache_tokens=40960
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


def batching_side(folder: Path, threads: int) -> Run:
    """`generate_batch` of transformers, its continuous batching, with pages for the largest shape."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    made: Any = transformers.GenerationConfig
    neutral = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": -1}
    pages = max(rows * -(-(context + ROOM) // 128) for rows, context in DECODE)
    batching: Any = transformers.ContinuousBatchingConfig
    batches = batching(page_size=128, num_blocks=pages, max_batch_tokens=2048)

    def run(prompts: IntArray, tokens: int) -> None:
        torch.set_num_threads(threads)
        settings = made(max_new_tokens=tokens, pad_token_id=0, **neutral)
        replies = model.generate_batch(
            prompts.tolist(),
            generation_config=settings,
            continuous_batching_config=batches,
            warmup=False,
            persistent_manager=True,
        )
        if (found := [len(one.generated_tokens) for one in replies.values()]) != [tokens] * len(prompts):
            raise RuntimeError(f"asked for {tokens} tokens each, got {found}")

    return run


@contextmanager
def llama_cpp_side(folder: Path, threads: int) -> Iterator[Run]:
    """llama.cpp's server in this process, with the same weights in float32, 64 slots and no prompt cache."""
    llama = import_module("xllamacpp")
    with tempfile.TemporaryDirectory() as temporary:
        file, tensors = Path(temporary) / "model.gguf", load_file(folder / "model.safetensors")
        described = json.loads((folder / "config.json").read_text())
        write_gguf(
            file, folder, described, tensors, lambda name: tensors[name].float().numpy(), dtype="float32"
        )
        params = llama.CommonParams()
        params.model.path, params.n_parallel, params.warmup = str(file), 64, False
        params.verbosity = -1
        params.n_ctx, params.kv_unified = max(rows * (context + ROOM) for rows, context in DECODE), True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        server: Any = llama.Server(params)
        url = f"{server.listening_address}/completion"

        def one(prompt: list[int], tokens: int) -> int:
            body = {
                "prompt": prompt, "n_predict": tokens, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
                "min_p": 0.0, "ignore_eos": True, "cache_prompt": False, "return_tokens": True,
            }  # fmt: skip
            request = urllib.request.Request(
                url, json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=3600) as answer:
                return len(json.load(answer)["tokens"])

        with _in_threads(one) as run:
            yield run
        del server


@contextmanager
def _in_threads(one: Callable[[list[int], int], int]) -> Iterator[Run]:
    """Yield a side of a server; `one` asks it for one prompt's tokens and returns how many came."""
    with ThreadPoolExecutor(64) as pool:

        def run(prompts: IntArray, tokens: int) -> None:
            found = list(pool.map(one, prompts.tolist(), [tokens] * len(prompts)))
            if found != [tokens] * len(prompts):
                raise RuntimeError(f"asked for {tokens} tokens each, got {found}")

        yield run


@contextmanager
def vllm_side(folder: Path, venv: Path, dtype: str, threads: int) -> Iterator[Run]:
    """vLLM's server on this CPU as it comes, compiled, with room for the largest shape."""
    context = max(c for _, c in DECODE) + ROOM
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    command = ["setpriv", "--pdeathsig", "TERM", str(venv / "bin" / "python"), "-m"]  # not left behind
    command += ["vllm.entrypoints.cli.main", "serve", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "policy"]
    command += ["--dtype", dtype, "--max-model-len", str(context), "--max-num-seqs", "64"]
    values = read_architecture(folder).token_values * (4 if dtype == "float32" else 2)
    tokens = max(rows * (context + ROOM) for rows, context in DECODE)
    command += ["--kv-cache-memory-bytes", str(int(1.1 * tokens * values))]
    cpus = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0))[:threads])
    settings = {
        "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_OMP_THREADS_BIND": cpus, "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    null = subprocess.DEVNULL
    server = subprocess.Popen(command, env=os.environ | settings, stdin=null, stdout=null, stderr=null)

    def one(prompt: list[int], tokens: int) -> int:
        body = {
            "model": "policy", "prompt": prompt, "max_tokens": tokens, "temperature": 1.0, "ignore_eos": True,
        }  # fmt: skip
        url, kind = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), kind)
        with urllib.request.urlopen(request, timeout=3600) as answer:
            return int(json.load(answer)["usage"]["completion_tokens"])

    try:
        _await_vllm(server, f"http://127.0.0.1:{port}/health")
        with _in_threads(one) as run:
            yield run
    finally:
        server.terminate()
        server.wait(60)


def _await_vllm(server: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + VLLM_START_S
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"vLLM ended with status {server.returncode} at its start")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"vLLM did not answer within {VLLM_START_S:g} s")


def _spent(run: Run, prompts: IntArray, tokens: int) -> Any:
    """Return the wall and CPU seconds of a call, those of child processes with them."""
    start = np.array([time.perf_counter(), _cpu_s()])
    run(prompts, tokens)
    return np.array([time.perf_counter(), _cpu_s()]) - start


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of those that descend from it."""
    found: dict[int, tuple[int, int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            found[int(stat.parent.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    mine = {os.getpid()}
    while more := {pid for pid, (parent, _) in found.items() if parent in mine} - mine:
        mine |= more
    ticks = sum(found[pid][1] for pid in mine if pid != os.getpid())
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def measure_model(
    sides: dict[str, Run], vocab: int, tokens: int, repeats: int, shapes: tuple[tuple[int, int], ...] = DECODE
) -> list[ModelRate]:
    """Measure every side in turns, after one that warms up; return the medians."""
    rng = np.random.default_rng(0)
    seen: dict[tuple[str, str], list[Any]] = {}
    slow: set[tuple[str, str]] = set()

    def decode(run: Run, rows: int, context: int, *, held: bool) -> Any:
        prompts = rng.integers(0, vocab, (rows, context), dtype=np.int32)
        for _ in range(1 + held):
            once = _spent(run, prompts, 1)
        return rows * (tokens - 1) / np.maximum(_spent(run, prompts, tokens) - once, 1e-9)

    def prefill(run: Run) -> Any:
        return PREFILL / _spent(run, rng.integers(0, vocab, (1, PREFILL), dtype=np.int32), 1)

    for turn in range(repeats + 1):
        for name, run in sides.items():
            for rows, context in (*shapes, (0, PREFILL)):
                case = (f"decode {rows} x {context}" if rows else f"prefill {context}", name)
                if case in slow:
                    continue
                began = time.perf_counter()
                # these hold a prompt after its first call
                held = name.startswith(("insitu", "vLLM"))
                rate = decode(run, rows, context, held=held) if rows else prefill(run)
                if time.perf_counter() - began > TURN_S:
                    slow.add(case)
                if turn or case in slow:
                    seen.setdefault(case, []).append(rate)
                print(turn, *case, *rate.round(1), file=sys.stderr, flush=True)
    medians = {case: np.median(values, 0).round(1).tolist() for case, values in seen.items()}
    return [
        ModelRate(shape=shape, side=side, tokens_s=wall, tokens_cpu_s=cpu, turns=len(seen[shape, side]))
        for (shape, side), (wall, cpu) in medians.items()
    ]


@contextmanager
def model_sides(
    folder: Path, threads: int, vllm: Path | None = None, only: Sequence[str] = ()
) -> Iterator[dict[str, Run]]:
    """Yield the sides that this machine has.

    vllm: the environment of one; only: how the names of the wanted sides begin, all if empty.
    """
    both: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    dtypes = both[: 1 + BFLOAT16]
    made: dict[str, Callable[[], Run | AbstractContextManager[Run]]] = {
        f"insitu {dtype}": partial(insitu_side, folder, dtype, threads) for dtype in dtypes
    }
    made["transformers generate"] = partial(transformers_side, folder, threads)
    made["transformers generate_batch"] = partial(batching_side, folder, threads)
    if find_spec("xllamacpp") is not None:
        made["llama.cpp"] = partial(llama_cpp_side, folder, threads)
    if vllm is not None:
        made.update({f"vLLM {dtype}": partial(vllm_side, folder, vllm, dtype, threads) for dtype in dtypes})
    with ExitStack() as stack:
        sides: dict[str, Run] = {}
        for name, make in made.items():
            if not only or name.startswith(tuple(only)):
                side = make()
                sides[name] = stack.enter_context(side) if isinstance(side, AbstractContextManager) else side
        yield sides
