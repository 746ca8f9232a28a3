"""Chooses the memory techniques of every micro-batch before a step begins, or refuses the step with numbers.

The least costly set that fits is taken, in the order of LADDER. Whether it fits is asked for a slightly
larger micro-batch, so that few shapes have to be run dry. A row that fits with none is refused, not left out:
the error names it, what it would take, what is there and what would help. A sharded rank is predicted as if
it held the whole model, and its moments stay on the device. Called by trainer/trainer.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from whet.errors import TrainError
from whet.train.memory.dry import Load
from whet.train.memory.predict import GIB, MemoryModel, Prediction
from whet.train.memory.techniques import PLAIN, Techniques
from whet.train.options import Lora
from whet.train.plan.pack import MicroBatch
from whet.train.plan.step import StepPlan
from whet.train.policy.hf import HfPolicy

KEPT_FREE = 0.06
"""Share of a device's memory that is left to fragmentation and libraries where no limit is configured."""

_SAVED = Techniques(checkpoint=True, save_attention=True)
_CHECKPOINT = Techniques(checkpoint=True)
TILE = 16384
"""Tokens of an MLP tile: large enough that a product fills a GPU, small beside what is tiled."""
LADDER: Sequence[Techniques] = (
    PLAIN,
    _SAVED,
    replace(_SAVED, tile_mlp=TILE),
    replace(_SAVED, tile_mlp=TILE, offload_activations=True),
    _CHECKPOINT,
    replace(_CHECKPOINT, tile_mlp=TILE),
    replace(_CHECKPOINT, tile_mlp=TILE, offload_activations=True),
    replace(_CHECKPOINT, tile_mlp=TILE, offload_activations=True, offload_optimizer=True),
)
"""From fast to slow. Long rows are attention for the most part, so computing it again comes late."""
_SUGGESTED = Lora(rank=16, alpha=32.0, targets=("q_proj", "k_proj", "v_proj", "o_proj"))


class Fit:
    """The choices of one trainer."""

    def __init__(
        self,
        config: Any,
        policy: HfPolicy,
        *,
        limit: int,
        host: int,
        measured: Callable[[], int] | None = None,
    ) -> None:
        """config: the policy's `PretrainedConfig`; limit, host: bytes of the device and of the host.
        measured: gives the limit anew when a step begins."""
        self._config, self._policy = config, policy
        self.limit, self._host, self._measured = limit, host, measured
        self._kernels: Literal["cpu", "cuda"] = "cuda" if policy.device.type == "cuda" else "cpu"
        self._ladder = [t for t in LADDER if self._kernels == "cuda" or not t.offload_activations]
        """On a CPU the device's memory is the host's."""
        if policy.shards > 1:
            self._ladder = [t for t in self._ladder if not t.offload_optimizer]
        self._model = self._of(policy.lora)

    @classmethod
    def of(cls, policy: HfPolicy, memory_gib: float, *, copies: bool = False) -> Fit:
        """memory_gib: what training may fill; 0 = what is free, with what training holds already: on a GPU
        when a step begins, since an engine may be awake on it now; on a CPU now.
        copies: a step keeps a copy of weights and moments, to go back to."""
        kept = sum(3 * p.nbytes for _, p in policy.named_parameters() if p.requires_grad) if copies else 0
        on_gpu = policy.device.type == "cuda"

        def measured() -> int:
            room = _on_gpu(policy.device) if on_gpu else _available() + _weights(policy)
            return int(room * (1.0 - KEPT_FREE)) - kept

        limit = int(memory_gib * GIB) - kept if memory_gib else measured()
        again = measured if on_gpu and not memory_gib else None
        return cls(policy.model.config, policy, limit=limit, host=_available(), measured=again)

    def plan(self, plan: StepPlan) -> list[Techniques]:
        """Techniques of every micro-batch of a step that is to begin. Raises TrainError when one fits with
        none of them."""
        if self._measured is not None:
            self.limit = self._measured()
        found = []
        for at, micro in enumerate(plan.batches):
            load = load_of(plan, micro)
            chosen = self.choose(load, first=at == 0)
            if chosen is None:
                raise TrainError(self._refusal(plan, micro, load, first=at == 0))
            found.append(chosen)
        if any(t.offload_optimizer for t in found):
            found = [replace(t, offload_optimizer=True) for t in found]
        return found

    def choose(self, load: Load, *, first: bool = True) -> Techniques | None:
        """The first of LADDER with which the load fits; None when there is none."""
        if self._fits(self._model.predict(_up(load, 4), PLAIN, first=first)):
            return PLAIN
        size = _up(load, 64)
        if not self._fits(self._model.predict(size, self._ladder[-1], first=first)):
            return None
        fitting = (t for t in self._ladder if self._fits(self._model.predict(size, t, first=first)))
        return next(fitting)

    def _fits(self, prediction: Prediction) -> bool:
        return prediction.peak <= self.limit and prediction.host <= self._host

    def _of(self, lora: Lora | None) -> MemoryModel:
        return MemoryModel(self._config, dtype=self._policy.mode.dtype, lora=lora, kernels=self._kernels)

    def _refusal(self, plan: StepPlan, micro: MicroBatch, load: Load, *, first: bool) -> str:
        row = max((plan.rows[i] for i in micro.rows), key=lambda r: len(r.ids))
        least = self._least(self._model, load, first)
        half = self._least(self._model, _scaled(load, 0.5), first)
        slope = (least - half) / (0.5 * load.tokens)
        fits = int(load.tokens - (least - self.limit) / slope) // 1000 * 1000 if slope > 0 else 0
        helps = [f"about {fits:,} tokens fit" if fits > 0 else "its weights alone do not fit"]
        if self._policy.lora is None:
            lora = self._least(self._of(_SUGGESTED), load, first)
            helps.append(f"policy.lora_rank 16 would need {lora / GIB:.1f} GiB")
        if load.rows > 1:
            helps.append("a smaller train.token_budget cuts the micro-batch")
        return (
            f"rollout {row.rollout_id} segment {row.segment}: a micro-batch of {load.tokens:,} tokens"
            f" ({load.rows} rows, the longest {len(row.ids):,}) needs {least / GIB:.1f} GiB on"
            f" {self._policy.device} with every technique on, {self.limit / GIB:.1f} GiB are there;"
            f" {'; '.join(helps)}: no update"
        )

    def _least(self, model: MemoryModel, load: Load, first: bool) -> int:
        """Bytes with the set of techniques that needs least."""
        return model.predict(load, self._ladder[-1], first=first).peak


def load_of(plan: StepPlan, micro: MicroBatch) -> Load:
    """What the forward of a micro-batch computes: a prefix's last token stands before each row, and the last
    token of a row predicts nothing. A tree is one flat stretch."""
    rows = [plan.rows[i] for i in micro.rows]
    if micro.layout == "tree":
        trained = sum(int(row.mask.sum()) for row in rows)
        return Load(prefix=0, rows=1, width=micro.tokens, trained=trained)
    longest = max(len(row.ids) for row in rows)
    return Load(
        prefix=max(0, micro.prefix - 1),
        rows=len(rows),
        width=longest - max(1, micro.prefix),
        trained=sum(int(row.mask.sum()) for row in rows),
    )


def _up(load: Load, parts: int) -> Load:
    """Sizes rounded up to one of `parts` steps per doubling; one row is one stretch of tokens."""

    def up(n: int) -> int:
        step = max(1, (1 << max(0, n.bit_length() - 1)) // parts)
        return -(-n // step) * step

    if load.rows == 1:
        return Load(prefix=0, rows=1, width=up(load.tokens), trained=up(load.trained))
    return Load(prefix=up(load.prefix), rows=up(load.rows), width=up(load.width), trained=up(load.trained))


def _scaled(load: Load, factor: float) -> Load:
    return replace(
        load,
        prefix=int(load.prefix * factor),
        width=max(1, int(load.width * factor)),
        trained=max(1, int(load.trained * factor)),
    )


def _weights(policy: HfPolicy) -> int:
    return sum(p.nbytes for _, p in policy.named_parameters()) // policy.shards


def _on_gpu(device: torch.device) -> int:
    """Bytes that are free or this process's own: its weights and moments, and what torch keeps for re-use."""
    return int(torch.cuda.mem_get_info(device)[0]) + int(torch.cuda.memory_reserved(device))


def _available() -> int:
    """Bytes of the host that can be used (Linux); all of its memory where that is not told."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
