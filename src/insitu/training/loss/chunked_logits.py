"""Output head in one pass: softmax statistics and gradients of a tile of positions, whole logits never held.

The vocabulary is walked in column chunks. A chunk's logits x exist once, in float32; what is kept of them is
e = exp(x - c) in the model's own dtype, with one reference c per row that is known before the row's sum is.
The gradient of a row by its logits is then a number times e, except at the target, whose entry is replaced:

    d logp / dx = -(e_j + [j = t] (expm1(logp) Z - e_t)) / (T Z)          Z = sum e

so the factor of a row, known last, is applied to the products e @ W and e.T @ hidden instead of to e. Three
matrix products in all, none repeated; confident tokens keep the digits of 1 - p. A weight of another type
than is computed in is cast on the way, whole or a chunk at a time: all that a tile takes has one budget of
bytes. Called by objective.py; memory/ predicts by `cut_of`.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from subprocess import SubprocessError
from typing import Literal, Protocol

import torch
from torch import Tensor

from insitu.errors import TrainError
from insitu.training.loss.mixed_matmul import product

log = logging.getLogger(__name__)

SLACK = 40.0
"""Nats by which a logit may exceed its row's reference before that moves: exp(40) x 10^6 is finite."""
BUDGET = 928 << 20
"""Bytes that a tile, and what is cast of the weight, may take beside the gradients: a GiB less what a GPU's
matrix library works in."""
CPU_TILE = (512, 512)
"""Rows and columns on a CPU: a chunk and its exponentials stay in the second-level cache."""
GPU_BLOCK, GPU_UNITS, GPU_WAVES = (128, 256), 132, 4
"""Output block of a large GPU matrix product, how many run at once, and how many such waves a chunk has:
whole ones, that none runs half empty, and enough that launching a chunk takes less than computing it."""
CHUNK = 64 << 20
"""Most bytes of a chunk of the weight that is cast by itself."""
GRADIENT, CAST = 8, 6
"""Bytes of a GPU's memory traffic per number of the weight: a tile reads and writes the weight's gradient;
casting reads float32 and writes bfloat16, once for a whole copy and twice for each tile without one."""

Kernels = Literal["auto", "torch", "triton"]
Out = Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a head's positions x vocabulary is cut."""

    rows: int
    columns: int
    cast: int
    """Columns (rows of the weight) whose numbers are held in the type computed in: all, a chunk's, or 0 where
    the weight is used as it is."""
    held: int
    """Bytes that a tile takes beside the gradients, with what is cast."""


def cut_of(hidden: Tensor, weight: Tensor, *, gpu: bool) -> Tiling:
    """The cut for hidden [N, d] and weight [V, d]; both may be without content."""
    used = computed_in(hidden.dtype, gpu=gpu)
    cast = 0 if weight.dtype == hidden.dtype == used else used.itemsize
    positions, width = hidden.shape
    return tiling(positions, width, weight.shape[0], element=used.itemsize, gpu=gpu, cast=cast)


def computed_in(dtype: torch.dtype, *, gpu: bool) -> torch.dtype:
    """The type of matrix products: products of bfloat16 with a float32 result exist on GPUs only."""
    return torch.float32 if dtype == torch.bfloat16 and not gpu else dtype


def tiling(positions: int, hidden: int, vocab: int, *, element: int, gpu: bool, cast: int = 0) -> Tiling:
    """The cut for `positions` x `vocab`. `element` = bytes of one number in the type computed in, `cast` the
    same where the weight must be cast to it, else 0."""
    shape = _Shape(positions, hidden, vocab, element, gpu)
    if not cast:
        return shape.cut(0)
    whole, chunks = shape.cut(vocab), shape.cut(-1)
    if whole.held > BUDGET or not gpu:
        return chunks if whole.held > BUDGET else whole
    kept = math.ceil(positions / whole.rows) * GRADIENT + CAST
    anew = math.ceil(positions / chunks.rows) * (GRADIENT + 2 * CAST)
    return whole if kept <= anew else chunks


@dataclass(frozen=True, slots=True)
class _Shape:
    """What is to be cut."""

    positions: int
    hidden: int
    vocab: int
    element: int
    gpu: bool

    def cut(self, cast: int) -> Tiling:
        """The largest tiles within the budget, all alike; one row or block at the least. cast: as in Tiling,
        -1 = a chunk's."""
        if not self.gpu:
            least, more = self._of(1, cast), self._of(2, cast)
            most = 1 + max(0, (BUDGET - least.held) // (more.held - least.held))
            return self._of(min(self.positions, CPU_TILE[0], most), cast)
        step = most = GPU_BLOCK[0]
        while most < self.positions and self._of(most + step, cast).held <= BUDGET:
            most += step
        parts = math.ceil(self.positions / most)
        return self._of(min(most, math.ceil(self.positions / parts / step) * step), cast)

    def _of(self, rows: int, cast: int) -> Tiling:
        vocab, hidden, element = self.vocab, self.hidden, self.element
        columns = min(vocab, _columns(rows) if self.gpu else CPU_TILE[1])
        if cast < 0:
            columns = cast = min(columns, max(GPU_BLOCK[1], CHUNK // (hidden * element) // 256 * 256))
        # on a CPU numbers are rounded to bfloat16 first, a chunk of them
        rounded = 0 if self.gpu or not cast else 2 * columns
        # exponentials, logits of a chunk, and of a position's states one row in float32 and one in their type
        row = -(-vocab // 64) * 64 * element + columns * 4 + hidden * (4 + element)
        row += 4 * math.ceil(vocab / columns) + 64
        held = rows * row + hidden * (cast * element + rounded)
        return Tiling(rows=rows, columns=columns, cast=cast, held=held)


def _columns(rows: int) -> int:
    """Columns of a chunk: near the waves it should have, those that leave least of a last wave empty."""
    down = math.ceil(rows / GPU_BLOCK[0])
    across = GPU_UNITS * GPU_WAVES / down

    def filled(blocks: int) -> float:
        return down * blocks / (math.ceil(down * blocks / GPU_UNITS) * GPU_UNITS)

    return max(range(math.ceil(0.75 * across), math.ceil(1.25 * across) + 1), key=filled) * GPU_BLOCK[1]


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


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def backend(device: torch.device, kernels: Kernels) -> Backend:
    """Triton on a CUDA device where it works, torch elsewhere; or the one that is asked for."""
    if kernels == "triton" or (kernels == "auto" and device.type == "cuda" and triton_works(device.type)):
        from insitu.training.loss.triton_kernels import TritonBackend

        return TritonBackend()
    return TorchBackend()


@cache
def triton_works(device: str) -> bool:
    """Whether Triton is there and its kernels compute what torch's do: it needs a C compiler, Python's
    headers and a folder to write to. Tried once per kind of device. Raises OutOfMemoryError."""
    if importlib.util.find_spec("triton") is None:
        return False
    x = torch.linspace(-2.0, 2.0, 8, device=device).view(2, 4)
    found = []
    from triton.errors import TritonError

    try:
        from insitu.training.loss.triton_kernels import TritonBackend

        for tried in (TritonBackend(), TorchBackend()):
            stats, out = Stats.fresh(x[:, 0]), torch.empty_like(x)
            targets, mark = torch.ones(2, dtype=torch.int64, device=device), torch.empty_like(x[:, 0])
            tried.absorb(x.clone(), out, 0, targets, stats, mark, 1.0)
            found.append(stats.logp)
    except torch.OutOfMemoryError:
        raise
    except (ImportError, OSError, RuntimeError, SubprocessError, TritonError, TypeError, ValueError) as error:
        log.warning("the head runs without Triton, which is slower: %s", str(error).partition("\n")[0])
        return False
    return bool(torch.allclose(found[0], found[1], atol=1e-5))


class ChunkedHead:
    """The head over one call's positions: buffers made once, used for each tile."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, temperature: float, *, store: bool, kernels: Kernels
    ) -> None:
        """hidden [N, d], which gives the type to compute in; weight [V, d] of any. `store` keeps the
        exponentials, which gradients need."""
        if hidden.dtype not in (torch.float32, torch.bfloat16, torch.float64):
            raise TrainError(f"the head computes in float32 or bfloat16, not in {hidden.dtype}")
        gpu = on_gpu(hidden.device)
        self.hidden, self.weight, self.by = hidden, weight, 1.0 / temperature
        self.cut = cut_of(hidden, weight, gpu=gpu)
        rows, columns, vocab = self.cut.rows, self.cut.columns, weight.shape[0]
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        make = hidden.new_empty
        used = computed_in(hidden.dtype, gpu=gpu)
        self._x = make((rows, columns), dtype=self.dtype)
        # a row's length a multiple of 64 numbers: matrix products want aligned rows
        self._e = make((rows, -(-vocab // 64) * 64), dtype=used)[:, :vocab] if store else None
        self._marks = make((-(-vocab // columns), rows), dtype=self.dtype)
        self._backend = backend(hidden.device, kernels)
        self._cast = make((self.cut.cast, hidden.shape[1]), dtype=used) if self.cut.cast else None
        if self.cut.cast == vocab and self._cast is not None:
            for at in range(0, vocab, columns):
                self._fill(self._cast[at : at + columns], at)

    def _fill(self, into: Tensor, at: int) -> None:
        """Numbers of the weight from column `at`, rounded to hidden's type."""
        chunk = self.weight[at : at + into.shape[0]]
        into.copy_(chunk if into.dtype == self.hidden.dtype else chunk.to(self.hidden.dtype))

    def _chunk(self, at: int, columns: int) -> Tensor:
        """[C, d] of the weight from column `at`, in the type computed in, until the next call."""
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
        """Hidden states of the positions, in the type computed in."""
        return self.hidden[part].to(computed_in(self.hidden.dtype, gpu=on_gpu(self.hidden.device)))

    def stats(self, part: slice, targets: Tensor, ref: Tensor | None = None) -> Stats:
        """Statistics of the positions `part`; their exponentials stay until the next call."""
        h, targets = self._states(part), targets[part]
        rows, columns = h.shape[0], self.cut.columns
        stats = Stats.fresh(self._marks[0, :rows], ref)
        for j, at in enumerate(range(0, self.weight.shape[0], columns)):
            chunk = self._chunk(at, columns)
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
        h, rows, vocab = self._states(part), slope.shape[0], self.weight.shape[0]
        e = self._e[:rows]
        missing = (torch.expm1(stats.logp) * stats.total).to(e.dtype)
        e[torch.arange(rows, device=e.device), targets[part]] = missing
        factor = (slope * (-self.by) / stats.total)[:, None]
        mixed = h.new_empty(h.shape, dtype=self.dtype)
        # what is cast a chunk at a time is multiplied so too
        columns = self.cut.columns if 0 < self.cut.cast < vocab else vocab
        for at in range(0, vocab, columns):
            product(e[:, at : at + columns], self._chunk(at, columns), mixed, add=at > 0)
        d_hidden[part] = mixed.mul_(factor)
        if d_weight is not None:
            scaled = torch.mul(h, factor, out=mixed).to(h.dtype)
            product(e.T, scaled, d_weight, add=True)
