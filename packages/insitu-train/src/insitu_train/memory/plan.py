"""Chooses the memory options of every micro-batch before a step, or refuses the step with numbers.

The first options of LADDER that fit are taken. A slightly larger shape is predicted first and cached, so few
dry runs are made. A row that fits with none is computed by several ranks together, each a part of its tokens
(attention/parts.py), or refused, not dropped: the error names it, its need, the limit and what would help.
A sharded rank's moments stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from insitu.errors import TrainError
from insitu_train.attention.tree import by_pieces, tree_pieces
from insitu_train.embedded.model import Qwen3
from insitu_train.host_memory import available_memory
from insitu_train.memory.meta_run import AttentionShape, BatchShape
from insitu_train.memory.predict import GIB, BuiltinMemory, Kernels, MemoryModel, MemoryPredictor, at_most
from insitu_train.model.base import PLAIN, MemoryOptions
from insitu_train.model.hf import HfPolicy
from insitu_train.options import Lora
from insitu_train.plan.packing import MicroBatch
from insitu_train.plan.prefix_tree import build_tree
from insitu_train.plan.step import StepPlan

KEPT_FREE = 0.06
"""Share of a device's memory that is left to fragmentation and libraries where no limit is configured."""

_SAVED = MemoryOptions(checkpoint=True, save_attention=True)
_CHECKPOINT = MemoryOptions(checkpoint=True)
TILE = 16384
"""Tokens of an MLP tile: enough to fill a GPU, few enough to save memory."""
LADDER: Sequence[MemoryOptions] = (
    PLAIN,
    _SAVED,
    replace(_SAVED, tile_mlp=TILE),
    replace(_SAVED, tile_mlp=TILE, offload_activations=True),
    _CHECKPOINT,
    replace(_CHECKPOINT, tile_mlp=TILE),
    replace(_CHECKPOINT, tile_mlp=TILE, offload_activations=True),
    replace(_CHECKPOINT, tile_mlp=TILE, offload_activations=True, offload_optimizer=True),
)
"""From fast to slow. Long rows are mostly attention, so recomputing it comes late."""
FINE = 1 << 40
"""Steps per doubling of sizes: exact sizes."""
_SUGGESTED = Lora(rank=16, alpha=32.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MemoryNeed:
    """Bytes of the device and of the host."""

    device: int
    host: int


def sharing_sizes(ranks: int, *, sharded: bool) -> list[int]:
    """Return how many ranks may share a row, fewest first."""
    return [n for n in range(2, ranks + 1) if not ranks % n and (n == ranks or not sharded)]


class MemoryPlanner:
    """Chooses the memory options of a trainer."""

    def __init__(
        self,
        config: Any,
        policy: HfPolicy | Qwen3,
        *,
        limit: int,
        host: int,
        measured: Callable[[], int] | None = None,
        reference: HfPolicy | Qwen3 | None = None,
        ranks: int = 1,
        undivided: str = "",
    ) -> None:
        """Set the limits in bytes of device and host.

        config: what the policy is built from (`_config_of`). measured: returns the current limit at the start
        of a step. reference: policy that scores each micro-batch first; its weights are not part of the
        limit. ranks: who may compute a row together, all or an equal part of them. undivided: why they may
        not, or empty. Raises TrainError when the memory of this architecture cannot be predicted.
        """
        self._config, self._policy = config, policy
        self.limit, self._host, self._measured = limit, host, measured
        self._kernels: Kernels = "cuda" if policy.device.type == "cuda" else "cpu"
        # on a CPU the device's memory is the host's
        self._ladder = [t for t in LADDER if self._kernels == "cuda" or not t.offload_activations]
        if isinstance(policy, Qwen3):
            self._ladder = [PLAIN]
        elif policy.shards > 1:
            self._ladder = [t for t in self._ladder if not t.offload_optimizer]
        self._first = 0
        """Options of the ladder before this index have run out of memory."""
        self._scored_by = reference
        self._ranks, self._undivided = ranks, undivided
        self._known: dict[tuple[MemoryOptions, bool], list[tuple[BatchShape, _MemoryNeed]]] = {}
        if not isinstance(policy, Qwen3):
            self._need(self._model, BatchShape(prefix=0, rows=1, width=2, trained=1), PLAIN, first=True)

    @classmethod
    def of(
        cls,
        policy: HfPolicy | Qwen3,
        memory_gib: float,
        *,
        copies: bool = False,
        references: Sequence[HfPolicy | Qwen3] = (),
        ranks: int = 1,
        here: int = 0,
        reserved: int = 0,
    ) -> MemoryPlanner:
        """Return a planner for free memory, or `memory_gib` if not 0.

        Free memory includes what training holds already: on a GPU it is measured at each step, since an
        engine may share it; on a CPU now, divided by the ranks on this machine, `here`, 0 = all. copies: a
        step keeps a backup of weights and moments. reserved: bytes that a sampler here may still fill.
        """
        kept = sum(3 * p.nbytes for _, p in policy.named_parameters() if p.requires_grad) if copies else 0
        kept //= 1 if isinstance(policy, Qwen3) else policy.shards
        beside = sum(map(_weights, references))
        # The largest one's forward pass needs most.
        reference = max(references, key=_weights, default=None)
        on_gpu = policy.device.type == "cuda"
        host = (available_memory() - reserved) // (here or ranks)

        def measured() -> int:
            room = (
                _on_gpu(policy.device) - beside
                if on_gpu
                else (available_memory() - reserved + _weights(policy)) // (here or ranks)
            )
            return int(room * (1.0 - KEPT_FREE)) - kept

        limit = int(memory_gib * GIB) - kept - beside if memory_gib else measured()
        again = measured if on_gpu and not memory_gib else None
        return cls(
            _config_of(policy), policy, limit=limit, host=host, measured=again, reference=reference,
            ranks=ranks, undivided=_undivided([policy, *references]),
        )  # fmt: skip

    @cached_property
    def _model(self) -> MemoryPredictor:
        return self._of(None if isinstance(self._policy, Qwen3) else self._policy.lora)

    @cached_property
    def _reference(self) -> MemoryPredictor | None:
        return None if self._scored_by is None else self._of(None, self._scored_by)

    def plan(self, plan: StepPlan) -> list[MemoryOptions | int]:
        """Return the options of every micro-batch of a step, or how many ranks together hold its row.

        Raises TrainError when a micro-batch fits with none of them.
        """
        if self._measured is not None:
            self.limit = self._measured()
        found: list[MemoryOptions | int] = []
        for at, micro in enumerate(plan.batches):
            load = self._load(plan, micro)
            chosen = self.choose(load, first=at == 0) or self._sharing(plan, micro)
            if not chosen:
                raise TrainError(self._refusal(plan, micro, load, first=at == 0))
            found.append(chosen)
        if any(isinstance(t, MemoryOptions) and t.offload_optimizer for t in found):
            found = [t if isinstance(t, int) else replace(t, offload_optimizer=True) for t in found]
        return found

    def _sharing(self, plan: StepPlan, micro: MicroBatch) -> int:
        """Return the fewest ranks that hold a row together, 0 for none.

        They are an equal part of all; of sharded ranks, whose layers are in step, they are all.
        """
        sharded = isinstance(self._policy, HfPolicy) and self._policy.shards > 1
        sizes = sharing_sizes(self._ranks, sharded=sharded)
        parts = {n: self._part(plan, micro, n) for n in sizes}
        return next((n for n, part in parts.items() if part and self.choose(part, first=False)), 0)

    def _load(self, plan: StepPlan, micro: MicroBatch) -> BatchShape:
        policy = self._policy
        return load_of(plan, micro, self._kernels, policy.compute_dtype, policy.head_dim)

    def _part(self, plan: StepPlan, micro: MicroBatch, ranks: int) -> BatchShape | None:
        """Return the shape of one of several ranks' parts of a micro-batch, None where it has none."""
        if ranks == 1 or micro.ranks > 1 or len(micro.rows) > 1 or self._undivided:
            return None
        load = self._load(plan, replace(micro, ranks=ranks))
        return replace(load, trained=min(load.trained, load.tokens))  # all may be in one part

    def choose(self, load: BatchShape, *, first: bool = True) -> MemoryOptions | None:
        """Return the first options of LADDER that fit the shape; None when none does."""
        if load.parts == 1 and self._surely(load):
            return PLAIN
        ladder = self._ladder[self._first :]
        return next((t for t in ladder if self._fits(load, t, first=first)), None)

    def ran_out(self, techniques: MemoryOptions) -> bool:
        """Exclude options that ran out of memory, and all before them.

        Returns False when none are left.
        """
        plain = replace(techniques, offload_optimizer=False)
        at = [t in (techniques, plain) for t in self._ladder]
        last = max((i for i, same in enumerate(at) if same), default=-1)
        if last + 1 >= len(self._ladder):
            return False
        self._first = max(self._first, last + 1)
        return True

    def _surely(self, load: BatchShape) -> bool:
        """Return whether the built-in model has room for several times the need."""
        if not isinstance(self._policy, Qwen3):
            return False
        need = at_most(self._policy.config, _weights(self._policy), load)
        return need * (1 if self._scored_by is None else 2) <= self.limit

    def _fits(self, load: BatchShape, techniques: MemoryOptions, *, first: bool) -> bool:
        """Return whether the shape fits, by comparison with earlier predictions where that decides."""
        load = _up(load, FINE)
        known = self._known.setdefault((techniques, first), [])
        for other, need in known:
            if self._there(need) and _covers(other, load):
                return True
            if not self._there(need) and _covers(load, other):
                return False
        # a small model usually has room for two to four times as much: one prediction covers all later shapes
        roomy = _resized(load, lambda n: 2 << max(n, 64).bit_length(), 2 << load.rows.bit_length())
        large = [roomy] if isinstance(self._policy, Qwen3) else []
        for size in (*large, *(_up(load, parts) for parts in (4, 64)), load):
            need = self._need(self._model, size, techniques, first=first)
            known.append((size, need))
            if self._there(need):
                return True
            if need.device // 2 > self.limit and size not in large:
                # rounding alone does not double it
                return False
        return False

    def _there(self, need: _MemoryNeed) -> bool:
        return need.device <= self.limit and need.host <= self._host

    def _of(self, lora: Lora | None, reference: HfPolicy | Qwen3 | None = None) -> MemoryPredictor:
        frozen = reference is not None
        config = _config_of(reference) if reference is not None else self._config
        if isinstance(self._policy, Qwen3):
            return BuiltinMemory(config, frozen=frozen)
        own = _config_of(reference or self._policy)
        return MemoryModel(
            config,
            dtype=self._policy.compute_dtype,
            lora=lora,
            kernels=self._kernels,
            frozen=frozen,
            # a reference is whole on each rank
            shards=1 if frozen else self._policy.shards,
            attention=getattr(own, "_attn_implementation", ""),
        )

    def _need(
        self, model: MemoryPredictor, load: BatchShape, techniques: MemoryOptions, *, first: bool
    ) -> _MemoryNeed:
        found = model.predict(load, techniques, first=first)
        scoring = self._reference.scoring(load, techniques) if self._reference is not None else 0
        return _MemoryNeed(device=max(found.peak, found.states + scoring), host=found.host)

    def _refusal(self, plan: StepPlan, micro: MicroBatch, load: BatchShape, *, first: bool) -> str:
        row = max((plan.rows[i] for i in micro.rows), key=lambda r: len(r.ids))
        what = "a micro-batch" if load.parts == 1 else f"one of {load.parts} parts"
        subject = (
            f"rollout {row.rollout_id} segment {row.segment}: {what} of {load.tokens:,} tokens"
            f" ({load.rows} rows, the longest {len(row.ids):,}) needs"
        )
        helps = []
        found = [self._need(self._model, load, t, first=first) for t in self._ladder]
        least = min(need.device for need in found)
        host = min((need.host for need in found if need.device <= self.limit), default=0)
        if host:
            needs = (
                f"{_gib(host)} of the host's memory to fit on {self._policy.device},"
                f" {_gib(self._host)} are available"
            )
        else:
            how = " with all memory options" if len(self._ladder) > 1 else ""
            needs = f"{_gib(least)} on {self._policy.device}{how}, {_gib(self.limit)} are available"
            width, trained = max(1, load.width // 2), max(1, load.trained // 2)
            shorter = replace(load, prefix=load.prefix // 2, width=width, trained=trained)
            half = self._least(self._model, shorter, first)
            slope = (least - half) / (0.5 * load.tokens)
            fits = int(load.tokens - (least - self.limit) / slope) if slope > 0 else 0
            fits -= fits % (1000 if fits >= 10_000 else 10)
            helps.append(f"about {fits:,} tokens fit" if fits > 0 else "the weights alone do not fit")
        if isinstance(self._policy, Qwen3):
            helps.append("policy.kind hf has options that need less")
        elif self._policy.lora is None:
            helps += self._with_adapters(load, first)
        if self._ranks > 1:
            helps.append(self._together(plan, micro, first))
        if load.rows > 1 or len(micro.rows) > 1:
            helps.append("a smaller train.token_budget cuts the micro-batch")
        return f"{subject} {'; '.join([needs, *helps])}: no update"

    def _together(self, plan: StepPlan, micro: MicroBatch, first: bool) -> str:
        """Return what all ranks together would need, or why they do not compute the row together."""
        part = self._part(plan, micro, self._ranks)
        if part is not None:
            need = self._least(self._model, part, first=False)
            return f"{_gib(need)} on each of {self._ranks} ranks that share the row"
        if micro.ranks > 1:
            return f"the row is shared by {micro.ranks} ranks already"
        return self._undivided or "ranks share a row that has a micro-batch of its own"

    def _with_adapters(self, load: BatchShape, first: bool) -> list[str]:
        """Return the need with adapters; empty where the model's layers have other names."""
        try:
            model = self._of(_SUGGESTED)
        except TrainError:
            return []
        return [f"policy.lora_rank 16 would need {_gib(self._least(model, load, first))}"]

    def _least(self, model: MemoryPredictor, load: BatchShape, first: bool) -> int:
        """Return the bytes with the most economical options."""
        return self._need(model, load, self._ladder[-1], first=first).device


def load_of(
    plan: StepPlan,
    micro: MicroBatch,
    kernels: Kernels = "cpu",
    dtype: torch.dtype = torch.float32,
    head_dim: int = 128,
) -> BatchShape:
    """Return the shape of a micro-batch's forward on a device, in a dtype.

    The last token of a prefix stands before each row, and the last token of a row predicts nothing. A tree is
    one flat row. Of a micro-batch of several ranks the row's mask is one rank's.
    """
    rows = [plan.rows[i] for i in micro.rows]
    trained = sum(int(row.mask.sum()) for row in rows)
    if micro.ranks > 1:
        width = len(rows[0].ids) - 1
        return BatchShape(prefix=0, rows=1, width=width, trained=max(1, trained), parts=micro.ranks)
    if micro.layout == "tree":
        pieces = tree_pieces(build_tree(rows))
        shape = AttentionShape.of(pieces) if by_pieces(pieces, kernels, dtype, head_dim) else None
        return BatchShape(prefix=0, rows=1, width=micro.tokens, trained=trained, tree=shape)
    longest = max(len(row.ids) for row in rows)
    return BatchShape(
        prefix=max(0, micro.prefix - 1),
        rows=len(rows),
        width=longest - max(1, micro.prefix),
        trained=trained,
    )


def _up(load: BatchShape, parts: int) -> BatchShape:
    """Round sizes up to one of `parts` steps per doubling."""

    def up(n: int) -> int:
        step = max(1, (1 << max(0, n.bit_length() - 1)) // parts)
        return -(-n // step) * step

    return _resized(load, up, up(load.rows))


def _resized(load: BatchShape, up: Callable[[int], int], rows: int) -> BatchShape:
    """Apply `up` to all sizes but the number of rows; one row is one run of tokens."""
    if load.rows > 1:
        return BatchShape(prefix=up(load.prefix), rows=rows, width=up(load.width), trained=up(load.trained))
    tree = load.tree and AttentionShape(**{k: up(n) for k, n in asdict(load.tree).items()})
    width = up(load.prefix + load.width)
    return BatchShape(prefix=0, rows=1, width=width, trained=up(load.trained), tree=tree, parts=load.parts)


def _covers(more: BatchShape, less: BatchShape) -> bool:
    """Return whether `more` is at least as large in every respect, with the same kind of attention."""
    kinds = [(load.rows == 1, load.tree is None, load.parts) for load in (more, less)]
    if kinds[0] != kinds[1]:
        return False
    return all(a >= b for a, b in zip(_sizes(more), _sizes(less), strict=True))


def _sizes(load: BatchShape) -> Sequence[int]:
    tree = () if load.tree is None else astuple(load.tree)
    return (load.prefix, load.rows, load.width, load.trained, *tree)


def _gib(size: int) -> str:
    """Format bytes in GiB; more digits for small models."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / GIB:.4f} GiB"


def _config_of(policy: HfPolicy | Qwen3) -> Any:
    """Return a `PretrainedConfig`, or the built-in model's own config."""
    return policy.config if isinstance(policy, Qwen3) else policy.model.config


def _undivided(policies: Sequence[HfPolicy | Qwen3]) -> str:
    """Return why ranks cannot share a row, or empty."""
    names = [type(p.model).__name__ for p in policies if isinstance(p, HfPolicy) and p.by_rows]
    return f"ranks cannot share a row of {names[0]}, which has its own attention" if names else ""


def _weights(policy: HfPolicy | Qwen3) -> int:
    held = sum(p.nbytes for _, p in policy.named_parameters())
    return held if isinstance(policy, Qwen3) else held // policy.shards


def _on_gpu(device: torch.device) -> int:
    """Return free bytes plus this process's own (weights, moments, cached blocks)."""
    return int(torch.cuda.mem_get_info(device)[0]) + int(torch.cuda.memory_reserved(device))
