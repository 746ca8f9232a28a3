"""Output head in one pass: softmax statistics and gradients of a tile of positions, whole logits never held.

The vocabulary is walked in column chunks. A chunk's logits x exist once, in float32; what is kept of them is
e = exp(x - c) in the model's own dtype, with one reference c per row that is known before the row's sum is.
The gradient of a row by its logits is then a number times e, except at the target, whose entry is replaced:

    d logp / dx = -(e_j + [j = t] (expm1(logp) Z - e_t)) / (T Z)          Z = sum e

so the factor of a row, known last, is applied to the products e @ W and e.T @ hidden instead of to e. Three
matrix products in all, none repeated; confident tokens keep the digits of 1 - p. Called by objective.py.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from whet.errors import TrainError

SLACK = 40.0
"""Nats by which a logit may exceed its row's reference before that moves: exp(40) x 10^6 is finite."""
GPU_BUDGET = 928 << 20
"""Bytes that a tile may take beside the gradients on a GPU: a GiB less what the matrix library works in."""
CPU_TILE = (512, 512)
"""Rows and columns on a CPU: a chunk and its exponentials stay in the second-level cache."""
GPU_BLOCK, GPU_UNITS, GPU_WAVES = (128, 256), 132, 4
"""Output block of a large GPU matrix product, how many run at once, and how many such waves a chunk has:
whole ones, that none runs half empty, and enough that launching a chunk takes less than computing it."""

Kernels = Literal["auto", "torch", "triton"]
Out = Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a head's positions x vocabulary is cut."""

    rows: int
    columns: int
    held: int
    """Bytes that a tile takes beside the gradients."""


def tiling(positions: int, hidden: int, vocab: int, *, element: int, gpu: bool) -> Tiling:
    """The cut for `positions` x `vocab`; `element` = bytes of one number in the model's dtype."""
    if not gpu:
        rows, columns = min(positions, CPU_TILE[0]), min(vocab, CPU_TILE[1])
        return Tiling(rows=rows, columns=columns, held=_held(rows, columns, hidden, vocab, element))
    step = GPU_BLOCK[0]
    most = _fit(hidden, vocab, element)
    parts = math.ceil(positions / most)
    rows = min(most, math.ceil(positions / parts / step) * step)
    columns = min(vocab, _columns(rows))
    return Tiling(rows=rows, columns=columns, held=_held(rows, columns, hidden, vocab, element))


def _fit(hidden: int, vocab: int, element: int) -> int:
    """Most rows, a multiple of the block's, whose tile is within the budget; one block at the least."""
    step = GPU_BLOCK[0]
    rows = step
    while _held(rows + step, _columns(rows + step), hidden, vocab, element) <= GPU_BUDGET:
        rows += step
    return rows


def _columns(rows: int) -> int:
    """Columns of a chunk: near the waves it should have, those that leave least of a last wave empty."""
    down = math.ceil(rows / GPU_BLOCK[0])
    across = GPU_UNITS * GPU_WAVES / down

    def filled(blocks: int) -> float:
        return down * blocks / (math.ceil(down * blocks / GPU_UNITS) * GPU_UNITS)

    return max(range(math.ceil(0.75 * across), math.ceil(1.25 * across) + 1), key=filled) * GPU_BLOCK[1]


def _held(rows: int, columns: int, hidden: int, vocab: int, element: int) -> int:
    """Exponentials, a chunk of logits, and three rows of hidden size, two of them float32, per position."""
    marks = 4 * math.ceil(vocab / columns)
    return rows * (vocab * element + columns * 4 + hidden * (8 + element) + marks + 64)


@dataclass(slots=True)
class Stats:
    """Running sums of a tile's rows over the columns seen so far, [R] float32 each. Logits are over T."""

    ref: Tensor
    """Reference c."""
    total: Tensor
    """Z = sum exp(x - c)."""
    moment: Tensor
    """sum exp(x - c) (x - c)."""
    top: Tensor
    """Largest logit."""
    chosen: Tensor
    """The target's logit."""

    @classmethod
    def fresh(cls, like: Tensor, ref: Tensor | None = None) -> Stats:
        """Nothing seen; `ref` fixes the reference, else the first chunk's largest logit becomes it.
        like: [R], gives dtype and device."""
        low, zero = torch.full_like(like, -math.inf), torch.zeros_like(like)
        return cls(low.clone() if ref is None else ref.clone(), zero, zero.clone(), low, low.clone())

    @property
    def logz(self) -> Tensor:
        return self.ref + self.total.log()

    @property
    def logp(self) -> Tensor:
        return self.chosen - self.logz

    @property
    def entropy(self) -> Tensor:
        return self.total.log() - self.moment / self.total


class Backend(Protocol):
    """What is done with a chunk: in torch here, in Triton in kernels.py."""

    def absorb(
        self,
        x: Tensor,
        out: Out,
        start: int,
        targets: Tensor,
        stats: Stats,
        mark: Tensor,
        by: float,
    ) -> None:
        """Add logits x [R, C] float32 (may be overwritten), columns start.. of the vocabulary, times `by`.

        Writes exp(x - c) to `out` [R, C] if given, and the c used to `mark` [R].
        """

    def settle(self, out: Tensor, marks: Tensor, ref: Tensor, columns: int) -> None:
        """Bring `out` [R, V] from each chunk's reference marks [chunks, R] to the final `ref`."""


class TorchBackend:
    """The reference, and what runs without Triton."""

    def absorb(
        self,
        x: Tensor,
        out: Out,
        start: int,
        targets: Tensor,
        stats: Stats,
        mark: Tensor,
        by: float,
    ) -> None:
        if by != 1.0:
            x.mul_(by)
        column = targets - start
        inside = (column >= 0) & (column < x.shape[1])
        found = x.gather(1, column.clamp(0, x.shape[1] - 1)[:, None])[:, 0]
        stats.chosen = torch.where(inside, found, stats.chosen)
        high = x.amax(1)
        stats.top = torch.maximum(stats.top, high)
        ref = torch.where(high > stats.ref + SLACK, high, stats.ref)
        # nothing seen: -inf - -inf is no number, and there is nothing to move
        gap = torch.where(stats.total > 0, stats.ref - ref, 0.0)
        keep = gap.exp()
        x.sub_(ref[:, None])
        e = x.exp() if out is None or out.dtype != x.dtype else torch.exp(x, out=out)
        z = e.sum(1)
        if out is not None and out is not e:
            out.copy_(e)
        stats.moment = keep * (stats.moment + gap * stats.total) + x.mul_(e).sum(1)
        stats.total = keep * stats.total + z
        stats.ref = ref
        mark.copy_(ref)

    def settle(self, out: Tensor, marks: Tensor, ref: Tensor, columns: int) -> None:
        for j in (marks != ref).any(1).nonzero()[:, 0].tolist():
            out[:, j * columns : (j + 1) * columns] *= (marks[j] - ref).exp()[:, None]


def backend(device: torch.device, kernels: Kernels) -> Backend:
    """Triton on a CUDA device that has it, torch elsewhere; or the one that is asked for."""
    if kernels == "triton" or (
        kernels == "auto" and device.type == "cuda" and importlib.util.find_spec("triton") is not None
    ):
        from whet.train.head.kernels import TritonBackend

        return TritonBackend()
    return TorchBackend()


def product(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """out = a @ b, or += , in float32 whatever the dtype of a and b."""
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    if add:
        return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


class Sweep:
    """The head over one call's positions: buffers made once, used for each tile."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, temperature: float, *, store: bool, kernels: Kernels
    ) -> None:
        """hidden [N, d], weight [V, d] of one dtype. `store` keeps the exponentials, which gradients need."""
        if hidden.dtype != weight.dtype or hidden.dtype not in (torch.float32, torch.bfloat16, torch.float64):
            raise TrainError(f"the head needs float32 or bfloat16, not {hidden.dtype} and {weight.dtype}")
        if hidden.device.type == "cpu" and hidden.dtype == torch.bfloat16:
            # products of bfloat16 with a float32 result exist on GPUs only
            hidden, weight = hidden.float(), weight.float()
        (positions, width), vocab = hidden.shape, weight.shape[0]
        self.hidden, self.weight, self.by = hidden, weight, 1.0 / temperature
        self.cut = tiling(
            positions, width, vocab, element=hidden.element_size(), gpu=hidden.device.type == "cuda"
        )
        rows, columns = self.cut.rows, self.cut.columns
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        make = hidden.new_empty
        self._x = make((rows, columns), dtype=self.dtype)
        # a row's length a multiple of 64 numbers: matrix products want aligned rows
        self._e = make((rows, -(-vocab // 64) * 64))[:, :vocab] if store else None
        self._marks = make((-(-vocab // columns), rows), dtype=self.dtype)
        self._backend = backend(hidden.device, kernels)

    def tiles(self) -> Iterator[slice]:
        for at in range(0, self.hidden.shape[0], self.cut.rows):
            yield slice(at, min(at + self.cut.rows, self.hidden.shape[0]))

    def stats(self, part: slice, targets: Tensor, ref: Tensor | None = None) -> Stats:
        """Statistics of the positions `part`; their exponentials stay until the next call."""
        h, targets = self.hidden[part], targets[part]
        rows, columns = h.shape[0], self.cut.columns
        stats = Stats.fresh(self._marks[0, :rows], ref)
        for j, at in enumerate(range(0, self.weight.shape[0], columns)):
            chunk = self.weight[at : at + columns]
            x = self._x.flatten()[: rows * chunk.shape[0]].view(rows, -1)
            product(h, chunk.T, x)
            out = None if self._e is None else self._e[:rows, at : at + chunk.shape[0]]
            self._backend.absorb(x, out, at, targets, stats, self._marks[j, :rows], self.by)
        if self._e is not None:
            self._backend.settle(self._e[:rows], self._marks[:, :rows], stats.ref, columns)
        return stats

    def gradients(
        self,
        part: slice,
        targets: Tensor,
        stats: Stats,
        slope: Tensor,
        d_hidden: Tensor,
        d_weight: Out,
    ) -> None:
        """After `stats` of the same part: write d_hidden[part] and add to d_weight [V, d] (float32).

        slope [R] float32: derivative of the objective by each log-probability.
        """
        if self._e is None:
            raise TrainError("gradients of a head that kept no exponentials")
        h, rows = self.hidden[part], slope.shape[0]
        e = self._e[:rows]
        missing = (torch.expm1(stats.logp) * stats.total).to(e.dtype)
        e[torch.arange(rows, device=e.device), targets[part]] = missing
        factor = (slope * (-self.by) / stats.total)[:, None]
        mixed = product(e, self.weight, h.new_empty(h.shape, dtype=self.dtype))
        d_hidden[part] = mixed.mul_(factor)
        if d_weight is not None:
            scaled = torch.mul(h, factor, out=mixed).to(h.dtype)
            product(e.T, scaled, d_weight, add=True)
