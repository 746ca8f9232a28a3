"""Output head in one pass: softmax statistics and gradients of a tile of positions, without whole logits.

The vocabulary is processed in column chunks. A chunk's logits x exist once, in float32; e = exp(x - c) is
kept in the model's dtype, with one reference c per row that is fixed before the row's sum is known. The
gradient by a row's logits is a number times e, except at the target, whose entry is replaced:

    d logp / dx = -(e_j + [j = t] (expm1(logp) Z - e_t)) / (T Z)          Z = sum e

The factor of a row, known last, is applied to the products e @ W and e.T @ hidden instead of to e. Three
matrix products, none repeated; expm1 keeps the digits of 1 - p of confident tokens. A weight of another dtype
is cast, whole or per chunk; a tile and its casts share one byte budget.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from subprocess import SubprocessError
from typing import Literal

import torch
from torch import Tensor

from insitu.errors import TrainError
from insitu_train.loss.mixed_matmul import product, rounded

log = logging.getLogger(__name__)

SLACK = 40.0
"""Nats by which a logit may exceed its row's reference before that moves: exp(40) x 10^6 is finite."""
BUDGET = 928 << 20
"""Bytes of a tile and of cast weights beside the gradients: a GiB less the workspace of a GPU's matrix
library."""
CPU_TILE = (512, 512)
"""Rows and columns on a CPU: a chunk and its exponentials fit the second-level cache."""
GPU_BLOCK, GPU_UNITS, GPU_WAVES = (128, 256), 132, 4
"""Output block of a large GPU matrix product, how many run at once, and how many such waves a chunk has.

Whole waves, so that none is half empty, and enough that a chunk takes longer than its launch.
"""
CHUNK = 64 << 20
"""Most bytes of a chunk of the weight that is cast separately."""
GRADIENT, CAST = 8, 6
"""GPU memory traffic in bytes per weight: a tile reads and writes the weight's gradient; a cast reads float32
and writes bfloat16, once for a whole copy and twice per tile without one."""

Kernels = Literal["auto", "torch", "triton"]
Out = Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """How positions x vocabulary of a head are divided."""

    rows: int
    columns: int
    cast: int
    """Columns (rows of the weight) held in the computed dtype: all, a chunk's, or 0 where no cast is
    needed."""
    held: int
    """Bytes of a tile beside the gradients, casts included."""


def cut_of(hidden: Tensor, weight: Tensor, *, gpu: bool) -> _Tiling:
    """Return the tiling for hidden [N, d] and weight [V, d], which may be meta tensors."""
    used = _computed_in(hidden.dtype, gpu=gpu)
    cast = 0 if weight.dtype == hidden.dtype == used else used.itemsize
    positions, width = hidden.shape
    return tiling(positions, width, weight.shape[0], element=used.itemsize, gpu=gpu, cast=cast)


def _computed_in(dtype: torch.dtype, *, gpu: bool) -> torch.dtype:
    """Return the dtype of operands: torch has bfloat16 products with a float32 result on GPUs only."""
    return torch.float32 if dtype == torch.bfloat16 and not gpu else dtype


def tiling(positions: int, hidden: int, vocab: int, *, element: int, gpu: bool, cast: int = 0) -> _Tiling:
    """Return the tiling for `positions` x `vocab`.

    element: bytes per number in the computed dtype. cast: the same where the weight must be cast, else 0.
    """
    shape = _Shape(positions, hidden, vocab, element, gpu)
    if not cast:
        return shape.cut(0)
    whole, chunks = shape.cut(vocab), shape.cut(-1)
    if whole.held > BUDGET or not gpu:
        return chunks if whole.held > BUDGET else whole
    once = math.ceil(positions / whole.rows) * GRADIENT + CAST
    per_tile = math.ceil(positions / chunks.rows) * (GRADIENT + 2 * CAST)
    return whole if once <= per_tile else chunks


@dataclass(frozen=True, slots=True)
class _Shape:
    """The problem to be tiled."""

    positions: int
    hidden: int
    vocab: int
    element: int
    gpu: bool

    def cut(self, cast: int) -> _Tiling:
        """Return the largest equal tiles within the budget, at least one row or block.

        cast: columns held in the computed dtype as in `_Tiling`; -1 = those of a chunk.
        """
        if not self.gpu:
            least, more = self._of(1, cast), self._of(2, cast)
            most = 1 + max(0, (BUDGET - least.held) // (more.held - least.held))
            return self._of(min(self.positions, CPU_TILE[0], most), cast)
        step = most = GPU_BLOCK[0]
        while most < self.positions and self._of(most + step, cast).held <= BUDGET:
            most += step
        parts = math.ceil(self.positions / most)
        return self._of(min(most, math.ceil(self.positions / parts / step) * step), cast)

    def _of(self, rows: int, cast: int) -> _Tiling:
        vocab, hidden, element = self.vocab, self.hidden, self.element
        columns = min(vocab, _columns(rows) if self.gpu else CPU_TILE[1])
        if cast < 0:
            columns = cast = min(columns, max(GPU_BLOCK[1], CHUNK // (hidden * element) // 256 * 256))
        # on a CPU a chunk is rounded to bfloat16 first
        rounded = 0 if self.gpu or not cast else 2 * columns
        # exponentials, logits of a chunk, and hidden states in float32 and in their dtype
        row = -(-vocab // 64) * 64 * element + columns * 4 + hidden * (4 + element)
        row += 4 * math.ceil(vocab / columns) + 64
        held = rows * row + hidden * (cast * element + rounded)
        return _Tiling(rows=rows, columns=columns, cast=cast, held=held)


def _columns(rows: int) -> int:
    """Return columns of a chunk: near the target number of waves, with the last wave as full as possible."""
    down = math.ceil(rows / GPU_BLOCK[0])
    across = GPU_UNITS * GPU_WAVES / down

    def filled(blocks: int) -> float:
        return down * blocks / (math.ceil(down * blocks / GPU_UNITS) * GPU_UNITS)

    return max(range(math.ceil(0.75 * across), math.ceil(1.25 * across) + 1), key=filled) * GPU_BLOCK[1]


@dataclass(slots=True)
class Stats:
    """Running sums of a tile's rows over the columns so far, [R] float32 each, of logits over T."""

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
        """Return empty sums. ref: fixed reference, else the first chunk's largest logit.

        like: [R], gives dtype and device.
        """
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


class TorchBackend:
    """Processing of a chunk in torch; triton_kernels.py overrides it."""

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
        """Add logits x [R, C] float32 (may be overwritten) of columns start.. , times `by`.

        Writes exp(x - c) to `out` [R, C] if given, and c to `mark` [R].
        """
        if by != 1.0:
            x.mul_(by)
        column = targets - start
        inside = (column >= 0) & (column < x.shape[1])
        found = x.gather(1, column.clamp(0, x.shape[1] - 1)[:, None])[:, 0]
        stats.chosen = torch.where(inside, found, stats.chosen)
        high = x.amax(1)
        stats.top = torch.maximum(stats.top, high)
        ref = torch.where(high > stats.ref + SLACK, high, stats.ref)
        # an empty row has nothing to rescale, and -inf - -inf is nan
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
        """Rescale `out` [R, V] from each chunk's reference marks [chunks, R] to the final `ref`."""
        for j in (marks != ref).any(1).nonzero()[:, 0].tolist():
            out[:, j * columns : (j + 1) * columns] *= (marks[j] - ref).exp()[:, None]


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def backend(device: torch.device, kernels: Kernels) -> TorchBackend:
    """Return the requested backend; auto = Triton on a CUDA device where it works."""
    if kernels == "triton" or (kernels == "auto" and device.type == "cuda" and triton_works(device.type)):
        from insitu_train.loss.triton_kernels import TritonBackend

        return TritonBackend()
    return TorchBackend()


@cache
def triton_works(device: str) -> bool:
    """Return whether Triton's kernels run and agree with torch's; tested once per kind of device.

    Triton needs a C compiler, Python's headers and a writable cache. Raises OutOfMemoryError.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    x = torch.linspace(-2.0, 2.0, 8, device=device).view(2, 4)
    found = []
    from triton.errors import TritonError

    try:
        from insitu_train.loss.triton_kernels import TritonBackend

        for tried in (TritonBackend(), TorchBackend()):
            stats, out = Stats.fresh(x[:, 0]), torch.empty_like(x)
            targets, mark = torch.ones(2, dtype=torch.int64, device=device), torch.empty_like(x[:, 0])
            tried.absorb(x.clone(), out, 0, targets, stats, mark, 1.0)
            found.append(stats.logp)
    except torch.OutOfMemoryError:
        raise
    except (ImportError, OSError, RuntimeError, SubprocessError, TritonError, TypeError, ValueError) as error:
        log.warning(
            "Triton unavailable, falling back to torch (slower): %s",
            str(error).partition("\n")[0],
        )
        return False
    return bool(torch.allclose(found[0], found[1], atol=1e-5))


class ChunkedHead:
    """The head over one call's positions, with buffers reused for each tile."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        temperature: float,
        *,
        store: bool,
        kernels: Kernels,
        soft_cap: float = 0.0,
    ) -> None:
        """Allocate the buffers.

        hidden [N, d] gives the computed dtype; weight [V, d] has any. store: keep exponentials, which
        gradients need. soft_cap: logits are soft_cap * tanh(logits / soft_cap); 0 = as they are.
        """
        if hidden.dtype not in (torch.float32, torch.bfloat16, torch.float64):
            raise TrainError(f"the head computes in float32 or bfloat16, not in {hidden.dtype}")
        gpu = _on_gpu(hidden.device)
        self.hidden, self.weight, self.by, self._soft_cap = hidden, weight, 1.0 / temperature, soft_cap
        self.cut = cut_of(hidden, weight, gpu=gpu)
        rows, columns, vocab = self.cut.rows, self.cut.columns, weight.shape[0]
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        make = hidden.new_empty
        used = _computed_in(hidden.dtype, gpu=gpu)
        self._x = make((rows, columns), dtype=self.dtype)
        # rows aligned to 64 numbers for matrix products
        self._e = make((rows, -(-vocab // 64) * 64), dtype=used)[:, :vocab] if store else None
        self._marks = make((-(-vocab // columns), rows), dtype=self.dtype)
        self._backend = backend(hidden.device, kernels)
        self._cast = make((self.cut.cast, hidden.shape[1]), dtype=used) if self.cut.cast else None
        if self.cut.cast == vocab and self._cast is not None:
            for at in range(0, vocab, columns):
                self._fill(self._cast[at : at + columns], at)

    def _fill(self, into: Tensor, at: int) -> None:
        """Copy weights from column `at`, rounded to hidden's dtype."""
        chunk = self.weight[at : at + into.shape[0]]
        into.copy_(chunk if into.dtype == self.hidden.dtype else chunk.to(self.hidden.dtype))

    def _chunk(self, at: int, columns: int) -> Tensor:
        """Return [C, d] of the weight from column `at` in the computed dtype, valid until the next call."""
        if self._cast is None:
            return self.weight[at : at + columns]
        if self.cut.cast == self.weight.shape[0]:
            return self._cast[at : at + columns]
        part = self._cast[: min(columns, self.weight.shape[0] - at)]
        self._fill(part, at)
        return part

    def tiles(self) -> Iterator[slice]:
        for at in range(0, self.hidden.shape[0], self.cut.rows):
            yield slice(at, min(at + self.cut.rows, self.hidden.shape[0]))

    def _states(self, part: slice) -> Tensor:
        """Return hidden states of the positions in the computed dtype."""
        return self.hidden[part].to(_computed_in(self.hidden.dtype, gpu=_on_gpu(self.hidden.device)))

    def stats(self, part: slice, targets: Tensor, ref: Tensor | None = None) -> Stats:
        """Return statistics of the positions `part`; their exponentials are valid until the next call."""
        h, targets = self._states(part), targets[part]
        rows, columns = h.shape[0], self.cut.columns
        stats = Stats.fresh(self._marks[0, :rows], ref)
        for j, at in enumerate(range(0, self.weight.shape[0], columns)):
            chunk = self._chunk(at, columns)
            x = self._x.flatten()[: rows * chunk.shape[0]].view(rows, -1)
            self._product(h, chunk.T, x)
            out = None if self._e is None else self._e[:rows, at : at + chunk.shape[0]]
            slope = self._capped(x)
            self._backend.absorb(x, out, at, targets, stats, self._marks[j, :rows], self.by)
            if out is not None and slope is not None:
                # from here on e is only a factor of gradients
                out.mul_(slope)
        if self._e is not None:
            self._backend.settle(self._e[:rows], self._marks[:, :rows], stats.ref, columns)
        return stats

    def _product(self, a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Compute out = a @ b, or +=; of a bfloat16 model with operands of no more digits, on any device."""
        with rounded(self.hidden.dtype == torch.bfloat16):
            product(a, b, out, add=add)

    def _capped(self, x: Tensor) -> Tensor | None:
        """Cap logits in place; return the derivative by the uncapped ones, None without a cap."""
        if not self._soft_cap:
            return None
        slope = 1.0 - x.div_(self._soft_cap).tanh_().square()
        x.mul_(self._soft_cap)
        return slope

    def gradients(
        self,
        part: slice,
        targets: Tensor,
        stats: Stats,
        slope: Tensor,
        d_hidden: Tensor,
        d_weight: Out,
    ) -> None:
        """Write d_hidden[part] and add to d_weight [V, d] (float32), after `stats` of the same part.

        slope [R] float32: derivative of the objective by each log-probability.
        """
        if self._e is None:
            raise TrainError("gradients need a head with store=True")
        h, rows, vocab = self._states(part), slope.shape[0], self.weight.shape[0]
        e = self._e[:rows]
        missing = torch.expm1(stats.logp) * stats.total
        if self._soft_cap:
            missing *= 1.0 - (stats.chosen / (self.by * self._soft_cap)).square()
        missing = missing.to(e.dtype)
        e[torch.arange(rows, device=e.device), targets[part]] = missing
        factor = (slope * (-self.by) / stats.total)[:, None]
        mixed = h.new_empty(h.shape, dtype=self.dtype)
        # weights cast per chunk are multiplied per chunk
        columns = self.cut.columns if 0 < self.cut.cast < vocab else vocab
        for at in range(0, vocab, columns):
            self._product(e[:, at : at + columns], self._chunk(at, columns), mixed, add=at > 0)
        d_hidden[part] = mixed.mul_(factor)
        if d_weight is not None:
            scaled = torch.mul(h, factor, out=mixed).to(h.dtype)
            self._product(e.T, scaled, d_weight, add=True)
