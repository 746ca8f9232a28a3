"""What does it cost to bring new weights to an engine, in seconds and in bytes that have to travel?

Run `python -m benchmarks publish` (--json: one object on the last line). A random Qwen3-shaped model takes
real AdamW steps at --lr from random rollouts; each version is then published by every method, and the median
is reported:

- inprocess: the embedded engine in the trainer's process reads its tensors (the demo's small model, fp32);
- disk: files in --dtype, loaded by a server; disk_delta: only what changed travels and is applied there. The
  server is insitu's fake one, which loads nothing: the seconds are the trainer's side, its checks included;
- vllm_disk, vllm_delta (with --url, a running vLLM server, and --model, the folder it was started with):
  the same with a real server, from the call to the resumed server;
- vllm_ipc (where a GPU is, which the server has too, started for IPC): the trainer's tensors by CUDA IPC,
  without files. Without a GPU it is left out, and a line says so. NCCL is not measured: two of its ranks
  cannot share one GPU.

Correctness first: what the server holds has the checksums of what was published.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from benchmarks._arguments import Arguments, amount, count
from insitu.config import WARM_START
from insitu.engines.http import HttpOptions
from insitu.engines.replicas import EngineSet
from insitu.engines.safetensors_file import read_folder
from insitu.engines.vllm import open_vllm
from insitu.errors import TrainError
from insitu.storage.temp_dirs import scratch_folder
from insitu.types import Group, Ledger, Rollout, Segment, Status, Timings, Trajectory
from insitu_train.embedded.architecture import ModelConfig
from insitu_train.embedded.model import initialise, save_model
from insitu_train.learner.client import Learner
from insitu_train.learner.process import LearnerSpec
from insitu_train.options import OptimConfig, PolicyConfig, TrainConfig
from insitu_train.plan.step import PlanConfig, StepPlan, plan_step
from insitu_train.weights.files import (
    DeltaPublisher,
    DiskPublisher,
    PublishOptions,
    SupportsPublish,
)
from insitu_train.weights.gpu import TransferPublisher
from tests.fakes.vllm import serve_vllm
from tests.fakes.weight_folders import served_sums

DTYPES = ("float32", "bfloat16")


class Sends(SupportsPublish, Protocol):
    """A publisher whose weights have to travel."""

    @property
    def sent_bytes(self) -> int: ...


@dataclass(slots=True, kw_only=True)
class Cost:
    """Of one method: one entry per publication."""

    seconds: list[float]
    sent: list[int]
    full_bytes: int

    def reported(self) -> dict[str, float | int]:
        return {
            "seconds": round(statistics.median(self.seconds), 4),
            "bytes": int(statistics.median(self.sent)),
            "full_bytes": self.full_bytes,
        }


def random_plan(vocab: int, tokens: int, version: int, step: int) -> StepPlan:
    """Two groups of two rollouts of random tokens, half of them trained."""
    rng = np.random.default_rng(step)
    groups = []
    for g in range(2):
        members = []
        for k in range(2):
            name = f"train/{step:05}/{g:03}/{k:02}"
            mask = np.arange(tokens) >= tokens // 2
            row = Segment(
                rollout_id=name,
                index=0,
                kind="sampled",
                label="final",
                ids=rng.integers(0, vocab, tokens).astype(np.int32),
                mask=mask,
                logprobs=np.where(mask, -math.log(vocab), 0.0).astype(np.float32),
                versions=np.where(mask, version, 0).astype(np.int32),
            )
            ledger = Ledger(captured=int(mask.sum()), trained=int(mask.sum()), excluded={})
            members.append(_rollout(name, float(k), row, ledger))
        groups.append(Group(id=f"train/{step:05}/{g:03}", task_id="random", rollouts=tuple(members)))
    return plan_step(groups, PlanConfig())


def _rollout(name: str, reward: float, row: Segment, ledger: Ledger) -> Rollout:
    return Rollout(
        id=name,
        task_id="random",
        category="none",
        status=Status.OK,
        reward=reward,
        trajectory=Trajectory(segments=(row,), turns=(), ledger=ledger),
        verdict=None,
        changed={},
        deleted=(),
        timings=Timings(),
    )


async def measure(
    learner: Learner, publishers: Mapping[str, Sends | Learner], options: argparse.Namespace, vocab: int
) -> dict[str, Cost]:
    """Train and publish `--repeats` times, after one version that every method brings whole."""
    found = {name: Cost(seconds=[], sent=[], full_bytes=0) for name in publishers}
    for step in range(options.repeats + 1):
        if step:
            await learner.step(random_plan(vocab, options.tokens, learner.version, step))
        for name, publisher in publishers.items():
            began = time.perf_counter()
            receipt = await publisher.publish(learner.version)
            seconds = time.perf_counter() - began
            if receipt.version != learner.version:
                raise TrainError(f"{name}: the receipt is for version {receipt.version}")
            sent = 0 if isinstance(publisher, Learner) else publisher.sent_bytes
            if step:
                found[name].seconds.append(seconds)
                found[name].sent.append(sent)
            else:
                found[name].full_bytes = sent
    return found


def _spec(folder: Path, options: argparse.Namespace, *, samples: bool) -> LearnerSpec:
    train = TrainConfig(optim=OptimConfig(lr=options.lr), max_logprob_gap=1e6, threads=options.threads)
    return LearnerSpec(model=folder, train=train, samples=samples)


async def by_files(options: argparse.Namespace, scratch: Path) -> dict[str, Cost]:
    """disk and disk_delta, for a random model of the asked size, into the fake server."""
    shape = ModelConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 128),
        head_dim=64,
        intermediate_size=3 * options.hidden,
    )
    model = initialise(shape, 0)
    print(f"random Qwen3 of {sum(p.numel() for p in model.parameters()):,} parameters, {options.dtype}")
    save_model(model, scratch / "model")
    del model
    async with AsyncExitStack() as stack:
        learner = await stack.enter_async_context(
            Learner.start(_spec(scratch / "model", options, samples=False))
        )
        publishers: dict[str, Sends | Learner] = {}
        for name in ("disk", "disk_delta"):
            fake = await stack.enter_async_context(serve_vllm(64))
            fake.sums = served_sums(read_folder(scratch / "model"))
            engine = await stack.enter_async_context(open_vllm(HttpOptions(url=fake.url)))
            engines = EngineSet({fake.url: engine}, max_wait_s=60.0)
            publishers[name] = _to_server(name, learner, engines, options, scratch)
        return await measure(learner, publishers, options, options.vocab)


def _to_server(
    name: str, learner: Learner, engines: EngineSet, options: argparse.Namespace, scratch: Path
) -> DiskPublisher:
    there = PublishOptions(folder=scratch / name, dtype=options.dtype)
    if name.endswith("delta"):
        return DeltaPublisher(learner, engines, there, scratch / f"{name}-spool")
    return DiskPublisher(learner, engines, there)


async def in_process(options: argparse.Namespace) -> dict[str, Cost]:
    async with Learner.start(_spec(WARM_START, options, samples=True)) as learner:
        found = await measure(learner, {"inprocess": learner}, options, 200)
        found["inprocess"].full_bytes = (WARM_START / "model.safetensors").stat().st_size
        return found


async def to_vllm(options: argparse.Namespace, scratch: Path) -> dict[str, Cost]:
    """A real server: whole files, then deltas. It is left with the weights it was started with."""
    model = Path(options.model)
    found: dict[str, Cost] = {}
    names = ["vllm_disk", "vllm_delta", *(["vllm_ipc"] if torch.cuda.is_available() else [])]
    for name in names:
        spec = _on_gpu(model, options) if name == "vllm_ipc" else _spec(model, options, samples=False)
        async with Learner.start(spec) as learner, open_vllm(HttpOptions(url=options.url)) as engine:
            engines = EngineSet({options.url: engine}, max_wait_s=60.0)
            publisher: Sends
            if name == "vllm_ipc":
                publisher = TransferPublisher(learner, engines, PublishOptions(folder=scratch / name), "ipc")
            else:
                publisher = _to_server(name, learner, engines, options, scratch)
            found |= await measure(learner, {name: publisher}, options, 200)
            await engine.load(model, 0)
    return found


def _on_gpu(model: Path, options: argparse.Namespace) -> LearnerSpec:
    """A learner whose weights are on the GPU that the server is on."""
    train = _spec(model, options, samples=False).train.changed(policy=PolicyConfig(kind="hf", device="cuda"))
    return LearnerSpec(model=model, train=train, samples=False)


def untested(options: argparse.Namespace) -> list[str]:
    """What is not measured here, a line each."""
    lines = ["vllm_nccl: untested: two NCCL ranks cannot share one GPU, and no machine with two was there"]
    if not torch.cuda.is_available():
        lines.append("vllm_ipc: untested: it needs a GPU, and none is here")
    elif not options.url:
        lines.append("vllm_ipc: not measured: give --url and --model of a server on this GPU")
    return lines


async def run(options: argparse.Namespace) -> dict[str, Cost]:
    with scratch_folder() as scratch:
        found = await in_process(options)
        found |= await by_files(options, scratch)
        if options.url:
            found |= await to_vllm(options, scratch)
    return found


def main(argv: Sequence[str]) -> int:
    """0, or 1 when a delta is more than a tenth of the whole."""
    parser = Arguments(prog="benchmarks publish", description=__doc__)
    parser.add_argument("--hidden", type=count, default=512)
    parser.add_argument("--layers", type=count, default=8)
    parser.add_argument("--vocab", type=count, default=16_384)
    parser.add_argument("--tokens", type=count, default=512, help="tokens of each of 4 rollouts per step")
    parser.add_argument("--lr", type=amount, default=1e-6)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--url", default="", help="a running vLLM server")
    parser.add_argument("--model", default="", help="the folder that server was started with")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args(argv)
    if bool(options.url) != bool(options.model):
        parser.error("--url and --model belong together")
    if options.hidden != 64 and options.hidden % 128:
        parser.error(f"--hidden {options.hidden}: give 64, or a multiple of 128")
    for line in untested(options):
        print(line, file=sys.stderr)
    found = asyncio.run(run(options))
    for name, cost in found.items():
        reported = cost.reported()
        share = reported["bytes"] / max(1, reported["full_bytes"])
        sizes = f"{reported['bytes']:14,} bytes of {reported['full_bytes']:,} ({share:.1%})"
        print(f"{name:12}{reported['seconds']:9.3f} s{sizes}")
    if options.json:
        print(json.dumps({name: cost.reported() for name, cost in found.items()}))
    delta = found["disk_delta"].reported()
    if options.dtype == "bfloat16" and delta["bytes"] > 0.1 * delta["full_bytes"]:
        print("a delta is more than a tenth of the whole", file=sys.stderr)
        return 1
    return 0
