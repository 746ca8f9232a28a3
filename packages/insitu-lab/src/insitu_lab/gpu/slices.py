"""The checks of `insitu gpu-check`: which there are, how long each may take, what it needs.

Checks of numbers are functions of training/gpu_checks.py; the others are runs of insitu on the toy tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_RUN: Mapping[str, object] = {
    "collect.groups_per_step": 4,
    "collect.group_size": 4,
    "harness.workers": 8,
    "train.min_groups": 1,
    "limits.wall_s": 300,
}
_TOY: Mapping[str, object] = {"collect.groups_per_step": 2, "harness.workers": 4, "train.threads": 1}
_HF: Mapping[str, object] = {"policy.kind": "hf", "policy.device": "cuda"}
_VLLM: Mapping[str, object] = {"engine.kind": "vllm"}
_SHARED = 'engine.args=["--gpu-memory-utilization", "0.4"]'
_WAYS: Mapping[str, Mapping[str, object]] = {
    "disk": {},
    "delta": {"engine.publish": "delta"},
    "ipc": {"engine.publish": "ipc"},
    "adapter": {"policy.lora_rank": 8},
    "merged": {"policy.lora_rank": 8, "engine.publish_lora": "merged"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCheck:
    """One check, in a process of its own."""

    name: str
    limit_s: int
    run: Mapping[str, object] | None = None
    """Overrides of a run; None = a function of that name."""
    rises: bool = False
    """The held-out result of the run must rise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSlice:
    """Checks that are asked for together."""

    name: str
    text: str
    limit_s: int
    checks: Sequence[GpuCheck]


def _computed(name: str, text: str, limit_s: int, checks: Mapping[str, int]) -> GpuSlice:
    made = tuple(GpuCheck(name=f"{name}.{check}", limit_s=seconds) for check, seconds in checks.items())
    return GpuSlice(name=name, text=text, limit_s=limit_s, checks=made)


def _runs(name: str, text: str, runs: Mapping[str, Mapping[str, object]]) -> GpuSlice:
    made = tuple(
        GpuCheck(name=f"{name}.{run}", limit_s=300, run=keys, rises=name == "run")
        for run, keys in runs.items()
    )
    return GpuSlice(name=name, text=text, limit_s=540, checks=made)


SLICES: Sequence[GpuSlice] = (
    _computed("env", "versions, compiler, GPU, the kernels that torch chooses", 60,
              {"versions": 50, "compiler": 30, "gpu": 50, "attention": 50}),
    _computed("kernels", "head and attention against float64 and explicit masks", 300,
              {"head": 200, "triton": 120, "rows": 150, "tree": 150}),
    _computed("step", "a step's loss and gradients against float32, each memory technique, a checkpoint", 480,
              {"full": 240, "lora": 240, "tree": 240, "techniques": 300, "checkpoint": 240}),
    _computed("memory", "predicted against measured peaks; a load over the limit", 540,
              {"predicted": 400, "refused": 300}),
    _computed("ranks", "several ranks, replicated and sharded, against one", 300,
              {"replicated": 150, "sharded": 150}),
    _runs("serve", "a vLLM server started by insitu: ids and log-probabilities of a step",
          {"exact": {"run.steps": 1, "eval.count": 4, "engine.publish_dtype": "float32",
                     "policy.dtype": "float32"},
           "rounded": {"run.steps": 1, "eval.count": 4}}),
    _runs("publish", "each way that weights reach vLLM, two steps each",
          {way: {"run.steps": 2, "eval.count": 0, **keys} for way, keys in _WAYS.items()}),
    _runs("share", "one GPU for vLLM and the trainer: sleep and wake around steps",
          {"sleep": {"run.steps": 5, "eval.count": 0, "engine.share_gpu": "true"}}),
    _runs("run", "the toy tasks are learned: synchronous, and with rollouts while it trains",
          {"sync": {"run.steps": 6, "eval.count": 64},
           "async": {"run.steps": 6, "eval.count": 64, "collect.max_staleness": 2}}),
)  # fmt: skip


def overrides(check: GpuCheck, folder: str, python: str, *, rehearse: bool) -> list[str]:
    """Return the arguments of a check's run. python: environment of vLLM; empty = the embedded engine."""
    keys: dict[str, object] = {"run.dir": folder, **_RUN, **(check.run or {})}
    if python:
        keys |= {**_VLLM, "engine.python": python, **_HF}
    if rehearse:
        keys |= {**_TOY, "run.steps": 1, "eval.count": 2}
    if rehearse and python:
        keys["policy.device"] = "cpu"
    return [f"{name}={value}" for name, value in keys.items()] + [_SHARED] * bool(python and not rehearse)
