"""Arithmetic of a run over many hosts: bytes per link and step, memory per rank, where one process gives in.

Each row says where its number comes from: `measured` here, `predicted` by the code that trains
(memory/predict.py), `derived` by the formula beside it, or `given`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig

from insitu_train.memory.meta_run import BatchShape
from insitu_train.memory.plan import LADDER
from insitu_train.memory.predict import MemoryModel

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hosts of eight GPUs: some train, the others serve the model, one server a host."""

    hosts: int = 64
    trainers: int = 32
    gpus: int = 8
    """Of a host."""
    shards: int = 256
    """Ranks that hold one copy of the model together: those of a host, or all (`shards_of`)."""
    memory: float = 80 * GB
    """Of a GPU."""
    rollouts: int = 4096
    """Of a step."""
    tokens: int = 10_000
    """Of a rollout, in one row."""
    row: int = 131_072
    """Tokens of the longest row."""
    link: float = 50 * GB
    """Bytes per second between hosts, shared by the GPUs of a host: 400 Gbit/s."""
    front: float = 3 * GB
    """Bytes per second of the learner's own link and of a shared folder: 25 Gbit/s."""
    flops: float = 989e12
    """Of a GPU in bfloat16."""
    mfu: float = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """What was measured in bytes, and by the record of `benchmarks scale`."""

    plan: float
    """Of a plan, per token of its rows."""
    frame: float
    """Of a finished rollout, from its node to the controller."""
    calls: float
    """Of its engine calls between node and controller."""
    store: float
    """Of a rollout in the store."""
    per_s: float
    """Finished rollouts that a controller's thread does per second."""
    commit_s: float


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table."""

    what: str
    figure: str
    how: str

    def __str__(self) -> str:
        return f"| {self.what} | {self.figure} | {self.how} |"


MODEL: Mapping[str, Any] = {
    "vocab_size": 128_256, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28_672, "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}  # fmt: skip
"""Llama 3 70B."""


def predicted(shards: int, tokens: int, parts: int = 1) -> tuple[int, float]:
    """Return (parameters, GB of a rank for a step with one row of `tokens`, spread over `parts` ranks).

    With the options that need least.
    """
    model = MemoryModel(LlamaConfig(**MODEL), dtype=torch.bfloat16, lora=None, kernels="cuda", shards=shards)
    load = BatchShape(prefix=0, rows=1, width=tokens, trained=max(1, tokens // 5 // parts), parts=parts)
    return model.parameters, model.predict(load, LADDER[-2], first=False).peak / GB


def lines(c: Cluster, b: Bytes, parameters: int, memory: Mapping[str, float]) -> Iterator[Line]:
    """Yield the table. memory: what -> GB of a rank, predicted."""
    p, ranks = parameters, c.trainers * c.gpus
    yield Line("parameters", f"{p / 1e9:.1f} billion", "predicted: Llama 3 70B, built without content")
    yield Line("memory of a GPU", f"{c.memory / GB:,.0f} GB", "given: H100")
    for what, gb in memory.items():
        figure = f"{gb:,.0f} GB" + (", does not fit" if gb * GB > c.memory else "")
        yield Line(f"memory of a rank, {what}", figure, "predicted, as by `--dry-run`")
    yield from _trainer(c, p, ranks)
    yield from _front(c, b, p)
    step_s = 6 * p * c.rollouts * c.tokens / (ranks * c.flops * c.mfu)
    yield Line(
        "an update at least",
        f"{step_s:,.0f} s",
        f"derived: 6 x parameters x {c.rollouts * c.tokens / 1e6:,.0f} million tokens / ({ranks} GPUs x"
        f" {c.flops / 1e12:,.0f} TFLOPS x {c.mfu})",
    )
    need = c.rollouts / step_s
    yield Line(
        "finished rollouts per second that keep it busy",
        f"{need:,.0f}",
        "derived: rollouts / update",
    )
    yield Line("finished rollouts per second of one controller", f"{b.per_s:,.0f}", "measured: `scale`")
    yield Line("commit of a step", f"{b.commit_s} s", "measured: `scale`")


def _trainer(c: Cluster, p: int, ranks: int) -> Iterator[Line]:
    copies = ranks // c.shards
    summed = 2 * (copies - 1) / copies * 4 * p * c.gpus / c.shards
    if copies > 1:
        yield Line(
            "gradients between copies of the model, per host and step",
            _moved(summed, c.link),
            f"derived: 2 x {copies - 1}/{copies} x 4 bytes x parameters x {c.gpus}/{c.shards}",
        )
    if c.shards > c.gpus:
        gathered = (2 + 2 + 4) * p * (c.shards - 1) / c.shards
        yield Line(
            "weights and gradients between the hosts of one copy, per host and micro-batch",
            _moved(gathered, c.link),
            "derived: weights in bfloat16 forward and backward, gradients in float32, through each host once",
        )
    micro = math.ceil(c.rollouts * c.tokens / ranks / 32_768)
    yield Line("micro-batches of a rank per step", f"{micro}", "derived: tokens / ranks / 32,768")
    width = MODEL["num_key_value_heads"] * MODEL["hidden_size"] // MODEL["num_attention_heads"]
    shared = MODEL["num_hidden_layers"] * 2 * width * c.row * (2 + 2 + 4)
    yield Line(
        f"keys and values of a shared row of {c.row:,} tokens, per host",
        _moved(shared, c.link),
        "derived: layers x 2 x width x tokens x (2 bytes forward, 2 again, 4 back), through each host once,"
        " for any number of ranks",
    )


def _front(c: Cluster, b: Bytes, p: int) -> Iterator[Line]:
    """Yield what goes through the controller, the learner's first rank and a shared folder."""
    tokens = c.rollouts * c.tokens
    yield Line("plan, per host", _moved(b.plan * tokens, c.front), f"measured: {b.plan:.1f} bytes per token")
    yield Line(
        "plan, out of the learner's host",
        _moved(b.plan * tokens * (c.trainers - 1), c.front),
        f"derived: x {c.trainers - 1} hosts",
    )
    yield Line(
        "rollouts into the controller",
        _moved(b.frame * c.rollouts, c.front),
        f"measured: {b.frame / 1e3:,.0f} kB per rollout",
    )
    yield Line(
        "engine calls through the controller",
        _moved(b.calls * c.rollouts, c.front),
        f"measured: {b.calls / 1e3:,.0f} kB per rollout from its node; more as JSON to a server",
    )
    stored = f"measured: {b.store / 1e3:,.0f} kB per rollout"
    yield Line("store, per step", f"{b.store * c.rollouts / GB:.1f} GB", stored)
    servers = c.hosts - c.trainers
    yield Line("weights, written once", _moved(2 * p, c.front), "derived: 2 bytes x parameters")
    yield Line(
        "weights, read by all servers from one folder",
        _moved(2 * p * servers, c.front),
        f"derived: x {servers} servers",
    )
    yield Line(
        "checkpoint from the learner's host", _moved(12 * p, c.front), "derived: 12 bytes x parameters"
    )


def _moved(size: float, rate: float) -> str:
    """Format bytes, and the seconds that a link takes for them."""
    return f"{size / GB:,.1f} GB, {size / rate:,.1f} s"
